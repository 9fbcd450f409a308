"""Candidate strategies in; the memory of a rank's parameters and gradients, which all of them share, out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hydra.costs.rank_bytes import held_elements
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import Strategy
from ds_hydra.pipe.transfers import twins_with
from ds_hydra.zero_hetero.scratch import Scratch


@dataclass
class Arena:
    """Memory of one rank's pulled parameters, gradients and messages; one strategy at a time uses it."""

    # A step computes with one strategy and pulls its parameters anew. So five strategies that need 6, 4, 4, 3 and 2 GiB
    # of a rank share 6 GiB, where buffers of their own would take 19. To change the strategy allocates neither, so it
    # cannot leave the allocator with blocks of sizes that no longer fit.

    params: Tensor  # compute dtype
    grads: Tensor  # where the gradients of micro-batches add up
    scratch: Scratch  # as large as the present strategy needs
    filled: tuple[object, int] | None = None  # who has pulled all of `params`, from which revision of the masters

    @classmethod
    def for_strategies(
        cls,
        plan: ModelPlan,
        strategies: Sequence[Strategy],
        rank: int,
        device: torch.device,
        *,
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        least: tuple[int, int] = (0, 0),
    ) -> Arena:
        """An arena as large as the largest need of any of the strategies on this rank, and at least for so many
        parameters and gradients."""
        found = [(strategy, twins_with(strategy, rank)) for strategy in strategies]
        sizes = [least, *(held_elements(plan, strategy, twins) for strategy, twins in found)]
        return cls(
            torch.zeros(max(params for params, _ in sizes), dtype=dtype, device=device),
            torch.zeros(max(grads for _, grads in sizes), dtype=grad_dtype, device=device),
            Scratch(device),
        )
