"""Connections between members: messages, heartbeats, and who is lost or silent.

Each member listens from the start, and two of them share the connections that either has made. One that closes is made
anew at once, if the machine has to hear of the other: where nobody listens any more, that process is dead; where the
host does not answer, it is lost; otherwise only the connection was, and nothing has happened.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from ds_hydra.elastic import messages as m
from ds_hydra.elastic.membership import Membership
from ds_hydra.elastic.messages import Member
from ds_hydra.watchdog.connection import Connection, Door, closed_in_children, encoded
from ds_hydra.watchdog.meeting import greeted
from ds_hydra.watchdog.watchdog import beat_seconds

_CONNECT_S = 2.0
_COMES_S = 2.0  # within which members come to the coordinator by themselves
_AT_ONCE = threading.BoundedSemaphore(64)  # connections that this process is making
_MAX_FRAME = 1 << 24  # whole rosters of thousands of members
Event = Callable[[], object]  # of the machine


@dataclass(eq=False)
class Peer:
    """A connection, and who is at its other end."""

    id: int  # -1: a process that wants to join
    connection: Connection
    joiner: Member | None = None  # who has knocked through it


class Links:
    """A machine's connections. One thread uses them, but for `wake`; another one sends the heartbeats, however long
    that thread is busy, unless it stands still for as long as a process may that is not frozen."""

    def __init__(self, machine: Membership, listener: socket.socket, secret: bytes, *, frozen_s: float,
                 heartbeat_s: float):  # fmt: skip
        self._machine, self._secret, self.frozen_s = machine, secret, frozen_s
        self._selector = selectors.DefaultSelector()
        self._door = Door(closed_in_children(listener), secret, self._selector, self._admit, self._read)
        self._peers: dict[int, list[Peer]] = {}  # by id
        self._heard: dict[int, float] = {}
        self._watched: frozenset[int] = frozenset()
        self._connecting: dict[int, list[m.Message]] = {}  # with what is to be said then, by id
        self._made: queue.SimpleQueue[tuple[int, Member, Connection | OSError]] = queue.SimpleQueue()
        self._events: list[Event] = []
        self._awake, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ, self)
        self._encoded: tuple[m.Message | None, bytes] = (None, b"")  # the last message: often for many members
        self._asked = 0  # members at which this process has knocked
        self.unanswered = 0  # of these the last ones, where nobody was
        self._lock = threading.Lock()  # of `_peers`, and of what is sent to them
        self._closing, self._turned, self._heartbeat_s = threading.Event(), time.monotonic(), heartbeat_s
        self._beats = threading.Thread(target=self._beat, daemon=True, name="heartbeats")
        self._beats.start()

    def wake(self) -> None:
        """End a wait; any thread may call it."""
        with contextlib.suppress(OSError):
            self._wakes.send(b"x")

    def wait(self, seconds: float) -> list[Event]:
        """What has come by then."""
        for key, _ in self._selector.select(seconds):
            if key.data is self:
                self._awake.recv(4096)
            elif isinstance(key.data, Peer):
                self._read(key.data)
            else:
                self._door.ready(key.data)
        while not self._made.empty():
            self._connected(*self._made.get())
        return self._taken()

    def send(self, to: Member, message: m.Message) -> None:
        """Say it, over a new connection where there is none; `lose` may come of that."""
        # The oldest, as long as it lasts: what goes over two connections may come in another order.
        peer = next((one for one in self._peers.get(to.id, ()) if one.joiner is None), None)
        if peer is not None:
            self._say(peer, message)
        elif to.id in self._connecting:
            self._connecting[to.id].append(message)
        elif to.host:
            self._connect(to, [message])

    def _say(self, peer: Peer, message: m.Message) -> None:
        if self._encoded[0] is not message:
            self._encoded = message, encoded(m.to_wire(message, self._machine.rosters))
        with self._lock:
            peer.connection.send_body(self._encoded[1])

    def watch(self) -> list[Event]:
        """Once a turn: be connected to whom the machine watches; who was silent for long is told."""
        now, members = time.monotonic(), self._machine.watched
        comes_s = _COMES_S if self._machine.coordinator == self._machine.me.id else -1.0
        self._turned, self._watched = now, frozenset(member.id for member in members)
        self._door.check(now)
        self._door.expected = len(self._watched)
        for member in members:
            self._heard.setdefault(member.id, now)
            if member.id not in self._peers and member.id not in self._connecting:
                if now - self._heard[member.id] > comes_s:
                    self._connect(member, [])
            elif now - self._heard[member.id] > self.frozen_s:
                self._events.append(partial(self._machine.silent, member.id))
        for number in self._heard.keys() - self._watched - self._peers.keys():
            del self._heard[number]
        return self._taken()

    def listened(self) -> None:
        """Nobody counts as silent: this process has not listened."""
        self._heard = dict.fromkeys(self._heard, time.monotonic())

    def knock(self, members: Sequence[Member]) -> None:
        """Once a turn, until this process is a member: ask one of them after the other."""
        self._turned = time.monotonic()
        if members and not self._connecting and not any(one.joiner for some in self._peers.values() for one in some):
            self._connect(members[self._asked % len(members)], [])
            self._asked += 1

    def joined(self) -> None:
        """This process has become a member: what it says next is to come from one."""
        for peer in [one for some in self._peers.values() for one in some if one.id >= 0 and one.joiner is not None]:
            self._gone(peer)

    def close(self, bye: m.Word) -> None:
        self._closing.set()
        self._beats.join()
        self._to_all(bye)
        self._door.close()
        for peer in [one for some in self._peers.values() for one in some]:
            peer.connection.leave()
        self._selector.close()
        self._awake.close()
        self._wakes.close()

    # Heartbeats: a thread of their own.

    @property
    def beat_s(self) -> float:
        """Seconds between two."""
        return beat_seconds(len(self._watched), self._heartbeat_s, self.frozen_s)

    def _beat(self) -> None:
        while not self._closing.wait(self.beat_s):
            if self._machine.me.id >= 0 and time.monotonic() - self._turned < self.frozen_s:
                self._to_all(self._machine.beat())

    def _to_all(self, word: m.Word) -> None:
        body = encoded(m.to_wire(word, {}))
        with self._lock:
            for peers in self._peers.values():
                if peers[0].id >= 0 and peers[0].joiner is None:
                    peers[0].connection.send_body(body)

    # Connections.

    def _connect(self, to: Member, messages: list[m.Message]) -> None:
        self._connecting[to.id] = messages
        number = self._machine.me.id

        def connect() -> None:
            try:
                with _AT_ONCE:
                    made: Connection | OSError = greeted(to.address, self._secret, number, _CONNECT_S)
            except OSError as error:
                made = error
            self._made.put((number, to, made))
            self.wake()

        threading.Thread(target=connect, daemon=True, name="connecting").start()

    def _connected(self, number: int, to: Member, made: Connection | OSError) -> None:
        waiting = self._connecting.pop(to.id, [])
        if isinstance(made, OSError) and to.id in self._peers:  # it has come by itself meanwhile
            for message in waiting:
                self.send(to, message)
            return
        if isinstance(made, OSError):
            self._events.append(partial(self._machine.lose, to.id, isinstance(made, ConnectionRefusedError)))
            self.unanswered += 1
            return
        self.unanswered = 0
        me = self._machine.me
        if me.id != number:  # it has become a member meanwhile
            made.close()
            self._connect(to, waiting)
            return
        peer = self._add(Peer(to.id, made, me if number < 0 else None))
        self._selector.register(made.socket, selectors.EVENT_READ, peer)
        if number < 0:
            made.send({"knock": asdict(me)})
        for message in waiting:
            self._say(peer, message)

    def _admit(self, connection: Connection, message: dict[str, Any]) -> Peer:
        return self._add(Peer(int(message["rank"]), connection))

    def _add(self, peer: Peer) -> Peer:
        peer.connection.max_frame = _MAX_FRAME
        with self._lock:
            self._peers.setdefault(peer.id, []).append(peer)
        return peer

    def _read(self, peer: Peer) -> None:
        if not peer.connection.read(partial(self._take, peer)):
            self._gone(peer)

    def _take(self, peer: Peer, message: dict[str, Any]) -> None:
        self._heard[peer.id] = time.monotonic()
        if peer.id < 0:
            self._knocked(peer, TypeAdapter(Member).validate_python(message["knock"]))
        elif message:
            self._events.append(partial(self._hear, peer, message))

    def _hear(self, peer: Peer, wire: dict[str, Any]) -> None:
        """Read only when all is known that came before."""
        try:
            message = m.from_wire(wire, self._machine.rosters)
        except (ValueError, TypeError, LookupError):
            self._gone(peer)
        else:
            if message is not None:
                self._machine.hear(peer.id, message)

    def _knocked(self, peer: Peer, joiner: Member) -> None:
        """Only the coordinator keeps who knocks; from others it goes on to the next."""
        if self._machine.coordinator != self._machine.me.id:
            raise ValueError("not at this door")
        peer.joiner = joiner
        self._events.append(partial(self._machine.knock, joiner))

    def _gone(self, peer: Peer) -> None:
        with self._lock:
            if peer not in self._peers.get(peer.id, ()):
                return
            self._peers[peer.id].remove(peer)
            if not self._peers[peer.id]:
                del self._peers[peer.id]
        peer.connection.close(self._selector)
        if peer.id < 0 and peer.joiner is not None:
            self._events.append(partial(self._machine.knocks.pop, peer.joiner.address, None))
        elif peer.id in self._watched & self._machine.roster.ids - self._peers.keys() - self._connecting.keys():
            self._connect(self._machine.roster.by_id[peer.id], [])

    def _taken(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken
