"""What messages add to a step: where it comes from, and that plans are chosen by it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.proposal.propose import ProposalEffort, propose_strategies
from ds_hydra.simulate.exposed import exposed_ms
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.step import Simulator
from tests.pure.test_chunked import CHUNKED, TABLE, WHOLE
from tests.pure.test_simulator import job

EXPOSED = st.lists(st.floats(0.0, 300.0), min_size=len(WHOLE), max_size=len(WHOLE))


def at(rate: float) -> LinkModel:
    return LinkModel(8, Speed(0.0, rate), Speed(0.0, rate))


def test_transfers_add_what_computing_does_not_hide() -> None:
    """Two layers of 400 bytes each on two ranks, of which each owns a half. The links carry 1 byte in a ms.

    A rank pulls 200 bytes of either layer, 400 ms, and computes one micro-batch of 300 ms: half of it for either layer,
    a third of it forward. The backward is done with layer 1 first. All else is waited for.
    """
    cluster = replace(job(at(1e3), 2, numel=400), element_bytes=1)
    slow = exposed_ms(cluster, StrategyShape.parse("2*tp1"), 200)
    assert 400.0 < slow <= 800.0
    assert exposed_ms(replace(cluster, links=at(2e3)), StrategyShape.parse("2*tp1"), 200) < slow
    assert exposed_ms(replace(cluster, links=at(1e15)), StrategyShape.parse("2*tp1"), 200) == pytest.approx(
        0.0, abs=1e-6
    )
    # More to compute hides more.
    assert exposed_ms(cluster, StrategyShape.parse("2*tp1"), 1200) < slow
    # One rank alone owns all that it needs, and so it is with its share of a larger job.
    assert exposed_ms(cluster, StrategyShape.parse("tp1"), 200) < 1e-6


@pytest.mark.parametrize("lengths", [[300, 300], [100] * 6, [600] * 4])
def test_one_stage_hides_transfers_behind_as_few_micro_batches_as_a_plan_has(lengths: list[int]) -> None:
    cluster, strategy = replace(job(at(1e3), 2, numel=400), element_bytes=1), StrategyShape.parse("2*tp1")
    plan = Planner(cluster.table, [strategy], PlannerOptions(kernels="compiled")).plan(0, range(len(lengths)), lengths)
    with_links = 1e3 * Simulator(cluster).step(plan).norm_s
    assert exposed_ms(cluster, strategy, sum(lengths)) == pytest.approx(with_links - plan.predicted_ms, rel=0.02)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), EXPOSED)
def test_the_shortest_step_is_planned_and_bounded(lengths: list[int], exposed: list[float]) -> None:
    """Few sequences, for which the plans of a strategy are optimal."""
    strategies, options = [StrategyShape.parse(text) for text in WHOLE], PlannerOptions(kernels="compiled")
    found = Planner(TABLE, strategies, options, exposed_ms=exposed).plan(0, range(len(lengths)), lengths)
    validate_plan(found, TABLE, 8)
    alone = [Planner(TABLE, [one], options).plan(0, range(len(lengths)), lengths) for one in strategies]
    steps = [plan.searched_ms + ms for plan, ms in zip(alone, exposed, strict=True)]
    own = exposed[strategies.index(found.phases[0].shape)]
    assert found.searched_ms + own == pytest.approx(min(steps), rel=0.0011)
    assert found.lower_bound_ms + own <= min(steps) * (1 + 1e-9) or found.lower_bound_ms == 0.0


def test_chunked_strategies_are_compared_by_steps_too() -> None:
    texts, lengths = (*WHOLE, *CHUNKED), [390, 200, 120, 80, 60, 50, 30, 30, 20, 20, 10]
    strategies, options = [StrategyShape.parse(text) for text in texts], PlannerOptions(kernels="compiled")
    free = Planner(TABLE, strategies, options).plan(0, range(len(lengths)), lengths)
    best = strategies.index(free.phases[0].shape)
    exposed = [1000.0 if index == best else 0.0 for index in range(len(texts))]
    other = Planner(TABLE, strategies, options, exposed_ms=exposed).plan(0, range(len(lengths)), lengths)
    assert other.phases[0].shape != free.phases[0].shape
    assert free.predicted_ms <= other.predicted_ms < free.predicted_ms + 1000.0
    # What adds to all alike changes nothing.
    same = Planner(TABLE, strategies, options, exposed_ms=[70.0] * len(texts)).plan(0, range(len(lengths)), lengths)
    assert same.phases == free.phases


def test_strategies_are_proposed_by_steps() -> None:
    lengths = [5, 10, 20, 30, 40, 60, 90, 200, 390] * 8
    effort = ProposalEffort(4, 2, 5, 1, 20)

    def proposed(added: dict[str, float]) -> str:
        found = propose_strategies(
            TABLE, 8, lengths, 1000, 100, count=1, effort=effort,
            exposed=lambda strategy: added.get(str(strategy.pipelines[0]), 0.0),
        )  # fmt: skip
        return str(found[0])

    free = proposed({})
    dear = dict.fromkeys((str(shape) for shape in StrategyShape.parse(free).pipelines), 1e5)
    assert not set(dear) & {str(shape) for shape in StrategyShape.parse(proposed(dear)).pipelines}


def test_simulated_steps_decide_among_the_best_plans() -> None:
    """Finalists are of several strategies; whichever is said to be soonest done wins, and its bound still holds."""
    texts, lengths = (*WHOLE, *CHUNKED), [390, 200, 120, 80, 60, 50, 30, 30, 20, 20, 10]
    strategies, options = [StrategyShape.parse(text) for text in texts], PlannerOptions(kernels="compiled")
    estimated = Planner(TABLE, strategies, options).plan(0, range(len(lengths)), lengths)
    asked: dict[str, float] = {}

    def other_than(wanted: str, plan: StepPlan) -> float:
        return float(plan.strategy != wanted)

    def as_estimated(plan: StepPlan) -> float:
        asked[plan.strategy] = plan.predicted_ms
        return plan.predicted_ms

    planner = Planner(TABLE, strategies, options, step_ms=as_estimated)
    assert planner.plan(0, range(len(lengths)), lengths).predicted_ms <= estimated.predicted_ms
    assert 1 < len(asked) <= 4
    for wanted in asked:
        chosen = Planner(TABLE, strategies, options, step_ms=partial(other_than, wanted))
        found = chosen.plan(0, range(len(lengths)), lengths)
        assert found.strategy == wanted
        assert found.step_ms == pytest.approx(0.0), "it states what it was chosen by"
        validate_plan(found, TABLE, 8)
        assert found.lower_bound_ms <= min(asked.values())


def test_several_plans_of_the_best_chunked_strategy_are_simulated() -> None:
    """What its messages add differs from plan to plan: here it is by far the least for the plan that computes most."""
    lengths, asked = [390, 200, 120, 80, 60, 50, 30, 30, 20, 20, 10] * 2, list[float]()

    def step_ms(plan: StepPlan) -> float:
        asked.append(plan.predicted_ms)
        return 1e6 - plan.predicted_ms

    planner = Planner(TABLE, [StrategyShape.parse(CHUNKED[0])], PlannerOptions(kernels="compiled"), step_ms=step_ms)
    found = planner.plan(0, range(len(lengths)), lengths)
    validate_plan(found, TABLE, 8)
    assert len(set(asked)) > 1
    assert found.predicted_ms == max(asked)


def test_a_simulation_is_asked_only_where_there_is_a_choice() -> None:
    def never(plan: StepPlan) -> float:
        raise AssertionError("one plan needs no comparison")

    lengths, options = [100, 50, 20], PlannerOptions(kernels="compiled")
    assert Planner(TABLE, [StrategyShape.parse(WHOLE[0])], options, step_ms=never).plan(0, range(3), lengths)
