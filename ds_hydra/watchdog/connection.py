"""Sockets between two ranks of one job: frames, each of which proves that its sender knows the job's secret, and the
listener where strangers connect and become peers by such a frame.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

_MAX_FRAME = 4096
_READ = 65536
_MAC_BYTES, NONCE_BYTES = 16, 16


_OPEN: weakref.WeakSet[Connection | socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections that a forked child inherits.

    The others take a closed connection as the sign that this rank has died. A child that lives on, such as a data
    loader's worker, would keep it open, and the death of its parent would go unnoticed.
    """
    for connection in list(_OPEN):
        connection.close()


def closed_in_children(sock: socket.socket) -> socket.socket:
    """A socket, such as one that listens, which forked children close in the same way."""
    _OPEN.add(sock)
    return sock


os.register_at_fork(after_in_child=_close_in_child)


class Connection:
    """Frames with a message authentication code over a non-blocking socket."""

    def __init__(self, sock: socket.socket, *, server: bool):
        sock.setblocking(False)
        self.socket, self._server = sock, server
        self.max_frame = _MAX_FRAME  # bytes; more only of a peer that has shown that it knows the secret
        _OPEN.add(self)
        self._key: bytes | None = None
        self._in, self._out = bytearray(), bytearray()
        self._received = self._sent = 0

    def set_key(self, secret: bytes, nonces: bytes) -> None:
        self._key = hmac.digest(secret, nonces, hashlib.sha256)

    @property
    def keyed(self) -> bool:
        """Whether there is a key, by which frames of this job are told from those of strangers."""
        return self._key is not None

    def take_raw(self, size: int) -> bytes | None:
        """The next `size` bytes, which come before any frame; None while fewer are there."""
        if len(self._in) < size:
            return None
        raw = bytes(self._in[:size])
        del self._in[:size]
        return raw

    def send_raw(self, data: bytes) -> None:
        self._out += data
        self.flush()

    def send(self, message: dict[str, Any]) -> None:
        self.send_body(encoded(message))

    def send_body(self, body: bytes) -> None:
        """Send what `encoded` has made of a message, which is the same for all who get it."""
        assert len(body) + _MAC_BYTES <= self.max_frame, "messages are short"
        self._out += (len(body) + _MAC_BYTES).to_bytes(4, "big") + body + self._mac(self._server, self._sent, body)
        self._sent += 1
        self.flush()

    def flush(self) -> None:
        """Send as many bytes as the system accepts now; the rest waits. An error shows at the next read."""
        with contextlib.suppress(OSError):
            while self._out:
                del self._out[: self.socket.send(self._out)]
        if len(self._out) > 64 * self.max_frame:
            # Nobody reads at the other end. The stream is broken from here on, which only matters to a rank that
            # has been silent for so long that it counts as frozen anyway; memory must not grow until then.
            self._out.clear()

    def receive(self) -> bool:
        """Read what is there; False when the other end has closed."""
        try:
            while True:
                data = self.socket.recv(_READ)
                if not data:
                    return False
                self._in += data
                if len(self._in) > 64 * self.max_frame:
                    return False
                if len(data) < _READ:
                    return True  # that was all; what comes later wakes the selector again
        except BlockingIOError:
            return True
        except OSError:
            return False

    def read(self, take: Callable[[dict[str, Any]], object]) -> bool:
        """Hand over each message that is there; False where the other end has closed, or has said what nobody says."""
        open_still = self.receive()
        try:
            for message in self.messages():
                take(message)
        except (ValueError, TypeError, LookupError):
            return False
        return open_still

    def messages(self) -> Iterator[dict[str, Any]]:
        """Complete frames; ValueError for one that is not from this job."""
        while len(self._in) >= 4:
            size = int.from_bytes(self._in[:4], "big")
            if not _MAC_BYTES < size <= self.max_frame:
                raise ValueError("a frame of impossible size")
            if len(self._in) < 4 + size:
                return
            body, mac = bytes(self._in[4 : 4 + size - _MAC_BYTES]), bytes(self._in[4 + size - _MAC_BYTES : 4 + size])
            del self._in[: 4 + size]
            # Nothing of a frame is parsed before its code is right: JSON from a stranger never reaches the parser.
            if not hmac.compare_digest(mac, self._mac(not self._server, self._received, body)):
                raise ValueError("a frame that does not know the job's secret")
            self._received += 1
            message = json.loads(body)
            if not isinstance(message, dict):
                raise ValueError("a frame that is no message")
            yield message

    def _mac(self, from_server: bool, count: int, body: bytes) -> bytes:
        assert self._key is not None, "frames follow the handshake"
        # The code covers who speaks and the frame's number. Otherwise somebody between two ranks could send rank 0's
        # frame 7 back to it as if it came from the other rank, or repeat an old heartbeat of a rank that is dead.
        text = bytes([from_server]) + count.to_bytes(8, "big") + body
        return hmac.digest(self._key, text, hashlib.sha256)[:_MAC_BYTES]

    def close(self, selector: selectors.BaseSelector | None = None) -> None:
        """`selector`: in which its socket may stand."""
        with contextlib.suppress(KeyError, ValueError):
            if selector is not None:
                selector.unregister(self.socket)
        with contextlib.suppress(OSError):
            self.socket.close()

    def leave(self) -> None:
        """Close when all that was sent has gone out."""
        # A close with bytes still unread resets the connection, and the reset may overtake the farewell that was just
        # sent. To end the writing side first lets farewell and end of stream go out before that.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.close()


