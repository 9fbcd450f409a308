"""Dynamic context parallelism as Megatron-Core's schedulers make it, without plans of ours. Pure: no torch.

A unit is one rank of the group of data and context parallelism: TP ranks, or a pipeline of them. Both schedulers count
the work of a sequence that k units share as l * l / k, so that short ones look free. `BalancedCPScheduler` is the class
of the published package itself; its successor, `next_hdp_group_packing_aware` of the development branch, stands here by
its rules, as no package for all of our versions of Python has it. Torch comes with Megatron-Core when it is used.

Units, recomputation and the most tokens of a sequence on a unit are the best in hindsight. Each sequence that several
units share pays for its ring. Pulls and pushes are those of the same units without groups.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.rivals.costs import Recomputed, Setting, Way, cluster_of, measured, powers_of_two, table_of
from ds_hydra.rivals.systems import Lengths
from ds_hydra.simulate.step import exposed_ms
from ds_hydra.zero_hetero.errors import PlanError

_SLACK = 1.05  # of what a unit may get in one turn, by the successor's rules


class Group(NamedTuple):
    """So many units in a row, and the positions of the sequences that all of them share, in the order of computing."""

    units: int
    positions: tuple[int, ...]


Turn = tuple[Group, ...]  # all units, in order


class _Ranks(NamedTuple):
    """Stands for a process group, of which the scheduler asks the size."""

    units: int

    def size(self) -> int:
        return self.units


def balanced_turns(lengths: Sequence[int], units: int, most: int) -> list[Turn]:
    """Turns by Megatron-Core's `BalancedCPScheduler`, with at most so many tokens of a sequence on a unit: each
    sequence is a micro-batch, and all units wait for each other after a turn.

    PlanError where a sequence fits nowhere, or where the scheduler itself fails.
    """
    _check_longest(lengths, 1 << (units.bit_length() - 1), most)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells what else it would like to find installed
        from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    try:
        _, found = BalancedCPScheduler(most, _Ranks(units)).get_groups_and_subsamples(list(enumerate(lengths)), None)
    except (AssertionError, IndexError) as error:
        raise PlanError(f"BalancedCPScheduler fails on {units} units: {error}") from error
    return [_in_groups(turn) for turn in found]


def _in_groups(turn: Sequence[Sequence[int]]) -> Turn:
    """Neighbours with the same sequences as groups."""
    groups: list[Group] = []
    for positions in map(tuple, turn):
        if groups and groups[-1].positions == positions:
            groups[-1] = Group(groups[-1].units + 1, positions)
        else:
            groups.append(Group(1, positions))
    return tuple(groups)


def packed_turns(lengths: Sequence[int], units: int, most: int) -> list[Turn]:
    """Turns by the successor's rules: what a group gets in a turn is one micro-batch, of at most so many tokens on a
    unit. PlanError where a sequence fits nowhere."""
    _check_longest(lengths, units, most)
    left = sorted(range(len(lengths)), key=lambda position: -lengths[position])
    turns = []
    while left:
        turn, left = _packed_turn(left, lengths, units, most)
        turns.append(turn)
    return turns


@dataclass
class _Growing:
    """A group that is being filled."""

    units: int
    positions: list[int] = field(default_factory=list)
    tokens: float = 0.0  # on each of its units
    work: float = 0.0

    def add(self, position: int, length: int) -> None:
        self.positions.append(position)
        self.tokens += length / self.units
        self.work += length * length / self.units


def _packed_turn(order: Sequence[int], lengths: Sequence[int], units: int, most: int) -> tuple[Turn, list[int]]:
    """A turn for these sequences, longest first, and those that are left for later ones.

    The longest one takes as few units as hold it. Each other one goes where the busiest unit gets least: to a group,
    or to units that are free, as few as hold it or twice, four times ... as many; but nowhere where a unit would get
    more than a full one of tokens of the longest one's kind.
    """
    longest = lengths[order[0]]
    cap = _SLACK * longest * most
    groups = [_Growing(_needed(longest, most, units))]
    groups[0].add(order[0], longest)
    left: list[int] = []
    for position in order[1:]:
        length = lengths[position]
        free, busiest = units - sum(group.units for group in groups), max(group.work for group in groups)
        best: tuple[float, _Growing] | None = None
        for size in _sizes(units):
            if size < _needed(length, most, units):
                continue
            known = [one for one in groups if one.units == size and one.tokens + length / size <= most]
            for group in [*known, *([_Growing(size)] if size <= free else [])]:
                after = max(busiest, group.work + length * length / size)
                if after <= cap and (best is None or after < best[0]):
                    best = after, group
        if best is None:
            left.append(position)
            continue
        best[1].add(position, length)
        if len(best[1].positions) == 1:
            groups.append(best[1])
    if not _fill(groups, units):
        # No group may grow so that all units have work: one of all of them takes what it holds.
        everyone, left = _Growing(units), []
        for position in order:
            if everyone.tokens + lengths[position] / units <= most:
                everyone.add(position, lengths[position])
            else:
                left.append(position)
        groups = [everyone]
    return tuple(Group(group.units, tuple(group.positions)) for group in groups), left


def _fill(groups: Sequence[_Growing], units: int) -> bool:
    """Let the smallest groups grow to the next size until no unit is without work; False if that does not do it."""
    while (free := units - sum(group.units for group in groups)) > 0:
        smallest = min(groups, key=lambda group: group.units)
        larger = [size for size in _sizes(units) if size > smallest.units]
        if not larger or larger[0] - smallest.units > free:
            return False
        smallest.units = larger[0]
    return True


def _sizes(units: int) -> list[int]:
    """Of groups: powers of two, and all units."""
    return sorted({*(1 << n for n in range(units.bit_length()) if 1 << n <= units), units})


def _needed(length: int, most: int, units: int) -> int:
    """The smallest group that holds a sequence."""
    return next(size for size in _sizes(units) if size * most >= length)


def _check_longest(lengths: Sequence[int], units: int, most: int) -> None:
    if (longest := max(lengths)) > units * most:
        raise PlanError(
            f"a sequence of {longest} tokens does not fit {units} units with {most} tokens on each; give units of more "
            "ranks"
        )


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
