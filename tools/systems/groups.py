"""Systems that share long sequences among more ranks than short ones, inside one fixed layout of TP and PP.

[Note: groups of units]
The GPUs are units of TP * PP ranks. A sequence that a unit cannot hold, or that would take it too long, runs on a group
of units that share its tokens. Groups form anew in each step. In a plan a group of k units is a pipeline <TP, PP, k>,
and the units that are in none are pipelines <TP, PP, 1>; short sequences that a group runs beside its long one are
shared by its units too, without messages, as if each unit ran some of them alone. No group waits for another before the
step's end. That favours these systems, whose groups form and part within a step, with a wait each time. But a sequence
that takes one unit longer than the whole step cannot run on one, so it pays for being shared. What the step takes is
found in turns: planned as if no sequence took too long, and then again by the step that this gave.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.planner import Planner
from ds_hydra.planner.proposal.propose import QUICK, propose_strategies
from ds_hydra.rivals.costs import Way, powers_of_two, table_of
from ds_hydra.rivals.static import OPTIONS, Configuration, Lengths, planned_by
from ds_hydra.zero_hetero.errors import PlanError
from tools.systems.cells import Cell

_MOST_OF_A_SIZE = 2  # groups of one size in a step, beside those of another
_TURNS, _LOOKED_AT = 2, 3  # by how many batches each
_HOPELESS = 1.2  # times what the best units so far take
_SIZES = 6  # of groups, where any number of units may make one


def dynamic_context_parallel(cell: Cell, batches: Sequence[Lengths]) -> Iterator[Configuration]:
    """Megatron-Core's dynamic context parallelism (pull requests 2282 and 5679): groups of 1, 2, 4, ... units."""
    return _grouped(cell, powers_of_two(cell.gpus), batches)


def hybrid_data_parallel(cell: Cell, batches: Sequence[Lengths]) -> Iterator[Configuration]:
    """ByteScale's and Zeppelin's hybrid data parallelism: groups of any number of units, balanced."""
    return _grouped(cell, tuple(range(1, cell.gpus + 1)), batches)


def flexsp(cell: Cell) -> Iterator[Configuration]:
    """FlexSP: Ulysses groups of different sizes in a step, with ZeRO-3, with any recomputation.

    Its solver has five seconds a step; here a proposal for the very batches that are reported and our search stand for
    it, which leave less to be gained.
    """
    for again in cell.of_model.forms:
        way = Way(powers_of_two(cell.gpus), ulysses=True, zero_3=True, again=again)
        table = of_unit(table_of(cell, way), 1, 1)
        if table is None or table.max_length < cell.context:
            continue
        sizes = [scheme.sp for scheme in table.schemes]
        shapes = dict.fromkeys(mixes_of_groups(cell.gpus, ParallelScheme(), sizes))
        shapes |= dict.fromkeys(
            propose_strategies(table, cell.gpus, cell.reported_lengths, cell.tokens, cell.context, effort=QUICK)
        )
        yield planned(f"ulysses{again.value}", table, holding(shapes, table, cell.context))


def _grouped(cell: Cell, degrees: tuple[int, ...], batches: Sequence[Lengths]) -> Iterator[Configuration]:
    least: Sequence[float] = [math.inf] * _LOOKED_AT  # what the best units so far take for each batch
    for again in cell.of_model.forms:
        way = Way(degrees, by_length=True, again=again)
        for tp, pp in dict.fromkeys((scheme.tp, scheme.pp) for scheme in table_of(cell, way).schemes):
            found = _of_units(cell, way, tp, pp)
            taken: list[float] = []
            for _ in range(_TURNS):
                if found is not None:
                    taken = _taken_ms(found, batches[:_LOOKED_AT], least)
                    # Later turns only take longer, as more sequences pay for being shared.
                    found = _of_units(cell, replace(way, alone_ms=fmean(taken)), tp, pp) if taken else None
            if found is not None:
                least = min(least, taken, key=sum)
                yield found


