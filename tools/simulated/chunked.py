"""Do plans with slices and split backwards take what was predicted? Many of them on the emulated cluster.

A step's prediction is that of the simulation, pulls and pushes included. Beside it stands what the plan itself states,
the time of its pipelines alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.cost_table import read_table_file
from ds_hydra.data.lengths import WEB_PAGES, read_lengths
from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.emulate.cluster import emulate_plans
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.simulate.job import SimulatedJob, shipped_job
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.step import Simulator
from tools import aims
from tools.simulated.part import Part

MODEL, CONTEXT, TOKENS, RANKS, NODE = "a800-7b", 32768, 50_000, 16, 8
# Lists and V's beside each other and beside whole sequences, of several depths; all hold the context.
STRATEGIES = (
    "2*tp2pp4/v", "tp4pp4/v", "tp2pp4/v + 2*pp4/v", "tp2pp8/v", "tp4pp2/list + tp2pp4/v", "tp4pp2/v + 2*pp2/list + tp4",
)  # fmt: skip


def chunked(num_steps: int, *, timeout_s: float) -> Part:
    """The planner's plans of a 7B model on 16 ranks, each step by another strategy, emulated; the table by strategy."""
    found = read_table_file(shipped(MODEL))
    strategies = [StrategyShape.parse(text) for text in STRATEGIES]
    job = shipped_job(MODEL, found, LinkModel(NODE), RANKS, strategies)
    lengths = read_lengths(WEB_PAGES, CONTEXT, 20_000, 0).lengths.tolist()
    plans = _planned(job, strategies, lengths, num_steps)
    steps = emulate_plans(job, plans, lengths, TOKENS, timeout_s=timeout_s)
    simulator = Simulator(job)
    emulated = np.array([1e3 * step.step_s for step in steps])
    predicted = np.array([plan.predicted_ms for plan in plans]) / emulated - 1.0
    simulated = np.array([1e3 * simulator.step(plan).step_s for plan in plans]) / emulated - 1.0
    names = np.array([plan.strategy for plan in plans])
    rows: list[tuple[object, ...]] = []
    for name in [*dict.fromkeys(names.tolist()), "all"]:
        own = (names == name) | (name == "all")
        cut = sum(_slices(plan) for plan, mine in zip(plans, own, strict=True) if mine)
        rows.append((name, int(own.sum()), cut, f"{np.median(emulated[own]):.0f}", *_shown(simulated[own]),
                     *_shown(predicted[own])))  # fmt: skip
    median, slices = float(np.median(np.abs(simulated))), sum(map(_slices, plans))
    missed = [
        f"simulated and emulated steps differ by {median:.2%} in the median, above {aims.EMULATED_CHUNKED:.0%}"
    ] * (median > aims.EMULATED_CHUNKED)
    kept = sum(one == other for one, other in pairwise(names))
    missed += [f"{kept} steps kept the strategy of the step before"] * (kept > 0)
    missed += ["no plan cuts a sequence"] * (slices == 0)
    headers = ("strategy", "steps", "slices", "emulated ms", "simulated", "p90", "pipelines", "p90")
    summary = f"{num_steps} chunked steps without a deadlock, {median:.2%} from their prediction in the median"
    figures = {"chunked_median": median, "chunked": simulated.tolist(), "chunked_pipelines": predicted.tolist()}
    return Part(
        "Plans with slices and split backwards on the emulated cluster", headers, rows, summary, figures, missed
    )


def _planned(
    job: SimulatedJob, strategies: Sequence[StrategyShape], lengths: Sequence[int], num_steps: int
) -> list[StepPlan]:
    planner = Planner(job.table, strategies, PlannerOptions(choose="cycle"))
    sampler = TokenBudgetSampler(lengths, TOKENS)
    return [planner.plan(step, sampler.batch(step), sampler.batch_lengths(step)) for step in range(num_steps)]


def _slices(plan: StepPlan) -> int:
    """Parts of sequences that are cut."""
    held = [batch.spans for _, pipeline in plan.named_pipelines() for batch in pipeline.microbatches]
    return sum((span.start, span.stop) != (0, plan.lengths[span.sequence]) for spans in held for span in spans)


def _shown(errors: np.ndarray) -> tuple[str, str]:
    median, p90 = np.quantile(np.abs(errors), [0.5, 0.9])
    return f"{median:.2%}", f"{p90:.2%}"
