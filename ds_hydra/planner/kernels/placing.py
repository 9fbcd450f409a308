"""Kernels that place sequences on pipelines: greedily, and up to a target time. Plain Python that numba can compile.

See [Note: dispatch]. Sequences come longest first, and equal pipelines are filled one after the other, so that of
several empty ones only the first need be looked at.
"""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.planner.kernels.arrays import Floats, Items, Placement, Problem, Scheme
from ds_hydra.planner.kernels.bound import BLOCKED
from ds_hydra.planner.kernels.packing import ideal_ms, scheme_at


def empty_placement(sequences: int, pipelines: int) -> Placement:
    """Every sequence on pipeline 0, in micro-batch 0, and all sums 0: to be filled."""
    return Placement(
        np.zeros(sequences, dtype=np.int64),
        np.zeros(sequences, dtype=np.int64),
        np.zeros(pipelines, dtype=np.float64),
        np.zeros(pipelines, dtype=np.int64),
        np.zeros(pipelines, dtype=np.float64),
        np.zeros(pipelines, dtype=np.float64),
        np.zeros(2, dtype=np.int64),
    )


def clear(place: Placement) -> None:
    """No sequence on any pipeline."""
    place.total[:] = 0.0
    place.held[:] = 0
    place.widest[:] = 0.0


def put(items: Items, k: int, i: int, p: int, place: Placement) -> None:
    """Sequence i, on no pipeline yet, goes to pipeline p of scheme k."""
    place.owner[i] = p
    place.total[p] += items.work[k, i]
    place.held[p] += items.tokens[i]
    place.widest[p] = max(place.widest[p], items.work[k, i])


def fullest_below(scheme: Scheme, work: float, tokens: int, tau: float, first: int, last: int, place: Placement) -> int:
    """Of pipelines first..last-1, of one scheme, the fullest that takes a sequence within tau; -1 if none does."""
    total, held, widest = place.total, place.held, place.widest
    fullest, slot = -1.0, -1
    for p in range(first, last):
        # The sum with c is no more than the ideal time and costs next to nothing: most pipelines fail it.
        if total[p] > fullest and total[p] + work + scheme.c <= tau:
            ms = ideal_ms(scheme, total[p] + work, held[p] + tokens, max(widest[p], work))
            if ms <= tau:
                fullest, slot = total[p], p
        if held[p] == 0:
            break  # those after the first empty one are empty too
    return slot


def place_by_price(problem: Problem, shares: Floats, price: Floats, tau: float, place: Placement) -> bool:
    """Multifit at target tau: each sequence to the cheapest priced kind where a pipeline still meets tau.

    shares (kinds, n), price (kinds,). False at the first sequence that meets tau nowhere.
    """
    clear(place)
    schemes, items, shape = problem
    work, tokens, scheme, pipelines = items.work, items.tokens, shape.scheme, shape.pipelines
    place.spent[0] += len(tokens) * len(shape.pipeline_scheme)  # at most
    kinds = len(pipelines)
    tried = np.empty(kinds, dtype=np.bool_)
    first = np.zeros(kinds, dtype=np.int64)
    for kind in range(1, kinds):
        first[kind] = first[kind - 1] + pipelines[kind - 1]
    for i in range(len(tokens)):
        tried[:] = False
        slot = -1
        while slot < 0:
            best, chosen = math.inf, -1
            for kind in range(kinds):
                if not tried[kind] and shares[kind, i] < BLOCKED and price[kind] * shares[kind, i] < best:
                    best, chosen = price[kind] * shares[kind, i], kind
            if chosen < 0:
                return False
            tried[chosen] = True
            k, at = scheme[chosen], first[chosen]
            one = scheme_at(schemes, k)
            slot = fullest_below(one, work[k, i], tokens[i], tau, at, at + pipelines[chosen], place)
            if slot >= 0:
                put(items, k, i, slot, place)
    return True


def place_greedily(problem: Problem, place: Placement) -> bool:
    """Longest first, each to the pipeline that would be done soonest with it. False if one fits nowhere."""
    clear(place)
    schemes, items, shape = problem
    work, tokens, total, held, widest = items.work, items.tokens, place.total, place.held, place.widest
    place.spent[0] += len(tokens) * len(shape.pipeline_scheme)  # at most
    for i in range(len(tokens)):
        soonest, slot, first = math.inf, -1, 0
        for kind in range(len(shape.pipelines)):
            k = shape.scheme[kind]
            one = scheme_at(schemes, k)
            if tokens[i] <= schemes.longest[k]:
                for p in range(first, first + shape.pipelines[kind]):
                    if total[p] < soonest:
                        more = work[k, i]
                        ms = ideal_ms(one, total[p] + more, held[p] + tokens[i], max(widest[p], more))
                        if ms < soonest:
                            soonest, slot = ms, p
                    if held[p] == 0:
                        break  # the empty pipelines after it are its equals
            first += shape.pipelines[kind]
        if slot < 0:
            return False
        put(items, shape.pipeline_scheme[slot], i, slot, place)
    return True
