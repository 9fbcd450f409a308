"""A plan or a strategy in; nothing out if this release can run it, else a PlanError that says why not. Pure: no torch.

The record of a plan can say more than the runtime can run, and so can the text of a strategy. This is the only place
that knows the difference: whoever teaches the runtime more takes a refusal out here. Everything behind it may rely on
at most one slice in a micro-batch, and on none where the job runs whole sequences only.
"""

from __future__ import annotations

from ds_hydra.pipe.schedules.registry import SCHEDULES
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.phase import MicroBatchPlan
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.zero_hetero.errors import PlanError


def check_runnable(plan: StepPlan, *, no_slices: str = "") -> None:
    """Raise PlanError with step, pipeline and micro-batch of the first thing that cannot be run.

    `no_slices` says why a job runs whole sequences only; empty: it may run slices too.
    """
    where = f"plan of step {plan.step}"
    for phase in plan.phases:
        check_shape(phase.shape, f"{where}: ")
    for name, pipeline in plan.named_pipelines():
        for number, batch in enumerate(pipeline.microbatches):
            _check_batch(batch, plan.lengths, no_slices, f"{where}: micro-batch {number} of {name}")


def check_shape(shape: StrategyShape, before: str = "") -> None:
    """Raise PlanError, which starts with `before`, for a pipeline that cannot be run. Stages may differ in their
    degrees, devices and in how many layers they hold, and hold two ranges of them that make a V. Whether the job has
    such devices shows where it is placed on them."""
    for pipeline in dict.fromkeys(shape.pipelines):
        try:
            reason = _refusal(pipeline)
        except PlanError as error:
            raise PlanError(f"{before}{error}") from None
        if reason is not None:
            raise PlanError(f"{before}pipeline {pipeline} {reason}")


def _refusal(pipeline: PipelineShape) -> str | None:
    if pipeline.schedule not in SCHEDULES:
        known = ", ".join(sorted(SCHEDULES))
        return f"asks for the schedule {pipeline.schedule!r} but this release runs {known}; name one of them after '/'"
    if pipeline.parts == 2 and not SCHEDULES[pipeline.schedule].weighs:
        return (
            f"holds two ranges of layers in each stage, which do not run by the schedule {pipeline.schedule!r}; name "
            f"one of {', '.join(name for name, one in sorted(SCHEDULES.items()) if one.weighs)} after '/'"
        )
    return None


def _check_batch(batch: MicroBatchPlan, lengths: tuple[int, ...], no_slices: str, where: str) -> None:
    slices = [
        span
        for span in batch.spans
        if 0 <= span.sequence < len(lengths) and (span.start, span.stop) != (0, lengths[span.sequence])
    ]
    if slices and no_slices:
        position, start, stop = slices[0]
        raise PlanError(
            f"{where} holds tokens {start} to {stop} of the {lengths[position]} of the sequence at position "
            f"{position}, but this job runs whole sequences only: {no_slices}. Plan without slices"
        )
    # Attention of a slice reads what the slices before it have kept. Two slices in one micro-batch would need each
    # other's rows in the same kernel, or tie two long sequences together for nothing.
    if len(slices) > 1:
        first, second = (f"{start} to {stop} of the one at position {position}" for position, start, stop in slices[:2])
        raise PlanError(
            f"{where} holds {len(slices)} slices of sequences (tokens {first}, tokens {second}), but at most one may "
            "stand in a micro-batch, beside whole sequences; give each slice a micro-batch of its own"
        )
