"""A model and a number of ranks in, the parallel schemes that may run out. Pure: no torch."""

from __future__ import annotations

from ds_hydra.pipe.head_sharing import head_parts, near_ranks
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import NodeSize, largest_node

MOST_SHARING = 16
"""TP * SP at most where several nodes share heads: all-to-alls over more ranks are dearer than what they save."""
MOST_NODES = 4
"""Nodes of a stage at most where they share queries alone, and of the one stage of a pipeline."""


def feasible_schemes(plan: ModelPlan, num_ranks: int, node_size: NodeSize) -> tuple[ParallelScheme, ...]:
    """Every scheme of up to `num_ranks` ranks that the model can be cut by.

    TP stays inside a node, and so does TP * SP, or it fills two nodes of up to 16 ranks together: a long sequence on a
    stage of two nodes needs half of the memory on each rank, and attention hides much of the messages between them.
    Where nodes share queries and not heads, a pipeline of one stage may fill up to four.
    """
    node = min(largest_node(node_size), num_ranks)
    schemes: list[ParallelScheme] = []
    for tp in range(1, node + 1):
        for sp in _sequence_degrees(tp, node, num_ranks):
            for pp in range(1, min(num_ranks // (tp * sp), plan.num_layers) + 1):
                # Experts are cut by width, or spread as whole ones: a plan is for one of the two.
                each = (ParallelScheme(tp, pp, sp, ep) for ep in sorted({1, tp, tp * sp}))
                schemes += [scheme for scheme in each if _fits(plan, scheme, node)]
    return tuple(schemes)


def _fits(plan: ModelPlan, scheme: ParallelScheme, node: int) -> bool:
    try:
        plan.check(place_strategy(StrategyShape.of([scheme]), scheme.num_ranks, plan.num_layers))
    except PlanError:
        return False
    sharing, sp, near = scheme.tp * scheme.sp, scheme.sp, near_ranks(scheme.sp, scheme.tp, node)
    heads = plan.num_heads, plan.num_kv_heads, scheme.tp if plan.heads_cut else 1
    if sharing <= max(node, MOST_SHARING) and (not plan.num_heads or head_parts(sp, *heads) == sp):
        return True
    # Keys and values of a token then go to a rank of each node; to several of a node they go only where asked.
    return scheme.pp == 1 and plan.num_heads > 0 and 0 < near == head_parts(sp, *heads, near=near)


def _sequence_degrees(tp: int, node: int, num_ranks: int) -> list[int]:
    """Those inside a node, and those that fill several whole nodes."""
    several = (nodes * node for nodes in range(2, MOST_NODES + 1) if nodes * node <= num_ranks)
    return [*range(1, node // tp + 1), *(ranks // tp for ranks in several if ranks % tp == 0)]
