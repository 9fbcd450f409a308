"""Dynamic context parallelism as Megatron-Core's schedulers really make it: a job in, what its steps take out.

Beside the idealised systems of `groups`, whose groups form without a wait. Units, recomputation and the most tokens of
a sequence on a unit are the best in hindsight. Computing and rings cost what they do there, but each sequence that
several units share pays for its ring. Pulls and pushes are those of the same units without groups. Pure: torch comes
with Megatron-Core when it is used.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.rivals.costs import Recomputed, Way, cluster_of, measured, powers_of_two, table_of
from ds_hydra.rivals.dynamic_cp import Turn, balanced_turns, packed_turns
from ds_hydra.rivals.hindsight import Lengths
from ds_hydra.rivals.setting import Setting
from ds_hydra.simulate.exposed import exposed_ms
from ds_hydra.zero_hetero.errors import PlanError

_SCREENED, _FINALISTS = 4, 2  # batches on which all set-ups are compared; set-ups that are compared on all batches
_PARTS = (1, 2, 4, 8)  # of MaxLen: the most tokens of a sequence on a unit


class Ran(NamedTuple):
    """One step: how long its units compute until the last one is done, and each of them by itself, in ms."""

    ms: float
    busy: tuple[float, ...]


@dataclass(frozen=True)
class Units:
    """One way to set such a system up: units of a scheme, and the costs of groups of 1, 2, 4, ... of them."""

    unit: ParallelScheme
    count: int
    most: int
    again: Recomputed
    table: CostTable

    def __str__(self) -> str:
        return f"{self.count}*{self.unit}{self.again.value}, {self.most} tokens of a sequence"

    def ms(self, units: int, lengths: Lengths) -> float:
        """One micro-batch of a group of so many units."""
        return self.table[ParallelScheme(self.unit.tp, self.unit.pp, units)].load_ms(lengths)

    def balanced(self, lengths: Lengths) -> Ran:
        """A step by `BalancedCPScheduler`."""
        total, busy = 0.0, [0.0] * self.count
        for turn in balanced_turns(lengths, self.count, self.most):
            taken = [sum(self.ms(group.units, [lengths[at]]) for at in group.positions) for group in turn]
            total += max(taken)  # a barrier of all
            busy = _added(busy, turn, taken)
        return Ran(total, tuple(busy))

    def packed(self, lengths: Lengths) -> Ran:
        """A step by its successor. A unit waits for the others of its group only; stages of it add the bubble of equal
        micro-batches, as if each were as the largest one."""
        ends, busy, largest = [0.0] * self.count, [0.0] * self.count, 0.0
        for turn in packed_turns(lengths, self.count, self.most):
            taken = [self.ms(group.units, [lengths[at] for at in group.positions]) for group in turn]
            busy, largest = _added(busy, turn, taken), max(largest, *taken)
            first = 0
            for group, ms in zip(turn, taken, strict=True):
                last = first + group.units
                ends[first:last] = [max(ends[first:last]) + ms] * group.units
                first = last
        return Ran(max(ends) + (self.unit.pp - 1) * largest, tuple(busy))


def _added(busy: Sequence[float], turn: Turn, taken: Sequence[float]) -> list[float]:
    each = [ms for group, ms in zip(turn, taken, strict=True) for _ in range(group.units)]
    return [one + more for one, more in zip(busy, each, strict=True)]


RunStep = Callable[[Units, Lengths], Ran]
AS_MADE: dict[str, RunStep] = {"BalancedCPScheduler": Units.balanced, "packing-aware CP": Units.packed}


class Made(NamedTuple):
    """The best set-up for some batches, and what it makes of each."""

    units: Units
    ran: tuple[Ran, ...]
    exposed_ms: float  # what pulls and pushes add to each step

    @property
    def gap(self) -> float:
        """Median of the busiest unit less the least busy one, over the busiest."""
        return statistics.median(1.0 - min(one.busy) / max(one.busy) for one in self.ran)

    @property
    def idle(self) -> float:
        """Mean share of a step for which units wait."""
        return statistics.fmean(1.0 - statistics.fmean(one.busy) / one.ms for one in self.ran)


def as_made(setting: Setting, batches: Sequence[Lengths], name: str) -> Made:
    """A scheduler's steps with the best of all set-ups. PlanError where none holds all batches."""
    run, order = AS_MADE[name], sorted(range(len(batches)), key=lambda step: -max(batches[step]))
    few = [order[round(at * (len(order) - 1) / (_SCREENED - 1))] for at in range(_SCREENED)]
    ranked: list[tuple[float, int, Units]] = []
    for number, units in enumerate(_set_ups(setting, pipelines=run is Units.packed)):
        try:
            ranked.append((sum(run(units, batches[step]).ms for step in few), number, units))
        except PlanError:
            continue
    found: list[Made] = []
    for _, _, units in sorted(ranked, key=lambda row: row[:2])[:_FINALISTS]:
        layout, exposed = StrategyShape.of([units.unit] * units.count), 0.0
        if setting.of_model.transfers:
            exposed = exposed_ms(cluster_of(setting, units.table), layout, setting.tokens)
        found.append(Made(units, tuple(run(units, batch) for batch in batches), exposed))
    if not found:
        raise PlanError(f"no units of {setting} hold all batches")
    return min(found, key=lambda made: sum(one.ms for one in made.ran) + len(made.ran) * made.exposed_ms)


def _set_ups(setting: Setting, *, pipelines: bool) -> Iterator[Units]:
    """All units that the context fits; of several stages only where `pipelines` are allowed."""
    all_units = {setting.gpus // scheme.num_ranks for scheme in measured(setting).schemes}
    degrees = tuple(sorted({*powers_of_two(setting.gpus), *all_units}))
    for again in setting.of_model.forms:
        table = table_of(setting, Way(degrees, again=again))
        for scheme in table.schemes:
            assert isinstance(scheme, ParallelScheme), "the tables have no others"
            count = setting.gpus // scheme.num_ranks
            if scheme.sp > 1 or setting.gpus % scheme.num_ranks or (scheme.pp > 1 and not pipelines):
                continue
            for part in _PARTS:
                most = int(table[scheme].max_length) // part
                if most * (1 << (count.bit_length() - 1)) >= setting.context:
                    yield Units(scheme, count, most, again, table)
