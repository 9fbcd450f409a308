"""Kernels that search one pipeline's micro-batches. Plain Python that numba can compile.

Which profile [Note: slots] is best depends on the sequences: many are tried, the best one is varied at random, and then
its micro-batches are changed a little. A try is one cut, or one change, and its simulation.
"""

from __future__ import annotations

from ds_hydra.pipe.schedules.list_walk import NEVER
from ds_hydra.planner.kernels.arrays import Floats, Ints, Pieces, Pipe, Profile
from ds_hydra.planner.kernels.cut_moves import move, varied
from ds_hydra.planner.kernels.list_time import list_time
from ds_hydra.planner.kernels.slots import copy_pieces, cut, empty_pieces, most_slots

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
