"""The order of a sum: which contribution is written and which is added, element by element, in rank order.

Plain intervals in, a list of steps out. The first contribution to an element is written instead of added to a zero,
which saves a pass over memory, and steps go block by block of the sum, so that a block stays in cache until every
rank has added to it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Contribution(NamedTuple):
    """Write (`first`) or add `length` elements of `sender` to the sum; `sender` None writes zeros."""

    sender: int | None
    src_offset: int  # in the sender's message
    dst_offset: int  # in the sum
    length: int
    first: bool


def order_contributions(
    parts: Iterable[tuple[int, Sequence[tuple[int, int, int]]]], numel: int, block: int | None = None
) -> tuple[Contribution, ...]:
    """Steps that sum everybody's parts into `numel` elements.

    `parts`: for each sender its (src_offset, dst_offset, length), in elements; they are taken by rank of the sender.
    `block`: elements of the sum that are finished before the next ones are begun; None: all at once.
    """
    covered = _Cover()
    steps: list[Contribution] = []
    for sender, slices in sorted(parts):
        for src_offset, dst_offset, length in slices:
            for start, stop, new in covered.split(dst_offset, dst_offset + length):
                steps.append(Contribution(sender, src_offset + start - dst_offset, start, stop - start, new))
            covered.add(dst_offset, dst_offset + length)
    for start, stop, new in covered.split(0, numel):
        if new:
            steps.append(Contribution(None, 0, start, stop - start, True))
    if block is None:
        return tuple(steps)
    cut = [part for step in steps for part in _cut(step, block)]
    return tuple(sorted(cut, key=lambda step: step.dst_offset // block))  # stable: keeps the order of ranks


def _cut(step: Contribution, block: int) -> Iterable[Contribution]:
    """The step, cut at the multiples of `block` in the sum."""
    done = 0
    while done < step.length:
        at = step.dst_offset + done
        length = min(step.length - done, block - at % block)
        yield step._replace(src_offset=step.src_offset + done, dst_offset=at, length=length)
        done += length


class _Cover:
    """A union of intervals, as sorted disjoint starts and stops; intervals that touch are one."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []

    def split(self, start: int, stop: int) -> list[tuple[int, int, bool]]:
        """[start, stop) as consecutive (start, stop, new) parts; `new` where the union does not reach yet."""
        parts: list[tuple[int, int, bool]] = []
        index = bisect_right(self.stops, start)
        while start < stop:
            begin = self.starts[index] if index < len(self.starts) else stop
            if start < begin:
                end = min(begin, stop)
                parts.append((start, end, True))
            else:
                end = min(self.stops[index], stop)
                parts.append((start, end, False))
                index += 1
            start = end
        return parts

    def add(self, start: int, stop: int) -> None:
        """Join [start, stop) to the union."""
        first = bisect_left(self.stops, start)
        last = bisect_right(self.starts, stop)
        if first < last:
            start, stop = min(start, self.starts[first]), max(stop, self.stops[last - 1])
        self.starts[first:last] = [start]
        self.stops[first:last] = [stop]
