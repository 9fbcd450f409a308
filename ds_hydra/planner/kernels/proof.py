"""Kernels that prove a time impossible by placing the longest sequences. Plain Python that numba can compile.

[Note: branching on the longest]
The dispatch bound deals sequences out in fractions, which is loose where a few long sequences meet the few
pipelines that hold them. Here the longest are placed whole, in every way up to the names of equal pipelines; at
each partial placement the bound is taken for the rest over what is left of the pipelines. A time is impossible
when every branch ends in a contradiction.

Example: sequences of 6, 5 and 4 ms on two equal pipelines (PP = 1, c = 0), and the question whether 8.5 ms can be
met. Fractions cannot say no, for 15 ms on two pipelines is 7.5 each. Branching can:

    6 on the first pipeline           the second would be its equal: one branch, not two
      5 on the first too: 11 > 8.5    contradiction
      5 on the second                 left are 2.5 and 3.5 ms, and the 4 fits into neither: contradiction

So the optimum is above 8.5, and with 9 reached by {6} and {5, 4}, a plan is certified to within 6 %.

A row is what one branching can choose from: a kind's untouched pipelines (the first rows, one for each kind) or one
pipeline that has been started.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hydra.planner.kernels.arrays import Floats, Ints, Items, Problem
from ds_hydra.planner.kernels.bound import BLOCKED, MOST_MICROBATCHES, search_prices, share_of_pipeline


class ProofRows(NamedTuple):
    """What is left at each depth of the branching, (depths, rows) each; shares (depths, rows, sequences)."""

    shares: Floats
    price: Floats
    left: Ints  # pipelines
    filled: Floats  # ms placed
    held: Ints  # tokens placed
    widest: Floats  # ms of the longest sequence placed
    least_v: Ints  # sequences placed that no micro-batch can hold two of
    scheme: Ints


def share_of_rest(problem: Problem, tau: float, rows: ProofRows, depth: int, row: int) -> bool:
    """Shares of what is left of the started pipeline in a row, for sequences from `depth` on; False if overfull.

    Sequences come longest first, so none to come is longer than those that the pipeline already has. As in
    `share_of_pipeline`, but of the room that is left: 4 ms are half of a pipeline that may take 8 and all of one that
    already has 4 of them.
    """
    schemes, items, _ = problem
    k = rows.scheme[depth, row]
    c, max_length, pp = schemes.c[k], schemes.max_length[k], schemes.pp[k]
    filled, held, widest = rows.filled[depth, row], rows.held[depth, row], rows.widest[depth, row]
    out, work, tokens, rate = rows.shares[depth, row], items.work[k], items.tokens, items.rates[k]
    out[depth:] = BLOCKED
    possible = False
    first_v = max(rows.least_v[depth, row], (held + max_length - 1) // max_length)
    if c == 0.0:
        first_v = MOST_MICROBATCHES  # more micro-batches cost nothing, and the last V stands for all above it
    for v in range(first_v, MOST_MICROBATCHES + 1):
        last = v == MOST_MICROBATCHES
        mean_cap = tau - v * c if last else tau * v / (v + pp - 1) - v * c
        drain_cap = tau - v * c - (pp - 1) * (widest + c)
        room, spare = min(mean_cap, drain_cap) - filled, v * max_length - held  # ms, tokens
        if room < 0.0:
            if drain_cap < filled:
                break  # it only falls with V
            continue
        possible = True
        by_tokens = not last and spare * rate < room
        for i in range(depth, len(out)):
            if tokens[i] > max_length or work[i] > room:
                continue
            if by_tokens:
                share = tokens[i] / spare if spare > 0 else BLOCKED
            else:
                share = work[i] / room if room > 0.0 else BLOCKED
            out[i] = min(out[i], share)
        if not by_tokens and drain_cap <= mean_cap:
            break  # the drain cap binds from here on, and it falls
    return possible


def rest_ratio(items: Items, rows: ProofRows, depth: int, used: int, rounds: int) -> float:
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
    rows.price[depth][live] = price  # the children begin with the prices found here
    return ratio


def branch_to(problem: Problem, tau: float, rows: ProofRows, depth: int, used: int, row: int) -> int:
    """Rows of the child that puts sequence `depth` into a row; the child's row count, or 0 if that is impossible."""
    schemes, items, shape = problem
    child, k = depth + 1, rows.scheme[depth, row]
    for x in range(used):
        rows.shares[child, x, child:] = rows.shares[depth, x, child:]
    rows.price[child] = rows.price[depth]
    rows.left[child] = rows.left[depth]
    rows.filled[child] = rows.filled[depth]
    rows.held[child] = rows.held[depth]
    rows.widest[child] = rows.widest[depth]
    rows.least_v[child] = rows.least_v[depth]
    rows.scheme[child] = rows.scheme[depth]
    target = row
    if row < len(shape.pipelines):
        # One of a kind's untouched pipelines is started: it leaves the kind's row and gets one of its own.
        target, used = used, used + 1
        rows.left[child, row] -= 1
        rows.left[child, target] = 1
        rows.scheme[child, target] = k
        rows.filled[child, target] = 0.0
        rows.held[child, target] = 0
        rows.widest[child, target] = items.work[k, depth]  # the longest it will have, as the longest come first
        rows.least_v[child, target] = 0
        rows.price[child, target] = rows.price[depth, row]
    before = max(tau - rows.filled[child, target], 1e-9)
    rows.filled[child, target] += items.work[k, depth]
    rows.held[child, target] += items.tokens[depth]
    if 2 * items.tokens[depth] > schemes.max_length[k]:
        rows.least_v[child, target] += 1
    # A pipeline half full is worth half a pipeline: a price to begin the child's search with, not a claim.
    rows.price[child, target] *= max(tau - rows.filled[child, target], 0.0) / before + 1e-6
    return used if share_of_rest(problem, tau, rows, child, target) else 0


