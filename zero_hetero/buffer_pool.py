"""Flat scratch buffers that are used again and again: packing must not pay for fresh pages each step."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Lends flat tensors and keeps what comes back; it never holds more than what was out at once."""

    def __init__(self) -> None:
        self.idle: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of at least `numel` elements with arbitrary contents, the caller's until given back."""
        alike = [
            (buffer.numel(), index)
            for index, buffer in enumerate(self.idle)
            if buffer.dtype == dtype and buffer.device == device
        ]
        fitting = [found for found in alike if found[0] >= numel]
        if fitting:
            return self.idle.pop(min(fitting)[1])
        if alike:  # one that is too small makes room for this one
            self.idle.pop(max(alike)[1])
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """Take back a tensor that `take` lent."""
        self.idle.append(buffer)
