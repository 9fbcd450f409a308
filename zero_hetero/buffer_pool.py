"""Flat scratch buffers that are used again and again, so that a step does not pay for fresh memory pages."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Lends flat tensors and keeps what comes back; it never holds more buffers than were lent at one time.

    Example: 3 and 5 elements are lent and come back. Who asks for 4 gets the 5; who then asks for 8 gets a new buffer,
    and the 3 is dropped for it: the pool still owns two.
    """

    def __init__(self) -> None:
        self.idle: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of at least `numel` elements with arbitrary contents, the caller's until given back."""
        alike = [
            (buffer.numel(), index)
            for index, buffer in enumerate(self.idle)
            if buffer.dtype == dtype and buffer.device == device
        ]
        # The smallest that is large enough, so that large ones stay for those who need them.
        fitting = [found for found in alike if found[0] >= numel]
        if fitting:
            return self.idle.pop(min(fitting)[1])
        if alike:  # one that is too small makes room for this one
            self.idle.pop(max(alike)[1])
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """Take back a tensor that `take` lent."""
        self.idle.append(buffer)
