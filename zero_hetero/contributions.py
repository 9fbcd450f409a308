"""The terms of a sum of intervals from several ranks: what is written, what is added, in which order. Pure.

[Note: order of a sum] Floating-point sums depend on their order: in FP32 (1e8 + 1) - 1e8 is 0, (1e8 - 1e8) + 1 is 1.
Messages arrive in any order, so the order is fixed here instead: every element takes its contributions by rank of the
sender, one after the other, and the same step gives the same bits every time. A later phase of a step goes on where
the earlier ones stopped: what the sum holds counts as the first contribution, and this phase's are added to it one by
one, in rank order again. With phases p, q of two ranks each, an element becomes (((p0 + p1) + q0) + q1).

Example: a sum of 8 elements, to which rank 0 gives elements 0 to 3 and rank 2 gives elements 2 to 5.

    element   0 1 2 3 4 5 6 7
    rank 0    w w w w            write [0, 4)
    rank 2        + + w w        add to [2, 4), write [4, 6), where nobody was before it
    nobody                0 0    write zeros to [6, 8)

Writing the first contribution, instead of adding it to zeros, saves a pass over memory. In a later phase the same
contributions would be two terms: add rank 0's to [0, 4), add rank 2's to [2, 6); elements 6 and 7 stay as they are.

Terms go block by block of the sum, so that a block stays in cache until every rank has added to it. Blocks do not
change the order in which one element takes its contributions, so they do not change the result.

[Note: where sums lie]
Masters need their gradients from the push to the update only, and by then the gradients of micro-batches have left. So
a rank's sums lie where gradients lay. Pushes end in their order: the sum of one is taken when all before it are over on
this rank, which has then sent what it held of their buckets and added its own part of it. So a sum may lie in the
gradients of any earlier push, and in none of its own or a later push: those are still to be sent, or autograd
still adds to them. What finds no such place gets one behind all gradients. Example, rank 0 of 2*tp1, whose shards are
halves of the buckets 2, 1 and 0, pushed in this order, with gradients of 8, 8 and 4 bytes:

    gradients     0 0 0 0 1 1 1 1 1 1 1 1 2 2 2 2 2 2 2 2
    sums                                      0 0 1 1 1 1 2 2 2 2     2 has nothing before it; 1 lies where 2 was

The first backward of the next step begins with zeros there, so they must not be needed any more: where gradients of
several phases add up, sums have memory of their own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ds_hydra.zero_hetero.errors import PlanError


class Contribution(NamedTuple):
    """One term of a sum: write (`first`) or add `length` elements of `sender`; `sender` None writes zeros."""

    sender: int | None
    src_offset: int  # in the sender's message
    dst_offset: int  # in the sum
    length: int
    first: bool


def order_contributions(
    parts: Iterable[tuple[int, Sequence[tuple[int, int, int]]]],
    numel: int,
    block: int | None = None,
    *,
    accumulate: bool = False,
) -> tuple[Contribution, ...]:
    """Terms that sum everybody's parts into `numel` elements.

    `parts`: for each sender its (src_offset, dst_offset, length), in elements; they are taken by rank of the sender.
    `block`: elements of the sum that are finished before the next ones are begun; None: all at once.
    `accumulate`: what the sum holds before counts as the first contribution to every element, so that nothing is
    written; else every element is written, with zero where nobody contributes.
    """
    covered = Cover()
    if accumulate:
        covered.add(0, numel)
    terms: list[Contribution] = []
    for sender, slices in sorted(parts):
        for src_offset, dst_offset, length in slices:
            # What no sender before has reached is written, the rest added: `split` tells the two apart.
            for start, stop, new in covered.split(dst_offset, dst_offset + length):
                terms.append(Contribution(sender, src_offset + start - dst_offset, start, stop - start, new))
            covered.add(dst_offset, dst_offset + length)
    for start, stop, new in covered.split(0, numel):  # what nobody has reached at all
        if new:
            terms.append(Contribution(None, 0, start, stop - start, True))
    if block is None:
        return tuple(terms)
    cut = [part for term in terms for part in _cut(term, block)]
    # `sorted` is stable: within a block, terms stay in the order of ranks.
    return tuple(sorted(cut, key=lambda term: term.dst_offset // block))


def _cut(term: Contribution, block: int) -> Iterable[Contribution]:
    """The term, cut at the multiples of `block` in the sum: by 4, [6, 14) becomes [6, 8), [8, 12), [12, 14)."""
    done = 0
    while done < term.length:
        at = term.dst_offset + done
        length = min(term.length - done, block - at % block)
        yield term._replace(src_offset=term.src_offset + done, dst_offset=at, length=length)
        done += length


class Cover:
    """A union of intervals, as sorted disjoint starts and stops; intervals that touch are one."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []

    def split(self, start: int, stop: int) -> list[tuple[int, int, bool]]:
        """[start, stop) as consecutive (start, stop, new) parts; `new` where the union does not reach yet."""
        parts: list[tuple[int, int, bool]] = []
        index = bisect_right(self.stops, start)  # the first interval that ends behind `start`
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
        # Those from `first` up to `last` meet or touch [start, stop): none of them ends before it or begins after it.
        first = bisect_left(self.stops, start)
        last = bisect_right(self.starts, stop)
        if first < last:
            start, stop = min(start, self.starts[first]), max(stop, self.stops[last - 1])
        self.starts[first:last] = [start]
        self.stops[first:last] = [stop]


