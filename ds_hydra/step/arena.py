"""Memory of a rank: what all strategies share for parameters and gradients, and the most that a step has held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hydra.costs.memory import ElementBytes, held_elements
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import Strategy
from ds_hydra.zero_hetero.contributions import Place
from ds_hydra.zero_hetero.link import Scratch
from ds_hydra.zero_hetero.nodes import NodeSize


@dataclass
class Arena:
    """Memory of one rank's pulled parameters, gradients, sums and messages; one strategy at a time uses it."""

    # A step computes with one strategy and pulls its parameters anew. So five strategies that need 6, 4, 4, 3 and 2 GiB
    # of a rank share 6 GiB, where buffers of their own would take 19. To change the strategy allocates neither, so it
    # cannot leave the allocator with blocks of sizes that no longer fit.

    params: Tensor  # compute dtype
    # Bytes, where the gradients of micro-batches add up. Before that pulls use them [Note: memory of pulls], and when
    # gradients have left sums lie there [Note: where sums lie].
    grads: Tensor
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
        element: ElementBytes,
        node_size: NodeSize,
        least: tuple[int, int] = (0, 0),
    ) -> Arena:
        """An arena as large as the largest need of any of the strategies on this rank, and at least for so many
        parameters and gradients."""
        sizes = [least, *(held_elements(plan, one, element, node_size=node_size)[rank] for one in strategies)]
        num_bytes = max(grads for _, grads in sizes) * element.grad
        return cls(
            torch.zeros(max(params for params, _ in sizes), dtype=dtype, device=device),
            torch.zeros(num_bytes, dtype=torch.uint8, device=device),
            Scratch(device),
        )

    def gradients_at(self, place: Place, dtype: torch.dtype) -> Tensor:
        """The bytes of a place in the memory for gradients, flat, as elements of `dtype`."""
        return self.grads[place.start : place.stop].view(dtype)


class PeakMemory:
    """The peak of one step at a time; on a CPU nobody counts, and it is 0."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def restart(self) -> None:
        """Count anew from what is held now."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> int:
        """Bytes."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
