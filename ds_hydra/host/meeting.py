"""A launcher's environment in; a channel of all ranks out, before torch's groups, or the name of who does not come.

[Note: meeting]
Ranks come minutes apart, since each imports, builds its model and reads its data first, and one that dies there is
nobody's peer yet. So those that have come say so in the store in which torch's groups will meet, and look for others:

  on their host    a process whose environment has the job's port and another RANK is that rank. It has died where it
                   was there and is gone, or never was for a while though the launcher stands on this host; it is frozen
                   where it was stopped for `frozen_s`
  on other hosts   who has come says each second in the store that it lives, and rank 0 hears it
  the store        is rank 0's, or the launcher's: it is lost where it closes, and frozen where it does not answer

Whoever finds a fault writes it there, and all end by it, with exit code 75. Nobody else ends before `timeout_s`: who is
waited for is named every ten seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple, NoReturn

from torch.distributed import PrefixStore, TCPStore

from ds_hydra.host.environment import launched_node_size, launched_number
from ds_hydra.watchdog.host import Identity, host, kill, say, started, status_of, stopped
from ds_hydra.zero_hetero.told import Told, mark_told, message_of

_TURN_S, _BEAT_S, _NAMED_S = 0.25, 1.0, 10.0
_STAYS_S = 1.5  # that others still read in rank 0's store how the meeting ended
_ABSENT_S = 10.0  # after which a rank whose launcher is here would have a process
_MOST_NAMED = 4  # ranks
_HOST = host().partition("/")[0]
_meetings = 0  # of this process, each with keys of its own


class Fellows:
    """The processes of this job's ranks that this host shows: what the launcher of this one has started, by RANK."""

    def __init__(self, rank: int, port: str, pid: int | None = None):
        self._port, self.now = f"MASTER_PORT={port}", dict[int, tuple[int, ...]]()
        self._stopped: dict[int, float] = {}  # since when
        self._began, self._first = time.monotonic(), dict[int, int]()
        self._launcher = _launcher_of(pid or os.getpid(), rank)
        local, size = launched_number("LOCAL_RANK"), launched_node_size()
        known = self._launcher is not None and local is not None and size is not None
        self._starts_here = range(rank - local, rank - local + size) if known else range(0)  # type: ignore[operator]

    def look(self) -> None:
        """See who is there now."""
        found: dict[int, list[int]] = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc") if self._launcher else ())):
            environment = _environment(pid)
            for text in environment if self._port in environment else ():
                number = text.removeprefix("RANK=")
                if number != text and number.isdigit() and _launcher_of(pid, int(number)) == self._launcher:
                    found.setdefault(int(number), []).append(pid)
        self.now = {rank: tuple(sorted(pids)) for rank, pids in found.items()}
        for rank, pids in self.now.items():
            self._first.setdefault(rank, pids[0])
            if any(stopped(_identity(pid)) for pid in pids):
                self._stopped.setdefault(rank, time.monotonic())
            else:
                self._stopped.pop(rank, None)

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal has stopped it, as it was seen last."""
        return rank in self._stopped

    def fault(self, frozen_s: float) -> tuple[int, str] | None:
        """A rank that cannot come, and why; one that is frozen is ended."""
        now = time.monotonic()
        for rank, pid in self._first.items():
            if rank not in self.now:
                return rank, f"rank {rank} died before all ranks had met (process {pid} on {_HOST})"
        for rank, since in self._stopped.items():
            if now - since > frozen_s:
                for pid in self.now[rank]:
                    kill(_identity(pid))
                return rank, f"rank {rank} is frozen: its process {self.now[rank][0]} on {_HOST} was stopped"
        for rank in self._starts_here:
            if rank not in self.now and now - self._began > _ABSENT_S:
                return rank, f"rank {rank} died before all ranks had met: no process on {_HOST} has RANK={rank}"
        return None

    def where(self, rank: int) -> str:
        """What is seen of a rank that has not come, in brackets."""
        return f" (process {self.now[rank][0]} on {_HOST} has not come yet)" if rank in self.now else ""


def _launcher_of(pid: int, rank: int) -> int | None:
    """The next process above that is not this rank's own: it has another RANK, or none. None where nothing shows it, as
    where a process was forked and told its rank later."""
    own, above = f"RANK={rank}", pid
    while above > 1 and own in _environment(above):
        above = int([*status_of(above), "0", "0"][1])
    return above if above > 1 and above != pid else None


def _environment(pid: int) -> frozenset[str]:
    with suppress(OSError):
        return frozenset(Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"))
    return frozenset()


def _identity(pid: int) -> Identity:
    return Identity(host(), pid, started(pid))


class _Ended(NamedTuple):
    rank: int
    text: str


class Meeting:
    """Exchanges texts of all ranks over their store (`Texts` of `ranks.together`), of which each call waits for all."""

    def __init__(self, rank: int, num_ranks: int, make_store: Callable[[], Any], *, timeout_s: float, frozen_s: float):
        """`frozen_s` 0: nobody counts as dead or frozen."""
        global _meetings
        _meetings += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.rank, self.num_ranks = rank, num_ranks
        self._prefix, self._make_store = f"ds_hydra/meeting_{attempt}_{_meetings}", make_store
        self._timeout_s, self._frozen_s, self._round = timeout_s, frozen_s, 0
        self._fellows = Fellows(rank, os.environ["MASTER_PORT"])
        self._store: Any = None
        self._asked: float | None = None  # when the store was asked that has not answered yet
        self._missing: list[int] = []
        self._heard: dict[int, tuple[int, float]] = {}
        self._found: _Ended | None = None

    def texts(self, text: str) -> list[str]:
        """Every rank's text, by rank. RuntimeError where a rank cannot come; it ends the script with exit code 75."""
        self._round += 1
        answers, done, began, told, looked = list[Any](), Event(), time.monotonic(), 0.0, 0.0
        Thread(target=self._exchange, args=(text, answers, done), daemon=True, name="meeting").start()
        while not done.wait(_TURN_S):
            now = time.monotonic()
            waited = now - began
            if self._frozen_s and now > looked + _BEAT_S:
                looked = now
                self._look(now)
            if waited > self._timeout_s + _STAYS_S * (self.rank > 0):  # rank 0 knows who is missing
                self._found = _Ended(self.rank, f"{self._waited_for()} did not come within {self._timeout_s:g} s "
                                                "(hydra.timeout_seconds)")  # fmt: skip
            if self._found is not None:
                done.wait(4 * _TURN_S)  # the other thread tells it
                self._end(self._found)
            if waited > told + _NAMED_S and (self.rank == 0 or (self._store is None and self._tells())):
                told = waited
                say(f"rank {self.rank} waits for {self._waited_for()} since {waited:.0f} s")
        if isinstance(answers[0], _Ended):
            self._end(answers[0])
        found: list[str] = answers[0]
        return found

    def _look(self, now: float) -> None:
        self._fellows.look()
        fault = self._fellows.fault(self._frozen_s)
        if fault is None and self._asked is not None and now - self._asked > self._frozen_s:
            fault = 0, "rank 0 is frozen, or whoever keeps the ranks' store: it does not answer"
        if fault is not None and self._found is None:
            self._found = _Ended(*fault)

    def _tells(self) -> bool:
        return self.rank == min(self._fellows.now.keys() - {0}, default=self.rank)

    def _waited_for(self) -> str:
        if self._store is None:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return f"rank 0, or whoever keeps the ranks' store, at {where}{self._fellows.where(0)}"
        more = f" and {len(self._missing) - _MOST_NAMED} more" if len(self._missing) > _MOST_NAMED else ""
        named = (f"rank {rank}{self._fellows.where(rank)}" for rank in self._missing[:_MOST_NAMED])
        return (", ".join(named) or "the other ranks") + more

    def _end(self, ended: _Ended) -> NoReturn:
        if self.rank == 0:
            time.sleep(_STAYS_S)
        text = f"{ended.text}. Restart the job"
        raise mark_told(RuntimeError(text), Told(ended.rank, text, here=False))

    # What asks the store: one thread, since no answer may come.

    def _exchange(self, text: str, answers: list[Any], done: Event) -> None:
        try:
            if self._store is None:
                self._store = PrefixStore(self._prefix, self._make_store())
            answers.append(self._exchanged(text))
        except Exception as error:
            answers.append(_Ended(0, f"the ranks' store is lost, with rank 0 or whoever keeps it: {message_of(error)}"))
        done.set()

    def _ask(self, name: str, *args: Any) -> Any:
        self._asked = time.monotonic()
        try:
            return getattr(self._store, name)(*args)
        finally:
            self._asked = None

    def _exchanged(self, text: str) -> list[str] | _Ended:
        self._heard.clear()
        keys = [f"{self._round}/{rank}" for rank in range(self.num_ranks)]
        whole = f"{self._round}/all"
        self._ask("set", keys[self.rank], text)
        self._ask("add", f"{self._round}/here", 1)
        for _ in self._turns():
            if self._found is not None:
                self._ask("set", "ended", f"{self._found.rank} {self._found.text}")
            if self._ask("check", ["ended"]):
                rank, _, why = self._ask("get", "ended").decode().partition(" ")
                return _Ended(int(rank), why)
            if self.rank == 0 and self._ask("add", f"{self._round}/here", 0) == self.num_ranks:
                self._ask("set", whole, "")
            if self._ask("check", [whole]):
                return [found.decode() for found in self._ask("multi_get", keys)]
        raise AssertionError("turns do not end")

    def _turns(self) -> Iterator[None]:
        """Turns of the wait for others; in some this rank says that it lives, and rank 0 hears who else does."""
        beat = named = time.monotonic()
        while True:
            yield
            time.sleep(_TURN_S)
            now = time.monotonic()
            if now - beat > _BEAT_S:
                beat = now
                self._ask("add", f"alive/{self.rank}", 1)
            if self.rank == 0 and now - named > 2 * _BEAT_S:
                named = now
                self._hear(now)

    def _hear(self, now: float) -> None:
        """Who has not come; and of those that have, who is silent."""
        here = [self._ask("check", [f"{self._round}/{rank}"]) for rank in range(self.num_ranks)]
        self._missing = [rank for rank, came in enumerate(here) if not came]
        for rank in range(1, self.num_ranks):
            if here[rank]:
                count = self._ask("add", f"alive/{rank}", 0)
                before = self._heard.get(rank, (-1, now))
                self._heard[rank] = (count, now) if count != before[0] else before
                if self._frozen_s and now - self._heard[rank][1] > self._frozen_s:
                    why = f"rank {rank} is frozen or its host is lost: it had come, and is not heard any more"
                    self._found = self._found or _Ended(rank, why)


def meeting_of(*, timeout_s: float, frozen_s: float) -> Meeting | None:
    """Of all ranks that a launcher has started; None for a rank alone, or where the environment does not name them."""
    rank, num_ranks = launched_number("RANK"), launched_number("WORLD_SIZE")
    address, port = os.environ.get("MASTER_ADDR"), launched_number("MASTER_PORT")
    if rank is None or num_ranks is None or num_ranks < 2 or rank < 0 or not address or not port:
        return None
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    make_store = partial(  # as torch makes it for `env://`, which takes the same one as long as it is there
        TCPStore, address, port, num_ranks, is_master=keeps, timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False, multi_tenant=True, use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )  # fmt: skip
    return Meeting(rank, num_ranks, make_store, timeout_s=timeout_s, frozen_s=frozen_s)
