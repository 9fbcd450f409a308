"""Layouts with gaps and odd sizes, what each rank holds of a tensor under them, and the sum of what all contribute."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hydra.zero_hetero.layout import Layout, Piece

NUMELS = (101, 64, 37)  # three parameters, none of which divides by what follows


def heterogeneous(num_ranks: int) -> Layout:
    """A replica of TP 3 (its last parameter not split), then replicas of TP 1; the very last rank holds nothing."""
    pieces: list[tuple[Piece, ...]] = []
    for rank in range(num_ranks):
        own: list[Piece] = []
        offset, base = 2, 0  # a gap at the start of the local buffer
        for index, numel in enumerate(NUMELS):
            low, high = (numel * rank // 3, numel * (rank + 1) // 3) if rank < 3 and index < 2 else (0, numel)
            own.append(Piece(base + low, base + high, offset))
            offset += high - low + 1  # and one after each parameter
            base += numel
        pieces.append(tuple(own) if rank < num_ranks - 1 else ())
    return Layout(sum(NUMELS), tuple(pieces), tuple(own[-1].offset + 60 if own else 0 for own in pieces))


def local_values(layout: Layout, rank: int, full: Tensor, gap: float) -> Tensor:
    buffer = torch.full((layout.sizes[rank],), gap, dtype=full.dtype)
    for start, stop, offset in layout.pieces[rank]:
        buffer[offset : offset + stop - start] = full[start:stop]
    return buffer


def full_tensor(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(sum(NUMELS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def contribution(layout: Layout, rank: int, dtype: torch.dtype) -> Tensor:
    """What `rank` contributes, as a full tensor, zero where it holds nothing."""
    held = torch.zeros(layout.numel, dtype=torch.bool)
    for start, stop, _ in layout.pieces[rank]:
        held[start:stop] = True
    return full_tensor(100 + rank, dtype) * held


def expected_sum(layout: Layout, dtype: torch.dtype, sum_dtype: torch.dtype) -> Tensor:
    """The reference: one contribution after the other, in rank order, in the sum's own dtype."""
    total = torch.zeros(layout.numel, dtype=sum_dtype)
    for rank in range(layout.num_ranks):
        total += contribution(layout, rank, dtype).to(sum_dtype)
    return total
