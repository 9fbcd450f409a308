"""Other systems as plans: groups of units, hand-made strategies, Hydraulis as published. Pure: no torch.

[Note: groups of units]
The GPUs are units of TP * PP ranks. A sequence that a unit cannot hold, or that would take it too long, runs on a group
of units that share its tokens. Groups form anew in each step. In a plan a group of k units is a pipeline <TP, PP, k>,
and the units that are in none are pipelines <TP, PP, 1>; short sequences that a group runs beside its long one are
shared by its units too, without messages, as if each unit ran some of them alone. No group waits for another before the
step's end. That favours these systems, whose groups form and part within a step, with a wait each time. But a sequence
that takes one unit longer than the whole step cannot run on one, so it pays for being shared. What the step takes is
found in turns: planned as if no sequence took too long, and then again by the step that this gave.

[Note: dealt out]
In the plans of [Note: groups of units] a group's units share its short sequences without a remainder and without
messages. A group can only have that in part: a sequence is shared, and goes round the ring with what else is shared, or
one unit computes it. Here so many of a group's longest sequences in the step are shared, and the others dealt out
whole, the longest first, each to the unit with the least work so far, and the group takes what its busiest unit does.
How many are shared is chosen for each group, the best of all. Three sequences of 40, 30 and 20 ms on a group of two:
shared they take 45 ms and what their rings leave exposed; with the first one shared the others make 20 + 30; with none
shared it is 50 as well. Units of several stages do so for each micro-batch.

Still in these systems' favour: units have room for what they get, a ring is hidden by attention of all that is shared,
units do not wait for each other between micro-batches, groups form and part without a wait, and adding up what each
turn of a ring gives takes no time. Against them: their plans were made as if there were no remainder.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from benchmarks.rivals.hydraulis import HydraulisPlanner
from benchmarks.rivals.proposal import propose_by_program
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.simulate import simulate_pipeline
from ds_hydra.plan.step_plan import PipelinePlan, StepPlan
from ds_hydra.planner import PhasedPlanner, Planner
from ds_hydra.planner.propose import QUICK, propose_strategies
from ds_hydra.rivals.costs import Way, measured, powers_of_two, table_of
from ds_hydra.rivals.systems import OPTIONS, Configuration, Lengths, PlanStep, planned_by
from ds_hydra.rivals.waits import WaitingCost
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


_BORDERS = (4096, 8192, 16384)  # where buckets of lengths may end below the context; the papers have 4K and 16K
_MOST_PHASES = 3  # HotSPa's strategies in the papers
_LONG = 2  # pipelines for long sequences in a strategy of Hetu-B
_SAMPLED = 6  # batches by which strategies are ranked before they are set up
_CLOSE = 1.1  # layouts are compared on all batches that take at most so many times the least on these few


def hotspa(cell: Cell, batches: Sequence[Lengths]) -> Iterator[Configuration]:
    """HotSPa, and Hetu-A, which does the same: sequences of each bucket of lengths under a layout of their own.

    For every number of buckets the borders and layouts that are best for these batches; our planner deals out and
    packs within a phase. What switching takes is not in these times but in those of the simulated step.
    """
    table = measured(cell)
    edges = [0, *(border for border in _BORDERS if border < cell.context), cell.context]
    best = {
        (low, high): _best_layout(cell, table, batches, low, high) for low, high in itertools.combinations(edges, 2)
    }
    for phases in range(1, min(_MOST_PHASES, len(edges) - 1) + 1):
        choices = []
        for inner in itertools.combinations(edges[1:-1], phases - 1):
            buckets = list(itertools.pairwise((0, *inner, cell.context)))
            found = [best[bucket] for bucket in buckets]
            shapes = [one[1] for one in found if one is not None]
            if len(shapes) == len(buckets):
                choices.append((sum(one[0] for one in found if one is not None), buckets, shapes))
        if choices:
            _, buckets, shapes = min(choices, key=lambda choice: choice[0])
            planner = PhasedPlanner(table, shapes, OPTIONS, longest=[high for _, high in buckets])
            text = " then ".join(f"{shape} to {high}" for shape, (_, high) in zip(shapes, buckets, strict=True))
            yield planned_by(text, table, planner)


def _best_layout(
    cell: Cell, table: CostTable, batches: Sequence[Lengths], low: int, high: int
) -> tuple[float, StrategyShape] | None:
    """(ms over all batches, layout) for sequences above `low` and up to `high` tokens; None if nothing holds them."""
    own = [[length for length in batch if low < length <= high] for batch in batches]
    few = _spread_over([some for some in own if some])
    found = []
    for strategy in layouts(cell, table):
        if table[strategy.pipelines[0]].max_length >= high:
            planner = Planner(table, [strategy], OPTIONS)
            found.append((_total_ms(planner, few), strategy, planner))
    least = min((ms for ms, *_ in found), default=0.0)
    close = [(_total_ms(planner, own), strategy) for ms, strategy, planner in found if ms <= _CLOSE * least]
    return min(close, key=lambda one: one[0], default=None)


def _spread_over(batches: Sequence[Lengths]) -> Sequence[Lengths]:
    """Some of the batches, far from each other."""
    return batches[:: max(1, len(batches) // _SAMPLED)][:_SAMPLED]


def _total_ms(planner: Planner, batches: Sequence[Lengths]) -> float:
    """What these batches take, as planned; those that are empty take nothing."""
    return sum(planner.plan(0, range(len(some)), some).predicted_ms for some in batches if some)


def layouts(cell: Cell, table: CostTable) -> Iterator[StrategyShape]:
    """One scheme for all GPUs, for every scheme that divides them."""
    for scheme in table.schemes:
        if cell.gpus % scheme.num_ranks == 0:
            yield StrategyShape.of([scheme] * (cell.gpus // scheme.num_ranks))


def hetu_b(cell: Cell, batches: Sequence[Lengths]) -> Iterator[Configuration]:
    """Hetu-B: one heterogeneous strategy for steps with a sequence above a border, another for all other steps.

    As its tables 11 and 12 have them: one or two pipelines for long sequences, all others of one scheme. Strategies and
    border are the best for these batches; our planner deals out and packs.
    """
    table = measured(cell)
    family = list(dict.fromkeys(long_and_short(cell, table)))
    for border in (border for border in _BORDERS if border < cell.context):
        above = [batch for batch in batches if max(batch) > border]
        below = [batch for batch in batches if max(batch) <= border]
        chosen = [
            _best_strategy(table, [one for one in family if _held(one, table) >= longest], some)
            for longest, some in ((cell.context, above), (border, below))
        ]
        planners = [Planner(table, [one], OPTIONS) for one in chosen]
        yield Configuration(f"{chosen[0]}; to {border} {chosen[1]}", table, _by_longest(planners, border))


def long_and_short(cell: Cell, table: CostTable) -> Iterator[StrategyShape]:
    """Strategies of some pipelines of one scheme and all others of another one that holds less."""
    schemes: tuple[ParallelScheme, ...] = table.schemes
    for long, short, count in itertools.product(schemes, schemes, range(1, _LONG + 1)):
        left = cell.gpus - count * long.num_ranks
        if table[long].max_length >= table[short].max_length and left >= 0 and left % short.num_ranks == 0:
            yield StrategyShape.of([long] * count + [short] * (left // short.num_ranks))


def _held(strategy: StrategyShape, table: CostTable) -> int:
    return max(table[pipeline].max_length for pipeline in strategy.pipelines)


def _best_strategy(table: CostTable, family: Sequence[StrategyShape], batches: Sequence[Lengths]) -> StrategyShape:
    """The strategy with the least time over some of these batches, of those that are best for one of them.

    PlanError when there is none.
    """
    if not family:
        raise PlanError("no strategy of two schemes holds the context")
    few = _spread_over(batches)
    every = Planner(table, family, OPTIONS)
    winners = dict.fromkeys(every.plan(0, range(len(batch)), batch).phases[0].shape for batch in few)

    return min(winners or family, key=lambda strategy: _total_ms(Planner(table, [strategy], OPTIONS), few))


def _by_longest(planners: Sequence[Planner], border: int) -> PlanStep:
    def plan(step: int, lengths: Lengths) -> StepPlan:
        return planners[max(lengths) <= border].plan(step, range(len(lengths)), lengths)

    return plan


# The strategies of its repository's README, for 32B on 64 GPUs (github.com/lhy101/Hydraulis).
HYDRAULIS_POOL = (
    "4*tp16", "tp16 + 2*tp8pp3", "tp16 + 6*tp8", "tp16 + 12*tp4", "tp8pp3 + 10*tp4", "tp8 + 14*tp4", "8*tp4pp2",
)  # fmt: skip


def hydraulis(cell: Cell) -> Iterator[Configuration]:
    """Hydraulis: Eq. 4 proposes, Algorithm 1 deals out, Eq. 1 packs and chooses the strategy of each step.

    Proposed for the lengths of the very batches that are reported, with c in T(l) and without; for 32B on 64 GPUs also
    the strategies that its authors published. Schemes are the measured ones: it has no CP.
    """
    table = measured(cell)
    pools = [
        (
            text,
            propose_by_program(table, cell.gpus, cell.reported_lengths, cell.context, table.schemes, with_overhead=c),
        )
        for text, c in (("proposed", True), ("proposed without c", False))
    ]
    if (cell.model, cell.gpus) == ("32b", 64):
        pools.append(("its README's", tuple(map(StrategyShape.parse, HYDRAULIS_POOL))))
    for text, strategies in pools:
        yield planned_by(f"{len(strategies)} {text}", table, HydraulisPlanner(table, strategies))


@dataclass(frozen=True, slots=True)
class DealtCost(WaitingCost):
    """Costs of a group whose micro-batches are dealt out."""

    def load_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> float:
        """One micro-batch by itself, in ms."""
        return self.c + self.work_ms(lengths)

    def work_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> float:
        """These sequences with the best number of them shared, without micro-batches' c, in ms [Note: dealt out]."""
        units = self.uniform.sp
        longest_first = np.sort(np.asarray(lengths, dtype=np.float64))[::-1]
        attention, others = self.a * longest_first**2, self.b * longest_first
        least = math.inf
        for shared in range(len(longest_first) + 1):
            ring = self.message * float(longest_first[:shared].sum())
            ms = float(others[:shared].sum()) + max(float(attention[:shared].sum()), ring)
            if ms >= least:
                break  # more of them only take longer
            least = min(least, ms + busiest_ms(units * (attention + others)[shared:], units))
        return least


