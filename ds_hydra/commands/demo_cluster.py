"""Part two: the engine itself on an emulated cluster, a fixed layout and ds-hydra on the same sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_hydra.commands.shipped import shipped
from ds_hydra.costs.table_file import read_table_file
from ds_hydra.data.length_sources import read_lengths
from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.emulate.cluster import emulate_plans
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.fixed_layout import packed_in_turn
from ds_hydra.report.gantt import draw_gantt
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.llama import shipped_job
from ds_hydra.simulate.spans import step_spans
from ds_hydra.simulate.step import Simulator

RANKS, TOKENS, CONTEXT, STEPS = 16, 100_000, 32768, 20
FIXED = StrategyShape.parse("4*tp4")
STRATEGIES = ("8*tp2", "tp4 + 6*tp2", "tp8 + 4*tp2", "2*tp4 + 4*tp2", "2*tp8")


def cluster(picture: Path | None, steps: int = STEPS) -> dict[str, Any]:
    """Print tokens a second of both and draw one step of both; returns what was seen."""
    print(
        f"\n2. LLaMA 7B on {RANKS} emulated A800 GPUs: the real engine, {RANKS} processes, virtual time, {steps} steps"
    )
    # Whole sequences under 1F1B, whose pushes overlap with the last backward.
    strategies = [FIXED, *map(StrategyShape.parse, STRATEGIES)]
    job = shipped_job("a800-7b", read_table_file(shipped("a800-7b")), LinkModel(8), RANKS, strategies)
    lengths = read_lengths("lognormal:6.22,1.233", CONTEXT, 20_000, 0).lengths.tolist()
    sampler = TokenBudgetSampler(lengths, TOKENS)
    planner = Planner(job.table, [StrategyShape.parse(text) for text in STRATEGIES], PlannerOptions(layers=32))
    ours = [planner.plan(step, sampler.batch(step), sampler.batch_lengths(step)) for step in range(steps)]
    # Packed to the context or to all that memory holds, whichever is faster for these very steps.
    packings = [_packed(job, ours, capacity) for capacity in (CONTEXT, int(job.table[FIXED.pipelines[0]].max_length))]
    fixed = min(packings, key=lambda plans: sum(plan.predicted_ms for plan in plans))
    rates = {}
    for name, plans in ((f"{FIXED} in every step", fixed), ("ds-hydra", ours)):
        done = emulate_plans(job, plans, lengths, TOKENS, timeout_s=600.0)
        seconds = sum(step.step_s for step in done)
        tokens = sum(plan.num_tokens for plan in plans)
        rates[name] = tokens / seconds
        used = len({plan.strategy for plan in plans})
        print(
            f"   {rates[name]:>9,.0f} tokens/s  {name}, {used} strateg{'ies' if used > 1 else 'y'}, {tokens:,} tokens"
        )
    one, other = rates.values()
    print(f"   {other / one:.2f} times as fast, every loss and gradient norm as counted")
    if picture is not None:
        print(f"   {draw_both(job, fixed, ours, picture)}")
    return rates


def _packed(job: SimulatedJob, steps: Sequence[StepPlan], capacity: int) -> list[StepPlan]:
    """The same steps under the fixed layout."""
    return [
        replace(packed_in_turn(one.step, one.lengths, FIXED, job.table, capacity), sequence_ids=one.sequence_ids)
        for one in steps
    ]


def draw_both(job: SimulatedJob, fixed: Sequence[StepPlan], ours: Sequence[StepPlan], picture: Path) -> str:
    """One picture of the step that gains the median of all, under the fixed layout and under ours."""
    simulator = Simulator(job)
    gains = [a.predicted_ms / b.predicted_ms for a, b in zip(fixed, ours, strict=True)]
    step = sorted(range(len(gains)), key=gains.__getitem__)[len(gains) // 2]
    both = {"fixed": fixed[step], "ds-hydra": ours[step]}
    spans = {name: list(step_spans(simulator.step(plan))) for name, plan in both.items()}
    title = f"Step {step} on {job.num_ranks} GPUs: {fixed[step].strategy} above, ds-hydra below ({ours[step].strategy})"
    return f"{picture}: step {step} of both, {draw_gantt(picture, spans, title, together=True)}"
