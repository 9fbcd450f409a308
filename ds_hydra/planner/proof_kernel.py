"""Kernels that prove a time impossible by placing the longest sequences one by one. Plain Python that numba can compile.

[Note: branching on the longest]
The dispatch bound deals sequences out in fractions, which is loose where a few long sequences meet the few
pipelines that hold them. Here the longest are placed whole, in every way up to the names of equal pipelines; at
each partial placement the bound is taken for the rest over what is left of the pipelines. A time is impossible
when every branch ends in a contradiction.
"""

from __future__ import annotations

import numpy as np

from ds_hydra.planner.bound_kernel import BLOCKED, MOST_MICROBATCHES, search_prices, share_of_pipeline


def share_of_rest(tau, work, tokens, start, n, c, max_length, pp, rate, filled, held, widest, least_v, out):
    """Share of what is left of one pipeline that each sequence from `start` on takes; False if it is overfull.

    The pipeline already runs `filled` ms (c excluded) and `held` tokens, its longest `widest` ms, in at least
    `least_v` micro-batches. Sequences come longest first, so none to come is longer.
    """
    for i in range(start, n):
        out[i] = BLOCKED
    possible = False
    first_v = max(least_v, (held + max_length - 1) // max_length)
    v = first_v
    while v <= MOST_MICROBATCHES:
        last = v == MOST_MICROBATCHES
        mean_cap = tau - v * c if last else tau * v / (v + pp - 1) - v * c
        room = min(mean_cap, tau - v * c - (pp - 1) * (widest + c)) - filled
        spare = v * max_length - held
        if room >= 0.0:
            possible = True
            by_tokens = not last and spare * rate < room
            for i in range(start, n):
                if tokens[i] > max_length or work[i] > room:
                    continue
                share = work[i] / room if room > 0.0 else BLOCKED
                if by_tokens:
                    share = tokens[i] / spare if spare > 0 else BLOCKED
                if share < out[i]:
                    out[i] = share
            if not by_tokens and (pp == 1 or tau - v * c - (pp - 1) * (widest + c) <= mean_cap):
                break
        elif v > first_v and tau - v * c - (pp - 1) * (widest + c) < filled:
            break
        v += 1
    return possible


def prove(
    tau, work, tokens, n, scheme_of, pipelines, groups, c, max_length, pp, rates, base_shares, base_price,
    deepest, rounds, budget, placed,
):  # fmt: skip
    """Try to prove that no plan meets tau [Note: branching on the longest].

    base_shares (groups, n) are `share_of_pipeline` at tau. Returns the nodes used if proven, 0 if not. Then
    placed[i] for i < deepest is the row of the placement that was not refuted (-1: not reached): rows below
    `groups` start a new pipeline of that group, row groups+x is the x-th pipeline started.
    """
    rows = groups + deepest
    shares = np.empty((deepest + 1, rows, n), dtype=np.float64)
    price = np.ones((deepest + 1, rows), dtype=np.float64)
    left = np.zeros((deepest + 1, rows), dtype=np.int64)
    filled = np.zeros((deepest + 1, rows), dtype=np.float64)
    held = np.zeros((deepest + 1, rows), dtype=np.int64)
    widest = np.zeros((deepest + 1, rows), dtype=np.float64)
    least_v = np.zeros((deepest + 1, rows), dtype=np.int64)
    scheme = np.zeros((deepest + 1, rows), dtype=np.int64)
    used = np.zeros(deepest + 1, dtype=np.int64)
    branch = np.zeros(deepest + 1, dtype=np.int64)
    ones = np.ones(n, dtype=np.int64)
    for i in range(deepest):
        placed[i] = -1
    for g in range(groups):
        shares[0, g] = base_shares[g]
        price[0, g] = base_price[g]
        left[0, g] = pipelines[g]
        scheme[0, g] = scheme_of[g]
    used[0] = groups
    depth, nodes = 0, 0
    entering = True
    while True:
        if entering:
            nodes += 1
            ratio = ratio_at(shares[depth], left[depth], price[depth], ones, depth, n, used[depth], rounds)
            if ratio > 1.0 + 1e-9:
                depth -= 1
            elif depth == deepest or depth == n or nodes >= budget:
                return 0
            else:
                branch[depth] = 0
            entering = False
            if depth < 0:
                return nodes
            continue
        r = branch[depth]
        if r >= used[depth]:
            depth -= 1
            if depth < 0:
                return nodes
            continue
        branch[depth] += 1
        if left[depth, r] == 0 or shares[depth, r, depth] >= BLOCKED:
            continue
        k = scheme[depth, r]
        child = depth + 1
        used[child] = used[depth]
        for x in range(used[depth]):
            left[child, x] = left[depth, x]
            price[child, x] = price[depth, x]
            filled[child, x] = filled[depth, x]
            held[child, x] = held[depth, x]
            widest[child, x] = widest[depth, x]
            least_v[child, x] = least_v[depth, x]
            scheme[child, x] = scheme[depth, x]
            shares[child, x, child:] = shares[depth, x, child:]
        target = r
        if r < groups:
            target = used[depth]
            used[child] += 1
            left[child, r] -= 1
            left[child, target] = 1
            scheme[child, target] = k
            filled[child, target] = 0.0
            held[child, target] = 0
            widest[child, target] = work[k, depth]
            least_v[child, target] = 0
            price[child, target] = price[depth, r]
        before = max(tau - filled[child, target], 1e-9)
        filled[child, target] += work[k, depth]
        held[child, target] += tokens[depth]
        if 2 * tokens[depth] > max_length[k]:
            least_v[child, target] += 1
        price[child, target] *= max(tau - filled[child, target], 0.0) / before + 1e-6
        placed[depth] = r
        if share_of_rest(
            tau, work[k], tokens, child, n, c[k], max_length[k], pp[k], rates[k], filled[child, target],
            held[child, target], widest[child, target], least_v[child, target], shares[child, target],
        ):  # fmt: skip
            depth = child
            entering = True


def ratio_at(shares, left, price, ones, start, n, used, rounds):
    """Best priced ratio found for the sequences from `start` on over the rows that still have a pipeline."""
    live = 0
    for r in range(used):
        if left[r] > 0:
            live += 1
    rows = np.empty(live, dtype=np.int64)
    at = 0
    for r in range(used):
        if left[r] > 0:
            rows[at] = r
            at += 1
    size = n - start
    part = np.empty((live, size), dtype=np.float64)
    own_price = np.empty(live, dtype=np.float64)
    own_left = np.empty(live, dtype=np.int64)
    for x in range(live):
        part[x] = shares[rows[x], start:n]
        own_price[x] = price[rows[x]]
        own_left[x] = left[rows[x]]
    if size == 0:
        return 0.0
    ratio = search_prices(part, ones, size, live, own_left, own_price, rounds)
    for x in range(live):
        price[rows[x]] = own_price[x]
    return ratio


def refute(
    tau, work, tokens, n, scheme_of, pipelines, groups, c, max_length, pp, rates, price, deepest, rounds, budget,
    placed,
):  # fmt: skip
    """`prove` with the shares of whole pipelines at tau made here; price (groups,) is a warm start."""
    shares = np.empty((groups, n), dtype=np.float64)
    for g in range(groups):
        k = scheme_of[g]
        share_of_pipeline(tau, work[k], tokens, n, c[k], max_length[k], pp[k], rates[k], shares[g])
    return prove(
        tau, work, tokens, n, scheme_of, pipelines, groups, c, max_length, pp, rates, shares, price, deepest,
        rounds, budget, placed,
    )  # fmt: skip
