"""What is recorded of a step: its record, and a trace of what was measured beside what was predicted.

[Note: measured trace]
Every rank times its activities anyway (`zero_hetero.clock`), and drops the laps when their sums are taken. In a step
that is traced they are kept, and after it gathered on rank 0, which simulates the same plan and writes both: under
"rank 3 predicted" stands "rank 3 measured". Both begin with the pull, which all ranks start after a message between
all of them. The clipping and the update itself are not in it: they still run when the step's laps are read.

In other steps nothing is kept, and all that it costs is to look the step's number up.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from ds_hydra.config.hydra_block import TraceConfig
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import PlannedStep
from ds_hydra.ranks.world import World
from ds_hydra.report.calibration import StageTime
from ds_hydra.report.record import HighsFigures, StepRecord
from ds_hydra.report.trace import Kind, Span, write_trace
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.step import Simulator, step_spans
from ds_hydra.step.stepper import Stepper
from ds_hydra.zero_hetero.clock import Lap, Laps
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.ranks.rank_stats import RankStats
    from ds_hydra.step.outcome import StepOutcome

logger = logging.getLogger(__name__)


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
    def of(cls, outcome: StepOutcome, seconds: float) -> Measured:
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
    outcome: StepOutcome,
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
        beside=plan.beside,
        num_padding=int(sum(rank.num_padding for rank in outcome.stats)),
        pipeline_ms=measured.pipeline_ms,
        num_pipelines=tuple(len(phase.pipelines) for phase in plan.phases),
        searched_ms=plan.searched_ms,
        lower_bound_ms=plan.lower_bound_ms,
        **_planning(planned),
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


def _waits(outcome: StepOutcome) -> dict[str, Any]:
    """What a step's slowest ranks spent on other things than micro-batches, by the record's names, in ms; and how many
    batches ran twice."""
    return {
        "pull_ms": 1e3 * sum(max(rank.exposed_pull_s for rank in phase.stats) for phase in outcome.phases),
        "push_ms": 1e3 * sum(max(pushing_s(phase.stats)) for phase in outcome.phases),
        "slowest_wait_ms": 1e3 * sum(fmean(waiting_s(phase.stats)) for phase in outcome.phases),
        "optimizer_ms": 1e3 * max(rank.optimizer_s for rank in outcome.stats),
        "run_twice": outcome.run_twice,
    }


def stage_times(outcome: StepOutcome, plan: StepPlan, measured: Measured, predicted_ms: StageMs) -> Iterator[StageTime]:
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


_KINDS: dict[str, Kind] = {
    "forward": "forward", "backward": "backward", "input_gradient": "backward", "weight_gradient": "backward",
    "pull": "pull", "push": "push", "receive": "receive", "send": "send", "optimizer": "norm", "run": "control",
}  # fmt: skip
_SIGNS = {"forward": "F", "backward": "B", "input_gradient": "I", "weight_gradient": "W"}


class Tracing:
    """Traces the steps that the config names. All ranks of the world make the same calls."""

    def __init__(self, config: TraceConfig, folder: Path, world: World, stepper: Stepper, job: SimulatedJob | None):
        """Files go to `folder`; `job` is what predictions are made of, if there are steps to trace."""
        self._config, self._folder, self._world, self._stepper, self._job = config, folder, world, stepper, job
        self._kept: Laps | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run the block, which trains `step`, and keep its laps if the config names the step."""
        if step not in self._config.steps:
            yield
            return
        self._stepper.keep_laps = self._keep
        try:
            with self._profiled(step, on=self._config.profiler):
                yield
        finally:
            self._stepper.keep_laps = None

    def _keep(self, step: int, laps: Laps) -> None:
        self._kept = laps

    def write(self, step: int, plan: StepPlan, table: CostTable) -> None:
        """Write the trace of the step that was just trained, if it is one to trace; predicted by these costs."""
        if self._kept is None:
            return
        spans, self._kept = measured_spans(self._kept, self._world.rank), None
        texts = self._world.channel.texts(json.dumps(spans))
        if self._world.rank == 0:
            self._write(step, plan, table, [Span(*span) for text in texts for span in json.loads(text)])

    def _write(self, step: int, plan: StepPlan, table: CostTable, measured: Sequence[Span]) -> None:
        assert self._job is not None, "the config names steps"
        predicted = Simulator(replace(self._job, found=replace(self._job.found, table=table))).step(plan)
        begin = predicted.agreed_s
        moved = [span._replace(start_s=span.start_s + begin, stop_s=span.stop_s + begin) for span in measured]
        path = self._folder / f"trace_step{step}.json"
        # Training is worth more than a trace that cannot be written.
        try:
            count = write_trace(path, {"predicted": step_spans(predicted), "measured": moved})
        except ConfigError as error:
            logger.warning("step %d: %s", step, error)
            return
        logger.info("step %d: trace with %d spans in %s; open it in https://ui.perfetto.dev", step, count, path)

    @contextmanager
    def _profiled(self, step: int, *, on: bool) -> Iterator[None]:
        """Run the block under torch's profiler, if asked to: one file of this rank."""
        if not on:
            yield
            return
        with torch.profiler.profile() as profile:
            yield
        profile.export_chrome_trace(str(self._folder / f"profile_step{step}_rank{self._world.rank}.json"))


def measured_spans(laps: Laps, rank: int) -> list[Span]:
    """A step's laps as spans, in seconds from its first pull on; what began before belongs to the step before."""
    zero = next(lap.begin for lap in laps.laps if lap.kind == "pull")
    spans = []
    for lap in laps.laps:
        start = laps.clock.seconds(zero, lap.begin)
        if start >= 0:
            spans.append(Span(rank, "compute", _KINDS[lap.kind], _name(lap), start, laps.clock.seconds(zero, lap.end)))
    return spans


def _name(lap: Lap) -> str:
    if lap.kind in _SIGNS:
        number = "" if lap.microbatch is None else str(lap.microbatch)  # W: of several together
        return _SIGNS[lap.kind] + number + "'" * lap.part
    return {"run": "schedule", "optimizer": "norm"}.get(lap.kind, lap.kind)


def _planning(planned: PlannedStep) -> dict[str, Any]:
    """How the plan came about."""
    return {
        "planning_ms": planned.planning_ms,
        "planning_hidden": planned.hidden,
        "plan_source": planned.plan.source,
        "planning_waited_ms": planned.waited_ms,
        "planning_by": planned.made_by,
        "mix_saved": planned.mix_saved,
        "highs": None if planned.highs is None else HighsFigures(*planned.highs),
        "planning_recipe": planned.recipe,
    }
