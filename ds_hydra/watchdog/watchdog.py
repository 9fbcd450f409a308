"""Heartbeats between ranks, outside the collectives: when a rank is dead or frozen, the job ends on all of them.

[Note: who ends when]
Every rank has connections to few others [Note: a tree of hosts], and a thread that sends heartbeats over them. A closed
connection means that the rank has died; silence means that it is frozen. Rank 0 tells all ranks what happened, as a
verdict, and each rank ends itself by it:

  what happened       a rank inside a step ends     a rank outside a step ends
  a rank is frozen    at once                       at once
  a rank died         after 4 turns (1 s)           after `frozen_s` (9 s)
  a rank failed       after 4 turns                 4 turns into its next step
  a rank has left     after 8 turns                 8 turns into its next step
  a rank stands still after 4 turns                 4 turns into its next step, or when it does nothing any more
  ranks call otherwise after 4 turns                after 1 s

A rank stands still for which others have waited in vain [Note: who stands still], by its watchdog or by a time-out; or
that has been in one part of a step for `still_s`, where that is given: on devices nothing else ends a wait for a
message that does not come, while all ranks live. Where a save is under way and all ranks live, they end
when it is whole, the one that failed too.

Inside a step a rank waits for messages that the lost rank will never send, so the step can never complete. Outside a
step it waits for nobody: it may be about to leave by itself, as all ranks do after the last step, and to end it then
would make an error of a job that succeeded. The turns that a rank inside a step still gets are for its own exception:
it may be about to fail too, by a fault of its own. Assembly counts as a step, and so does a call of all ranks until
they have all come to it. Ranks call otherwise that have waited for some seconds in calls of different names, though
equally many were made before [Note: one call on all ranks].

[Note: who tells]
The cause is told once on each host: by the rank that failed, with its own traceback, else by the first rank of the host
(by any one of them, if that is the rank that is gone). The others end without a word, with the verdict's exit code: 75,
or that of a refusal. An error that only says that a connection was lost, or that repeats another rank's, is no cause:
its rank waits for the verdict, and its traceback goes to the log at level DEBUG.

Whoever connects must know the job's secret, which travels over the ranks' process group. Nothing that is received can
do more than end this job.
"""

from __future__ import annotations

import atexit
import logging
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ds_hydra.ranks.calling import Calling, different, who_calls
from ds_hydra.ranks.channel import Texts, agree
from ds_hydra.ranks.groups import CONNECTING
from ds_hydra.watchdog.connection import Connection, Door, encoded
from ds_hydra.watchdog.host import EXIT_CODE, end_process, kill, say, stopped
from ds_hydra.watchdog.meeting import START_S, Call, Peer, Verdict, different_calls, greet, meet
from ds_hydra.watchdog.progress import (
    GRACE_S,
    IDLE,
    NAMED_S,
    Progress,
    Stand,
    few_of,
    late_of,
    named,
    read_in_vain,
    stuck,
)
from ds_hydra.watchdog.words import LastWords, as_line, follows, lost_connection, refusal_code, timed_out
from ds_hydra.zero_hetero.errors import INTERRUPTED, OWN_FAULT, ConfigError
from ds_hydra.zero_hetero.told import told_of

logger = logging.getLogger(__name__)

TURN_S = 0.25
BUSY_TURNS = 4  # that a rank inside a step still gets after another one died or failed
_LEFT_TURNS = 8  # the same after a rank left in good order: its last messages may still be on their way
_STAYS_S = 3.0  # in different calls, after which ranks do not go on by themselves: one may leave its call by an error
_IDLE_S = 1.0  # that a rank outside a step still gets then
_NO_RANK = -1  # whose fault it is where ranks call otherwise
_MANY = 32  # peers whose messages are read once in a turn

_COMPUTING = frozenset({"pull", "forward", "backward", "push", "optimizer"})  # parts of a step on the device
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_RANKS_A_BEAT = 256  # ranks that one rank hears in the time between two heartbeats of a small job
_MOST_NAMED = 4  # ranks
FINISH_S = 600.0  # in which ranks that must end finish a save that is under way
_NOTHING_S = 3.0  # for which a rank outside a step does nothing, when others have waited in vain for one
_OF_A_TIME_OUT = 300  # characters of its text that a verdict tells, beside those for whom it was
_TURNS_OF_OTHERS = 12  # that another rank's fault may take to become known, when a connection is lost


