"""Elastic jobs on two and three hosts: a cable is pulled, a host dies whole, a host joins.

The hosts are network namespaces on this machine, each on a cable of its own to one switch. A cable that is pulled tells
nobody: no connection is closed. Nor does a host that dies whole: its cable goes first, then all its processes. What
happens, happens between two steps or in one, as it comes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import small_job
from tests.support.elastic_cells import PLAIN, Judge
from tests.support.elastic_job import Life, Result, result_of
from tests.support.ends import live
from tools.hosts.namespaces import Host, made_hosts, why_not

MEGABITS = 1000.0
FROZEN_S = 3.0
DONE, STEPS = 3, 12  # steps made when it happens; in all
LEFT_BEHIND, KILLED = 75, -9
LIMIT_S = 120.0
_PORT = 29_700


@dataclass(frozen=True)
class Course:
    """What befalls hosts: `does` to host `of`. `ends` are the exit codes of each host's ranks, those of the start
    first: one of these lists, whichever side goes on."""

    name: str
    ranks: tuple[int, ...]
    does: str  # "pull", "die", "flicker" or "join"
    of: int
    ends: tuple[tuple[int, ...], ...]
    shared: bool = False
    joiners: int = 0


COURSES = (
    Course("cable of the last of three hosts", (1, 1, 1), "pull", 2, ((0, 0, 75),)),
    Course("cable of the last of three hosts", (2, 2, 2), "pull", 2, ((0, 0, 75),)),
    Course("cable of the coordinator's of three", (2, 2, 2), "pull", 0, ((75, 0, 0),)),
    Course("cable between two, a common folder", (2, 2), "pull", 1, ((0, 75), (75, 0)), shared=True),
    Course("cable between two, no common folder", (2, 2), "pull", 1, ((75, 75),)),
    Course("a cable that is out for a second", (2, 2, 2), "flicker", 1, ((0, 0, 0),)),
    Course("one of two hosts dies", (2, 2), "die", 1, ((0, KILLED),), shared=True),
    Course("the coordinator's of two hosts dies", (2, 2), "die", 0, ((KILLED, 0),), shared=True),
    Course("one of three hosts dies", (2, 2, 2), "die", 1, ((0, KILLED, 0),)),
    Course("the largest of three unequal hosts dies", (3, 2, 1), "die", 0, ((KILLED, 0, 0),), shared=True),
    Course("a third host joins two", (2, 2), "join", 2, ((0, 0, 0),), joiners=2),
)  # fmt: skip


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("stopped"))


@pytest.mark.long
@pytest.mark.parametrize("course", COURSES, ids=lambda course: f"{course.name}, {course.ranks}")
def test_what_befalls_hosts(course: Course, judge: Judge, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    ends, result = run(course, tmp_path / "job")
    assert any([[code] * len(of) for code, of in zip(codes, ends, strict=True)] == ends for codes in course.ends), (
        ends, result.told)  # fmt: skip
    if result.digests:
        legs = result.legs(sum(course.ranks), STEPS)
        assert (len(legs) > 1) == (course.does != "flicker"), legs
        assert result.digests == judge.of_legs("plain", legs)[0], "not what a stop and a restart come to"


def run(course: Course, folder: Path) -> tuple[list[list[int | None]], Result]:
    """Exit codes of each host's processes, and what they came to."""
    folder.mkdir()
    of_all = [*course.ranks, *((course.joiners,) if course.joiners else ())]
    small_job.find_before_forks()
    with made_hosts(MEGABITS, names=[f"node{index}" for index in range(len(of_all))]) as made:
        pids = [_forked(made[index], made[0].address, *life) for index, life in _lives(course, folder)]
        codes: list[int | None] = [None] * len(pids)
        try:
            _befall(course, made, folder, lambda: _reap(pids, codes))
            deadline = time.monotonic() + LIMIT_S
            while None in codes and time.monotonic() < deadline:
                time.sleep(0.02)
                _reap(pids, codes)
        finally:
            for pid, code in zip(pids, codes, strict=True):
                if code is None:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
    ends, first = [], 0
    for ranks in of_all:
        ends.append(codes[first : first + ranks])
        first += ranks
    return ends, result_of(folder, codes, _told(folder))


def _lives(course: Course, folder: Path) -> Iterator[tuple[int, tuple[Callable[[], None], int, int, Path]]]:
    """Of each process its host, what it does, its rank, of how many, and where it writes."""
    ranks, start = sum(course.ranks), folder / "start"
    hydra: dict[str, Any] = {"elastic": {}, "faults": {"frozen_seconds": FROZEN_S}}
    if course.shared:
        hydra["checkpoint"] = {"dir": str(folder / "checkpoints"), "every": 1000, "resume": False}
    job = replace(PLAIN, after_step=partial(_noted, folder))
    life = Life(folder, ranks, STEPS, (), job, (DONE,) * course.joiners, False, None, hydra)
    start.mkdir()
    hosts_of = [index for index, of in enumerate(course.ranks) for _ in range(of)]
    for rank, index in enumerate(hosts_of):
        yield index, (partial(life.train, rank), rank, ranks, start)
    for number in range(course.joiners):
        place = folder / f"apart{number}"
        place.mkdir()
        yield len(course.ranks), (partial(life.join, number), 0, 1, place)


def _noted(folder: Path, engine: Any) -> None:
    """The first rank tells how far they are."""
    if engine.global_rank == 0:
        draft = folder / f"made.{os.getpid()}"
        draft.write_text(str(engine.global_steps))
        draft.replace(folder / "made")


def _forked(host: Host, first: str, program: Callable[[], None], rank: int, num_ranks: int, place: Path) -> int:
    """A process on a host; `first` is the address of the first one."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            host.enter()
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": first, "MASTER_PORT": str(_PORT)}
            small_job.rank_environment = lambda rank: os.environ.update(of_rank)
            live(program, rank, num_ranks, place)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def _reap(pids: list[int], codes: list[int | None]) -> None:
    """Take the exit codes of those that have ended."""
    for at, pid in enumerate(pids):
        if codes[at] is None:
            done, status = os.waitpid(pid, os.WNOHANG)
            codes[at] = os.waitstatus_to_exitcode(status) if done else None


def _befall(course: Course, made: tuple[Host, ...], folder: Path, reap: Callable[[], None]) -> None:
    """Do it when enough steps are made."""
    deadline, progress = time.monotonic() + LIMIT_S, folder / "made"
    while not (progress.exists() and int(progress.read_text()) >= DONE):
        reap()
        if time.monotonic() > deadline:
            raise RuntimeError("a job on several hosts did not begin: " + "\n".join(_told(folder))[-3000:])
        time.sleep(0.005)
    host = made[course.of]
    happens: dict[str, Callable[[], None]] = {"pull": host.pull, "flicker": host.pull, "die": host.die}
    happens.get(course.does, lambda: None)()
    if course.does == "flicker":
        time.sleep(1.0)
        host.plug()


def _told(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("*/stderr*"))]
