"""Packs and unpacks one rank's messages of a transfer.

A message whose elements lie side by side in the local buffer is sent from it, or received into it, as it is. Any
other is copied through scratch memory: gathered before it is sent, scattered after it has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


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

    @property
    def in_place(self) -> bool:
        """Whether the message is one interval of the local buffer, and so needs no copy."""
        return len(self.parts) == 1

    def interval(self, buffer: Tensor) -> Tensor:
        """The message where it lies in the local buffer, shape (numel,), if it is `in_place`."""
        return buffer.narrow(0, self.parts[0].offset, self.numel)

    def gather(self, src: Tensor, message: Tensor) -> Tensor:
        """Copy the elements from their places in `src` into `message`, shape (numel,), and cast them to its dtype."""
        for offset, position, length in self.parts:
            message.narrow(0, position, length).copy_(src.narrow(0, offset, length))
        return message

    def scatter(self, message: Tensor, dst: Tensor) -> None:
        """Copy the elements of `message`, shape (numel,), to their places in `dst`."""
        for offset, position, length in self.parts:
            dst.narrow(0, offset, length).copy_(message.narrow(0, position, length))
