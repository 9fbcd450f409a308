"""Kernels that search one pipeline's micro-batches with slices. Plain Python for numba.

Which profile [Note: slots] is best depends on the sequences: many are tried, the best one is varied at random, and then
its micro-batches are changed a little. A try is one cut, or one change, and its simulation.

What a stage does whenever it is free, and when it is done, is in [Note: the list order]; a plan's check runs the same
walk. Here its arrays are made from pieces.

Random numbers come from a linear congruential generator, so that they are the same with numba and without, on every
machine. `state` (1,) is where it stands.
"""

from __future__ import annotations

import numpy as np

from ds_hydra.costs.stage_work import stage_work
from ds_hydra.pipe.schedules.list_walk import NEVER, Jobs, Walk, list_walk
from ds_hydra.planner.kernels.packing import copy_pieces, cut, empty_pieces, most_slots, spare
from ds_hydra.planner.kernels.problem import Floats, Ints, Pieces, Pipe, Profile


def followers(pieces: Pieces) -> Ints:
    """For each micro-batch the one that holds the next slice, -1 for none: `Batches.after`."""
    slots = pieces.counts[1]
    after = np.full(slots, -1, dtype=np.int64)
    for m in range(slots):
        if pieces.before[m] >= 0:
            after[pieces.before[m]] = m
    return after


def reserve(pipe: Pipe, pieces: Pieces, squares: Ints, after: Ints, works: Ints) -> bool:
    """Fill what each run [Note: chains] reserves at its first forward, with layers computed again where it has too
    much; False where a stage has no room for one all the same."""
    n, kept, reserved = pieces.counts[1], works[3], works[5]
    pieces.again[:n] = 0.0
    last = np.arange(n)
    for m in range(n - 1, -1, -1):
        if after[m] >= 0:
            last[m] = last[after[m]]
    reserved[:] = 0
    begin, stop = 0, 0
    for m in range(n):
        stop = max(stop, last[m])
        reserved[begin] += pipe.costs.parts * kept[m]
        if stop == m:
            if reserved[begin] > pipe.room:
                if pipe.layers == 0 or not spare(pipe, pieces, squares, after, works, begin, m + 1):
                    return False
                reserved[begin] = 0
                for of_run in range(begin, m + 1):
                    reserved[begin] += pipe.costs.parts * kept[of_run]
            begin = m + 1
    return True


def jobs_of(pipe: Pipe, pieces: Pieces, squares: Ints, after: Ints, works: Ints) -> Jobs:
    """What the list order wants to know of micro-batches that keep all; fills works (6, slots) with it, and squares
    (slots,)."""
    for at in range(pieces.counts[0]):
        start, stop = pieces.start[at], pieces.stop[at]
        squares[pieces.slot[at]] += stop * stop - start * start
    for m in range(pieces.counts[1]):
        work = stage_work(pipe.costs, squares[m], pieces.held[m], after[m] >= 0, 0.0)
        works[0, m], works[1, m], works[2, m], works[3, m], works[4, m] = work
    return Jobs(
        pipe.num_stages, pipe.costs.parts, works[0], works[1], works[2], works[3], works[4], after, works[5], pipe.room
    )


def fresh_list_walk(jobs: Jobs) -> Walk:
    """Nothing has begun yet."""
    n, stages = len(jobs.forward), jobs.num_stages
    virtual = jobs.parts * stages
    return Walk(
        np.full(virtual * n, NEVER),
        np.full(virtual * n, NEVER),
        np.zeros(virtual, dtype=np.int64),
        np.zeros(virtual * n, dtype=np.int64),
        np.zeros(virtual, dtype=np.int64),
        np.zeros(virtual, dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
        np.zeros(3 * virtual * n, dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
        np.zeros(virtual * n, dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
    )


def list_time(pipe: Pipe, pieces: Pieces, ceiling: int) -> int:
    """Microseconds of these micro-batches under the list order; NEVER if there is no room, or no less than `ceiling`.

    A stage computes all its work, and the last one begins after the first forward has come down to it. Where that
    alone reaches the ceiling, nothing is simulated. Fills `pieces.again`.
    """
    slots = pieces.counts[1]
    works, squares = np.zeros((6, slots), dtype=np.int64), np.zeros(slots, dtype=np.int64)
    after = followers(pieces)
    jobs = jobs_of(pipe, pieces, squares, after, works)
    least = 0
    for m in range(slots):
        least += works[0, m] + works[1, m] + works[2, m]
    if pipe.costs.parts * least + (pipe.num_stages - 1) * works[0, 0] >= ceiling:
        return NEVER
    if not reserve(pipe, pieces, squares, after, works):
        return NEVER
    took = list_walk(jobs, fresh_list_walk(jobs))
    return took if 0 <= took < ceiling else NEVER


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


NEAR = 16  # a profile within 1/16 of the best is remembered


def profile_at(rows: Floats, row: int) -> Profile:
    """A row (slots, first, growth, last, begin) as a profile."""
    return Profile(int(rows[row, 0]), rows[row, 1], rows[row, 2], rows[row, 3], int(rows[row, 4]))


def search_profiles(
    pipe: Pipe, work: Floats, tokens: Ints, rows: Floats, variations: int, state: Ints, us: Ints, best: Pieces
) -> int:
    """Try each profile of rows (profiles + 1, 5) but the last, then variations of the best one.

    Microseconds of the best, NEVER where nothing fits; `best` gets its micro-batches and the last row its profile.
    us (profiles,) gets the time of each, NEVER where it is far above that of one before.
    """
    slots, count = 0, len(rows) - 1
    for row in range(count):
        slots = max(slots, int(rows[row, 0]))
    most = most_slots(pipe, tokens, slots + variations)
    trial = empty_pieces(most + len(tokens), most)
    found = NEVER
    for turn in range(count + variations):
        if turn < count:
            profile = profile_at(rows, turn)
            us[turn] = NEVER
        elif found == NEVER:
            break
        else:
            profile = varied(profile_at(rows, count), state)
        if not cut(pipe, profile, work, tokens, trial):
            continue
        if turn < count:
            # What is a little worse is told too: for other sequences it may be the best one.
            took = list_time(pipe, trial, found + found // NEAR)
            us[turn] = took
        else:
            took = list_time(pipe, trial, found)
        if took < found:
            found = took
            copy_pieces(trial, best)
            rows[count, 0], rows[count, 1], rows[count, 2] = profile.slots, profile.first, profile.growth
            rows[count, 3], rows[count, 4] = profile.last, profile.begin
    return found


def search_moves(pipe: Pipe, moves: int, took: int, state: Ints, best: Pieces) -> int:
    """Change micro-batches, which take `took` microseconds, a little where that helps; what they take then."""
    trial = empty_pieces(len(best.item), len(best.before))
    copy_pieces(best, trial)
    for _ in range(moves):
        if not move(pipe, trial, state):
            continue
        after = list_time(pipe, trial, took)
        if after < took:
            took = after
            copy_pieces(trial, best)
        else:
            copy_pieces(best, trial)
    return took
