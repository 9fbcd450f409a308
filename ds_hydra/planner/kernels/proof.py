"""Kernels that prove a time impossible by placing the longest sequences. Plain Python that numba can compile.

[Note: branching on the longest]
The dispatch bound deals sequences out in fractions, which is loose where a few long sequences meet the few
pipelines that hold them. Here the longest are placed whole, in every way up to the names of equal pipelines; at
each partial placement the bound is taken for the rest over what is left of the pipelines. A time is impossible
when every branch ends in a contradiction.

A row is a group's untouched pipelines (rows below `groups`) or one pipeline that has been started.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hydra.planner.kernels.arrays import Floats, Ints, Items, Schemes, Shape
from ds_hydra.planner.kernels.bound import BLOCKED, MOST_MICROBATCHES, search_prices, share_of_pipeline


class Rows(NamedTuple):
    """What is left at each depth of the branching, (depths, rows) each; shares (depths, rows, sequences)."""

    shares: Floats
    price: Floats
    left: Ints  # pipelines
    filled: Floats  # ms placed
    held: Ints  # tokens placed
    widest: Floats  # ms of the longest sequence placed
    least_v: Ints  # sequences placed that no micro-batch can hold two of
    scheme: Ints


def share_of_rest(schemes: Schemes, items: Items, start: int, tau: float, rows: Rows, depth: int, r: int) -> bool:
    """Shares of what is left of the started pipeline in row r, for sequences from `start` on; False if overfull.

    Sequences come longest first, so none to come is longer than those that the pipeline already has.
    """
    k = rows.scheme[depth, r]
    c, max_length, pp = schemes.c[k], schemes.max_length[k], schemes.pp[k]
    filled, held, widest = rows.filled[depth, r], rows.held[depth, r], rows.widest[depth, r]
    out, work, tokens, rate = rows.shares[depth, r], items.work[k], items.tokens, items.rates[k]
    out[start:] = BLOCKED
    possible = False
    first_v = max(rows.least_v[depth, r], (held + max_length - 1) // max_length)
    if c == 0.0:
        first_v = MOST_MICROBATCHES
    for v in range(first_v, MOST_MICROBATCHES + 1):
        last = v == MOST_MICROBATCHES
        mean_cap = tau - v * c if last else tau * v / (v + pp - 1) - v * c
        drain_cap = tau - v * c - (pp - 1) * (widest + c)
        room, spare = min(mean_cap, drain_cap) - filled, v * max_length - held
        if room < 0.0:
            if drain_cap < filled:
                break
            continue
        possible = True
        by_tokens = not last and spare * rate < room
        for i in range(start, len(out)):
            if tokens[i] > max_length or work[i] > room:
                continue
            if by_tokens:
                share = tokens[i] / spare if spare > 0 else BLOCKED
            else:
                share = work[i] / room if room > 0.0 else BLOCKED
            out[i] = min(out[i], share)
        if not by_tokens and drain_cap <= mean_cap:
            break
    return possible


def rest_ratio(items: Items, rows: Rows, depth: int, used: int, rounds: int) -> float:
    """Best priced ratio found for the sequences from `depth` on, over the rows that still have a pipeline."""
    n = len(items.tokens)
    if depth == n:
        return 0.0
    live = np.flatnonzero(rows.left[depth, :used] > 0)
    shares = np.empty((len(live), n - depth), dtype=np.float64)
    for x in range(len(live)):
        shares[x] = rows.shares[depth, live[x], depth:]
    price = rows.price[depth][live]
    ratio = search_prices(shares, items.copies[depth:], rows.left[depth][live], price, rounds)
    rows.price[depth][live] = price
    return ratio


def branch_to(
    schemes: Schemes, items: Items, tau: float, groups: int, rows: Rows, depth: int, used: int, r: int
) -> int:
    """Rows of the child that puts sequence `depth` into row r; the child's row count, or 0 if that is impossible."""
    child, k = depth + 1, rows.scheme[depth, r]
    for x in range(used):
        rows.shares[child, x, child:] = rows.shares[depth, x, child:]
    rows.price[child] = rows.price[depth]
    rows.left[child] = rows.left[depth]
    rows.filled[child] = rows.filled[depth]
    rows.held[child] = rows.held[depth]
    rows.widest[child] = rows.widest[depth]
    rows.least_v[child] = rows.least_v[depth]
    rows.scheme[child] = rows.scheme[depth]
    target = r
    if r < groups:
        target, used = used, used + 1
        rows.left[child, r] -= 1
        rows.left[child, target] = 1
        rows.scheme[child, target] = k
        rows.filled[child, target] = 0.0
        rows.held[child, target] = 0
        rows.widest[child, target] = items.work[k, depth]
        rows.least_v[child, target] = 0
        rows.price[child, target] = rows.price[depth, r]
    before = max(tau - rows.filled[child, target], 1e-9)
    rows.filled[child, target] += items.work[k, depth]
    rows.held[child, target] += items.tokens[depth]
    if 2 * items.tokens[depth] > schemes.max_length[k]:
        rows.least_v[child, target] += 1
    rows.price[child, target] *= max(tau - rows.filled[child, target], 0.0) / before + 1e-6
    return used if share_of_rest(schemes, items, child, tau, rows, child, target) else 0


def refute(
    schemes: Schemes,
    items: Items,
    shape: Shape,
    tau: float,
    base_price: Floats,
    deepest: int,
    rounds: int,
    budget: int,
) -> int:
    """Try to prove that no plan under a strategy meets tau ms [Note: branching on the longest].

    Places up to `deepest` sequences, looks at up to `budget` partial placements. Every item must be one
    sequence. Returns the placements looked at if proven, 0 if not.
    """
    groups, n = len(shape.pipelines), len(items.tokens)
    size = (deepest + 1, groups + deepest)
    rows = Rows(
        np.empty((deepest + 1, groups + deepest, n), dtype=np.float64),
        np.ones(size, dtype=np.float64),
        np.zeros(size, dtype=np.int64),
        np.zeros(size, dtype=np.float64),
        np.zeros(size, dtype=np.int64),
        np.zeros(size, dtype=np.float64),
        np.zeros(size, dtype=np.int64),
        np.zeros(size, dtype=np.int64),
    )
    for g in range(groups):
        share_of_pipeline(schemes, shape.scheme[g], items, tau, rows.shares[0, g])
        rows.price[0, g] = base_price[g]
        rows.left[0, g] = shape.pipelines[g]
        rows.scheme[0, g] = shape.scheme[g]
    used = np.full(deepest + 1, groups, dtype=np.int64)
    branch = np.zeros(deepest + 1, dtype=np.int64)
    depth, looked, entering = 0, 0, True
    while depth >= 0:
        if entering:
            entering = False
            looked += 1
            if rest_ratio(items, rows, depth, used[depth], rounds) > 1.0 + 1e-9:
                depth -= 1
                continue
            if depth == min(deepest, n) or looked >= budget:
                return 0
            branch[depth] = 0
        r = branch[depth]
        if r >= used[depth]:
            depth -= 1
            continue
        branch[depth] += 1
        if rows.left[depth, r] > 0 and rows.shares[depth, r, depth] < BLOCKED:
            rows_of_child = branch_to(schemes, items, tau, groups, rows, depth, used[depth], r)
            if rows_of_child > 0:
                depth += 1
                used[depth] = rows_of_child
                entering = True
    return looked
