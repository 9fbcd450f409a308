"""A dispatch whose packing takes longer than hoped in, a better one out. Plain Python that numba can compile.

[Note: repair]
Dispatch works with ideal times, as if micro-batches always filled to the last token. Often they cannot. With
MaxLen 10, sequences of 6, 6 and 6 tokens look as if two micro-batches held their 18 tokens, but no two of them fit
together: there must be three, and the pipeline pays c once more than dispatch counted. Trading one 6 for a 4 of
another pipeline cures that (6 + 4, 6). Only packing tells, so here both pipelines are packed anew for every exchange
that is looked at. That is dear: the number of packings is limited.
"""

from __future__ import annotations

from ds_hydra.planner.kernels.arrays import Ints, Placement, Problem
from ds_hydra.planner.kernels.packing import pack_pipeline


def repair(problem: Problem, rounds: int, goal: float, budget: int, place: Placement) -> float:
    """Local search on packed times: relieve the slowest pipeline by moves and swaps, packing both ends anew.

    `budget` caps the packings. Only owner, bin_of and ms are kept up. Returns the slowest pipeline's ms.
    """
    trial_owner, trial_bins = place.owner.copy(), place.bin_of.copy()
    while budget > 0:
        slow = int(place.ms.argmax())
        if place.ms[slow] <= goal:
            break
        spent = relieve(problem, rounds, budget, trial_owner, trial_bins, place)
        if spent < 0:
            break
        budget -= spent
    return place.ms.max()


def relieve(problem: Problem, rounds: int, budget: int, trial_owner: Ints, trial_bins: Ints, place: Placement) -> int:
    """The first exchange that makes the slowest pipeline sooner done, made. Returns the packings spent; -1 if none.

    The trial arrays (n,) equal the placement's when this is called and when it returns.
    """
    schemes, items, shape = problem
    n, pipelines, slow = len(items.tokens), len(shape.pipeline_scheme), int(place.ms.argmax())
    slow_scheme = shape.pipeline_scheme[slow]
    peak = place.ms[slow]
    spent = 0
    for i in range(n):
        if place.owner[i] != slow:
            continue
        for j in range(-pipelines, n):  # negative: a move to pipeline -j-1; else a swap with sequence j
            q = -j - 1 if j < 0 else place.owner[j]
            its_scheme = shape.pipeline_scheme[q]
            if q == slow or items.tokens[i] > schemes.max_length[its_scheme]:
                continue
            gain, extra = items.work[slow_scheme, i], items.work[its_scheme, i]  # ms off here, ms on there
            if j >= 0:
                gain -= items.work[slow_scheme, j]
                extra -= items.work[its_scheme, j]
                if items.tokens[j] > schemes.max_length[slow_scheme] or (gain <= 0.0 and its_scheme == slow_scheme):
                    continue
            # An exchange that adds work here may still pay if it saves a micro-batch: its c, in all PP stages at most.
            # There is no hope where the work alone makes the other pipeline as late as this one is.
            if gain <= -schemes.pp[slow_scheme] * schemes.c[slow_scheme] or place.ms[q] + extra >= peak:
                continue
            if spent >= budget:
                return -1
            spent += 1
            trial_owner[i] = q
            if j >= 0:
                trial_owner[j] = slow
            _, to_ms = pack_pipeline(problem, q, rounds, trial_owner, trial_bins)
            from_ms = peak
            if to_ms < peak * (1.0 - 1e-9):  # else the second packing would be for nothing
                _, from_ms = pack_pipeline(problem, slow, rounds, trial_owner, trial_bins)
            if from_ms < peak * (1.0 - 1e-9):
                place.owner[:] = trial_owner
                place.bin_of[:] = trial_bins
                place.ms[slow], place.ms[q] = from_ms, to_ms
                return spent
            trial_owner[:] = place.owner
            trial_bins[:] = place.bin_of
    return -1
