"""The watchdog's thread: one loop, run by rank 0, which hears all ranks, and by the others, which hear only rank 0."""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ds_hydra.watchdog.connection import NONCE_BYTES, Connection, encoded

if TYPE_CHECKING:
    from ds_hydra.watchdog.watchdog import Watchdog

logger = logging.getLogger(__name__)

TURN_S = 0.25
_BUSY_TURNS = 4  # that a rank inside a step still gets after another one died or failed
_LEFT_TURNS = 8  # the same after a rank left in good order: its last messages may still be on their way
_HANDSHAKE_S = 10.0
_MAX_STRANGERS = 64
_MANY = 32  # peers whose messages are read once in a turn


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the job cannot go on, and how long a rank may still live [Note: who ends when].

    A rank inside a step has `turns` left, one outside a step `idle_s` seconds (None: until it begins a step).
    """

    text: str
    turns: int
    idle_s: float | None
    frozen: int | None = None  # a rank that cannot end itself


@dataclass
class Peer:
    """What a rank knows of another one."""

    rank: int
    heard: float
    step: int = 0
    activity: str = "start"
    connection: Connection | None = None
    left: bool = False
    judged: bool = False


class Side:
    """The heartbeat thread's loop.

    In each turn it reads messages, looks for silent ranks, acts on a verdict and sends a heartbeat when one is due.
    On exit it tells the others that this rank has left.
    """

    def __init__(self, dog: Watchdog):
        self.dog = dog
        self.selector = selectors.DefaultSelector()

    def run(self) -> None:
        dog = self.dog
        last_turn, next_beat = time.monotonic(), 0.0
        while not dog.closing.is_set():
            for key, _ in self.wait_for_messages():
                self.ready(key)
            now = time.monotonic()
            # Suppose this process was suspended for 30 s, with frozen_s 9. By the clock every other rank was silent for
            # 30 s, yet it was this one that did not listen: their heartbeats lie unread in its sockets. So after a gap
            # of more than 2 s nobody is judged, and every rank has the full 9 s again.
            if now - last_turn > max(2.0, 4 * TURN_S):
                for peer in dog.peers.values():
                    peer.heard = max(peer.heard, now)
            elif now >= last_turn + 0.8 * TURN_S:
                self.check(now)
                dog.obey()
            else:
                continue  # a message woke the selector early: no turn, or many messages would use a verdict's turns up
            last_turn = now
            for message in dog.take_outbox():
                self.failed(message)
            if now >= next_beat:
                next_beat = now + dog.beat_s
                self.broadcast(dog.beat())
        for message in dog.take_outbox():
            self.failed(message)
        self.broadcast({"bye": dog._where()[0]})
        self.close()

    def wait_for_messages(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Whose messages are there; returns by the end of a turn."""
        peers = self.dog.peers.values()
        if len(peers) < _MANY or any(peer.connection is None for peer in peers):  # some have yet to connect, or left
            return self.selector.select(timeout=min(TURN_S, self.dog.heartbeat_s))
        # To wake up for each of hundreds of heartbeats a second would cost several times what reading them does.
        self.dog.closing.wait(TURN_S)
        return self.selector.select(timeout=0)

    def ready(self, key: selectors.SelectorKey) -> None:
        raise NotImplementedError

    def check(self, now: float) -> None:
        """Judge ranks that are still connected but have been silent for longer than `frozen_s`."""
        for peer in self.dog.peers.values():
            silent = now - peer.heard
            if not peer.left and not peer.judged and silent > self.dog.frozen_s:
                peer.judged = True
                self.verdict(self._frozen(peer, silent))

    def verdict(self, verdict: Verdict) -> None:
        self.dog.judge(verdict)

    def failed(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def broadcast(self, message: dict[str, Any]) -> None:
        body = encoded(message)
        for peer in self.dog.peers.values():
            if peer.connection is not None:
                peer.connection.send_body(body)

    def note(self, peer: Peer, message: dict[str, Any]) -> None:
        """Note what a heartbeat or a farewell says; both show that the rank lives."""
        peer.heard = max(peer.heard, time.monotonic())
        if "beat" in message:
            peer.step, peer.activity = int(message["beat"][0]), str(message["beat"][1])
        if "bye" in message:
            peer.left, peer.step = True, int(message["bye"])
            self.verdict(self._left(peer))

    def lost(self, peer: Peer) -> None:
        """The connection has closed; if the rank has not said farewell before, it died."""
        if peer.connection is not None:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(peer.connection.socket)
            peer.connection.close()
            peer.connection = None
        if not peer.left and not peer.judged:
            peer.judged = peer.left = True
            self.verdict(self._died(peer))

    def _died(self, peer: Peer) -> Verdict:
        text = f"rank {peer.rank} died, last heard of in step {peer.step} ({peer.activity})"
        return Verdict(text, _BUSY_TURNS, self.dog.frozen_s)

    def _frozen(self, peer: Peer, silent_s: float) -> Verdict:
        who = self.dog.identities[peer.rank]
        text = (
            f"rank {peer.rank} is frozen: nothing heard for {silent_s:.1f} s, last in step {peer.step} "
            f"({peer.activity}; process {who.pid} on {who.host})"
        )
        # No time is left to anybody: a frozen process does not fail by itself, it must be killed, and until then it
        # holds the others in their collectives.
        return Verdict(text, 0, 0.0, peer.rank)

    def _left(self, peer: Peer) -> Verdict:
        return Verdict(f"rank {peer.rank} has left the job after step {peer.step}", _LEFT_TURNS, None)

    def close(self) -> None:
        for peer in self.dog.peers.values():
            if peer.connection is not None:
                # A close with bytes still unread resets the connection, and the reset may overtake the farewell that
                # was just sent. To end the writing side first lets farewell and end of stream go out before that.
                with contextlib.suppress(OSError):
                    peer.connection.socket.shutdown(socket.SHUT_WR)
                peer.connection.close()
        self.selector.close()


class Client(Side):
    """A rank other than 0: it hears rank 0 only, and learns of the other ranks by rank 0's verdicts."""

    def __init__(self, dog: Watchdog):
        super().__init__(dog)
        self.peer = dog.peers[0]
        assert self.peer.connection is not None, "connected by the constructor"
        self.selector.register(self.peer.connection.socket, selectors.EVENT_READ)

    def ready(self, key: selectors.SelectorKey) -> None:
        connection = self.peer.connection
        if connection is None:
            return
        open_still = connection.receive()
        try:
            for message in connection.messages():
                self.note(self.peer, message)
                if "verdict" in message:
                    self.dog.judge(Verdict(**message["verdict"]))
        except (ValueError, TypeError, KeyError, IndexError):
            open_still = False
        if not open_still:
            self.lost(self.peer)

    def failed(self, message: dict[str, Any]) -> None:
        self.broadcast(message)


class Server(Side):
    """Rank 0: accepts connections, hears all ranks and tells them its verdicts."""

    # [Note: handshake] Whoever connects is a stranger until it has shown that it knows the job's secret:
    #
    #   rank 0 -> rank 3   a nonce A of 16 random bytes, made for this connection
    #   rank 3 -> rank 0   a nonce B, then the frame {"rank": 3}; its code is keyed by HMAC(secret, A + B)
    #
    # The secret itself never goes over this socket. A frame that was recorded on another connection fails here, for A
    # and B differ; one recorded on this connection fails by its number (`Connection._mac`). A port scanner, or another
    # job that was given the same port, sends no such frame and is dropped after 10 s at the latest.

    def __init__(self, dog: Watchdog):
        super().__init__(dog)
        dog.listener.setblocking(False)
        self.selector.register(dog.listener, selectors.EVENT_READ, None)
        self.strangers: dict[Connection, tuple[float, bytes]] = {}

    def ready(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            self._accept()
        elif isinstance(key.data, Peer):
            self._hear(key.data)
        else:
            self._meet(key.data)

    def check(self, now: float) -> None:
        for connection in [c for c, (since, _) in self.strangers.items() if now - since > _HANDSHAKE_S]:
            self._refuse(connection)
        super().check(now)

    def verdict(self, verdict: Verdict) -> None:
        if self.dog.judge(verdict):
            self.broadcast({"verdict": asdict(verdict)})

    def failed(self, message: dict[str, Any]) -> None:
        self.verdict(Verdict(str(message["failed"]), _BUSY_TURNS, None))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.dog.listener.accept()
                # Each open socket takes one of this process's descriptors, which training needs too.
                if len(self.strangers) >= _MAX_STRANGERS + self.dog.num_ranks:
                    sock.close()
                    continue
                connection = Connection(sock, server=True)
                nonce = secrets.token_bytes(NONCE_BYTES)
                self.strangers[connection] = (time.monotonic(), nonce)
                self.selector.register(sock, selectors.EVENT_READ, connection)
                connection.send_raw(nonce)

    def _meet(self, connection: Connection) -> None:
        """A stranger has sent something; it becomes a rank by a first frame that is valid [Note: handshake]."""
        open_still = connection.receive()
        _, nonce = self.strangers[connection]
        try:
            if not connection.keyed:
                theirs = connection.take_raw(NONCE_BYTES)
                if theirs is not None:
                    connection.set_key(self.dog.secret, nonce + theirs)
            if connection.keyed:
                for message in connection.messages():
                    peer = self.dog.peers[int(message["rank"])]
                    if peer.connection is not None or peer.left:
                        raise ValueError("that rank is here already")
                    peer.connection, peer.heard = connection, time.monotonic()
                    del self.strangers[connection]
                    self.selector.modify(connection.socket, selectors.EVENT_READ, peer)
                    self._hear(peer)
                    return
        except (ValueError, TypeError, KeyError):
            open_still = False
        if not open_still:
            logger.warning("refused a connection to the heartbeat port that does not know the job's secret")
            self._refuse(connection)

    def _refuse(self, connection: Connection) -> None:
        self.strangers.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(connection.socket)
        connection.close()

    def _hear(self, peer: Peer) -> None:
        connection = peer.connection
        if connection is None:
            return
        open_still = connection.receive()
        try:
            for message in connection.messages():
                self.note(peer, message)
                if "failed" in message:
                    self.failed(message)
        except (ValueError, TypeError, KeyError, IndexError):
            open_still = False
        if not open_still:
            self.lost(peer)

    def close(self) -> None:
        for connection in list(self.strangers):
            self._refuse(connection)
        self.dog.listener.close()
        super().close()