def busiest_ms(works: Sequence[float] | NDArray[np.float64], units: int) -> float:
    """Works in the order in which they are dealt out, each to the unit with the least so far; what most a unit gets."""
    busy = [0.0] * units
    for work in works:
        heapq.heapreplace(busy, busy[0] + float(work))
    return max(busy)


def dealt_out_ms(plan: StepPlan, table: CostTable) -> tuple[float, ...]:
    """What each pipeline of a plan takes where its group deals out; `table` is the plan's, with `dealt` costs."""
    return tuple(_pipeline_ms(pipeline, table) for pipeline in plan.pipelines)


def _pipeline_ms(pipeline: PipelinePlan, table: CostTable) -> float:
    cost = table[pipeline.shape]
    if not isinstance(cost, DealtCost) or pipeline.shape.pp > 1 or not pipeline.microbatches:
        return simulate_pipeline(pipeline, table)
    lengths = [length for batch in pipeline.microbatches for length in batch.lengths]
    return len(pipeline.microbatches) * cost.c + cost.work_ms(lengths)


def dealt(table: CostTable) -> CostTable:
    """The same costs where groups deal out what they do not share."""
    return CostTable(tuple(map(_dealt, table.costs)), table.source)


def _dealt(cost: SchemeCost) -> SchemeCost:
    if not isinstance(cost, WaitingCost):
        return cost
    return DealtCost(**{field.name: getattr(cost, field.name) for field in fields(cost)})
