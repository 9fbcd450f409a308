"""A model and a number of ranks in, the parallel schemes that may run out. Pure: no torch."""

from __future__ import annotations

from ds_hydra.pipe.head_sharing import head_parts
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import NodeSize, largest_node

MOST_SHARING = 16
"""TP * SP at most where it is more than a node: all-to-alls over more ranks are dearer than what they save."""


def feasible_schemes(plan: ModelPlan, num_ranks: int, node_size: NodeSize) -> tuple[ParallelScheme, ...]:
    """Every scheme of up to `num_ranks` ranks that the model can be cut by.

    TP stays inside a node, and so does TP * SP, or it fills two nodes of up to 16 ranks together: a long sequence on a
    stage of two nodes needs half of the memory on each rank, and attention hides much of the messages between them.
    """
    node = min(largest_node(node_size), num_ranks)
    schemes: list[ParallelScheme] = []
    for tp in range(1, node + 1):
        for sp in _sequence_degrees(tp, node, num_ranks):
            for pp in range(1, min(num_ranks // (tp * sp), plan.num_layers) + 1):
                # Experts are cut by width, or spread as whole ones: a plan is for one of the two.
                each = (ParallelScheme(tp, pp, sp, ep) for ep in sorted({1, tp, tp * sp}))
                schemes += [scheme for scheme in each if _fits(plan, scheme)]
    return tuple(schemes)


def _fits(plan: ModelPlan, scheme: ParallelScheme) -> bool:
    try:
        plan.check(place_strategy(StrategyShape.of([scheme]), scheme.num_ranks, plan.num_layers))
    except PlanError:
        return False
    # More ranks than share heads have to be asked for: keys and values of a token then go to several of them.
    tp = scheme.tp if plan.heads_cut else 1
    return not plan.num_heads or head_parts(scheme.sp, plan.num_heads, plan.num_kv_heads, tp) == scheme.sp


def _sequence_degrees(tp: int, node: int, num_ranks: int) -> list[int]:
    inside, two = list(range(1, node // tp + 1)), 2 * node
    across = two <= min(num_ranks, MOST_SHARING) and two % tp == 0
    return [*inside, two // tp] if across else inside