def encoded(message: dict[str, Any]) -> bytes:
    """The body of a frame."""
    return json.dumps(message).encode()


logger = logging.getLogger(__name__)

T = TypeVar("T")
_HANDSHAKE_S = 10.0
_MAX_STRANGERS = 64
_TOLD = frozenset(10**power for power in range(10))  # counts of refused strangers that are worth a line
_PUSHED_OUT_S = 1.0  # after which a stranger has to go where many others wait


class Door(Generic[T]):
    """Accepts connections; `enter` is called for each rank that has come in and may have said more."""

    # [Note: handshake] Whoever connects is a stranger until it has shown that it knows the job's secret:
    #
    #   rank 0 -> rank 3   a nonce A of 16 random bytes, made for this connection
    #   rank 3 -> rank 0   a nonce B, then the frame {"rank": 3}; its code is keyed by HMAC(secret, A + B)
    #
    # The secret itself never goes over this socket. A frame that was recorded on another connection fails here, for A
    # and B differ; one recorded on this connection fails by its number (`Connection._mac`). A port scanner, or another
    # job that was given the same port, sends no such frame and is dropped after 10 s at the latest.

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        selector: selectors.BaseSelector,
        admit: Callable[[Connection, dict[str, Any]], T],
        enter: Callable[[T], None],
    ):
        """`admit` makes a peer of a connection and its first message; ValueError or LookupError where it may not enter.

        Its socket stands in `selector` with that peer from then on.
        """
        self.secret, self.selector, self._admit, self._enter = secret, selector, admit, enter
        self.expected = 0  # that may connect at the same time
        self._listener = listener
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, None)
        self.strangers: dict[Connection, tuple[float, bytes]] = {}
        self._num_refused = 0

    def ready(self, stranger: Connection | None) -> None:
        """Somebody connects, or a stranger has sent something."""
        if stranger is None:
            self._accept()
        else:
            self._meet(stranger)

    def check(self, now: float) -> None:
        """Drop strangers that take too long."""
        for connection in [c for c, (since, _) in self.strangers.items() if now - since > _HANDSHAKE_S]:
            self._refuse(connection)

    def close(self) -> None:
        """Nobody can connect any more."""
        for connection in list(self.strangers):
            self._refuse(connection)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                # Each open socket takes one of this process's descriptors, which training needs too.
                if len(self.strangers) >= _MAX_STRANGERS + self.expected:
                    oldest, (since, _) = next(iter(self.strangers.items()))
                    if time.monotonic() - since < _PUSHED_OUT_S:
                        sock.close()  # a rank comes again
                        continue
                    self._refuse(oldest)
                connection = Connection(sock, server=True)
                nonce = secrets.token_bytes(NONCE_BYTES)
                self.strangers[connection] = (time.monotonic(), nonce)
                self.selector.register(sock, selectors.EVENT_READ, connection)
                connection.send_raw(nonce)

    def _meet(self, connection: Connection) -> None:
        """A stranger becomes a rank by a first frame that is valid [Note: handshake]."""
        if connection not in self.strangers:
            return  # sent away for others that came at the same time
        open_still = connection.receive()
        _, nonce = self.strangers[connection]
        try:
            if not connection.keyed:
                theirs = connection.take_raw(NONCE_BYTES)
                if theirs is not None:
                    connection.set_key(self.secret, nonce + theirs)
            if connection.keyed:
                for message in connection.messages():
                    peer = self._admit(connection, message)
                    del self.strangers[connection]
                    self.selector.modify(connection.socket, selectors.EVENT_READ, peer)
                    self._enter(peer)
                    return
        except (ValueError, TypeError, KeyError):
            open_still = False
        if not open_still:
            self._num_refused += 1
            if self._num_refused in _TOLD:
                logger.warning(
                    "refused a connection to the heartbeat port that does not know the job's secret; %d so far",
                    self._num_refused,
                )
            self._refuse(connection)

    def _refuse(self, connection: Connection) -> None:
        self.strangers.pop(connection, None)
        connection.close(self.selector)
