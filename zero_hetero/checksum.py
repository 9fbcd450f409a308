"""Sums over the bits of slices: what a rank has sent against what the other one holds.

[Note: checksum] Element p of a message counts as its bits, read as an integer, times the odd number 2 (p + base) + 1;
sums wrap at 2^64. If one element is wrong, the sum changes by the difference of its bits times an odd number. That is
never a multiple of 2^64, so one wrong element is always seen. Differences of several elements could cancel, but each
place has a factor of its own, so that elements which changed places do not simply do so. `base` is 2^40 times the
number of the hop, more than a message has elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ds_hydra.zero_hetero.envelope import Part
from ds_hydra.zero_hetero.mover import Hop

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 20  # elements that are widened to 64 bits at a time
_HOP_SHIFT = 40  # messages have fewer than 2^40 elements


def checksums_of(hops: Sequence[Hop], ranks: int, *, first: int = 0) -> Tensor:
    """int64 of shape (2, ranks) on CPU: of all that this rank sent to each rank, and of what it holds from each.

    Each of `hops` was a pull between flat tensors as they were on the wire. The sum of what rank i sent to j equals
    that of what j holds from i, unless something was changed on the way or afterwards. `first` is the number of the
    first of the hops.
    """
    totals = torch.zeros(2, ranks, dtype=torch.int64, device=hops[0].src.device)
    for index, (rank, sends, recvs, local, src, dst) in enumerate(hops, start=first):
        base = index << _HOP_SHIFT
        for envelope in sends:
            totals[0, envelope.peer] += _checksum(src, envelope.parts, base)
        for envelope in recvs:
            totals[1, envelope.peer] += _checksum(dst, envelope.parts, base)
        for src_offset, dst_offset, length in local:
            # A local move has no message; its elements count by their place in the source on both sides.
            totals[0, rank] += _checksum(src, [Part(src_offset, src_offset, length)], base)
            totals[1, rank] += _checksum(dst, [Part(dst_offset, src_offset, length)], base)
    return totals.cpu()


def _checksum(buffer: Tensor, parts: Iterable[Part], base: int) -> Tensor:
    """The sum of the parts' elements, a scalar; see [Note: checksum]. They count by their place in the message."""
    bits = buffer.detach().view(_BITS[buffer.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for part in parts:
        for start in range(0, part.length, _BLOCK):
            stop = min(start + _BLOCK, part.length)
            first = base + part.position + start
            # int64 products and sums wrap, which is what is wanted here.
            odd = torch.arange(first, first + stop - start, device=buffer.device).mul_(2).add_(1)
            total += odd.mul_(bits[part.offset + start : part.offset + stop]).sum()
    return total
