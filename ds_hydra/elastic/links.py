"""Connections between members: messages out and in, and who is lost or silent.

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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from ds_hydra.elastic import messages as m
from ds_hydra.elastic.view import Member
from ds_hydra.watchdog.connection import Connection, closed_in_children, encoded
from ds_hydra.watchdog.door import Door
from ds_hydra.watchdog.meeting import greeted

_CONNECT_S = 2.0
_MAX_FRAME = 1 << 28  # the reports of a thousand members, a thousand rows each


@dataclass(eq=False)
class Peer:
    """A connection, and who is at its other end."""

    id: int  # -1: a process that wants to join
    connection: Connection
    joiner: Member | None = None


class Links:
    """This member's connections; one thread uses them, but for `wake`."""

    def __init__(self, listener: socket.socket, secret: bytes, *, frozen_s: float):
        self.me: Member | None = None
        self.coordinator: Member | None = None
        self.roster: m.Roster | None = None
        self._secret, self.frozen_s = secret, frozen_s
        self._selector = selectors.DefaultSelector()
        self._door = Door(closed_in_children(listener), secret, self._selector, self._admit, self._read)
        self._peers: list[Peer] = []
        self._heard: dict[int, float] = {}
        self._watched: frozenset[int] = frozenset()
        self._connecting: dict[int, list[m.Message]] = {}  # with what is to be said then, by id
        self._made: queue.SimpleQueue[tuple[int, Member, Connection | OSError]] = queue.SimpleQueue()
        self._events: list[m.Event] = []
        self._awake, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ, self)
        self._told: tuple[m.Message | None, bytes] = (None, b"")  # what was encoded last: often for many members
        self._asked = 0  # members at which this process has knocked
        self.unanswered = 0  # of these the last ones, where nobody was

    def wake(self) -> None:
        """End a wait; any thread may call it."""
        with contextlib.suppress(OSError):
            self._wakes.send(b"x")

    def wait(self, seconds: float) -> list[m.Event]:
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
        """Say it, over a new connection where there is none; `Lost` may come of that."""
        # The oldest, as long as it lasts: what goes over two connections may come in another order.
        peer = next((one for one in self._peers if one.id == to.id), None)
        if peer is not None:
            peer.connection.send_body(self._encoded(message))
        elif to.id in self._connecting:
            self._connecting[to.id].append(message)
        elif to.host:
            self._connect(to, [message])

    def _encoded(self, message: m.Message) -> bytes:
        """Once for all who get it: the views of a thousand members are megabytes."""
        if self._told[0] is not message:
            self._told = message, encoded(m.to_wire(message))
        return self._told[1]

    def watch(self, members: Sequence[Member]) -> list[m.Event]:
        """Once a turn: be connected to these; who was silent for long is told."""
        now, here = time.monotonic(), {peer.id for peer in self._peers}
        self._watched = frozenset(member.id for member in members)
        self._door.check(now)
        self._door.expected = len(self._watched)
        for member in members:
            self._heard.setdefault(member.id, now)
            if member.id not in here and member.id not in self._connecting:
                self._connect(member, [])
            elif now - self._heard[member.id] > self.frozen_s:
                self._events.append(m.Silent(member.id))
        for number in self._heard.keys() - self._watched - here:
            del self._heard[number]
        return self._taken()

    def beat(self, beat: m.Beat | m.Bye) -> None:
        """To all that are connected."""
        for number in {peer.id for peer in self._peers if peer.id >= 0}:
            self.send(Member(number, "", ("", 0)), beat)

    def listened(self) -> None:
        """Nobody counts as silent: this process has not listened."""
        self._heard = dict.fromkeys(self._heard, time.monotonic())

    def knock(self, me: Member, members: Sequence[Member]) -> None:
        """Once a turn, until this process is a member: ask one of them after the other."""
        self.me = me
        if members and not self._connecting and not any(peer.joiner for peer in self._peers):
            self._connect(members[self._asked % len(members)], [])
            self._asked += 1

    def joined(self) -> None:
        """This process has become a member: what it says next is to come from one."""
        for peer in [one for one in self._peers if one.id >= 0 and one.joiner is not None]:
            self._gone(peer)

    def close(self, bye: m.Bye) -> None:
        self.beat(bye)
        self._door.close()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.connection.socket.shutdown(socket.SHUT_WR)  # as `sides.Side.close` says
            peer.connection.close()
        self._selector.close()
        self._awake.close()
        self._wakes.close()

    # Connections.

    def _connect(self, to: Member, messages: list[m.Message]) -> None:
        self._connecting[to.id] = messages
        number = self.me.id if self.me is not None else -1

        def connect() -> None:
            try:
                made: Connection | OSError = greeted(to.address, self._secret, number, _CONNECT_S)
            except OSError as error:
                made = error
            self._made.put((number, to, made))
            self.wake()

        threading.Thread(target=connect, daemon=True, name="connecting").start()

    def _connected(self, number: int, to: Member, made: Connection | OSError) -> None:
        waiting = self._connecting.pop(to.id, [])
        if isinstance(made, OSError):
            self._events.append(m.Lost(to.id, dead=isinstance(made, ConnectionRefusedError)))
            self.unanswered += 1
            return
        self.unanswered = 0
        if self.me is not None and self.me.id != number:  # it has become a member meanwhile
            made.close()
            self._connect(to, waiting)
            return
        made.max_frame = _MAX_FRAME
        joins = number < 0
        peer = Peer(to.id, made, self.me if joins else None)
        self._peers.append(peer)
        self._selector.register(made.socket, selectors.EVENT_READ, peer)
        if joins and self.me is not None:
            made.send({"knock": asdict(self.me)})
        for message in waiting:
            made.send_body(self._encoded(message))

    def _admit(self, connection: Connection, message: dict[str, Any]) -> Peer:
        peer = Peer(int(message["rank"]), connection)
        connection.max_frame = _MAX_FRAME
        self._peers.append(peer)
        return peer

    def _read(self, peer: Peer) -> None:
        open_still = peer.connection.receive()
        try:
            for message in peer.connection.messages():
                self._heard[peer.id] = time.monotonic()
                if peer.id < 0:
                    self._knocked(peer, TypeAdapter(Member).validate_python(message["knock"]))
                elif message:
                    self._events.append(m.Heard(peer.id, m.from_wire(message)))
        except (ValueError, TypeError, LookupError):
            open_still = False
        if not open_still:
            self._gone(peer)

    def _knocked(self, peer: Peer, joiner: Member) -> None:
        """Only the coordinator keeps who knocks; from others it goes on to the next."""
        if self.me is not None and self.coordinator == self.me:
            peer.joiner = joiner
            self._events.append(m.Knock(joiner))
        else:
            raise ValueError("not at this door")

    def _gone(self, peer: Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection.socket)
        peer.connection.close()
        if peer.id < 0 and peer.joiner is not None:
            self._events.append(m.KnockGone(peer.joiner))
        elif peer.id in self._watched and not any(one.id == peer.id for one in self._peers) and self.roster is not None:
            again: Iterable[Member] = (one for one in self.roster.members if one.id == peer.id)
            for member in again:
                if member.id not in self._connecting:
                    self._connect(member, [])

    def _taken(self) -> list[m.Event]:
        taken, self._events = self._events, []
        return taken