ALIGNED_BYTES = 256


class Place(NamedTuple):
    """Bytes [start, stop) of a rank's memory for gradients."""

    start: int
    stop: int


@lru_cache(maxsize=4096)
def places_of_sums(gradients: tuple[Place, ...], sizes: tuple[int, ...]) -> tuple[Place, ...]:
    """A place for the sum of each push, of so many bytes, in the order of the pushes; `gradients` are what they push.

    Raises PlanError as `check_places`.
    """
    end = aligned(max((place.stop for place in gradients), default=0))
    free: list[Place] = []  # in ascending order, apart from each other
    found: list[Place] = []
    for own, size in zip(gradients, sizes, strict=True):
        # From above, as buckets mostly leave: what is left of one then lies beside what the next one leaves.
        fitting = (i for i in reversed(range(len(free))) if _highest(free[i], size) >= free[i].start)
        index = next(fitting, None)
        if index is None:
            found.append(Place(end, end + size))
            end = aligned(end + size)
        else:
            start = _highest(free[index], size)
            found.append(Place(start, start + size))
            free[index] = Place(free[index].start, start)
        free = _joined([*free, own])
    places = tuple(found)
    check_places(gradients, places)
    return places


def check_places(gradients: Sequence[Place], places: Sequence[Place]) -> None:
    """PlanError if a sum would lie where gradients may still be read or sent, or where another sum does."""
    for number, place in enumerate(places):
        for what, others in (
            ("gradients", list(enumerate(gradients))[number:]),
            ("sum", [*enumerate(places)][:number]),
        ):
            for other, (start, stop) in others:
                if max(start, place.start) < min(stop, place.stop):
                    raise PlanError(
                        f"the sum of push {number} would lie in bytes [{place.start}, {place.stop}), where the {what} "
                        f"of push {other} may be in use: [{start}, {stop})"
                    )


def aligned(num_bytes: int) -> int:
    """The next place at which a sum may begin."""
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _highest(place: Place, size: int) -> int:
    """The last byte of a place at which a sum of this size may begin; it may be before the place."""
    return (place.stop - size) // ALIGNED_BYTES * ALIGNED_BYTES


def _joined(places: Iterable[Place]) -> list[Place]:
    """The same bytes in as few places as can be, in ascending order."""
    joined: list[Place] = []
    for start, stop in sorted(place for place in places if place.stop > place.start):
        if joined and start == joined[-1].stop:
            start = joined.pop().start
        joined.append(Place(start, stop))
    return joined
