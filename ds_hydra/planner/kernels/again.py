"""Kernels that choose layers to compute again, so that micro-batches which live together fit a stage. Plain Python that
numba can compile.

[Note: layers of a run]
Under the list order a run [Note: chains] reserves its memory at once, and runs do not share any. So what a run has too
much is saved within it, and what costs the least is: the micro-batches with the least forward for what they save, which
of slices are the first ones [Note: layers computed again]. All of their layers, one micro-batch after the other; of the
last one as many as are still needed. That is off the least cost by a part of one micro-batch's layers at most.

While a layer is computed again it keeps everything for a moment. A run that has any keeps room for the largest one.
"""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.costs.stage_work import UNITS, stage_work
from ds_hydra.planner.kernels.arrays import Ints, Pieces, Pipe


def unfolded(pipe: Pipe, tokens: int) -> int:
    """Units of a stage that a layer takes more while it is computed again for so many tokens."""
    costs = pipe.costs
    return math.ceil(UNITS * (1.0 - costs.recomputed) * tokens / (costs.parts * pipe.layers))


def spare(pipe: Pipe, pieces: Pieces, squares: Ints, after: Ints, works: Ints, begin: int, stop: int) -> bool:
    """Let layers of the run of micro-batches begin, ..., stop - 1 be computed again until it fits the room.

    Fills `pieces.again` and the works (at least 4, slots) with that. False if it does not fit with all layers.
    """
    count, parts = stop - begin, pipe.costs.parts
    most, held = 0, 0
    saved = np.zeros(count, dtype=np.int64)
    for m in range(begin, stop):
        every = stage_work(pipe.costs, squares[m], pieces.held[m], after[m] >= 0, 1.0)
        saved[m - begin] = works[3, m] - every[3]
        held += works[3, m]
        most = max(most, pieces.held[m])
    # Works are rounded: a unit for each micro-batch makes up for that.
    missing = held + count - (pipe.room - unfolded(pipe, most)) // parts
    while missing > 0:
        cheapest = -1
        for m in range(begin, stop):
            at = m - begin
            # Less than the cheapest so far, of forward over what is saved; without a division, as all is whole.
            if saved[at] > 0 and (
                cheapest < 0 or works[0, m] * saved[cheapest - begin] < works[0, cheapest] * saved[at]
            ):
                cheapest = m
        if cheapest < 0:
            return False
        saves = saved[cheapest - begin]
        layers = min(pipe.layers, math.ceil(missing * pipe.layers / saves))
        pieces.again[cheapest] = layers / pipe.layers
        saved[cheapest - begin] = 0
        missing -= saves * layers // pipe.layers
    for m in range(begin, stop):
        work = stage_work(pipe.costs, squares[m], pieces.held[m], after[m] >= 0, pieces.again[m])
        works[0, m], works[1, m], works[2, m], works[3, m], works[4, m] = work
    return True
