"""The memory model and a stage's simulated actions in, bytes over time out. Pure: no torch."""

from __future__ import annotations

import math

from ds_hydra.costs.memory import JobMemory
from ds_hydra.pipe.placement import whole_layers
from ds_hydra.plan.phase import PipelinePlan
from ds_hydra.simulate.pipeline import StageTimes


def memory_over_time(memory: JobMemory, plan: PipelinePlan, times: StageTimes) -> list[tuple[float, float]]:
    """(time in s, bytes held from then on) of the fullest rank of a stage: its states, and the micro-batches alive.

    While it computes a micro-batch it holds that one's transient too, and beside slices that others follow their share
    of contexts. Of layers that are computed again it holds a share, and where that is all of them, one as a whole in
    the backward. ConfigError as `JobMemory.needs`.
    """
    needs = memory.needs(plan.shape.cost_key, times.index)
    # The model counts the most micro-batches that the schedule ever keeps; here each counts while it is kept.
    layers = [last - first for first, last in times.stage.ranges]
    ends = (needs.per_token / needs.alive - sum(layers) * needs.layer) / len(layers)
    followed = set(plan.chain)
    held = float(needs.states)
    curve = [(times.start, held)]
    for (kind, microbatch, part), start, stop in times.actions:
        size, kept = plan.microbatches[microbatch].num_tokens, layers[part] * needs.layer
        again = whole_layers(plan.microbatches[microbatch].recompute, layers[part]) / layers[part]
        context = needs.context * (microbatch in followed)
        alive = size * (ends + kept * (1.0 + context - again * (1.0 - needs.recomputed)))
        waiting = size * kept * (1.0 - again + context) * needs.until_weight
        freed = {"backward": alive, "input_gradient": alive - waiting, "weight_gradient": waiting}.get(kind, 0.0)
        held += alive if kind == "forward" else 0.0
        # Where some layers are not computed again, what they kept is free by the time of those that are. The embeddings
        # come last, in the backward of the first part.
        back = kind in ("backward", "input_gradient")
        end = freed if back and part == 0 else math.inf
        curve.append((start, held + needs.on_top(size, again=back and again == 1.0, given_back=end)))
        held -= freed
        curve.append((stop, held))
    return curve