def _of_units(cell: Cell, way: Way, tp: int, pp: int) -> Configuration | None:
    """Groups of units of this TP and PP; None where they do not hold the context."""
    own, count = of_unit(table_of(cell, way), tp, pp), cell.gpus // (tp * pp)
    if own is None or own.max_length < cell.context or cell.gpus % (tp * pp):
        return None
    sizes = _spread([scheme.sp for scheme in own.schemes if scheme.sp <= count])
    shapes = holding(mixes_of_groups(count, ParallelScheme(tp, pp), sizes), own, cell.context)
    return planned(f"{ParallelScheme(tp, pp)}{way.again.value}", own, shapes) if shapes else None


def _taken_ms(configuration: Configuration, batches: Sequence[Lengths], least: Sequence[float]) -> list[float]:
    """What each of these steps takes; nothing where a sequence fits nowhere, or clearly more than in `least`."""
    taken: list[float] = []
    for step, batch in enumerate(batches):
        try:
            taken.append(configuration.plan(step, batch).predicted_ms)
        except PlanError:
            return []
        if sum(taken) > _HOPELESS * sum(least[: len(taken)]):
            return []
    return taken


def of_unit(table: CostTable, tp: int, pp: int) -> CostTable | None:
    """The entries with this TP and PP, whatever shares their sequences; None if there are none."""
    costs = tuple(
        cost
        for cost in table.costs
        if isinstance(cost.scheme, ParallelScheme) and (cost.scheme.tp, cost.scheme.pp) == (tp, pp)
    )
    return CostTable(costs, table.source) if costs else None


def mixes_of_groups(units: int, unit: ParallelScheme, sizes: Sequence[int]) -> Iterator[StrategyShape]:
    """All units in groups of one size, or one or two groups of each of two sizes and the other units alone."""
    for size in sizes:
        if units % size == 0:
            yield _groups(unit, {size: units // size})
    several = [size for size in sizes if size > 1]
    for large, most in itertools.product(several, range(1, _MOST_OF_A_SIZE + 1)):
        left = units - most * large
        if left >= 0:
            yield _groups(unit, {large: most, 1: left})
        for small, more in itertools.product(several, range(1, _MOST_OF_A_SIZE + 1)):
            if small < large and left >= more * small:
                yield _groups(unit, {large: most, small: more, 1: left - more * small})


def _spread(sizes: Sequence[int]) -> list[int]:
    """At most a few of the sizes, close together where they are small."""
    if len(sizes) <= _SIZES:
        return list(sizes)
    least, most = min(sizes), max(sizes)
    wanted = [least * (most / least) ** (step / (_SIZES - 1)) for step in range(_SIZES)]
    return sorted({min(sizes, key=lambda size: abs(size - want)) for want in wanted})


def _groups(unit: ParallelScheme, counts: dict[int, int]) -> StrategyShape:
    return StrategyShape.of(
        ParallelScheme(unit.tp, unit.pp, size) for size in sorted(counts, reverse=True) for _ in range(counts[size])
    )


def holding(
    shapes: Iterator[StrategyShape] | dict[StrategyShape, None], table: CostTable, longest: int
) -> list[StrategyShape]:
    """Each strategy once whose pipelines all have costs, if one of them all holds `longest` tokens; else none."""
    known = {cost.scheme: cost.max_length for cost in table.costs}
    kept = [one for one in dict.fromkeys(shapes) if all(pipeline.cost_key in known for pipeline in one.pipelines)]
    held = max((known[pipeline.cost_key] for one in kept for pipeline in one.pipelines), default=0)
    return kept if held >= longest else []


def planned(text: str, table: CostTable, strategies: Sequence[StrategyShape]) -> Configuration:
    """The best of these strategies in every step, by our search."""
    if not strategies:
        raise PlanError(f"{text}: no strategy holds the context")
    return planned_by(text, table, Planner(table, strategies, OPTIONS))
