"""The watchdog's thread: one loop, which hears the ranks above and below, finds faults, and passes verdicts on."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ds_hydra.ranks.calling import different, who_calls
from ds_hydra.watchdog.connection import Connection, encoded
from ds_hydra.watchdog.door import Door
from ds_hydra.watchdog.tree import Call, Peer, Verdict, different_calls
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.watchdog.watchdog import Watchdog

TURN_S = 0.25
BUSY_TURNS = 4  # that a rank inside a step still gets after another one died or failed
_LEFT_TURNS = 8  # the same after a rank left in good order: its last messages may still be on their way
_STAYS_S = 3.0  # in different calls, after which ranks do not go on by themselves: one may leave its call by an error
_IDLE_S = 1.0  # that a rank outside a step still gets then
_NO_RANK = -1  # whose fault it is where ranks call otherwise
_MANY = 32  # peers whose messages are read once in a turn


class Side:
    """The heartbeat thread's loop.

    In each turn it reads messages, looks for silent ranks, acts on a verdict and sends a heartbeat when one is due.
    On exit it tells the others that this rank has left.
    """

    def __init__(self, dog: Watchdog):
        self.dog = dog
        self.selector = selectors.DefaultSelector()
        self._told_calls = False
        self.door: Door[Peer] | None = None
        if dog.below:
            assert dog.listener is not None, "there are ranks below"
            self.door = Door(dog.listener, dog.secret, self.selector, self._admit, self._hear)
            self.door.expected = len(dog.below)
        if dog.above is not None:
            assert dog.above.connection is not None, "connected by the watchdog's constructor"
            self.selector.register(dog.above.connection.socket, selectors.EVENT_READ, dog.above)

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
                dog.look_at_itself(now)
                self._compare_calls(now)
                dog.obey()
            else:
                continue  # a message woke the selector early: no turn, or many messages would use a verdict's turns up
            last_turn = now
            self._tell_failures()
            if now >= next_beat:
                next_beat = now + dog.beat_s
                self.send(dog.beat(), dog.peers.values())
        self._tell_failures()
        self.send({"bye": dog._where()[0] - 1, "by": dog.leaves_by}, dog.peers.values())
        self.close()

    def _tell_failures(self) -> None:
        for verdict in self.dog.take_outbox():
            self.found(verdict)

    def wait_for_messages(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Whose messages are there; returns by the end of a turn."""
        peers = self.dog.peers.values()
        if len(peers) < _MANY or any(peer.connection is None for peer in peers):  # some have yet to connect, or left
            return self.selector.select(timeout=min(TURN_S, self.dog.heartbeat_s))
        # To wake up for each of hundreds of heartbeats a second would cost several times what reading them does.
        self.dog.closing.wait(TURN_S)
        return self.selector.select(timeout=0)

    def ready(self, key: selectors.SelectorKey) -> None:
        """Read what has come."""
        if isinstance(key.data, Peer):
            self._hear(key.data)
        elif self.door is not None:
            self.door.ready(key.data)

    def _admit(self, connection: Connection, message: dict[str, Any]) -> Peer:
        peer = self.dog.below[int(message["rank"])]
        if peer.connection is not None or peer.left:
            raise ValueError("that rank is here already")
        peer.connection, peer.heard = connection, time.monotonic()
        return peer

    def _hear(self, peer: Peer) -> None:
        connection = peer.connection
        if connection is None:
            return
        open_still = connection.receive()
        try:
            for message in connection.messages():
                self.note(peer, message)
                if "verdict" in message and peer is self.dog.above:
                    self.decide(Verdict(**message["verdict"]))
                elif "found" in message and peer is not self.dog.above:
                    self.found(Verdict(**message["found"]))
        except (ValueError, TypeError, KeyError, IndexError):
            open_still = False
        if not open_still:
            self.lost(peer)

    def check(self, now: float) -> None:
        """Judge ranks that are still connected but have been silent for longer than `frozen_s`."""
        if self.door is not None:
            self.door.check(now)
        for peer in self.dog.peers.values():
            silent = now - peer.heard
            if not peer.left and not peer.judged and silent > self.dog.frozen_s:
                peer.judged = True
                self.found(self._frozen(peer, silent), peer)

    def _compare_calls(self, now: float) -> None:
        """Judge ranks that wait for each other in different calls, of this one and those below it."""
        dog = self.dog
        calls = {} if self._told_calls else different_calls((dog.itself, *dog.below.values()), now, _STAYS_S)
        if calls:
            self._told_calls = True
            self.found(Verdict(_NO_RANK, different(calls), BUSY_TURNS, _IDLE_S, code=ConfigError.exit_code))

    def found(self, verdict: Verdict, about: Peer | None = None) -> None:
        """Tell rank 0 what was found, or decide here: on rank 0, and of the rank above [Note: a tree of hosts]."""
        above = self.dog.above
        if above is None or above is about or above.connection is None:
            self.decide(verdict)
        else:
            above.connection.send({"found": asdict(verdict)})

    def decide(self, verdict: Verdict) -> None:
        """Accept a verdict if it is the first, and pass it on to the ranks below."""
        if self.dog.judge(verdict):
            self.send({"verdict": asdict(verdict)}, self.dog.below.values())

    def send(self, message: dict[str, Any], peers: Iterable[Peer]) -> None:
        """Send a message to each of these ranks that is there."""
        body = encoded(message)
        for peer in peers:
            if peer.connection is not None:
                peer.connection.send_body(body)

    def note(self, peer: Peer, message: dict[str, Any]) -> None:
        """Note what a heartbeat or a farewell says; both show that the rank lives."""
        peer.heard = max(peer.heard, time.monotonic())
        if "beat" in message:
            peer.step, peer.activity = int(message["beat"][0]), str(message["beat"][1])
            peer.note_call(Call(*message["call"]) if "call" in message else None, peer.heard)
        if "bye" in message:
            peer.left, peer.step, peer.call = True, int(message["bye"]), None
            if message["by"] is not None:
                self.found(self._left(peer, str(message["by"])), peer)

    def lost(self, peer: Peer) -> None:
        """The connection has closed; if the rank has not said farewell before, it died."""
        if peer.connection is not None:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(peer.connection.socket)
            peer.connection.close()
            peer.connection = None
        if not peer.left and not peer.judged:
            peer.judged = peer.left = True
            self.found(self._died(peer), peer)

    def _died(self, peer: Peer) -> Verdict:
        text = f"rank {peer.rank} died, last heard of in step {peer.step} ({peer.activity})"
        return Verdict(peer.rank, text, BUSY_TURNS, self.dog.frozen_s, gone=True)

    def _frozen(self, peer: Peer, silent_s: float) -> Verdict:
        who = self.dog.identities[peer.rank]
        text = (
            f"rank {peer.rank} is frozen: nothing heard for {silent_s:.1f} s, last in step {peer.step} "
            f"({peer.activity}; process {who.pid} on {who.host})"
        )
        # No time is left to anybody: a frozen process does not fail by itself, it must be killed, and until then it
        # holds the others in their collectives.
        return Verdict(peer.rank, text, 0, 0.0, gone=True, frozen=True)

    def _left(self, peer: Peer, error: str) -> Verdict:
        steps = f"{peer.step} step{'s' * (peer.step != 1)}"
        if error:
            return Verdict(peer.rank, f"rank {peer.rank} failed after {steps}: {error}", _LEFT_TURNS, None)
        calls = self.dog.known_calls()
        meanwhile = f"while {who_calls(calls)}" if calls else "and the others go on"
        text = (
            f"rank {peer.rank}'s script ended after {steps}, or destroyed its engine, {meanwhile}: every rank must "
            "make the same calls, as often: take them out of what only some ranks come to, such as `if rank == 0:`, "
            "and give all ranks as many batches (drop_last, an even sampler), or call engine.step() without a batch "
            "on a rank that has none, train_batch([]), and engine([]) in an evaluation"
        )
        return Verdict(peer.rank, text, _LEFT_TURNS, None, code=ConfigError.exit_code)

    def close(self) -> None:
        if self.door is not None:
            self.door.close()
        for peer in self.dog.peers.values():
            if peer.connection is not None:
                # A close with bytes still unread resets the connection, and the reset may overtake the farewell that
                # was just sent. To end the writing side first lets farewell and end of stream go out before that.
                with contextlib.suppress(OSError):
                    peer.connection.socket.shutdown(socket.SHUT_WR)
                peer.connection.close()
        self.selector.close()
