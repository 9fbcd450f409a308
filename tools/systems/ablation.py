"""What each idea adds (Hydraulis, figure 16), and what ours adds to them: mean steps of one cell."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.rivals.dispatch import ComparedDispatch
from benchmarks.rivals.hydraulis import HydraulisPlanner
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner.fixed_layout import packed, packed_in_turn, step_plan
from ds_hydra.planner.kernels.problem import Batch
from ds_hydra.rivals.costs import measured
from ds_hydra.rivals.hindsight import Configuration, Lengths, StepMs, hindsight, planned_by
from tools.systems.cells import Cell
from tools.systems.measure import Simulators
from tools.systems.ours import settings
from tools.systems.published import hydraulis
from tools.systems.rates import tflops
from tools.systems.switching import layouts, long_and_short


def ablation(cell: Cell, steps: int) -> list[dict[str, object]]:
    """Rows for the paper's five systems and two of ours, each with one idea more."""
    batches, simulators = cell.batches(steps), Simulators(cell)
    rows: list[dict[str, object]] = []
    first = 0.0
    for text, configurations in _ideas(cell, simulators.ms):
        chosen = hindsight(configurations, batches, simulators.ms)
        ms = statistics.fmean(simulators.ms(plan, chosen.configuration.table) for plan in chosen.plans)
        first = first or ms
        rows.append({"step by step": text, "ms": round(ms), "times as fast as the first": f"{first / ms:.2f}",
                     "TFLOP/s": round(tflops(cell, batches, ms))})  # fmt: skip
    return rows


def _ideas(cell: Cell, ms: StepMs) -> Iterator[tuple[str, Iterator[Configuration]]]:
    table = measured(cell)
    fixed = [one for one in layouts(cell, table) if table[one.pipelines[0]].max_length >= cell.context]

    def each(strategies: Sequence[StrategyShape]) -> Iterator[Configuration]:
        for strategy in strategies:
            yield planned_by(str(strategy), table, HydraulisPlanner(table, [strategy]))

    yield (
        "static layout, packed full, dealt out in turn",
        (Configuration(str(one), table, partial(_full, strategy=one, table=table)) for one in fixed),
    )
    yield (
        "(a) dealt out by Eq. 3, then packed full",
        (Configuration(str(one), table, partial(_dispatched, strategy=one, table=table)) for one in fixed),
    )
    yield "(b) and packed by Eq. 1", each(fixed)
    mixed = [one for one in long_and_short(cell, table) if _holds(one, table) >= cell.context]
    yield "(c) one heterogeneous strategy", each(list(dict.fromkeys(mixed)))
    yield "(d) another strategy in each step: Hydraulis", hydraulis(cell)
    for ours in settings(cell, table, ms):
        yield f"our proposal, bounds and assignment: {ours.configuration.text}", iter([ours.configuration])


def _full(step: int, lengths: Lengths, *, strategy: StrategyShape, table: CostTable) -> StepPlan:
    return packed_in_turn(step, lengths, strategy, table, int(table[strategy.pipelines[0]].max_length))


def _dispatched(step: int, lengths: Lengths, *, strategy: StrategyShape, table: CostTable) -> StepPlan:
    """Sequences dealt out by Algorithm 1 on Eq. 3, each pipeline's packed to what it holds."""
    problem = ComparedDispatch.of(lengths, strategy, table)
    owner = problem.by_algorithm_1()
    assert owner is not None, "every pipeline holds the context"
    position = Batch.of(lengths, table).position
    most = int(table[strategy.pipelines[0]].max_length)
    own = [position[owner == pipeline].tolist() for pipeline in range(len(strategy.pipelines))]
    return step_plan(step, lengths, strategy, [packed(some, lengths, most) for some in own], table)


def _holds(strategy: StrategyShape, table: CostTable) -> int:
    return max(int(table[pipeline].max_length) for pipeline in strategy.pipelines)
