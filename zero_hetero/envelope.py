"""One rank's side of the messages of a transfer: where their elements lie in its buffer, and how they get there.

A message whose elements lie side by side in the local buffer is sent from it, or received into it, as it is. Any
other is copied through scratch memory: gathered before it is sent, scattered after it has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ds_hydra.zero_hetero.buffer_pool import BufferPool


class Part(NamedTuple):
    """`length` elements at `offset` of a local buffer and at `position` of a message."""

    offset: int
    position: int
    length: int


class Envelope(NamedTuple):
    """One rank's side of one message: its parts in message order; a single part needs no copy."""

    peer: int
    numel: int
    parts: tuple[Part, ...]

    @classmethod
    def of_intervals(cls, peer: int, intervals: Iterable[tuple[int, int]]) -> Envelope:
        """From (offset, length) in message order; neighbours that touch become one part.

        The intervals (4, 2), (6, 3), (20, 1) of a buffer are 6 elements in two parts: 5 from offset 4, 1 from 20.
        """
        parts: list[Part] = []
        numel = 0
        for offset, length in intervals:
            if parts and parts[-1].offset + parts[-1].length == offset:
                parts[-1] = parts[-1]._replace(length=parts[-1].length + length)
            else:
                parts.append(Part(offset, numel, length))
            numel += length
        return cls(peer, numel, tuple(parts))

    @property
    def end(self) -> int:
        """The least length of a local buffer that holds every part."""
        return max((part.offset + part.length for part in self.parts), default=0)

    def outgoing(self, src: Tensor, scratch: Scratch) -> Tensor:
        """The message to send, shape (numel,) in the scratch's dtype: an interval of `src` itself where it can be."""
        if len(self.parts) == 1 and src.dtype == scratch.dtype:  # another dtype must be cast, which is a copy anyway
            return src.narrow(0, self.parts[0].offset, self.numel)
        message = scratch.take(self.numel)
        for offset, position, length in self.parts:
            message.narrow(0, position, length).copy_(src.narrow(0, offset, length))
        return message

    def landing(self, dst: Tensor, scratch: Scratch) -> Tensor:
        """Where the message is received, shape (numel,): in `dst` itself where it is one interval."""
        if len(self.parts) == 1:
            return dst.narrow(0, self.parts[0].offset, self.numel)
        return scratch.take(self.numel)

    def scatter(self, message: Tensor, dst: Tensor) -> None:
        """Bring a message that arrived at its `landing` to its places in `dst`; nothing to do where it landed there."""
        if len(self.parts) == 1:
            return
        for offset, position, length in self.parts:
            dst.narrow(0, offset, length).copy_(message.narrow(0, position, length))


class Scratch:
    """What one operation has borrowed from the pool."""

    def __init__(self, pool: BufferPool, dtype: torch.dtype, device: torch.device):
        self.pool, self.dtype, self.device = pool, dtype, device
        self.lent: list[Tensor] = []

    def take(self, numel: int) -> Tensor:
        """A tensor of shape (numel,) with arbitrary contents, the operation's until `give_back`."""
        if numel == 0:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        self.lent.append(self.pool.take(numel, self.dtype, self.device))
        return self.lent[-1].narrow(0, 0, numel)

    def give_back(self) -> None:
        """Return all that was borrowed."""
        for buffer in self.lent:
            self.pool.give(buffer)
        self.lent = []
