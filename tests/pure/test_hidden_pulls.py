"""Plans of steps whose pulls a light first micro-batch does not hide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.phase import Phase
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.hidden_pulls import with_hidden_pulls
from ds_hydra.planner.pipelines import longest_outside

TABLE = CostTable((
    SchemeCost(ParallelScheme(2, 1), a=0.0, b=0.5, c=1.0, max_length=1000, util_length=100),
    SchemeCost(ParallelScheme(1, 1), a=0.0, b=1.0, c=1.0, max_length=400, util_length=50),
))  # fmt: skip
STRATEGIES = tuple(map(StrategyShape.parse, ("tp2 + 2*tp1", "2*tp2")))
PULLS_MS = 60.0


def taken_ms(plan: StepPlan) -> float:
    """What a step takes whose pulls a pipeline's first forward hides, and nothing else."""
    taken = []
    for pipeline in plan.pipelines:
        loads = [TABLE[pipeline.shape].load_ms(batch.lengths) for batch in pipeline.microbatches]
        taken.append(sum(loads) + max(0.0, PULLS_MS - loads[0] / 3.0) if loads else PULLS_MS)
    return max(taken)


def planner(**more: Any) -> Planner:
    options = PlannerOptions(kernels="compiled", highs="off")
    return Planner(TABLE, STRATEGIES, options, **more)


# One sequence fills a row of tp2, and beside it the search runs a light micro-batch.
LENGTHS = [1000, *([10] * 105)]


def test_a_light_first_micro_batch_gives_its_sequences_away() -> None:
    plain, simulated = (planner(step_ms=ms).plan(0, range(106), LENGTHS) for ms in (None, taken_ms))
    assert taken_ms(plain) > 1.04 * taken_ms(simulated)
    assert simulated.step_ms == taken_ms(simulated)


def test_no_more_than_usual_moves_nothing() -> None:
    usual = planner(step_ms=lambda plan: plan.predicted_ms).plan(0, range(106), LENGTHS)
    assert usual.phases == planner().plan(0, range(106), LENGTHS).phases
    one_pipeline = replace(usual, phases=(Phase(usual.pipelines[:1]),))
    assert with_hidden_pulls(one_pipeline, TABLE, 2.0 * usual.predicted_ms) is None
    assert (
        with_hidden_pulls(replace(usual, phases=(*usual.phases, *usual.phases)), TABLE, 2.0 * usual.predicted_ms)
        is None
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=20, max_size=60), st.integers(900, 1000))
def test_what_is_moved_stays_a_plan(short: list[int], long: int) -> None:
    lengths = [long, *short]
    plan = planner().plan(0, range(len(lengths)), lengths)
    found = with_hidden_pulls(plan, TABLE, taken_ms(plan))
    event(f"moved: {found is not None}")
    if found is not None:
        validate_plan(found, TABLE, 4)  # every sequence once, in rows that hold it, in the times that it says
        assert found.phases != plan.phases


def test_the_heaviest_micro_batches_run_first_and_last() -> None:
    for count, order in ((1, [1.0]), (2, [1.0, 2.0]), (5, [4.0, 1.0, 2.0, 3.0, 5.0])):
        loaded: list[tuple[float, tuple[int, ...]]] = [(float(load), (load,)) for load in range(count, 0, -1)]
        assert [load for load, _ in longest_outside(loaded)] == order