class Activity:
    """What this rank does, in one word such as "forward" or "saving"; heartbeats and errors tell it.

    `now` is written by the part that does the work and read by the heartbeat's thread.

    Within a `with` block, plain assignments to `now` may follow (a stage goes from "forward" to "backward" to "push").
    When the block ends, `now` is again what it was before.
    """

    # No lock: one thread writes a name, the other reads it, and either name is true at the moment of the change.

    def __init__(self, coming_step: Callable[[], int] = lambda: 1) -> None:
        self.now, self.coming_step = IDLE, coming_step
        self.calling = Calling()  # the call of all ranks in which it does so

    @property
    def told(self) -> str:
        """What others are told: the call in which this rank waits for them, where it does nothing that has a name."""
        return self.now if self.now != IDLE else self.calling.waiting or IDLE

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before, self.now = self.now, name
        try:
            yield
        finally:
            self.now = before


def _waits(activity: str) -> bool:
    """Whether it takes no longer than messages take."""
    return activity in _COMPUTING or activity.startswith(CONNECTING)


def beat_seconds(num_heard: int, heartbeat_s: float, frozen_s: float) -> float:
    """Seconds between two heartbeats of a rank: `heartbeat_s`, or more where many would keep one rank busy.

    The rank that hears most, `num_heard`, hears and answers them in a thread of the process that trains. Where it hears
    1024, each beats once in 3 s: still three beats within 9 s, after which a silent rank counts as frozen.
    """
    return max(heartbeat_s, min(frozen_s / 3, heartbeat_s * num_heard / _RANKS_A_BEAT))


class Side:
    """The heartbeat thread's loop.

    In each turn it reads messages, looks for silent ranks, acts on a verdict and sends a heartbeat when one is due.
    On exit it tells the others that this rank has left.
    """

    def __init__(self, dog: Watchdog):
        self.dog = dog
        self.selector = selectors.DefaultSelector()
        self._told_calls, self._named_at = False, 0.0
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
                self._compare_stands(now)
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
        if peer.connection is not None and not peer.connection.read(partial(self.note, peer)):
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

    def _compare_stands(self, now: float) -> None:
        """Rank 0: name the ranks for which others wait for long, and judge those that stand still."""
        dog = self.dog
        if dog.above is not None or dog.verdict is not None:
            return
        late, why = stuck(dog.stands(), GRACE_S)
        if not late:
            late, why = read_in_vain(dog.stands())
        if late:
            self.found(Verdict(late[0].rank, why, BUSY_TURNS, None, still=True))
        elif now > self._named_at + NAMED_S and (text := named(dog.stands())):
            self._named_at = now
            say(text)

    def found(self, verdict: Verdict, about: Peer | None = None) -> None:
        """Tell rank 0 what was found, or decide here: on rank 0, and of the rank above [Note: a tree of hosts]."""
        above = self.dog.above
        if above is None or above is about or above.connection is None:
            self.decide(verdict)
        else:
            above.connection.send({"found": asdict(verdict)})

    def decide(self, verdict: Verdict) -> None:
        """Accept a verdict if it is the first, and pass it on to the ranks below."""
        if verdict.still and self.dog.above is None:
            late = f"; {text}" if verdict.error and (text := late_of(self.dog.stands())) else ""
            verdict = replace(verdict, text=f"{verdict.text}{late}; {self.dog.progress.told}")
        if self.dog.judge(verdict):
            self.send({"verdict": asdict(verdict)}, self.dog.below.values())

    def send(self, message: dict[str, Any], peers: Iterable[Peer]) -> None:
        """Send a message to each of these ranks that is there."""
        body = encoded(message)
        for peer in peers:
            if peer.connection is not None:
                peer.connection.send_body(body)

    def note(self, peer: Peer, message: dict[str, Any]) -> None:
        """Note what a rank says; whatever it is shows that it lives."""
        peer.heard = max(peer.heard, time.monotonic())
        if "beat" in message:
            peer.step, peer.activity = int(message["beat"][0]), str(message["beat"][1])
            peer.note_call(Call(*message["call"]) if "call" in message else None, peer.heard)
            peer.stands = [Stand(*one) for one in message.get("stands", ())]
        if "bye" in message:
            peer.left, peer.step, peer.call, peer.stands = True, int(message["bye"]), None, ()
            if message["by"] is not None:
                self.found(self._left(peer, str(message["by"])), peer)
        if "verdict" in message and peer is self.dog.above:
            self.decide(Verdict(**message["verdict"]))
        elif "found" in message and peer is not self.dog.above:
            self.found(Verdict(**message["found"]))

    def lost(self, peer: Peer) -> None:
        """The connection has closed; if the rank has not said farewell before, it died."""
        if peer.connection is not None:
            peer.connection.close(self.selector)
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
                peer.connection.leave()
        self.selector.close()