def empty_rows(depths: int, most_rows: int, sequences: int) -> ProofRows:
    """Rows without a pipeline, at prices of 1."""
    size = (depths, most_rows)
    return ProofRows(
        np.empty((depths, most_rows, sequences), dtype=np.float64),
        np.ones(size, dtype=np.float64),
        np.zeros(size, dtype=np.int64),
        np.zeros(size, dtype=np.float64),
        np.zeros(size, dtype=np.int64),
        np.zeros(size, dtype=np.float64),
        np.zeros(size, dtype=np.int64),
        np.zeros(size, dtype=np.int64),
    )


def refute(problem: Problem, tau: float, base_price: Floats, deepest: int, rounds: int, budget: int) -> int:
    """Try to prove that no plan under a strategy meets tau ms [Note: branching on the longest].

    Places up to `deepest` sequences, with `rounds` price updates at each partial placement, of which up to `budget`
    are looked at; base_price (kinds,) are the bound's. Every item must be one sequence. Returns the placements looked
    at if proven, 0 if not.
    """
    schemes, items, shape = problem
    kinds, n = len(shape.pipelines), len(items.tokens)
    # Each sequence that is placed starts one pipeline at most, so there are never more than kinds + deepest rows.
    rows = empty_rows(deepest + 1, kinds + deepest, n)
    for kind in range(kinds):
        share_of_pipeline(schemes, shape.scheme[kind], items, tau, rows.shares[0, kind])
        rows.price[0, kind] = base_price[kind]
        rows.left[0, kind] = shape.pipelines[kind]
        rows.scheme[0, kind] = shape.scheme[kind]
    # Depth first, without recursion: used[d] rows stand at depth d, and branch[d] is the next one to try there.
    used = np.full(deepest + 1, kinds, dtype=np.int64)
    branch = np.zeros(deepest + 1, dtype=np.int64)
    depth, looked, entering = 0, 0, True
    while depth >= 0:
        if entering:
            entering = False
            looked += 1
            if rest_ratio(items, rows, depth, used[depth], rounds) > 1.0 + 1e-9:
                depth -= 1  # the rest asks for more pipelines than are left: this branch is a contradiction
                continue
            if depth == min(deepest, n) or looked >= budget:
                return 0  # one branch stays open, so nothing is proven
            branch[depth] = 0
        row = branch[depth]
        if row >= used[depth]:
            depth -= 1  # every place for sequence `depth` was contradicted, and with that what its parents chose
            continue
        branch[depth] += 1
        if rows.left[depth, row] > 0 and rows.shares[depth, row, depth] < BLOCKED:
            rows_of_child = branch_to(problem, tau, rows, depth, used[depth], row)
            if rows_of_child > 0:
                depth += 1
                used[depth] = rows_of_child
                entering = True
    return looked
