"""What images take of a pipeline's first stage: in plans, their times, their search, and the words of the planner."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost, table_file_from_record, table_record
from ds_hydra.costs.loads import EVERY, Lengths, Load, Loads, dealt, dealt_us, first_ranks, loads_of
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.simulate import simulate_pipeline, simulate_plan
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan
from ds_hydra.plan.validate import modelled_ms, validate_plan
from ds_hydra.planner import Planner, PlannerOptions, PlanRecipe
from ds_hydra.planner.kernels.problem import PipelineKinds, scheme_arrays
from ds_hydra.planner.pipelines import Whole, loaded
from ds_hydra.planner.service import PlannerService
from ds_hydra.report.calibration import Calibration
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.step import Simulator
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.planner_cases import (
    TABLES,
    Instance,
    a800_batch,
    in_slices,
    partitions,
    random_instance,
    random_job,
    random_plan,
    random_table,
)

FREE = LinkModel(8, Speed(0.0, 1e18), Speed(0.0, 1e18))


def besides(pipeline: PipelinePlan, us: Sequence[int]) -> PipelinePlan:
    """With so much besides for each of its micro-batches."""
    batches = tuple(replace(one, beside_us=more) for one, more in zip(pipeline.microbatches, us, strict=True))
    return replace(pipeline, microbatches=batches)


def loads_for(rng: np.random.Generator, count: int, most: int = 60_000) -> Loads:
    """Of each of some sequences up to three units, of some none; half of them can be shared."""

    def load() -> Load:
        us = int(rng.integers(1, most))
        return Load(us, int(rng.integers(0, us)) if rng.random() < 0.5 else us)

    return tuple(tuple(load() for _ in range(rng.integers(0, 4))) for _ in range(count))


def optimum(instance: Instance, loads: Loads, strategy: StrategyShape) -> float:
    """Least slowest pipeline over all ways to deal sequences out and to pack them, by the formula."""

    def of_pipeline(cost: SchemeCost, own: tuple[int, ...]) -> float:
        best = math.inf
        for blocks in partitions(own) if own else ():
            if all(sum(instance.lengths[i] for i in block) <= cost.max_length for block in blocks):
                text = [cost.load_ms([instance.lengths[i] for i in block]) for block in blocks]
                units = [[load for i in block for load in loads[i]] for block in blocks]
                more = sum(dealt_us(one, first_ranks(cost.scheme)) for one in units) / 1e3
                best = min(best, cost.pipeline_ms(text) + more)
        return best if own else 0.0

    found, count = math.inf, len(instance.lengths)
    for owners in itertools.product(range(len(strategy.pipelines)), repeat=count):
        shares = [tuple(i for i in range(count) if owners[i] == p) for p in range(len(strategy.pipelines))]
        found = min(found, max(of_pipeline(instance.table[p], own)
                               for p, own in zip(strategy.pipelines, shares, strict=True)))  # fmt: skip
    return found


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_plans_with_loads_are_valid_and_their_bound_holds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    instance = random_instance(rng, most_sequences=4)
    loads = loads_for(rng, len(instance.lengths))
    lengths = Lengths.of(instance.lengths, loads)
    plan = instance.planner(highs="off").plan(0, range(len(lengths)), lengths)
    validate_plan(plan, instance.table, 4)
    for pipeline in plan.pipelines:
        for batch in pipeline.microbatches:
            units = [load for span in batch.spans for load in loads[span.sequence]]
            assert batch.beside_us == round(dealt_us(units, first_ranks(pipeline.shape)))
    best = min(optimum(instance, loads, strategy) for strategy in instance.strategies)
    assert plan.lower_bound_ms <= best * (1 + 1e-4) <= plan.searched_ms * (1 + 2e-4)
    whole = Whole.of(lengths, instance.table, scheme_arrays(instance.table), 4)
    kinds = [PipelineKinds.of(strategy, instance.table) for strategy in instance.strategies]
    assert whole.bound(kinds, kernels.compiled().strategy_bound, math.inf) <= best * (1 + 1e-9) or not any(loads)
    assert plan.searched_ms <= 1.6 * best
    assert StepPlan.from_json(plan.to_json()) == plan


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_more_to_do_besides_never_makes_a_step_shorter(seed: int, sliced: bool) -> None:
    rng = random.Random(seed)
    table = random_table(rng)
    plan = random_plan(rng, table, 8)
    plan = in_slices(plan, table) if sliced else plan
    before = simulate_plan(plan, table)
    for bare, ms in zip(plan.pipelines, before, strict=True):
        pipeline = besides(bare, [rng.randint(0, 10**6) for _ in bare.microbatches])
        more, taken = math.fsum(pipeline.beside_ms), simulate_pipeline(pipeline, table)
        # The first stage has it to do, and no other waits for it longer than that.
        assert max(ms, more) * (1 - 1e-9) <= taken + 0.002 <= ms + more + 0.01


@pytest.mark.parametrize(("schedule", "before"), [("1f1b", 20.0), ("list", 17.0), ("zb-h1", 50.0 / 3)])
def test_only_the_first_stage_takes_it(schedule: str, before: float) -> None:
    """One micro-batch of 10 ms on each of two stages, and 4 ms besides: 4 ms more, not 8."""
    cost = SchemeCost(ParallelScheme(1, 2), a=0.0, b=0.1, c=0.0, max_length=200)
    table, shape = CostTable((cost,)), PipelineShape.parse(f"pp2/{schedule}")
    pipeline = besides(PipelinePlan(shape, (MicroBatchPlan.of_whole([0], [100]),), 0.0), [4000])
    assert simulate_pipeline(pipeline, table) == pytest.approx(before + 4.0, abs=0.01)
    assert modelled_ms(pipeline, table) == pytest.approx((17.0 if schedule == "list" else 20.0) + 4.0, abs=0.01)
    plan = StepPlan(0, (0,), (100,), (Phase((replace(pipeline, predicted_ms=24.0),)),), 24.0)
    stage_ms = Calibration(table, 4).predict(plan).stage_ms[0]
    assert stage_ms == pytest.approx((14.0, 10.0), abs=0.01)
    assert plan.beside == pytest.approx(4 / 24)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_the_simulation_of_steps_counts_it_as_a_plan_does(seed: int) -> None:
    rng = random.Random(seed)
    job: SimulatedJob = replace(random_job(rng, 8), links=FREE)
    table = job.found.table
    plan = random_plan(rng, table, 8)
    phases = [[besides(one, [10**5] * len(one.microbatches)) for one in phase.pipelines] for phase in plan.phases]
    shown = replace(plan, phases=tuple(Phase(tuple(phase)) for phase in phases))
    simulator = Simulator(job)
    added = simulator.step_ms(shown) - simulator.step_ms(plan)
    expected = shown.total_ms(simulate_plan(shown, table)) - plan.total_ms(simulate_plan(plan, table))
    assert expected > 0.0
    if "/" not in str(plan.strategy):
        assert added == pytest.approx(expected, rel=0.02, abs=0.05)
    # The messages of a slot are waited for together, which schedules of slots with a slow first stage feel.
    assert simulator.step_ms(shown) == pytest.approx(shown.total_ms(simulate_plan(shown, table)), rel=0.15)


def chosen(lengths: Sequence[int]) -> StepPlan:
    table = CostTable.load(TABLES / "llama_7b_a800.json")
    strategies = [StrategyShape.parse(text) for text in ("16*tp2", "16*pp2", "8*tp4", "4*tp8")]
    planner = Planner(table, strategies, PlannerOptions(kernels="compiled", highs="off"))
    return planner.plan(0, range(len(lengths)), lengths)


def test_no_loads_leave_a_plan_as_it_is_to_the_bit() -> None:
    lengths = a800_batch(3)
    assert type(Lengths.of(lengths, [()] * len(lengths))) is tuple
    plan = chosen(Lengths.of(lengths, [()] * len(lengths)))
    assert plan.digest() == chosen(lengths).digest()
    assert "beside_us" not in plan.to_json()
    assert plan.beside == 0.0


def test_loads_balance_pipelines_by_the_total() -> None:
    lengths = a800_batch(3)
    # Every other sequence has images, of about 5 ms each.
    loads = [(Load.whole(5000),) * (length // 50) if place % 2 else () for place, length in enumerate(lengths)]
    plan = chosen(Lengths.of(lengths, loads))
    (blind,) = chosen(lengths).phases
    _, ms = loaded(blind, tuple(loads), CostTable.load(TABLES / "llama_7b_a800.json"), lengths)
    assert plan.predicted_ms < 0.97 * ms
    assert plan.balance < 1.05
    assert 0.1 < plan.beside < 0.9


def test_the_planners_process_plans_with_loads() -> None:
    instance = random_instance(np.random.default_rng(5))
    lengths = Lengths.of(instance.lengths, [(Load(40_000, 400), Load.whole(7_000))] * len(instance.lengths))
    recipe = PlanRecipe(instance.table, instance.strategies, PlannerOptions(kernels="compiled", highs="off"))
    service = PlannerService(recipe, ahead=1)
    try:
        service.submit(0, range(len(lengths)), lengths)
        found = service.get(0)
    finally:
        service.close()
    assert found.made_by == "producer"
    assert found.plan.beside > 0.0
    assert found.plan == recipe.settled().planner().plan(0, range(len(lengths)), lengths)


def test_units_are_dealt_out_the_largest_first() -> None:
    assert [dealt_us([*map(Load.whole, (30, 20, 20, 10))], ranks) for ranks in (1, 2, 8)] == [80, 40, 30]
    assert loads_of(Lengths.of([3, 4], [([5, 2],), ()])) == ((Load(5, 2),), ())
    assert loads_of((3, 4)) == ()


def test_units_that_others_would_wait_for_are_shared() -> None:
    single, small = Load(30, 2), Load.whole(10)
    assert [dealt([single], ranks) for ranks in (1, 2, 4)] == [([0], 30), ([EVERY], 17), ([EVERY], 9.5)]
    assert dealt([small, single], 4) == ([0, EVERY], 19.5)
    assert dealt([single] * 4, 4).us == 30, "of as many as ranks each has one"
    assert dealt([single, single], 8) == ([EVERY, EVERY], 11.5)
    assert dealt([Load(30, 27)], 8) == ([0], 30), "messages would take longer"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 4, 8]))
def test_sharing_is_a_choice(seed: int, ranks: int) -> None:
    """What is dealt out adds up to what it takes; whole units take no less; and a unit that is left whole although it
    could be shared is not what a step waits for alone, or sharing it besides would take as long."""
    rng = np.random.default_rng(seed)
    units = [one for held in loads_for(rng, 4) for one in held]
    owners, us = dealt(units, ranks)
    held = [sum(one.us for one, owner in zip(units, owners, strict=True) if owner == rank) for rank in range(ranks)]
    shared = [one for one, owner in zip(units, owners, strict=True) if owner == EVERY]
    assert us == pytest.approx(max(held) + sum(one.shared_by(ranks) for one in shared))
    assert sum(one.us for one in units) / ranks <= us + 1e-6
    assert us <= dealt_us([Load.whole(one.us) for one in units], ranks)
    longest = max((one for one, owner in zip(units, owners, strict=True) if owner != EVERY), default=None)
    if longest is not None and longest.us > sum(held) - longest.us:
        assert us <= sum(one.shared_by(ranks) for one in (*shared, longest)) + (sum(held) - longest.us) + 1e-6


def test_impossible_times_besides_are_refused() -> None:
    cost = SchemeCost(ParallelScheme(1, 1), a=0.0, b=0.1, c=0.0, max_length=200)
    bare = PipelinePlan(PipelineShape.parse("tp1"), (MicroBatchPlan.of_whole([0], [100]),), 10.0)
    for us, words in ((-4000, "takes -4000 us besides"), (4000, r"states 10\.000 ms but the cost table gives 14\.000")):
        plan = StepPlan(0, (0,), (100,), (Phase((besides(bare, [us]),)),), 10.0)
        with pytest.raises(PlanError, match=words):
            validate_plan(plan, CostTable((cost,)), 1)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-4, 3e-3))
def test_what_images_keep_takes_room_of_tokens(seed: int, beside: float) -> None:
    """With 1e-3 a microsecond of the rank with the most keeps as much as a thousandth of a token."""
    rng = np.random.default_rng(seed)
    instance = random_instance(rng, most_sequences=8)
    table = replace(instance.table, costs=tuple(replace(cost, beside=beside) for cost in instance.table.costs))
    lengths = Lengths.of(instance.lengths, loads_for(rng, len(instance.lengths)))
    planner = Planner(table, instance.strategies, PlannerOptions(kernels="compiled", highs="off"))
    try:
        plan = planner.plan(0, range(len(lengths)), lengths)
    except PlanError as error:
        assert "In this step the largest MaxLen is" in str(error)  # noqa: PT017
        return
    validate_plan(plan, table, 4)
    for pipeline in plan.pipelines:
        for batch in pipeline.microbatches:
            assert batch.num_tokens + beside * batch.beside_us <= table[pipeline.shape].max_length


@pytest.mark.parametrize("images", [{"a": 0, "b": 0, "keep": 1}, {"a": 1, "b": 1}, {"a": -1, "b": 1, "keep": 0}, 5])
def test_a_price_that_cannot_be_is_refused(images: object) -> None:
    record = table_record(CostTable.load(TABLES / "llama_7b_a800.json"))
    assert table_file_from_record(record, "old").images is None
    with pytest.raises(ConfigError, match=r'new: "images" must hold "a", "b" and "keep"'):
        table_file_from_record({**record, "images": images}, "new")


def test_images_that_keep_too_much_are_refused() -> None:
    cost = SchemeCost(ParallelScheme(1, 1), a=0.0, b=0.1, c=0.0, max_length=150, beside=0.02)
    pipeline = besides(PipelinePlan(PipelineShape.parse("tp1"), (MicroBatchPlan.of_whole([0], [100]),), 14.0), [4000])
    plan = StepPlan(0, (0,), (100,), (Phase((pipeline,)),), 14.0)
    with pytest.raises(
        PlanError, match="holds 100 tokens, and images that keep as much as 80 more, but there is memory for 150"
    ):
        validate_plan(plan, CostTable((cost,)), 1)
    planner = Planner(CostTable((cost,)), [StrategyShape.parse("tp1")], PlannerOptions(kernels="pure"))
    with pytest.raises(PlanError, match="In this step the largest MaxLen is 82, of 150 without images"):
        planner.plan(0, [0], Lengths.of([100], [(Load.whole(4000),)]))
