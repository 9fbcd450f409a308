"""A model and a number of ranks in, the parallel schemes that may run out. Pure: no torch."""

from __future__ import annotations

from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.zero_hetero.errors import PlanError


def feasible_schemes(plan: ModelPlan, num_ranks: int, node_size: int) -> tuple[ParallelScheme, ...]:
    """Every scheme of up to `num_ranks` ranks that the model can be cut by; TP and SP stay inside a node."""
    node = min(node_size, num_ranks)
    schemes: list[ParallelScheme] = []
    for tp in range(1, node + 1):
        for sp in range(1, node // tp + 1):
            for pp in range(1, min(num_ranks // (tp * sp), plan.num_layers) + 1):
                scheme = ParallelScheme(tp, pp, sp)
                try:
                    plan.check(place_strategy(StrategyShape.of([scheme]), scheme.num_ranks, plan.num_layers))
                except PlanError:
                    continue
                schemes.append(scheme)
    return tuple(schemes)
