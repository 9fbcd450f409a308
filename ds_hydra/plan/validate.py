"""Validates a plan against itself, the job and this release; PlanError says what is wrong. Pure: no torch.

Whether the runtime can run what a right plan says is for `runnable` to tell.

The record of a plan can say more than the runtime can run, and so can the text of a strategy. This is the only place
that knows the difference: whoever teaches the runtime more takes a refusal out here. Everything behind it may rely on
at most one slice in a micro-batch, and on none where the job runs whole sequences only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import SCHEDULES, orders
from ds_hydra.pipe.schedules.simulate import peak_units
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.simulate import UNITS, batches_of, has_formula, simulate_pipeline, simulated_ms
from ds_hydra.plan.step_plan import MicroBatchPlan, PipelinePlan, Span, StepPlan
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


_RELATIVE = 1e-6  # how far a stated time may be from the cost model's

Limits = CostTable | Mapping[ParallelScheme, int]


def validate_plan(plan: StepPlan, limits: Limits, num_ranks: int) -> None:
    """Check that ranks are tiled, every token runs exactly once, memory holds and times are those of the model.

    `limits` is the cost table, or just MaxLen (tokens) by scheme, in which case times are only checked for
    being possible. Raises PlanError with step, phase, pipeline, micro-batch, and the numbers that disagree.
    """
    where = f"plan of step {plan.step}"
    check_safe(plan, limits, num_ranks)
    for name, pipeline in plan.named_pipelines():
        # MaxLen micro-batches of whole sequences fit as 1F1B keeps them. Other schedules keep other numbers of them,
        # and of a sequence in slices they keep all.
        if not has_formula(pipeline):
            check_room(pipeline, limits, f"{where}: {name} ({pipeline.shape})")
    _check_times(plan, limits if isinstance(limits, CostTable) else None, where)


def check_safe(plan: StepPlan, limits: Limits, num_ranks: int) -> None:
    """The part of `validate_plan` that runs no schedule: for a plan that was validated where it was made.

    On 1024 GPUs it takes a tenth of the time. Raises PlanError if ranks are not tiled, a token does not run exactly
    once, or a micro-batch is longer than MaxLen.
    """
    check_complete(plan, num_ranks)
    _check_lengths(plan, limits, f"plan of step {plan.step}")


def check_complete(plan: StepPlan, num_ranks: int) -> None:
    """The part of `validate_plan` that needs no costs: ranks are tiled, every token runs exactly once, no phase is
    without sequences."""
    where = f"plan of step {plan.step}"
    _check_ranks(plan, num_ranks, where)
    _check_sequences(plan, where)


def _check_ranks(plan: StepPlan, num_ranks: int, where: str) -> None:
    if plan.step < 0:
        raise PlanError(f"{where}: the step must not be negative")
    if not plan.phases:
        raise PlanError(f"{where}: it has no phase; needs at least one")
    for number, phase in enumerate(plan.phases):
        needed = phase.shape.num_ranks
        if needed != num_ranks:
            of_phase = f" in phase {number}" if len(plan.phases) > 1 else ""
            raise PlanError(
                f"{where}: its {len(phase.pipelines)} pipelines{of_phase} use {needed} ranks but the job has "
                f"{num_ranks}; every rank must be in exactly one"
            )
        if len(plan.phases) > 1 and not any(pipeline.microbatches for pipeline in phase.pipelines):
            raise PlanError(
                f"{where}: phase {number} ({phase.shape}) of its {len(plan.phases)} runs no sequence; leave it out, or "
                "move sequences of another phase to it"
            )


def _check_sequences(plan: StepPlan, where: str) -> None:
    size = len(plan.lengths)
    if len(plan.sequence_ids) != size or size == 0:
        raise PlanError(
            f"{where}: {len(plan.sequence_ids)} sequence ids and {size} lengths; needs one each, at least 1"
        )
    short = [i for i, length in enumerate(plan.lengths) if length < 1]
    if short:
        raise PlanError(f"{where}: sequence at position {short[0]} has length {plan.lengths[short[0]]}, not at least 1")
    whole: Counter[int] = Counter()
    slices: dict[int, list[tuple[Span, str]]] = {}  # of sequences that are cut, in the order in which they run
    for name, pipeline in plan.named_pipelines():
        for number, batch in enumerate(pipeline.microbatches):
            wrong = _wrong_in_batch(batch, size)
            if wrong is not None:
                raise PlanError(f"{where}: micro-batch {number} of {name} {wrong}")
            for span in batch.spans:
                position, start, stop = span
                if start == 0 and stop == plan.lengths[position]:
                    whole[position] += 1
                else:
                    slices.setdefault(position, []).append((span, name))
    _check_slices(plan, slices, where)
    whole.update(slices.keys())
    twice = [i for i, count in whole.items() if count > 1]
    if twice:
        raise PlanError(f"{where}: the sequence at position {min(twice)} runs {whole[min(twice)]} times, not once")
    missing = [i for i in range(size) if i not in whole]
    if missing:
        raise PlanError(f"{where}: {len(missing)} sequences run nowhere, the first at position {missing[0]}")
    for name, pipeline in plan.named_pipelines() if slices else ():
        try:
            Batches(pipeline.chain)
        except PlanError as error:
            raise PlanError(f"{where}: {name}: {error}") from None


def _wrong_in_batch(batch: MicroBatchPlan, size: int) -> str | None:
    """What is wrong with a micro-batch of a step with `size` sequences; None when nothing is."""
    if not batch.spans:
        return "is empty; leave it out"
    unknown = [position for position, _, _ in batch.spans if not 0 <= position < size]
    if unknown:
        return f"names position {unknown[0]} but the step has positions 0..{size - 1}"
    if not 0.0 <= batch.recompute <= 1.0:
        return f"recomputes a share {batch.recompute} of its layers; it must be within 0..1"
    if batch.beside_us < 0:
        return f"takes {batch.beside_us} us besides its layers; it must be at least 0"
    return None


def _check_slices(plan: StepPlan, slices: Mapping[int, list[tuple[Span, str]]], where: str) -> None:
    """The slices of a sequence follow each other in one pipeline: a slice needs keys and values of those before it."""
    for position, found in slices.items():
        homes = sorted({name for _, name in found})
        if len(homes) > 1:
            raise PlanError(
                f"{where}: slices of the sequence at position {position} run in {homes[0]} and in {homes[1]}; one "
                "pipeline must run them all"
            )
        length = plan.lengths[position]
        ends = [0, *(span.stop for span, _ in found)]
        # Each slice starts where the one before it stopped, holds at least a token, and the last ends the sequence.
        if [span.start for span, _ in found] != ends[:-1] or ends != sorted(set(ends)) or ends[-1] != length:
            listed = ", ".join(f"{span.start}..{span.stop}" for span, _ in found)
            raise PlanError(
                f"{where}: the sequence at position {position} has {length} tokens but its slices, in the order in "
                f"which they run, hold {listed}"
            )


def _check_lengths(plan: StepPlan, limits: Limits, where: str) -> None:
    for name, pipeline in plan.named_pipelines():
        if pipeline.schedule not in SCHEDULES:
            known = ", ".join(sorted(SCHEDULES))
            raise PlanError(f"{where}: {name} has the schedule {pipeline.schedule!r}; the known ones are {known}")
        try:
            limit = limits[pipeline.shape.cost_key]  # type: ignore[index]  # a mapping may lack it, as any other key
        except (KeyError, PlanError):
            raise PlanError(f"{where}: {name} has shape {pipeline.shape}, for which MaxLen is unknown") from None
        most = limit if isinstance(limit, int) else limit.max_length
        for number, batch in enumerate(pipeline.microbatches):
            tokens, beside = batch.num_tokens, 0 if isinstance(limit, int) else limit.tokens_beside(batch.beside_us)
            what = f"{where}: micro-batch {number} of {name} ({pipeline.shape}) holds {tokens} tokens"
            if tokens > most:
                raise PlanError(f"{what} but MaxLen is {most}")
            if beside and not isinstance(limit, int) and tokens + beside > limit.most_held:
                raise PlanError(
                    f"{what}, and images that keep as much as {beside} more, but there is memory for {limit.most_held}"
                )


def check_room(pipeline: PipelinePlan, limits: Limits, place: str) -> None:
    """PlanError, which starts with `place`, unless what the schedule keeps at once fits a stage.

    With MaxLen alone the usual figures stand for measured ones.
    """
    key = pipeline.shape.cost_key
    if isinstance(limits, CostTable):
        cost, shares = limits.paced(pipeline.shape, pipeline.paces), limits.shares(pipeline.shape)
    else:
        cost, shares = SchemeCost(key, 0.0, 1.0, 0.0, limits[key]), Shares.usual()  # type: ignore[index]
    try:
        batches = batches_of(pipeline.microbatches, pipeline.chain, cost, shares, parts=pipeline.shape.parts)
        made = orders(pipeline.schedule, batches, pipeline.shape.pp)
    except PlanError as error:
        raise PlanError(f"{place}: {error}") from None
    peaks = [peak_units(order, batches) for order in made]
    if max(peaks, default=0) > batches.room:
        raise PlanError(
            f"{place}: stage {peaks.index(max(peaks))} keeps up to {max(peaks) // UNITS} tokens at once but has room "
            f"for {batches.room // UNITS}; use fewer or shorter slices, or more ranks"
        )


def _check_times(plan: StepPlan, table: CostTable | None, where: str) -> None:
    for name, pipeline in plan.named_pipelines():
        ms = pipeline.predicted_ms
        if not math.isfinite(ms) or ms < 0 or (ms > 0) != bool(pipeline.microbatches):
            raise PlanError(f"{where}: {name} runs {len(pipeline.microbatches)} micro-batches in a predicted {ms} ms")
        expected = None if table is None else modelled_ms(pipeline, table)
        if expected is not None and abs(ms - expected) > _RELATIVE * expected:
            raise PlanError(
                f"{where}: {name} states {ms:.3f} ms but the cost table gives {expected:.3f} ms; plan and job use "
                "different cost tables; of a run that corrected its costs name the steps file in hydra.cost_correction"
            )
    _check_prediction(plan, table, where)
    if not 0 <= plan.lower_bound_ms <= plan.searched_ms * (1 + _RELATIVE):
        raise PlanError(
            f"{where}: the lower bound {plan.lower_bound_ms} ms is not within 0..{plan.searched_ms} ms, the time that "
            "was searched for"
        )


def _check_prediction(plan: StepPlan, table: CostTable | None, where: str) -> None:
    """The step's time is the simulation's, or the formula's own, which plans of earlier releases state."""
    stated, formula = plan.predicted_ms, plan.searched_ms
    if not math.isfinite(plan.messages_ms) or plan.step_ms < 0:
        raise PlanError(f"{where}: pipelines of {stated} ms and {plan.messages_ms} ms besides make no step")
    expected = simulated_ms(plan.phases, table) if table is not None else formula
    if abs(stated - expected) <= _RELATIVE * expected or abs(stated - formula) <= _RELATIVE * formula:
        return
    # Without costs, all that is known of the simulated time is that it is near the formula's and hardly ever above it.
    if table is None and 0.5 * formula < stated < 1.001 * formula:
        return
    raise PlanError(
        f"{where}: predicted {stated} ms for the step but its slowest pipeline takes {expected:.3f} ms"
        + (", summed over its phases" if len(plan.phases) > 1 else "")
    )


def modelled_ms(pipeline: PipelinePlan, table: CostTable) -> float:
    """What a pipeline states: the cost model's time in ms, simulated where no formula is near it."""
    if not has_formula(pipeline):
        return simulate_pipeline(pipeline, table)
    cost = table.paced(pipeline.shape, pipeline.paces)
    loads = [cost.load_ms(batch.lengths) for batch in pipeline.microbatches]
    return cost.pipeline_ms(loads) + math.fsum(pipeline.beside_ms)
