"""The work of a micro-batch on a stage: whole microseconds and units of memory. Pure: no torch.

The planner's search times as many micro-batches as a plan's check does one by one, and must not be off by one
microsecond: an order made from other times may be another order. So both ask the one function here, which is plain
arithmetic over numbers that numba can compile.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.costs.shares import Shares, Terms

UNITS = 1000  # of memory in a token: whole numbers that are fine enough for what a slice keeps beside its tokens


class StageCosts(NamedTuple):
    """What decides the work of a micro-batch on a virtual stage, in plain numbers."""

    ms: Terms  # a, b and c of the scheme
    forward: Terms  # shares of them
    weight: Terms
    until_weight: float
    context: float
    recomputed: float
    state: float
    parts: int  # ranges of layers of a stage
    floor: float  # ms of the launches, of which each part has its share of c


def stage_costs(cost: SchemeCost, shares: Shares, parts: int) -> StageCosts:
    """A scheme's figures as plain numbers; a table from JSON may hold whole ones, which numba tells from others."""

    def floats(terms: Terms) -> Terms:
        return Terms(float(terms.a), float(terms.b), float(terms.c))

    ms = Terms(float(cost.a), float(cost.b), float(cost.c))
    forward, weight = floats(shares.forward), floats(shares.weight)
    kept = float(shares.until_weight), float(shares.context), float(shares.recomputed), float(shares.state)
    return StageCosts(ms, forward, weight, *kept, parts, float(cost.floor))


def stage_work(
    costs: StageCosts, squares: int, tokens: int, followed: bool, again: float
) -> tuple[int, int, int, int, int]:
    """The fields of a `Work` for a micro-batch of slices with these sums of stop^2 - start^2 and of tokens.

    `followed`: a later micro-batch goes on with one of its sequences; `again`: the share of its layers that are
    computed again. A stage of two ranges of layers takes half of the time in each, and keeps half.
    """
    ms, forward, weight = costs.ms, costs.forward, costs.weight
    by_square, by_token = ms.a * squares, ms.b * tokens
    of_forward = forward.a * by_square + forward.b * by_token + forward.c * ms.c
    of_weight = weight.a * by_square + weight.b * by_token + weight.c * ms.c
    of_backward = by_square + by_token + ms.c - of_forward - of_weight
    if costs.floor > 0.0:
        of_forward, of_weight = max(of_forward, forward.c * costs.floor), max(of_weight, weight.c * costs.floor)
        of_backward = max(of_backward, (1.0 - forward.c - weight.c) * costs.floor)
    # A layer that is computed again gives its memory back until then, and has its weights' gradients computed at once.
    backward = of_backward + again * (of_forward + of_weight)
    contexts = tokens * costs.context + costs.state if followed else 0.0
    kept_tokens = tokens + contexts - again * (1.0 - costs.recomputed) * tokens
    waiting_tokens = ((1.0 - again) * tokens + contexts) * costs.until_weight
    return (
        max(1, round(1e3 * of_forward / costs.parts)),
        max(1, round(1e3 * backward / costs.parts)),
        round(1e3 * (1.0 - again) * of_weight / costs.parts),
        round(UNITS * kept_tokens / costs.parts),
        int(UNITS * waiting_tokens / costs.parts),
    )
