"""A real process group in; one whose collectives take virtual time out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.emulate.clock import VirtualClock
from ds_hydra.simulate.links import LinkModel


class ClockedGroup(dist.ProcessGroup):
    """What `torch.distributed` calls for a collective of all ranks; the real group does it.

    A broadcast takes no time: the engine broadcasts before the first step only.
    """

    def __init__(self, inner: dist.ProcessGroup, clock: VirtualClock, links: LinkModel):
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner: Any = inner  # whose overloads say less than what torch passes on
        self._clock, self._links = clock, links

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        self._pass("all_reduce", tensors[0].numel() * tensors[0].element_size())
        return self._inner.allreduce(tensors, opts)

    def allgather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        self._pass("all_gather", self.size() * inputs[0].numel() * inputs[0].element_size())
        return self._inner.allgather(outputs, inputs, opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._inner.broadcast(tensors, opts)

    def _pass(self, operation: str, num_bytes: int) -> None:
        """All go on at the latest of their times, later by the collective's own."""
        latest = torch.tensor([self._clock.now()], dtype=torch.float64)
        dist.all_reduce(latest, dist.ReduceOp.MAX, group=self._inner)
        seconds = self._links.collective_s(operation, range(self.size()), num_bytes)
        self._clock.wait_until(float(latest) + seconds)