class Watchdog:
    """This rank's heartbeat and its ear for the others'. See [Note: who ends when]."""

    def __init__(
        self,
        channel: Texts,
        where: Callable[[], tuple[int, str]],
        *,
        heartbeat_s: float = 1.0,
        frozen_s: float = 9.0,
        still_s: float | None = None,
        address: str | None = None,
        remedy: str = "",
        end: Callable[[str], None] | None = None,
        calling: Callable[[], Calling] = Calling,
        limit_s: float = 300.0,
        folder: Path | None = None,
    ):
        """Connect all ranks; every rank must call it. `where` says (step, activity); `end` replaces the process' end.

        `calling` gives the call of all ranks in which this one is. `remedy` says what starting the job again does. A
        rank may wait for others for `limit_s`; in `folder` stacks are written. Does nothing when the job has a single
        rank, or when `heartbeat_s` is 0. ConfigError, on all ranks, where rank 0 cannot listen on `address`.
        """
        self.rank, self.num_ranks, self._where = channel.rank, channel.num_ranks, where
        self.heartbeat_s, self.frozen_s, self._still_s, self._end = heartbeat_s, frozen_s, still_s, end
        self._calling = calling
        self.progress = Progress(self.rank, where, limit_s, folder)
        self.finishes: Callable[[], bool] = bool  # whether work is under way that the ranks still finish together
        self.code = OWN_FAULT  # with which an error ends the script
        self._seen, self._seen_since = (0, IDLE), 0.0
        self.verdict: Verdict | None = None
        self._turns = 0
        self._judged_at = 0.0
        self._reported = False
        self._leaving, self._at = False, (0, IDLE)  # where it was when it failed
        self._outbox: list[Verdict] = []
        self._lock = threading.Lock()
        self.closing = threading.Event()
        self.leaves_by: str | None = ""  # the error by which its script ends; None: it does not end
        self._thread: threading.Thread | None = None
        self._hook_before, self._hook = sys.excepthook, self._excepthook  # a bound method: kept, to compare later
        self._scripts_hook: Hook | None = None
        self.address: tuple[str, int] | None = None
        self.above: Peer | None = None
        self.itself, self.peers = Peer(self.rank, 0.0), dict[int, Peer]()
        if channel.num_ranks == 1 or heartbeat_s == 0:
            return
        self._connect(channel, address, remedy)
        atexit.register(self.close)
        self._hook_before, sys.excepthook = sys.excepthook, self._hook

    @property
    def running(self) -> bool:
        """Whether this rank is watched."""
        return self._thread is not None

    @property
    def reported(self) -> bool:
        """Whether this rank has met an error that ends it."""
        return self._reported

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on; returns when it is known who is the cause [Note: who tells]."""
        if not self.running or self.closing.is_set() or self._reported:
            return
        self._reported, self._at = True, self._where()
        if sys.excepthook is not self._hook:  # the script has put its own in this place
            self._scripts_hook, sys.excepthook = sys.excepthook, self._hook
        still, alone = timed_out(error), self._waited_alone(error)
        turns = BUSY_TURNS if not lost_connection(error) else 2 * _TURNS_OF_OTHERS if still else _TURNS_OF_OTHERS
        with self.progress.settled() if still else nullcontext():
            if follows(error) and not alone and self._judged_within(turns):
                return
            if not follows(error) or lost_connection(error):
                step, activity = self._at
                line = as_line(error)[: _OF_A_TIME_OUT if still else None]
                text = f"rank {self.rank} failed in step {step} ({activity}): {alone}{line}"
                code = refusal_code(error) or EXIT_CODE
                with self._lock:
                    self._outbox.append(Verdict(self.rank, text, BUSY_TURNS, None, error=line, code=code, still=still))
                self._judged_within(BUSY_TURNS)

    def _waited_alone(self, error: BaseException) -> str:
        """Of a wait that was too long for ranks which have not come to this one's call: which, in words."""
        calling = self._calling()
        name, left = calling.waiting or calling.failed, [rank for rank, peer in self.peers.items() if peer.call is None]
        if not (name and left and timed_out(error)):
            return ""
        others = f"rank{'s' * (len(left) > 1)} {', '.join(map(str, left[:_MOST_NAMED]))}"
        return (
            f"it waited in vain for {others} in {name}: every rank must make this call, and all of them within "
            "hydra.timeout_seconds. "
        )

    def _judged_within(self, turns: int) -> bool:
        """Wait for a verdict."""
        deadline = time.monotonic() + turns * TURN_S
        while self.verdict is None and time.monotonic() < deadline:
            time.sleep(TURN_S / 5)
        return self.verdict is not None

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An exception that ends the script of one rank, also between steps, is told to the others."""
        self.code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else OWN_FAULT
        try:
            self._told(kind, error, trace)
        except SystemExit as leave:  # Python leaves with a hook's code
            self.code = int(leave.code or 0)
            raise

    def _told(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told = told_of(error)
        if refusal_code(error) is None or told is None:  # otherwise all ranks end alike
            self.report(error)
        verdict, alike = self.verdict, told is not None and refusal_code(error) is not None
        if verdict is not None and not alike:
            if verdict.rank == self.rank and not lost_connection(error):
                self._words.spoken()
            elif follows(error) or as_line(error) == verdict.error:
                logger.debug("ended by a fault of rank %d", verdict.rank, exc_info=(kind, error, trace))
                self._words.say(verdict, *self._at)
                self._leaving = True
                self._end_stopped(verdict)
                raise SystemExit(verdict.code if follows(error) else refusal_code(error) or self.code)
        # To the script's hook, or to the one that was there before, to which that may hand on through this one.
        scripts, self._scripts_hook = self._scripts_hook, None
        (scripts or self._hook_before)(kind, error, trace)

    def close(self, *, goes_on: bool = False) -> None:
        """Say farewell: this rank leaves in good order, and the others may finish work that does not need it.

        `goes_on`: all ranks close, and live on without this.
        """
        if self._thread is not None and not self.closing.is_set():
            error = sys.exc_info()[1]  # on its way through a script's `finally`
            self.leaves_by = "" if error is None or isinstance(error, SystemExit) else as_line(error)
            if not self.leaves_by and (call := self._calling().exits):
                self.leaves_by = f"SystemExit in {call}"  # the others may be in this call
            self.leaves_by = None if goes_on else self.leaves_by
            self.closing.set()
            self._thread.join(timeout=5.0)
            atexit.unregister(self.close)
            self.progress.watch_the_end()
            if self.verdict is not None and self._reported:
                # An error on its way to the hook is told there, with its traceback; one that a script has caught, here.
                if not isinstance(error, Exception):
                    self._words.say(self.verdict, *self._at)
            elif sys.excepthook is self._hook:
                sys.excepthook = self._hook_before

    def _connect(self, channel: Texts, address: str | None, remedy: str) -> None:
        met = meet(channel, address)
        self.identities, self.secret = met.identities, met.secret
        self.address, self.listener = met.address, met.listener
        self.beat_s = beat_seconds(met.most_heard, self.heartbeat_s, self.frozen_s)
        now = time.monotonic()
        # Those below count as heard until START_S from now, since none can beat before it has connected.
        self.below = {rank: Peer(rank, now + START_S) for rank in met.place.below}
        self.peers, failed = dict(self.below), None
        self._words = LastWords(self.rank, self.identities, met.place.above, self.secret, remedy)
        if met.place.above is not None:
            self.above = self.peers[met.place.above] = Peer(met.place.above, now)
            try:
                self.above.connection = greet(met.address, met.secret, self.rank)
            except OSError as error:
                failed = error
        if failed is None:
            self._thread = threading.Thread(target=self._live, daemon=True, name="watchdog")
            self._thread.start()
        # A rank that leaves at once must not be gone before the others have connected.
        agree(channel, failed, "connecting the heartbeats")

    # Living: one thread.

    def _live(self) -> None:
        try:
            Side(self).run()
        except Exception:
            logger.exception("the watchdog of rank %d has ended; faults of other ranks go unnoticed", self.rank)

    def beat(self) -> dict[str, Any]:
        """The message that this rank sends every `beat_s` seconds: where it is, in which call it waits for others, or a
        rank below it, and who of them stands still."""
        step, activity = self._where()
        waiting = (self.itself.call, *(peer.call for peer in self.below.values()))
        call = next((one for one in waiting if one is not None), None)
        told = {"beat": [step, activity], "stands": few_of(self.stands())}
        return told if call is None else {**told, "call": call}

    def stands(self) -> list[Stand]:
        """What this rank does, and those below it, as far as it knows."""
        peers = (peer for peer in self.below.values() if not (peer.left or peer.judged))
        return [self.progress.look(time.monotonic()), *(stand for peer in peers for stand in peer.stands)]

    def known_calls(self) -> dict[int, str]:
        """By rank, the calls in which ranks wait for others, as far as this one knows."""
        found = {peer.call.rank: peer.call.name for peer in self.peers.values() if peer.call is not None}
        own = self._calling().waiting
        return found | ({self.rank: own} if own else {})

    def look_at_itself(self, now: float) -> None:
        """Once a turn: note in which call this rank waits, and tell the others if it stands still."""
        self.progress.look_at_the_end(now)
        calling = self._calling()
        self.itself.note_call(Call(self.rank, calling.number, calling.waiting) if calling.waiting else None, now)
        if (at := self._where()) != self._seen:
            self._seen, self._seen_since = at, now
        elif self._still_s is not None and _waits(at[1]) and now - self._seen_since > self._still_s:
            self._seen_since = now  # told once
            remedy = (
                "NCCL_DEBUG=INFO tells how far it came, NCCL_SOCKET_IFNAME names the interface"
                if at[1].startswith(CONNECTING)
                else "a message did not come, or a step takes longer than that"
            )
            text = (
                f"rank {self.rank} has been in step {at[0]} ({at[1]}) for {self._still_s:g} s (hydra.timeout_seconds), "
                f"while all ranks live: {remedy}"
            )
            with self._lock:
                self._outbox.append(Verdict(self.rank, text, BUSY_TURNS, None, still=True))

    def judge(self, verdict: Verdict) -> bool:
        """Accept a verdict, if it is the first; True if it was."""
        # One death makes many: ranks that lose their peer fail one after the other. Only the first is the cause.
        if self.verdict is not None:
            return False
        self.verdict, self._turns, self._judged_at = verdict, 0, time.monotonic()
        if verdict.still:
            self.progress.write(verdict.text)
        return True

    def obey(self) -> None:
        """Once a turn: end this process if the verdict asks for it."""
        verdict = self.verdict
        if verdict is None or self.closing.is_set():
            return
        step, activity = self._where()
        # Turns and not seconds: a turn passes only while this thread gets processor time. On a host so busy that a
        # rank runs for a moment every 1.5 s, 4 turns are 6 s, and its own error still has 4 chances to come first.
        # They count from 0 again for a rank that was idle, since its next step can still fail by itself.
        waited = time.monotonic() - self._judged_at
        stand = self.progress.look(time.monotonic())
        hangs = verdict.still and stand.stands_s > _NOTHING_S  # such as the thread that saves
        finishes = not (verdict.gone or hangs) and waited < FINISH_S and self.finishes()
        self._turns = self._turns + 1 if (activity != IDLE or self._leaving) and not finishes else 0
        idle_s = verdict.idle_s
        if verdict.still and not finishes:
            idle_s = 0.0 if stand.still_s > _NOTHING_S else FINISH_S
        if self._turns >= max(1, verdict.turns) or (idle_s is not None and waited >= idle_s):
            self._end_stopped(verdict)
            if self._end is not None:
                self._end(self._words.line(verdict, step, activity))
                return
            self._words.say(verdict, step, activity)
            own = verdict.rank == self.rank and verdict.code == EXIT_CODE and not verdict.still
            end_process(OWN_FAULT if own else verdict.code)

    def _end_stopped(self, verdict: Verdict) -> None:
        """End who cannot end itself: the frozen rank of a verdict, and any that was stopped, of which nobody hears."""
        for rank, who in enumerate(self.identities):
            if (verdict.frozen and rank == verdict.rank) or stopped(who):
                kill(who)

    def take_outbox(self) -> list[Verdict]:
        """Errors on this rank, which the others are to hear."""
        with self._lock:
            taken, self._outbox = self._outbox, []
        return taken
