"""A planned step and its outcome in, the step's record out. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ds_hydra.planner import PlannedStep
from ds_hydra.report.calibration import StageTime
from ds_hydra.report.record import HighsFigures, StepRecord

if TYPE_CHECKING:
    from ds_hydra.plan.step_plan import StepPlan
    from ds_hydra.ranks.rank_stats import RankStats
    from ds_hydra.step.outcome import Outcome

StageMs = Sequence[Sequence[float]]  # of each stage of each pipeline


@dataclass(frozen=True)
class Measured:
    """Times of a step in ms. A pipeline and a stage each take as long as their slowest rank.

    Pipelines are listed phase after phase, as in `StepPlan.pipelines`.
    """

    step_ms: float
    pipeline_ms: tuple[float, ...]
    stage_ms: tuple[tuple[float, ...], ...]  # computing, of every stage of every pipeline

    @classmethod
    def of(cls, outcome: Outcome, seconds: float) -> Measured:
        """The times of an outcome; `seconds` passed from asking for the plan to the updated masters."""
        pipelines = [(pipeline, phase.stats) for phase in outcome.phases for pipeline in phase.strategy.pipelines]
        return cls(
            1e3 * seconds,
            tuple(1e3 * max(stats[rank].run_s for rank in pipeline.ranks) for pipeline, stats in pipelines),
            tuple(
                tuple(1e3 * max(stats[rank].compute_s for rank in stage.ranks) for stage in pipeline.stages)
                for pipeline, stats in pipelines
            ),
        )


def step_record(
    planned: PlannedStep,
    outcome: Outcome,
    measured: Measured,
    *,
    step: int,
    previous: StepRecord | None,
    learning_rate: float,
    skipped_steps: int,
    flops: float | None = None,
    cluster: bytes = b"",
    watched: Mapping[str, Any],
) -> StepRecord:
    """The record of a step.

    `flops` are the model's for all sequences, on all ranks; `skipped_steps` counts the steps that were skipped before
    this one; `cluster` is the digest of the job's cluster; `watched` holds the fields of the `StepWatch`.
    """
    plan, num_ranks = planned.plan, max(len(phase.stats) for phase in outcome.phases)
    return StepRecord(
        step=step,
        loss=outcome.loss,
        router_loss=outcome.router_loss,
        expert_imbalance=fmean(outcome.expert_imbalances or [0.0]),
        worst_expert_imbalance=max(outcome.expert_imbalances, default=0.0),
        grad_norm=outcome.grad_norm,
        learning_rate=learning_rate,
        num_tokens=plan.num_tokens,
        num_targets=outcome.weight,
        num_sequences=len(plan.lengths),
        strategy=plan.strategy,
        changed=previous is not None and plan.strategy != previous.strategy,
        step_ms=measured.step_ms,
        predicted_ms=plan.predicted_ms,
        recomputed=plan.recomputed,
        num_padding=int(sum(rank.num_padding for rank in outcome.stats)),
        pipeline_ms=measured.pipeline_ms,
        num_pipelines=tuple(len(phase.pipelines) for phase in plan.phases),
        searched_ms=plan.searched_ms,
        lower_bound_ms=plan.lower_bound_ms,
        planning_ms=planned.planning_ms,
        planning_hidden=planned.hidden,
        plan_source=plan.source,
        planning_waited_ms=planned.waited_ms,
        planning_by=planned.made_by,
        highs=None if planned.highs is None else HighsFigures(*planned.highs),
        planning_recipe=planned.recipe,
        plan_digest=plan.digest(cluster).hex(),
        ids_digest=hashlib.sha256(repr(plan.sequence_ids).encode()).hexdigest()[:16],
        num_micro_batches=tuple(len(pipeline.microbatches) for pipeline in plan.pipelines),
        **_waits(outcome),
        pull_bytes=outcome.pull_bytes,
        push_bytes=outcome.push_bytes,
        peak_memory_bytes=int(max(rank.peak_memory_bytes for rank in outcome.stats)),
        tflops=0.0 if flops is None else flops / num_ranks / (1e9 * measured.step_ms),
        skipped=outcome.skipped,
        skipped_steps=skipped_steps + outcome.skipped,
        plan=plan.to_json(),
        **watched,
    )


def _waits(outcome: Outcome) -> dict[str, Any]:
    """What a step's slowest ranks spent on other things than micro-batches, by the record's names, in ms."""
    return {
        "pull_ms": 1e3 * sum(max(rank.exposed_pull_s for rank in phase.stats) for phase in outcome.phases),
        "push_ms": 1e3 * sum(max(pushing_s(phase.stats)) for phase in outcome.phases),
        "slowest_wait_ms": 1e3 * sum(fmean(waiting_s(phase.stats)) for phase in outcome.phases),
        "optimizer_ms": 1e3 * max(rank.optimizer_s for rank in outcome.stats),
    }


def stage_times(outcome: Outcome, plan: StepPlan, measured: Measured, predicted_ms: StageMs) -> Iterator[StageTime]:
    """Every stage of every pipeline of a step, for those who look for slow ranks [Note: slow ranks]: predicted as if
    none were known."""
    placed = [pipeline for phase in outcome.phases for pipeline in phase.strategy.pipelines]
    times = zip(placed, plan.pipelines, predicted_ms, measured.stage_ms, strict=True)
    for pipeline, planned, predicted, computed in times:
        for index, (stage, pace) in enumerate(zip(pipeline.stages, planned.stage_paces, strict=True)):
            yield StageTime((planned.shape, index), stage.ranks, predicted[index] / pace, computed[index])


def waiting_s(stats: Sequence[RankStats]) -> list[float]:
    """For each rank of a phase the part of its wait in pushes for which some rank still computed.

    A rank that is done 2 s before the slowest one and spends 2.5 s in its pushes waited 2 s for that rank.
    """
    slowest = max(rank.run_s for rank in stats)
    return [min(rank.exposed_push_s, slowest - rank.run_s) for rank in stats]


def pushing_s(stats: Sequence[RankStats]) -> list[float]:
    """The rest of it: what the pushes themselves take."""
    return [rank.exposed_push_s - waited for rank, waited in zip(stats, waiting_s(stats), strict=True)]
