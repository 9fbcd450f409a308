"""The block of bytes that a rank's transfers share, cut by windows that were planned; see [Note: scratch memory]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hydra.zero_hetero.layout import padded
from ds_hydra.zero_hetero.scratch_plan import Window


class Scratch:
    """Scratch memory of one rank; one strategy at a time uses it."""

    def __init__(self, device: torch.device | str, num_bytes: int = 0):
        self._block = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @classmethod
    def within(cls, block: Tensor) -> Scratch:
        """Scratch memory in these bytes, which somebody else uses when nothing is under way."""
        scratch = cls(block.device)
        scratch._block = block
        return scratch

    @property
    def num_bytes(self) -> int:
        """Bytes that are held now."""
        return self._block.numel()

    def fit(self, num_bytes: int) -> None:
        """Hold exactly this many bytes from now on, with arbitrary contents. Nothing may be under way.

        So a step holds what its own strategy needs, and what only another one needed is there for activations.
        """
        if num_bytes != self.num_bytes:
            device = self._block.device
            self._block = torch.empty(0, dtype=torch.uint8, device=device)  # both at once might not fit
            self._block = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def at(self, window: Window, dtype: torch.dtype) -> Tensor:
        """The bytes of a window, flat, as elements of `dtype`."""
        assert window.stop <= self.num_bytes, f"{window} is beyond the {self.num_bytes} bytes that were fitted"
        return self._block[window.start : window.stop].view(dtype)


class Cuts:
    """How a flat tensor is cut into tensors of given sizes, aligned. Cutting costs one call, however many they are."""

    def __init__(self, numels: Sequence[int]):
        self.numel = sum(padded(numel) for numel in numels)
        self._sizes: list[int] = []
        self._wanted: list[int] = []  # the others are gaps
        for numel in numels:
            self._wanted.append(len(self._sizes))
            self._sizes += [numel, padded(numel) - numel] if numel < padded(numel) else [numel]

    def of(self, buffer: Tensor) -> Sequence[Tensor]:
        """Tensors of shapes (numels[i],) with the memory of `buffer`, which has at least `numel` elements."""
        parts = buffer[: self.numel].split(self._sizes) if self._sizes else ()
        return parts if len(parts) == len(self._wanted) else [parts[index] for index in self._wanted]
