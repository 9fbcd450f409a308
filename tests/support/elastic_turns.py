"""A job that loses a rank and gets one again, turn after turn: how soon it goes on, and what a turn leaves behind."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.elastic_cells import PLAIN
from tests.support.elastic_job import Loss, Result, failed_at, run_elastic
from tests.support.small_job import find_before_forks

RANKS = 4


class Noted(NamedTuple):
    """What a member has, and holds, at the end of a step."""

    epoch: int
    planned_s: float  # when the step's plan was there, by `time.perf_counter`; 0 in a step at whose end one joined
    threads: int
    descriptors: int
    shared: int  # files of shared memory that this process has mapped
    resident: int  # bytes
    old_groups: int  # process groups of former epochs that are alive


class Turns(NamedTuple):
    """A job of so many losses and joins."""

    result: Result
    seconds: list[float]  # from each death to the next step's plan, on the last survivor that has it
    noted: list[list[Noted]]  # of members 1 and 2, which live from the start to the end


def run_turns(folder: Path, turns: int) -> Turns:
    """In each turn a member is killed, in a step's forward, and another one joins at the end of the next step."""
    find_before_forks()
    # The coordinator first: whoever follows it as rank 0 holds more from then on, and is to be compared with itself.
    victims = [0, 3, *range(RANKS, RANKS + turns)][:turns]
    losses = [Loss("forward", victim, 2 * turn + 1) for turn, victim in enumerate(victims)]
    joins_in = [2 * turn + 2 for turn in range(turns)]
    job = replace(PLAIN, after_step=_Notes())
    result = run_elastic(folder, RANKS, 2 * turns + 3, losses, job=job, joins_in=joins_in, limit_s=60.0 + 30.0 * turns)
    whole = [[Noted(*one) for one in own] for own in result.noted if len(own) == 2 * turns + 3]
    seconds = []
    for victim in victims if whole else ():
        died = failed_at(folder, victim)
        after = [next((one.planned_s for one in own if one.planned_s > died and one.epoch != _before(own, died)), None)
                 for own in whole]  # fmt: skip
        seconds.append(max(found for found in after if found is not None) - died)
    return Turns(result, seconds, whole)


def _before(own: list[Noted], died: float) -> int:
    """The epoch in which a member was at that time."""
    return [one.epoch for one in own if 0.0 < one.planned_s <= died][-1]


class _Notes:
    """Called after each step."""

    def __init__(self) -> None:
        self.groups: list[weakref.ref[Any]] = []

    def __call__(self, engine: Any) -> Noted:
        import torch.distributed as dist

        epoch, world = engine.going_on.agent.view.epoch, engine.crew.world
        now = list(dict.fromkeys([dist.group.WORLD, *world._made, *world.groups, *world.teams]))
        old = [ref for ref in self.groups if (group := ref()) is not None and not any(group is one for one in now)]
        self.groups = [*old, *map(weakref.ref, now)]
        opened = engine.steps.open  # None where a process has just joined
        planned_s = 0.0 if opened is None else opened.began + 1e-3 * engine.last_step.planning_waited_ms
        maps = Path("/proc/self/maps").read_text()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        threads, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        return Noted(epoch, planned_s, threads, descriptors, maps.count("/dev/shm/"), resident, len(old))
