"""Many plans on the emulated cluster: each takes what the simulator says, none stands still, and nothing grows."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import numpy as np
import pytest

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.cost_table import read_table_file
from ds_hydra.costs.shape_costs import priced
from ds_hydra.data.lengths import WEB_PAGES, read_lengths
from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.emulate.cluster import EmulatedJob, emulate, emulate_plans
from ds_hydra.emulate.engine import EmulatedEngine
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.simulate.job import SimulatedJob, shipped_job
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.step import Simulator
from tests.support.planner_cases import MODEL, dealt_phase, random_job, random_lengths, random_plan, unequal_shapes
from tools import aims

DRAWN, LONG = pytest.mark.drawn, pytest.mark.long
TIMEOUT_S = 3600.0
Made = tuple[SimulatedJob, list[StepPlan], tuple[int, ...], int]
"""A cluster, plans of its steps, the lengths of the data, and tokens of a step."""


def any_plans(rng: random.Random, num_ranks: int, count: int) -> Made:
    """Links from fast to slow; a third of the plans has two phases."""
    cluster, lengths, tokens = random_job(rng, num_ranks), random_lengths(rng, 4000), 400 * num_ranks
    sampler, plans = TokenBudgetSampler(lengths, tokens), []
    for step in range(count):
        plan = random_plan(rng, cluster.table, num_ranks, step=step, lengths=sampler.batch_lengths(step))
        plans.append(replace(plan, sequence_ids=sampler.batch(step)))
    return cluster, plans, lengths, tokens


def unequal_plans(rng: random.Random, num_ranks: int, count: int) -> Made:
    """Pipelines whose stages differ, with costs that are priced from those of their stages' schemes."""
    cluster, lengths, tokens = random_job(rng, num_ranks), random_lengths(rng, 2000), 400 * num_ranks
    sampler, plans = TokenBudgetSampler(lengths, tokens), []
    for step in range(count):
        shapes, batch = unequal_shapes(rng, num_ranks), sampler.batch_lengths(step)
        table = cluster.table
        known = {cost.scheme for cost in table.costs}
        new = dict.fromkeys(shape.cost_key for shape in shapes if shape.cost_key not in known)
        costs = tuple(priced(key, table, MODEL.layers, 1 << 20) for key in new if isinstance(key, PipelineShape))
        cluster = replace(cluster, found=replace(cluster.found, table=replace(table, costs=(*table.costs, *costs))))
        phase = dealt_phase(rng, cluster.table, shapes, range(len(batch)), batch)
        plans.append(StepPlan(step, sampler.batch(step), batch, (phase,), phase.predicted_ms))
    return cluster, plans, lengths, tokens


def errors(made: Made) -> list[float]:
    """How far the simulator's time of each step is from the emulated cluster's, over the latter."""
    cluster, plans, lengths, tokens = made
    simulator, steps = Simulator(cluster), emulate_plans(cluster, plans, lengths, tokens, timeout_s=TIMEOUT_S)
    return [abs(simulator.step(step.plan).step_s / step.step_s - 1.0) for step in steps]


@pytest.mark.parametrize(
    ("make", "seed", "sizes", "plans", "most"),
    [
        pytest.param(any_plans, 32, (8,), 6, (aims.EMULATED_MEDIAN, aims.EMULATED_P90), marks=DRAWN),
        pytest.param(any_plans, 32, (8, 16, 24, 32) * 3, 9, (aims.EMULATED_MEDIAN, aims.EMULATED_P90), marks=LONG),
        pytest.param(unequal_plans, 36, (8,), 5, (aims.EMULATED_UNEQUAL, aims.EMULATED_UNEQUAL), marks=DRAWN),
        pytest.param(unequal_plans, 36, (8, 12, 16) * 3, 5, (aims.EMULATED_UNEQUAL, aims.EMULATED_UNEQUAL), marks=LONG),
    ],
)
def test_random_plans_take_what_was_simulated(
    make: Callable[[random.Random, int, int], Made],
    seed: int,
    sizes: Sequence[int],
    plans: int,
    most: tuple[float, float],
) -> None:
    rng = random.Random(seed)
    found = [error for num_ranks in sizes for error in errors(make(rng, num_ranks, plans))]
    assert np.median(found) <= most[0]
    assert np.quantile(found, 0.9) <= most[1]


# Lists and V's beside each other and beside whole sequences, of several depths; all hold the context.
CHUNKED = (
    "2*tp2pp4/v", "tp4pp4/v", "tp2pp4/v + 2*pp4/v", "tp2pp8/v", "tp4pp2/list + tp2pp4/v", "tp4pp2/v + 2*pp2/list + tp4",
)  # fmt: skip


@pytest.mark.parametrize("steps", [pytest.param(6, marks=DRAWN), pytest.param(300, marks=LONG)])
def test_plans_with_slices_and_split_backwards_take_what_was_simulated(steps: int) -> None:
    """The planner's plans of a 7B model on 16 ranks, another strategy in each."""
    found, strategies = read_table_file(shipped("a800-7b")), [StrategyShape.parse(text) for text in CHUNKED]
    job = shipped_job("a800-7b", found, LinkModel(8), 16, strategies)
    lengths = tuple(read_lengths(WEB_PAGES, 32768, 20_000, 0).lengths.tolist())
    planner, sampler = (
        Planner(job.table, strategies, PlannerOptions(choose="cycle")),
        TokenBudgetSampler(lengths, 50_000),
    )
    plans = [planner.plan(step, sampler.batch(step), sampler.batch_lengths(step)) for step in range(steps)]
    held = [
        (plan.lengths[span.sequence], span.stop - span.start)
        for plan in plans for _, pipeline in plan.named_pipelines() for batch in pipeline.microbatches
        for span in batch.spans
    ]  # fmt: skip
    assert any(length != part for length, part in held), "no sequence is cut"
    assert np.median(errors((job, plans, lengths, 50_000))) <= aims.EMULATED_CHUNKED


def holding(engine: EmulatedEngine) -> tuple[int, int, int] | None:
    """Bytes that are no files, descriptors and threads of this process, after every tenth step."""
    if engine.global_steps % 10:
        return None
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    counts = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return (int(status["RssAnon"].split()[0]) << 10, *counts)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("num_ranks", "count", "steps"), [pytest.param(8, 8, 20, marks=DRAWN), pytest.param(16, 12, 300, marks=LONG)]
)
def test_many_steps_of_other_strategies_leave_nothing_behind(num_ranks: int, count: int, steps: int) -> None:
    rng = random.Random(16)
    cluster, lengths = random_job(rng, num_ranks), random_lengths(rng, 4000)
    strategies: dict[str, None] = {}
    while len(strategies) < count:
        strategies[str(random_plan(rng, cluster.table, num_ranks).phases[0].shape)] = None
    job = EmulatedJob(cluster, tuple(strategies), lengths, 400 * num_ranks, choose="cycle")
    runs = emulate(job, steps, look=holding, timeout_s=TIMEOUT_S)
    assert not any(step.fault for step in runs[0])
    assert all(one.plan.strategy != other.plan.strategy for one, other in pairwise(runs[0]))
    for run in runs:
        seen = [step.seen for step in run if step.seen is not None]
        grown = [late - early for early, late in zip(seen[len(seen) // 3], seen[-1], strict=True)]
        assert grown[0] <= aims.GROWTH_BYTES
        assert max(grown[1:]) <= 0
