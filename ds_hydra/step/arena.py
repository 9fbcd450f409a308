"""Candidate strategies in; flat buffers for a rank's parameters and gradients, which all of them share, out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import Stage, Strategy


@dataclass
class Arena:
    """Memory of one rank's pulled parameters and gradients; one strategy at a time uses it."""

    # A step computes with one strategy and pulls its parameters anew. So five strategies that need 6, 4, 4, 3 and 2 GiB
    # of a rank share 6 GiB, where buffers of their own would take 19. To change the strategy allocates nothing, so it
    # cannot run out of memory hours into a run, nor leave the allocator with blocks of sizes that no longer fit.

    params: Tensor  # compute dtype
    grads: Tensor  # FP32, or the compute dtype where that is wider

    @classmethod
    def for_strategies(
        cls, plan: ModelPlan, strategies: Sequence[Strategy], rank: int, device: torch.device, dtype: torch.dtype
    ) -> Arena:
        """An arena as large as the largest need of any of the strategies on this rank."""
        sizes = [_sizes(plan, strategy, rank) for strategy in strategies]
        wide = torch.promote_types(dtype, torch.float32)
        return cls(
            torch.zeros(max(params for params, _ in sizes), dtype=dtype, device=device),
            torch.zeros(max(grads for _, grads in sizes), dtype=wide, device=device),
        )


def _sizes(plan: ModelPlan, strategy: Strategy, rank: int) -> tuple[int, int]:
    """Elements of parameters and of gradients that a rank holds under a strategy."""
    stage = _stage(strategy, rank)
    params = grads = 0
    for bucket in plan.buckets:
        size = sum(slot.numel for slot in plan.slots(bucket, stage, stage.coordinates(rank)[0]))
        params += size
        grads += size if bucket.trainable else 0
    return params, grads


def _stage(strategy: Strategy, rank: int) -> Stage:
    pipeline, stage = strategy.locate(rank)
    return strategy.pipelines[pipeline].stages[stage]
