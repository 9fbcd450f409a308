"""Kernels of local search: moves and swaps between pipelines by ideal times. Plain Python that numba can compile.

Only exchanges with the slowest pipeline can make a step shorter. Both ends' new times follow from their sums, less
what leaves and plus what comes; the longest sequence that stays is known from the two longest of each pipeline.
"""

from __future__ import annotations

import numpy as np

from ds_hydra.planner.kernels.arrays import Floats, Ints, Items, Placement, Problem, Schemes, Shape
from ds_hydra.planner.kernels.packing import ideal_ms, scheme_at
from ds_hydra.planner.kernels.placing import put


def find_longest(owner: Ints, longest: Ints, second: Ints) -> None:
    """Positions of the longest and second longest sequence of every pipeline; n where there is none."""
    n = len(owner)
    longest[:] = n
    second[:] = n
    for i in range(n):
        p = owner[i]
        if longest[p] == n:
            longest[p] = i
        elif second[p] == n:
            second[p] = i


def other_work(work: Floats, k: int, longest: int, second: int, i: int) -> float:
    """Work under scheme k of a pipeline's longest sequence apart from i, given its two longest; 0 if none."""
    other = second if longest == i else longest
    return work[k, other] if other < work.shape[1] else 0.0


def retime(schemes: Schemes, shape: Shape, p: int, place: Placement) -> None:
    """Set place.ms[p] from the pipeline's sums."""
    one = scheme_at(schemes, shape.pipeline_scheme[p])
    place.ms[p] = ideal_ms(one, place.total[p], place.held[p], place.widest[p])


def improve(problem: Problem, goal: float, budget: int, place: Placement) -> float:
    """Local search: moves and swaps that relieve the slowest pipeline, until it meets `goal` or nothing helps.

    `budget` caps the candidates that are looked at. Returns the slowest pipeline's ideal time in ms.
    """
    schemes, items, shape = problem
    pipelines = len(shape.pipeline_scheme)
    longest = np.empty(pipelines, dtype=np.int64)
    second = np.empty(pipelines, dtype=np.int64)
    find_longest(place.owner, longest, second)
    for p in range(pipelines):
        retime(schemes, shape, p, place)
    looked = 0
    while True:
        slow = int(place.ms.argmax())
        peak = place.ms[slow]
        if peak <= goal or looked >= budget:
            return peak
        i, q, j, spent = find_exchange(problem, slow, goal, budget - looked, longest, second, place)
        looked += spent
        place.spent[0] += spent + 3 * len(place.owner)  # sequences are gone through here, in the exchange, and after it
        if i < 0:
            return peak
        exchange(items, shape, i, slow, j, q, place)
        find_longest(place.owner, longest, second)
        retime(schemes, shape, slow, place)
        retime(schemes, shape, q, place)


def find_exchange(
    problem: Problem, slow: int, goal: float, budget: int, longest: Ints, second: Ints, place: Placement
) -> tuple[int, int, int, int]:
    """A move of i from `slow` to q (j = -1) or a swap with j of q after which both are sooner done than `slow` is.

    The best one, the first that is half way to `goal`, or the best until `budget` candidates are looked at and those of
    one sequence to its end. Returns (i, q, j, candidates looked at); i = -1: none.
    """
    schemes, items, shape = problem
    work, tokens, scheme, longest_held = items.work, items.tokens, shape.pipeline_scheme, schemes.longest
    owner, total, held, widest = place.owner, place.total, place.held, place.widest
    n, ks, peak = len(tokens), scheme[slow], place.ms[slow]  # ks, kq: scheme of the slowest pipeline, of pipeline q
    one = scheme_at(schemes, ks)
    enough = 0.5 * (peak + goal)  # a good step now is worth more than the best one after looking at all
    best, best_i, best_q, best_j, looked = peak * (1.0 - 1e-9), -1, -1, -1, 0
    for i in range(n):
        if owner[i] != slow:
            continue
        if looked >= budget:
            break
        rest = other_work(work, ks, longest[slow], second[slow], i)
        left, left_held = total[slow] - work[ks, i], held[slow] - tokens[i]
        without = ideal_ms(one, left, left_held, rest)
        if without >= best:
            continue  # even without i, and nothing in its place, this pipeline takes too long
        for q in range(len(scheme)):
            kq = scheme[q]
            # The plain sums are no more than the times and settle most candidates without computing a time.
            if q == slow or tokens[i] > longest_held[kq] or total[q] + work[kq, i] >= best:
                continue
            looked += 1
            wider = max(widest[q], work[kq, i])
            after = ideal_ms(scheme_at(schemes, kq), total[q] + work[kq, i], held[q] + tokens[i], wider)
            if max(without, after) < best:
                best, best_i, best_q, best_j = max(without, after), i, q, -1
                if best <= enough:
                    return best_i, best_q, best_j, looked
        for j in range(n):
            q = owner[j]
            kq = scheme[q]
            there = total[q] + work[kq, i] - work[kq, j]
            if q == slow or there >= best or left + work[ks, j] >= best or tokens[j] == tokens[i]:
                continue
            if tokens[i] > longest_held[kq] or tokens[j] > longest_held[ks]:
                continue
            looked += 1
            here = ideal_ms(one, left + work[ks, j], left_held + tokens[j], max(rest, work[ks, j]))
            if here >= best:
                continue
            wider = max(other_work(work, kq, longest[q], second[q], j), work[kq, i])
            after = ideal_ms(scheme_at(schemes, kq), there, held[q] - tokens[j] + tokens[i], wider)
            if max(here, after) < best:
                best, best_i, best_q, best_j = max(here, after), i, q, j
                if best <= enough:
                    return best_i, best_q, best_j, looked
    return best_i, best_q, best_j, looked


def exchange(items: Items, shape: Shape, i: int, p: int, j: int, q: int, place: Placement) -> None:
    """Sequence i goes from pipeline p to q, and j, unless it is -1, from q to p; both sums are made anew.

    Anew, because adding and subtracting leaves rounding errors behind, which would pile up over many exchanges.
    """
    place.owner[i] = q
    if j >= 0:
        place.owner[j] = p
    for r in (p, q):
        place.total[r] = 0.0
        place.held[r] = 0
        place.widest[r] = 0.0
    owner = place.owner
    for x in range(len(owner)):
        r = owner[x]
        if r == p or r == q:  # noqa: SIM109 (numba builds no tuple here)
            put(items, shape.pipeline_scheme[r], x, r, place)
