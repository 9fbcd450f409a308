"""Kernels that cut and deal a pipeline's sequences into micro-batches. Plain Python that numba can compile.

[Note: slots]
Micro-batches are made to a profile of target loads. The first forward is how long the last stage waits and the last
backward how long the first one does, so slots are small first, grow, and are smaller at the end; few and large ones pay
c less often. A profile is (slots, first, growth, last, begin): targets first, first*growth, first*growth^2 and so on up
to 1, the last of them no more than `last`, and all scaled to add up to the work. Six slots of 280 ms of work, with
first = 0.3, growth = 1.5, last = 0.7:

  relative   0.30   0.45   0.68   1.00   0.85   0.70        the last but one is midway between 1 and `last`
  ms           21     32     48     70     60     49

A sequence of more than 1.3 of the largest target is cut, from slot `begin` on into slots in a row: each slice ends
where its slot's target is reached. No slice is shorter than UtilLen, and a rest of less than 0.6 of that joins the
slice before. Then the whole sequences go, longest first, where the load is the smallest share of the target; beside a
last slice too, but beside no earlier one, where they would live as long as the sequence.
"""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.costs.stage_work import UNITS
from ds_hydra.planner.kernels.arrays import Floats, Ints, Pieces, Pipe, Profile

LONG = 1.3  # largest targets: what takes more is cut
SHORT_REST = 0.6  # of UtilLen: what is left over and shorter joins the slice before
MORE, MORE_WHOLE = 0.7, 0.5  # of the largest target: a further slot for a slice, for a whole sequence


def empty_pieces(pieces: int, slots: int) -> Pieces:
    """Nothing yet, with room for so many."""
    return Pieces(
        np.zeros(pieces, dtype=np.int64),
        np.zeros(pieces, dtype=np.int64),
        np.zeros(pieces, dtype=np.int64),
        np.zeros(pieces, dtype=np.int64),
        np.zeros(slots, dtype=np.int64),
        np.zeros(slots, dtype=np.int64),
        np.zeros(slots, dtype=np.float64),
        np.zeros(2, dtype=np.int64),
    )


def most_slots(pipe: Pipe, tokens: Ints, slots: int) -> int:
    """More micro-batches than a profile of so many slots can ever need."""
    most = slots + 2
    for length in tokens:
        most += length // pipe.util_length + 2
    return most


def copy_pieces(source: Pieces, target: Pieces) -> None:
    """Make `target` equal to `source`."""
    pieces, slots = source.counts
    target.item[:pieces] = source.item[:pieces]
    target.start[:pieces] = source.start[:pieces]
    target.stop[:pieces] = source.stop[:pieces]
    target.slot[:pieces] = source.slot[:pieces]
    target.before[:slots] = source.before[:slots]
    target.held[:slots] = source.held[:slots]
    target.again[:slots] = source.again[:slots]
    target.counts[:] = source.counts


def copied(source: Pieces) -> Pieces:
    """A deep copy."""
    made = empty_pieces(len(source.item), len(source.before))
    copy_pieces(source, made)
    return made


def add_piece(pieces: Pieces, item: int, start: int, stop: int, slot: int) -> None:
    """One more slice, or whole sequence, in a slot."""
    at = pieces.counts[0]
    pieces.item[at] = item
    pieces.start[at] = start
    pieces.stop[at] = stop
    pieces.slot[at] = slot
    pieces.held[slot] += stop - start
    pieces.counts[0] = at + 1


def set_targets(profile: Profile, work: float, target: Floats) -> float:
    """Fill target (at least slots,) in ms; the largest of them."""
    slots, relative = profile.slots, profile.first
    for s in range(slots):
        target[s] = min(1.0, relative)
        relative *= profile.growth
    if slots > 3:
        target[slots - 1] = min(target[slots - 1], profile.last)
    if slots > 5:
        target[slots - 2] = min(target[slots - 2], (1.0 + profile.last) / 2)
    total = 0.0
    for s in range(slots):
        total += target[s]
    largest = 0.0
    for s in range(slots):
        target[s] *= work / total
        largest = max(largest, target[s])
    return largest


