"""A dispatch whose packing takes longer than hoped in, a better one out. Plain Python that numba can compile.

[Note: repair]
Dispatch works with ideal times, as if micro-batches always filled to the last token. Often they cannot. With
MaxLen 10, sequences of 6, 6 and 6 tokens look as if two micro-batches held their 18 tokens, but no two of them fit
together: there must be three, and the pipeline pays c once more than dispatch counted. Trading one 6 for a 4 of
another pipeline cures that (6 + 4, 6). Only packing tells, so here both pipelines are packed anew for every exchange
that may help: by three sums of each, its ideal time is less than what the slowest takes. That is dear: the number of
packings is limited, and all repairs of a dispatch together do no more elementary work than the dispatch itself.
"""

from __future__ import annotations

import numpy as np

from ds_hydra.planner.kernels.arrays import Ints, Placement, Problem
from ds_hydra.planner.kernels.improve import exchange, find_longest, other_work
from ds_hydra.planner.kernels.packing import ideal_ms, pack_pipeline, scheme_at


def repair(problem: Problem, rounds: int, goal: float, packings: int, place: Placement) -> float:
    """Local search on packed times: relieve the slowest pipeline by moves and swaps, packing both ends anew.

    `packings` caps how often. Returns the slowest pipeline's ms.
    """
    while packings > 0 and place.ms.max() > goal:
        made = relieve(problem, rounds, packings, place)
        if made < 0:
            break
        packings -= made
    return place.ms.max()


def relieve(problem: Problem, rounds: int, packings: int, place: Placement) -> int:
    """An exchange that makes the slowest pipeline sooner done, made. Returns the packings spent; -1 if none.

    Of each sequence there, the longest first, the exchange that looks best is packed.
    """
    owner, spent, n, slow = place.owner, place.spent, len(place.owner), int(place.ms.argmax())
    better = place.ms[slow] * (1.0 - 1e-9)
    longest = np.empty(len(place.ms), dtype=np.int64)
    second = longest.copy()
    find_longest(owner, longest, second)
    trial_owner, trial_bins = owner.copy(), place.bin_of.copy()
    made = 0
    spent[1] += 3 * n
    for i in range(n):
        if owner[i] != slow:
            continue
        q, j = likeliest(problem, slow, i, better, longest, second, place)
        if q < 0:
            continue
        if made >= packings or spent[1] >= spent[0]:
            return -1
        made += 1
        trial_owner[i] = q
        if j >= 0:
            trial_owner[j] = slow
        there, looks = pack_pipeline(problem, q, rounds, trial_owner, trial_bins)
        spent[1] += looks
        here = better
        if there < better:  # else the second packing would be for nothing
            here, looks = pack_pipeline(problem, slow, rounds, trial_owner, trial_bins)
            spent[1] += looks
        if here < better:
            exchange(problem.items, problem.shape, i, slow, j, q, place)
            place.bin_of[:] = trial_bins
            place.ms[slow], place.ms[q] = here, there
            return made
        trial_owner[:] = owner
        trial_bins[:] = place.bin_of
    return -1


def likeliest(
    problem: Problem, slow: int, i: int, better: float, longest: Ints, second: Ints, place: Placement
) -> tuple[int, int]:
    """Where sequence i may best go, and what may come for it (-1: nothing), if neither end needs another micro-batch.

    (-1, -1) where no exchange may bring both ends below `better` ms: ideal times of their new sums tell.
    """
    schemes, items, shape = problem
    work, tokens, owner = items.work, items.tokens, place.owner
    ks = shape.pipeline_scheme[slow]  # ks, kq: scheme of the slowest pipeline, of pipeline q
    one, rest = scheme_at(schemes, ks), other_work(work, ks, longest[slow], second[slow], i)
    best, best_q, best_j = better, -1, -1
    for j in range(-len(shape.pipeline_scheme), len(tokens)):  # negative: a move to pipeline -j-1; else a swap
        q = -j - 1 if j < 0 else owner[j]
        kq = shape.pipeline_scheme[q]
        if q == slow or tokens[i] > schemes.max_length[kq]:
            continue
        gain, extra = work[ks, i], work[kq, i]  # ms off here, ms on there
        held, here_widest, there_widest = tokens[i], rest, place.widest[q]
        if j >= 0:
            if tokens[j] > schemes.max_length[ks]:
                continue
            gain -= work[ks, j]
            extra -= work[kq, j]
            held -= tokens[j]
            here_widest = max(rest, work[ks, j])
            there_widest = other_work(work, kq, longest[q], second[q], j)
        # An exchange that adds work here may still pay if it saves a micro-batch: its c, in all PP stages at most.
        # There is no hope where the work alone makes the other pipeline too late.
        place.spent[1] += 1
        if gain <= -one.pp * one.c or place.ms[q] + extra >= best:
            continue
        here = ideal_ms(one, place.total[slow] - gain, place.held[slow] - held, here_widest)
        if here >= best:
            continue
        its = scheme_at(schemes, kq)
        there = ideal_ms(its, place.total[q] + extra, place.held[q] + held, max(there_widest, work[kq, i]))
        after = max(here, there, place.ms[q] + extra, place.ms[slow] - gain)
        if after < best:
            best, best_q, best_j = after, q, max(j, -1)
    return best_q, best_j
