"""The memory model and a stage's simulated actions in, bytes over time out. Pure: no torch."""

from __future__ import annotations

from ds_hydra.costs.memory import JobMemory
from ds_hydra.plan.phase import PipelinePlan
from ds_hydra.simulate.pipeline import StageTimes


def memory_over_time(memory: JobMemory, plan: PipelinePlan, times: StageTimes) -> list[tuple[float, float]]:
    """(time in s, bytes held from then on) of the fullest rank of a stage: its states, and the micro-batches alive.

    While it computes a micro-batch it holds that one's transient too, and beside slices that others follow their share
    of contexts. Of layers that are computed again it holds a share, and in their backward one of them as a whole.
    ConfigError as `JobMemory.needs`.
    """
    needs = memory.needs(plan.shape.cost_key, times.index)
    # The model counts the most micro-batches that the schedule ever keeps; here each counts while it is kept.
    kept = needs.per_token / needs.alive / plan.shape.parts
    followed = set(plan.chain)
    held = float(needs.states)
    curve = [(times.start, held)]
    for (kind, microbatch, _), start, stop in times.actions:
        size, again = plan.microbatches[microbatch].num_tokens, plan.microbatches[microbatch].recompute
        transient = float(needs.held(0.0, size) - needs.states)
        context = needs.context * (microbatch in followed)
        alive = kept * size * (1.0 + context - again * (1.0 - needs.recomputed))
        waiting = kept * size * (1.0 - again + context) * needs.until_weight
        held += alive if kind == "forward" else 0.0
        if again and kind in ("backward", "input_gradient"):
            transient += size * needs.layer * (1.0 - needs.recomputed)
        curve.append((start, held + transient))
        held -= {"backward": alive, "input_gradient": alive - waiting, "weight_gradient": waiting}.get(kind, 0.0)
        curve.append((stop, held))
    return curve
