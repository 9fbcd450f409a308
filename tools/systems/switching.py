"""Systems that change between strategies made by hand: HotSPa within a step, Hetu v2 from step to step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import PhasedPlanner, Planner
from ds_hydra.rivals.costs import measured
from ds_hydra.rivals.static import OPTIONS, Configuration, Lengths, PlanStep, planned_by
from ds_hydra.zero_hetero.errors import PlanError
from tools.systems.cells import Cell

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
