"""Part two: the engine on an emulated cluster: the best fixed layout of TP, balanced, and ds-hydra on its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_hydra.commands.figures import shipped
from ds_hydra.commands.moving import moving
from ds_hydra.costs.cost_table import read_table_file
from ds_hydra.data.lengths import read_lengths
from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.emulate.cluster import emulate_plans
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.report.plots import draw_gantt
from ds_hydra.report.record import is_heterogeneous
from ds_hydra.report.trace import Span
from ds_hydra.simulate.job import SimulatedJob, shipped_job
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.step import SimulatedStep, Simulator, step_spans

RANKS, TOKENS, CONTEXT, STEPS = 16, 100_000, 65536, 20
FIXED = StrategyShape.parse("2*tp8")  # of measured shapes that hold the context the fastest, once balanced
STRATEGIES = ("8*tp2", "tp4 + 6*tp2", "tp8 + 4*tp2", "2*tp4 + 4*tp2", "2*tp8")
_SECONDS_A_STEP, _SECONDS_AT_LEAST = 1.5, 15.0  # of emulating, on two cores


def cluster(picture: Path | None, steps: int = STEPS) -> dict[str, Any]:
    """Print tokens a second of both and draw one step of both; returns what was seen."""
    print(f"\n2. LLaMA 7B on {RANKS} emulated A800 GPUs, context 64K: the real engine, {RANKS} processes, virtual time")
    print("   Layouts of tensor parallelism alone, whose costs were measured; one with Ulysses is closer to ds-hydra.")
    with moving(f"planning {steps} steps; the first time also compiling the planner"):
        job, lengths, fixed, ours = planned(steps)
    rates = {}
    for name, plans in ((f"{FIXED} in every step, sequences balanced", fixed), ("ds-hydra", ours)):
        with moving(f"emulating {steps} steps: {name}", _SECONDS_AT_LEAST + steps * _SECONDS_A_STEP):
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
        with moving("drawing"):
            words = draw_both(job, fixed, ours, picture)
        print(f"   {words}")
    return rates


def planned(steps: int) -> tuple[SimulatedJob, list[int], list[StepPlan], list[StepPlan]]:
    """The job, the lengths of its data, and its first steps under the balanced fixed layout and under ours."""
    strategies = [FIXED, *map(StrategyShape.parse, STRATEGIES)]
    job = shipped_job("a800-7b", read_table_file(shipped("a800-7b")), LinkModel(8), RANKS, strategies)
    lengths = read_lengths("lognormal:6.22,1.233", CONTEXT, 20_000, 0).lengths.tolist()
    sampler = TokenBudgetSampler(lengths, TOKENS)
    fixed, ours = (_plans(job, sampler, shapes, steps) for shapes in ([FIXED], strategies[1:]))
    return job, lengths, fixed, ours


def _plans(
    job: SimulatedJob, sampler: TokenBudgetSampler, strategies: Sequence[StrategyShape], steps: int
) -> list[StepPlan]:
    """The first steps, each planned as well as these strategies allow."""
    planner = Planner(job.table, strategies, PlannerOptions(layers=32))
    return [planner.plan(step, sampler.batch(step), sampler.batch_lengths(step)) for step in range(steps)]


def draw_both(job: SimulatedJob, fixed: Sequence[StepPlan], ours: Sequence[StepPlan], picture: Path) -> str:
    """One picture of a step under the balanced fixed layout and under ours: of those in which we mix layouts, if there
    are any, the one that gains their median."""
    simulator = Simulator(job)
    gains = [a.predicted_ms / b.predicted_ms for a, b in zip(fixed, ours, strict=True)]
    mixed = [step for step, plan in enumerate(ours) if is_heterogeneous(plan.strategy)] or range(len(ours))
    step = sorted(mixed, key=gains.__getitem__)[len(mixed) // 2]
    both = {"fixed": simulator.step(fixed[step]), "ds-hydra": simulator.step(ours[step])}
    gain = both["fixed"].step_s / both["ds-hydra"].step_s
    title = (
        f"One step on {job.num_ranks} GPUs: above {fixed[step].strategy} as in every step, sequences balanced; below "
        f"ds-hydra, {ours[step].strategy}: {gain:.2f} times as fast"
    )
    words = draw_gantt(picture, {name: told_lengths(one) for name, one in both.items()}, title, together=True)
    return f"{picture}: step {step} of both, {words}; {gain:.2f} times as fast"


def told_lengths(step: SimulatedStep) -> list[Span]:
    """What ranks compute and wait for, each forward and backward named by the sequences in it: "5.4K,1.8K,1.4K..."."""
    named: list[Span] = []
    for phase in step.phases:
        held = {
            rank: [_lengths(batch.lengths) for batch in plan.microbatches]
            for plan, times, _ in phase.stages()
            for rank in times.stage.ranks
        }
        for span in step_spans(step):
            if span.stream == "compute" and span.kind in ("forward", "backward"):
                number = int("".join(filter(str.isdigit, span.name.split()[0])))
                span = span._replace(name=held[span.rank][number])
            if span.stream == "compute":
                named.append(span)
    return named


def _lengths(tokens: Sequence[int]) -> str:
    """The longest three, and how many there are."""
    longest = sorted(tokens, reverse=True)
    shown = ",".join(f"{one / 1024:.1f}K" for one in longest[:3])
    return shown + (f"+{len(longest) - 3}" if len(longest) > 3 else "")
