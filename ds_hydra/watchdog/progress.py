"""Finds whether the thread that trains moves, waits for others or stands still, and where; writes stacks to a file.

[Note: who stands still]
Heartbeats show that a process lives, not that it gets on. So the thread that sends them looks at the one that trains,
once a second:

  it moves     another activity, other frames, or processor time that it has used, however little; or other threads and
               children of its process use a twentieth of a core, as where workers read data or compile
  it waits     nothing of that, in torch.distributed or in a wait of this package: for other ranks
  it stands    nothing of that, elsewhere: a lock that is taken twice, a read that does not return

Where one waits for long, those that do not wait are late: they are named every 30 s, with what they do and the
innermost frame of the user's code. They end the job only where one has waited for as long as it may, which is
hydra.timeout_seconds or, where that is longer, the time-out of the group in which it waits (in a job that does not go
on some seconds more, in which an error that ends the wait names the call); and where all that are late have stood still
for half of that. Who moves is not ended by this: when a time-out has ended a wait for it, it may go on until it comes
to a step, or stands still.

A rank that reads a loss before its step waits for the next call of all others [Note: losses read early]. Where one of
them waits in a collective of the script's own meanwhile, and nobody moves, no time-out is waited for.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ds_hydra.ranks.calling import READS, ROUND
from ds_hydra.ranks.moving import (
    is_wait,
    stacks,
    that_is_waited_for,
    time_out_of,
    user_frame,
    walk,
    work_beside,
    work_of,
)
from ds_hydra.watchdog.host import EXIT_CODE, end_process, say
from ds_hydra.zero_hetero.files import append_file

logger = logging.getLogger(__name__)

IDLE = "idle"  # outside a step, a save and a load
READ_S = 4.0  # of a wait to read a loss, after which others may be found to wait elsewhere
NAMED_S = 30.0  # of a wait, after which those that are waited for are named, and then again and again
LOOK_S = 1.0  # between two looks at the thread that trains
_BESIDE_S, _BESIDE = 2.0, 0.05  # seconds between two looks at what else runs, and cores that it uses where it does
_KEPT_S = 5.0  # in one place, after which a thread's stack is kept
_TELLS_S = 10.0  # within which an error that has ended a wait comes to who tells of it
GRACE_S = 3.0  # after which a wait that may last no longer is over by others' verdict: its own error says more
_MOST_NAMED = 4  # ranks
_AT = 160  # characters of a frame that a heartbeat tells


class Stand(NamedTuple):
    """What a rank tells of itself; of its seconds at most one is not 0."""

    rank: int
    step: int
    activity: str
    waits_s: float  # for others
    stands_s: float  # without a wait for others
    limit_s: float  # for which it may wait
    at: str  # the innermost frame of the user's code

    @property
    def still_s(self) -> float:
        """For which it does nothing."""
        return self.waits_s + self.stands_s

    def __str__(self) -> str:
        doing = f"stands still since {self.stands_s:.0f} s" if self.stands_s else "moves"
        return f"rank {self.rank} {doing}, in step {self.step} ({self.activity}), at {self.at}"


def named(stands: Iterable[Stand]) -> str:
    """Who waits longest, and for whom, in words; empty where nobody waits for as long as `NAMED_S`."""
    found = sorted(stands, key=lambda one: -one.waits_s)
    if not found or found[0].waits_s < NAMED_S:
        return ""
    first, late = found[0], [one for one in found if not one.waits_s]
    waits = f"rank {first.rank} waits since {first.waits_s:.0f} s in step {first.step} ({first.activity})"
    return f"{waits}, at {first.at}, and so do all others" if not late else f"{waits} for others: {_listed(late)}"


def late_of(stands: Iterable[Stand]) -> str:
    """Who does not wait, in words."""
    return _listed([one for one in stands if not one.waits_s])


def _listed(late: Sequence[Stand]) -> str:
    more = f"; and {len(late) - _MOST_NAMED} more" if len(late) > _MOST_NAMED else ""
    return "; ".join(map(str, late[:_MOST_NAMED])) + more


def stuck(stands: Iterable[Stand], grace_s: float = 0.0) -> tuple[list[Stand], str]:
    """Those for which others have waited for too long, and that do nothing, with what is to be told of it; nobody where
    that is in doubt [Note: who stands still]."""
    found = list(stands)
    waiting, late = [one for one in found if one.waits_s], [one for one in found if not one.waits_s]
    limit_s = max((one.limit_s for one in waiting), default=0.0)
    if (
        not late
        or all(one.waits_s < limit_s + grace_s for one in waiting)
        or any(one.stands_s < limit_s / 2 for one in late)
    ):
        return [], ""
    return late, f"{_listed(late)}, while others wait for {limit_s:g} s (hydra.timeout_seconds, or their group's)"


def read_in_vain(stands: Iterable[Stand]) -> tuple[list[Stand], str]:
    """Who waits to read a loss, or to compute one, while another rank waits in a collective of the script's own, and
    what is to be told of it; nobody where a rank moves."""
    found = list(stands)
    readers, elsewhere = _reading(found), _waiting_outside(found)
    if not (readers and elsewhere) or any(one.waits_s < READ_S for one in found):
        return [], ""
    why, remedy = _IN_VAIN[readers[0].activity]
    at = f"rank {elsewhere[0].rank} waits at {elsewhere[0].at}"
    return (
        readers,
        f"rank {readers[0].rank} {why} at {readers[0].at}, and waits for all other ranks, but {at}: {remedy}",
    )


_IN_VAIN = {
    READS: (
        "reads a loss before its step, for the first time in the job,",
        'set "losses": "early" in the block "hydra", by which each loss is there when engine(batch) returns, or read '
        "the loss after engine.step()",
    ),
    ROUND: (
        "computes a loss that may be read before its step,",
        "before a collective of the script's own give all ranks as many batches, engine([]) where one has none, and "
        'read logits for the first time on all of them; or set "losses": "step" in the block "hydra", by which losses '
        "are there after engine.step()",
    ),
}


def _reading(stands: Sequence[Stand]) -> list[Stand]:
    return [one for one in stands if one.activity in _IN_VAIN and one.waits_s]


def _waiting_outside(stands: Sequence[Stand]) -> list[Stand]:
    return [one for one in stands if one.activity == IDLE and one.waits_s]


def few_of(stands: Iterable[Stand]) -> list[Stand]:
    """Those by which others judge and name: of who is late those that have moved last; who waits longest, and one each
    of those that wait to read a loss and outside of calls."""
    ordered = sorted(stands, key=lambda one: (one.waits_s > 0, one.stands_s, -one.waits_s))
    late = [one for one in ordered if not one.waits_s]
    waiting = ordered[len(late) :]
    kept = {id(one): one for one in waiting[:1] + _reading(waiting)[:1] + _waiting_outside(waiting)[:1]}
    return late[:_MOST_NAMED] + list(kept.values())


class Progress:
    """Of the thread that makes it; another one looks."""

    def __init__(self, rank: int, where: Callable[[], tuple[int, str]], limit_s: float, folder: Path | None):
        """`where` says (step, activity); `folder` is for stacks."""
        self.rank, self._where, self._limit_s = rank, where, limit_s
        self._thread, self._number = threading.get_ident(), threading.get_native_id()
        self.file = None if folder is None else folder.absolute() / f"stacks-{socket.gethostname()}.txt"
        self._seen: tuple[Any, ...] = ()
        self._looked = self._since = time.monotonic()
        self._beside = (self._since, 0)
        self._stand = Stand(rank, *where(), 0.0, 0.0, limit_s, "")
        self._waits, self._settled, self._kept = False, False, ""
        self._waited = (0.0, 0.0, "")  # when the last wait began, when it was over, and what was kept of it
        self._asked_size = os.fstat(_asked()).st_size

    @property
    def told(self) -> str:
        """Where all ranks write their stacks, in words."""
        return f"stacks of all ranks: {self.file}" if self.file else "stacks are written beside hydra.steps_file alone"

    def look(self, now: float) -> Stand:
        """What it does; the one before if it was looked at less than a second ago."""
        if now - self._looked >= LOOK_S:
            if now - self._looked > 4 * LOOK_S:  # this process was suspended
                self._since += now - self._looked
            self._looked = now
            self._look(now)
            if (size := os.fstat(_asked()).st_size) != self._asked_size:
                self._asked_size = size
                self.write("SIGQUIT")
                say(f"rank {self.rank}: stacks of all threads {f'are in {self.file}' if self.file else stacks()}")
        return self._stand

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Within it the thread that trains tells of an error that has ended its wait, and counts as if it still did."""
        if not self._waits and time.monotonic() - self._waited[1] < _TELLS_S:
            self._since, _, self._kept = self._waited
        self._settled, self._waits = True, True
        try:
            yield
        finally:
            self._settled = False

    def _look(self, now: float) -> None:
        step, activity = self._where()
        frame = sys._current_frames().get(self._thread)
        frames = list(walk(frame))
        used, busy = work_of(os.getpid(), self._number)
        seen = (step, activity, used, *((id(one.f_code), one.f_lasti) for one in frames))
        if self._settled:
            pass
        elif seen != self._seen or busy or frame is None:
            if self._waits:
                self._waited = self._since, now, self._kept
            self._seen, self._since, self._kept, self._beside, self._waits = seen, now, "", (now, -1), False
        else:
            frames = that_is_waited_for(frames)
            self._waits = is_wait(frames)
            if not self._waits and self._moves_beside(now):
                self._since = now
            if not self._kept and now - self._since > _KEPT_S:
                self._kept = stacks()
        still_s = now - self._since if now - self._since >= LOOK_S else 0.0
        waits_s, stands_s = (still_s, 0.0) if self._waits else (0.0, still_s)
        limit_s = max(self._limit_s, time_out_of(frames) if self._waits else 0.0)
        at = user_frame(frames).encode("ascii", "replace").decode()[-_AT:]
        self._stand = Stand(self.rank, step, activity[:_AT], waits_s, stands_s, limit_s, at)

    def _moves_beside(self, now: float) -> bool:
        """Whether other threads and children do something; no, between two looks at them."""
        then, before = self._beside
        if before >= 0 and now - then < _BESIDE_S:
            return False
        work = work_beside(threading.get_native_id())
        self._beside = now, work
        return before >= 0 and not 0 <= work - before < _BESIDE * 1e9 * (now - then)

    def write(self, why: str) -> None:
        """Append the stacks of all threads to the file: at a time-out as they stood before it."""
        if self.file is None:
            return
        kept = f"Before, when it stood:\n{self._kept}\n" if self._kept and self._settled else ""
        head = f"=== rank {self.rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {why}"
        try:
            with append_file(self.file) as file:
                file.write(f"{head}\n{kept}{stacks()}\n".encode(errors="replace"))  # at once: others write too
        except OSError as error:
            logger.warning("stacks cannot be written: %s", error)

    def look_at_the_end(self, now: float) -> None:
        """End this process where its script has ended, and something that runs at its exit stands still."""
        stand = self.look(now)
        if not threading.main_thread().is_alive() and stand.stands_s >= stand.limit_s:
            self.write("at its exit")
            say(f"{stand}, after its script has ended ({stand.limit_s:g} s, hydra.timeout_seconds); {self.told}")
            end_process(EXIT_CODE)

    def watch_the_end(self) -> None:
        """From now on alone, in a thread of its own, where this process is about to exit."""

        def live() -> None:
            while True:
                time.sleep(LOOK_S)
                self.look_at_the_end(time.monotonic())

        # While Python takes its modules apart, a thread that is started never begins, and who starts it waits for ever.
        if not threading.main_thread().is_alive() and not sys.is_finalizing():
            with suppress(RuntimeError):  # too late for one
                threading.Thread(target=live, daemon=True, name="exit").start()


def _asked() -> int:
    """A descriptor to which SIGQUIT writes from now on, whatever the thread that trains is in; a handler of the user's
    own that was set before is called too."""
    if _ASKED[:1] != [os.getpid()]:
        _ASKED[:] = os.getpid(), os.memfd_create("stacks")
        own = signal.getsignal(signal.SIGQUIT) not in (signal.SIG_DFL, signal.SIG_IGN, None)
        faulthandler.register(signal.SIGQUIT, file=_ASKED[1], all_threads=False, chain=own)
    return _ASKED[1]


_ASKED: list[int] = []  # the process that has it, and the descriptor
