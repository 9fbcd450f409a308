"""What a rank pushes, and its shards of what is pushed, in; where the sums lie in the same memory out. Pure.

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

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ds_hydra.zero_hetero.errors import PlanError

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
