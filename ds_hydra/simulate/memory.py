"""The memory model and a stage's simulated actions in, bytes over time out. Pure: no torch."""

from __future__ import annotations

from ds_hydra.costs.memory import JobMemory
from ds_hydra.plan.phase import PipelinePlan
from ds_hydra.simulate.pipeline import StageTimes


def memory_over_time(memory: JobMemory, plan: PipelinePlan, times: StageTimes) -> list[tuple[float, float]]:
    """(time in s, bytes held from then on) of the fullest rank of a stage: its states, and the micro-batches alive.

    While it computes a micro-batch it holds that one's transient too, and beside slices that others follow their share
    of contexts. ConfigError as `JobMemory.needs`.
    """
    needs = memory.needs(plan.shape.cost_key, times.index)
    # The model counts the most micro-batches that the schedule ever keeps; here each counts while it is kept.
    kept = needs.per_token / needs.alive / plan.shape.parts
    freed = {"backward": 1.0, "input_gradient": 1.0 - needs.until_weight, "weight_gradient": needs.until_weight}
    followed = set(plan.chain)
    held = float(needs.states)
    curve = [(times.start, held)]
    for (kind, microbatch, _), start, stop in times.actions:
        size = plan.microbatches[microbatch].num_tokens
        transient = needs.held(0.0, size) - needs.states
        alive = kept * size * (1.0 + needs.context * (microbatch in followed))
        held += alive if kind == "forward" else 0.0
        curve.append((start, held + transient))
        held -= freed.get(kind, 0.0) * alive
        curve.append((stop, held))
    return curve
