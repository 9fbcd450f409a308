"""A device's error that it has no memory left in; the same error with what ran, the predicted peak and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ds_hydra.costs.memory import JobMemory, gibibytes
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.step.stepper import Running


@contextmanager
def explained(
    plan: StepPlan, memory: JobMemory, rank: int, running: Callable[[], Running | None], allocated: Callable[[], int]
) -> Iterator[None]:
    """Within it torch.OutOfMemoryError says what a step was about when it came.

    `running` is the phase that this rank is in, None: it is in none; `allocated` gives the most bytes that the
    allocator has given out in the step.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The same type: who catches it still does.
        raise torch.OutOfMemoryError(_text(plan, memory, rank, running(), allocated()) + f"\n{error}") from error


def _text(plan: StepPlan, memory: JobMemory, rank: int, running: Running | None, allocated: int) -> str:
    if running is None:
        where, pipeline = "between the passes of a step, where nothing depends on its tokens", None
    else:
        pipeline = plan.phases[running.phase].pipelines[running.pipeline]
        stage = f"stage {running.stage} of {pipeline.shape} under {plan.phases[running.phase].shape}"
        if running.action is None:
            where = f"outside of micro-batches, in {stage}"
        else:
            kind, number, _ = running.action
            batch = pipeline.microbatches[number]
            ids = [plan.sequence_ids[span.sequence] for span in batch.spans]
            more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
            where = (
                f"in the {kind.replace('_', ' ')} of micro-batch {number} ({batch.num_tokens} tokens, sequences "
                f"{', '.join(map(str, ids[:8]))}{more}), in {stage}"
            )
    lines = [f"rank {rank} has no memory left {where}: {gibibytes(allocated)} were given out at the most"]
    remedy = "Take the most demanding strategy out of hydra.strategies: its parameters and gradients have room always"
    if pipeline is not None and pipeline.microbatches:
        assert running is not None, "it has a pipeline"
        needs = memory.needs(pipeline.shape.cost_key, running.stage)
        most = max(batch.num_tokens for batch in pipeline.microbatches)
        predicted = needs.total(most)
        lines.append(
            f"{gibibytes(predicted)} are predicted for its micro-batches of up to {most} tokens, "
            f"{gibibytes(needs.states)} of them for parameters, gradients and optimizer"
        )
        if allocated > predicted:
            remedy = (
                "The prediction is too low: measure this model with `ds-hydra profile` and name its table in "
                "hydra.cost_table, or lower hydra.context_length"
            )
        else:
            remedy = (
                "Others hold memory of this device, or it is in pieces: end them, or set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower hydra.context_length"
            )
        remedy += "; hydra.activation_checkpointing and a larger tp, sp or pp in hydra.strategies need less"
    return "; ".join(lines) + f". {remedy}"
