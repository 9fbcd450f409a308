"""Kernels that change micro-batches with slices a little, at random. Plain Python that numba can compile.

Random numbers come from a linear congruential generator, so that they are the same with numba and without, on every
machine. `state` (1,) is where it stands.
"""

from __future__ import annotations

import numpy as np

from ds_hydra.planner.kernels.arrays import Ints, Pieces, Pipe, Profile
from ds_hydra.planner.kernels.list_time import followers

REORDERINGS, RECUTS = 0.4, 0.3  # shares of the small changes; the rest moves whole sequences


def draw(state: Ints) -> float:
    """A number within 0..1, 1 left out."""
    state[0] = (state[0] * 1103515245 + 12345) % 2147483648
    return state[0] / 2147483648.0


def draw_below(state: Ints, count: int) -> int:
    """One of 0, 1, ..., count - 1."""
    return int(draw(state) * count)


def varied(profile: Profile, state: Ints) -> Profile:
    """A profile near another one."""
    slots = max(2, profile.slots + draw_below(state, 3) - 1)
    first = min(1.0, max(0.06, profile.first * (0.65 + 0.8 * draw(state))))
    growth = max(1.0, profile.growth + 0.5 * (draw(state) - 0.5))
    last = min(1.0, max(0.12, profile.last * (0.65 + 0.8 * draw(state))))
    return Profile(slots, first, growth, last, max(0, profile.begin + draw_below(state, 3) - 1))


def move(pipe: Pipe, pieces: Pieces, state: Ints) -> bool:
    """A micro-batch elsewhere in the order, a cut at another token, or a whole sequence in another micro-batch.

    False, with nothing changed, where the change drawn cannot be: too many tokens in a micro-batch, or too few in a
    slice.
    """
    slots = pieces.counts[1]
    if slots < 2:
        return False
    which = draw(state)
    if which < REORDERINGS:
        source, target = draw_below(state, slots), draw_below(state, slots)
        if source == target:
            return False
        reorder(pieces, source, target)
        return True
    if which < REORDERINGS + RECUTS and recut(pipe, pieces, state):
        return True
    return repack(pipe, pieces, state)


def reorder(pieces: Pieces, source: int, target: int) -> None:
    """Micro-batch `source` at place `target`; slices of a sequence keep their order among themselves."""
    slots = pieces.counts[1]
    after = followers(pieces)
    head = np.arange(slots)
    order = np.empty(slots, dtype=np.int64)
    for m in range(slots):
        if pieces.before[m] >= 0:
            head[m] = head[pieces.before[m]]
    at = 0
    for place in range(slots):
        if place == target:
            order[place] = source
            continue
        at += at == source
        order[place] = at
        at += 1
    # The places that a chain's micro-batches have now go to them in the order of their slices.
    coming = np.arange(slots)  # by head: the one of its chain that has no place yet
    place_of = np.empty(slots, dtype=np.int64)
    for place in range(slots):
        chain = head[order[place]]
        place_of[coming[chain]] = place
        coming[chain] = after[coming[chain]]
    before, held = pieces.before[:slots].copy(), pieces.held[:slots].copy()
    for m in range(slots):
        pieces.before[place_of[m]] = place_of[before[m]] if before[m] >= 0 else -1
        pieces.held[place_of[m]] = held[m]
    for piece in range(pieces.counts[0]):
        pieces.slot[piece] = place_of[pieces.slot[piece]]


def recut(pipe: Pipe, pieces: Pieces, state: Ints) -> bool:
    """A slice that follows another begins earlier or later, and the one before it ends there."""
    count = 0
    for piece in range(pieces.counts[0]):
        count += pieces.start[piece] > 0
    if count == 0:
        return False
    skip, later = draw_below(state, count), -1
    for piece in range(pieces.counts[0]):
        if pieces.start[piece] > 0:
            if skip == 0:
                later = piece
                break
            skip -= 1
    earlier = -1
    for piece in range(pieces.counts[0]):
        if pieces.item[piece] == pieces.item[later] and pieces.stop[piece] == pieces.start[later]:
            earlier = piece
    shorter = min(pieces.stop[later] - pieces.start[later], pieces.stop[earlier] - pieces.start[earlier])
    by = int(shorter * (draw(state) - 0.5))
    at = pieces.start[later] + by
    if min(at - pieces.start[earlier], pieces.stop[later] - at) < pipe.util_length:
        return False
    one, other = pieces.slot[earlier], pieces.slot[later]
    if by == 0 or max(pieces.held[one] + by, pieces.held[other] - by) > pipe.max_length:
        return False
    pieces.held[one] += by
    pieces.held[other] -= by
    pieces.stop[earlier] = at
    pieces.start[later] = at
    return True


def repack(pipe: Pipe, pieces: Pieces, state: Ints) -> bool:
    """A whole sequence, or a last slice's company, in another micro-batch, but beside no slice that others follow."""
    piece, target = draw_below(state, pieces.counts[0]), draw_below(state, pieces.counts[1])
    source, tokens = pieces.slot[piece], pieces.stop[piece] - pieces.start[piece]
    if source == target or pieces.held[source] == tokens or pieces.held[target] + tokens > pipe.max_length:
        return False
    # A slice stays where it is: it has others before it, or after it.
    if pieces.start[piece] > 0:
        return False
    for m in range(pieces.counts[1]):
        if pieces.before[m] == source or pieces.before[m] == target:
            return False
    pieces.slot[piece] = target
    pieces.held[source] -= tokens
    pieces.held[target] += tokens
    return True