def slot_after(slots: int, more: float, target: Floats, pieces: Pieces) -> int:
    """A further slot with a target of `more` ms; how many there are then."""
    target[slots] = more
    pieces.before[slots] = -1
    pieces.held[slots] = 0
    return slots + 1


def cut_one(pipe: Pipe, item: int, length: int, at: int, more: float, target: Floats, load: Floats,
            limit: Ints, pieces: Pieces) -> int:  # fmt: skip
    """Put a sequence's slices into slots from `at` on; the slot after its last one. `limit`: tokens of each slot."""
    a, b = pipe.costs.ms.a, pipe.costs.ms.b
    start, done, earlier, states = 0, 0.0, -1, 0.0
    while start < length:
        while pieces.counts[1] <= at:
            pieces.counts[1] = slot_after(pieces.counts[1], more, target, pieces)
        until = done + target[at]
        # The length whose work is `until`: the root of a*l^2 + b*l in the form that does not divide by a.
        stop = max(int(2.0 * until / (b + math.sqrt(b * b + 4.0 * a * until))), start + pipe.util_length)
        if length - stop < SHORT_REST * pipe.util_length:
            stop = length
        stop = min(stop, start + pipe.max_length)
        ms = a * stop * stop + b * stop
        add_piece(pieces, item, start, stop, at)
        load[at] += ms - done
        pieces.before[at] = earlier
        # Nothing stands beside a slice that others follow. Beside the last one there is the room that all leave: they
        # live together.
        others = math.ceil(start * (1.0 + pipe.costs.context) + states) + 1
        limit[at] = 0 if stop < length else min(pipe.max_length, pipe.room // UNITS - others)
        start, done, earlier, at, states = stop, ms, at, at + 1, states + pipe.costs.state
    return at


def cut(pipe: Pipe, profile: Profile, work: Floats, tokens: Ints, pieces: Pieces) -> bool:
    """Micro-batches to a profile [Note: slots] for sequences longest first; False where one fits nowhere.

    work (sequences,) ms, tokens (sequences,). Fills `pieces`, which has room for `most_slots`.
    """
    n, most = len(tokens), len(pieces.before)
    target = np.zeros(most, dtype=np.float64)
    load = np.zeros(most, dtype=np.float64)
    limit = np.full(most, pipe.max_length)
    total = 0.0
    for i in range(n):
        total += work[i]
    unit = set_targets(profile, total, target)
    pieces.counts[0], pieces.counts[1] = 0, profile.slots
    pieces.before[: profile.slots] = -1
    pieces.held[: profile.slots] = 0
    at = profile.begin
    for i in range(n):
        if pipe.slices and (work[i] > LONG * unit or tokens[i] > pipe.max_length):
            at = cut_one(pipe, i, tokens[i], at, MORE * unit, target, load, limit, pieces)
    for i in range(n):
        if pipe.slices and (work[i] > LONG * unit or tokens[i] > pipe.max_length):
            continue
        if tokens[i] > pipe.max_length:
            return False
        chosen, least = -1, math.inf
        for s in range(pieces.counts[1]):
            if pieces.held[s] + tokens[i] <= limit[s] and (load[s] + work[i]) / target[s] < least:
                chosen, least = s, (load[s] + work[i]) / target[s]
        if chosen < 0:
            chosen = pieces.counts[1]
            pieces.counts[1] = slot_after(chosen, MORE_WHOLE * unit, target, pieces)
        add_piece(pieces, i, 0, tokens[i], chosen)
        load[chosen] += work[i]
    leave_out_empty(pieces)
    return True


def leave_out_empty(pieces: Pieces) -> None:
    """Number the slots that hold something 0, 1, 2, ..."""
    slots = pieces.counts[1]
    number = np.full(slots, -1, dtype=np.int64)
    used = 0
    for s in range(slots):
        if pieces.held[s] > 0:
            number[s] = used
            used += 1
    for s in range(slots):
        if number[s] >= 0:
            earlier = pieces.before[s]
            pieces.held[number[s]] = pieces.held[s]
            pieces.before[number[s]] = number[earlier] if earlier >= 0 else -1
    for at in range(pieces.counts[0]):
        pieces.slot[at] = number[pieces.slot[at]]
    pieces.counts[1] = used
