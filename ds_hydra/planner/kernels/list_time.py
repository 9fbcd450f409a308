"""Kernels that time a pipeline's micro-batches under the list order. Plain Python that numba can compile.

What a stage does whenever it is free, and when it is done, is in [Note: the list order]; a plan's check runs the same
walk. Here its arrays are made from pieces.
"""

from __future__ import annotations

import numpy as np

from ds_hydra.costs.stage_work import stage_work
from ds_hydra.pipe.schedules.list_walk import NEVER, Jobs, Walk, list_walk
from ds_hydra.planner.kernels.again import spare
from ds_hydra.planner.kernels.arrays import Ints, Pieces, Pipe


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
