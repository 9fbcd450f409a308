"""Random micro-batches and broken schedules, many of them: what held, and what did not."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.check import check_slots, lower
from ds_hydra.pipe.schedules.orders import list_us
from ds_hydra.pipe.schedules.registry import orders
from ds_hydra.pipe.schedules.simulate import peak_units, simulate_works
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.schedule_cases import bound, mutants, random_works, refused

_MOST, _MOST_MUTATED = 10, 5  # micro-batches of a case
_STAGES, _STAGES_MUTATED = 6, 4


@dataclass
class Sweep:
    """Cases by ranges of layers in a stage, with what was found in them."""

    cases: Counter[int] = field(default_factory=Counter)
    faults: Counter[tuple[int, str]] = field(default_factory=Counter)
    over_bound: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # sum of time / bound

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"ranges": parts, "cases": count, **{fault: self.faults[parts, fault] for fault in FAULTS},
             "time / bound": self.over_bound[parts] / count}
            for parts, count in sorted(self.cases.items())
        ]  # fmt: skip


FAULTS = ("stood still", "above room", "below bound", "other time")


def sweep_cases(count: int, seed: int = 0) -> Sweep:
    """Random works, chains and rooms under the list order, each simulated and checked in full."""
    found = Sweep()
    for case in range(count):
        rng = random.Random(f"{seed} {case}")
        parts = rng.choice((1, 2))
        batches, num_stages = random_works(rng, _MOST, parts), rng.randint(1, _STAGES)
        found.cases[parts] += 1
        for fault in _faults(batches, num_stages, found.over_bound):
            found.faults[parts, fault] += 1
    return found


def _faults(batches: Batches, num_stages: int, over: dict[int, float]) -> Iterator[str]:
    try:
        made = orders("list", batches, num_stages)
        check_slots(lower(made, batches), batches)
    except (PlanError, AssertionError):
        yield "stood still"
        return
    us, least = simulate_works(made, batches), bound(batches, num_stages)
    over[batches.parts] += us / least if least else 1.0
    if max(peak_units(order, batches) for order in made) > batches.room:
        yield "above room"
    if us < least:
        yield "below bound"
    if us != list_us(batches, num_stages):
        yield "other time"  # than the order was made with


@dataclass
class Mutations:
    """How many broken schedules of each kind there were, and those that nothing refused."""

    made: Counter[str] = field(default_factory=Counter)
    passed: list[str] = field(default_factory=list)


def sweep_mutations(count: int, seed: int = 0) -> Mutations:
    """Schedules with one dependency broken, each of which has to be refused."""
    found, case = Mutations(), 0
    while found.made.total() < count:
        rng = random.Random(f"{seed} {case}")
        batches = random_works(rng, _MOST_MUTATED, rng.choice((1, 2)))
        num_stages = rng.randint(1, _STAGES_MUTATED)
        slots = lower(orders("list", batches, num_stages), batches)
        for what, broken in mutants(slots, batches, rng):
            found.made[_kind(what)] += 1
            if not refused(broken, batches):
                found.passed.append(f"case {case}: {what}")
        case += 1
    return found


def _kind(what: str) -> str:
    for words in ("leave out", "twice", "before"):
        if words in what:
            return words
    raise AssertionError(f"a mutation of an unknown kind: {what}")
