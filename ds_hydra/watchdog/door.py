"""Where ranks below connect: strangers in, peers that know the job's secret out."""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ds_hydra.watchdog.connection import NONCE_BYTES, Connection

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
