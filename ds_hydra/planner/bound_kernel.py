"""Kernels of the certified bound: no plan under a strategy can finish sooner. Plain Python that numba can compile.

[Note: dispatch bound]
Suppose a step of tau ms exists. A pipeline with V micro-batches, work W (ms, c excluded) and L tokens then has
W <= tau*V/(V+PP-1) - V*c (its largest load is at least the mean), and, if sequence i is on it,
W <= tau - V*c - (PP-1)*(w_i + c), and L <= V*MaxLen. So with cap_i the smaller of the first two,
sum w_i/cap_i <= 1 and sum l_i/(V*MaxLen) <= 1 over its sequences. Take for every sequence and group of equal
pipelines the cheapest such coefficient over V; give each group a price. If, with every sequence in its cheapest
group, the priced coefficients exceed the priced number of pipelines, tau is impossible: by duality, for any
prices. Prices are found by Rprop, tau is raised on every proof.
"""

from __future__ import annotations

import math

import numpy as np

BLOCKED = 1e30
MOST_MICROBATCHES = 64


def share_of_pipeline(tau, work, tokens, n, c, max_length, pp, rate, out):
    """out[i] = smallest share of a pipeline that sequence i takes in any step of tau ms; BLOCKED if it cannot."""
    for i in range(n):
        out[i] = BLOCKED
    peak_v = MOST_MICROBATCHES
    if pp == 1:
        peak_v = 1
    elif c > 0.0:
        peak_v = min(peak_v, max(1, int(math.ceil(math.sqrt(tau * (pp - 1) / c) - (pp - 1)))))
    crossed = False
    for v in range(1, MOST_MICROBATCHES + 1):
        mean_cap = tau * v / (v + pp - 1) - v * c
        if v == MOST_MICROBATCHES:
            mean_cap = tau - v * c  # stands for every larger v too
        if mean_cap <= 0.0:
            if v >= peak_v:
                break
            continue
        by_tokens = v < MOST_MICROBATCHES and v * max_length * rate < mean_cap
        for i in range(n):
            if tokens[i] > max_length:
                continue
            cap = min(mean_cap, tau - v * c - (pp - 1) * (work[i] + c))
            if cap < work[i]:
                continue
            share = tokens[i] / (v * max_length) if by_tokens else work[i] / cap
            if share < out[i]:
                out[i] = share
        if not by_tokens:
            crossed = True
        if crossed and v >= peak_v:
            break


def priced_ratio(shares, count, n, groups, pipelines, price, load):
    """Priced demand over priced pipelines; load[g] gets the pipelines' worth that group g is asked for."""
    total, supply = 0.0, 0.0
    for g in range(groups):
        load[g] = 0.0
        supply += price[g] * pipelines[g]
    for i in range(n):
        best, chosen = math.inf, -1
        for g in range(groups):
            if shares[g, i] < BLOCKED:
                charge = price[g] * shares[g, i]
                if charge < best:
                    best, chosen = charge, g
        if chosen < 0:
            return math.inf
        load[chosen] += shares[chosen, i] * count[i]
        total += best * count[i]
    return total / supply


def search_prices(shares, count, n, groups, pipelines, price, rounds):
    """Raise the priced ratio by Rprop on log-prices; `price` ends at the best. Returns that ratio."""
    load = np.empty(groups, dtype=np.float64)
    log_price = np.log(price[:groups])
    step = np.full(groups, 0.12)
    before = np.zeros(groups, dtype=np.float64)
    trial = price[:groups].copy()
    best = 0.0
    for _ in range(rounds):
        ratio = priced_ratio(shares, count, n, groups, pipelines, trial, load)
        if ratio > best:
            best = ratio
            for g in range(groups):
                price[g] = trial[g]
        if groups == 1 or math.isinf(ratio):
            break
        for g in range(groups):
            slope = load[g] / pipelines[g] - ratio
            if slope * before[g] > 0.0:
                step[g] = min(step[g] * 1.3, 1.0)
            elif slope * before[g] < 0.0:
                step[g] = max(step[g] * 0.45, 1e-5)
            before[g] = slope
            if slope > 0.0:
                log_price[g] += step[g]
            elif slope < 0.0:
                log_price[g] -= step[g]
            trial[g] = math.exp(log_price[g])
    return best


def longest_ms(work, tokens, n, scheme_of, groups, c, max_length, pp):
    """Time that the longest sequence alone takes at best; infinite when no pipeline can hold it."""
    best = math.inf
    for g in range(groups):
        k = scheme_of[g]
        if tokens[0] <= max_length[k]:
            best = min(best, pp[k] * (work[k, 0] + c[k]))
    return best


def sharing_ms(work, tokens, count, n, scheme_of, pipelines, groups, c, max_length, pp):
    """Pigeonhole: of the first D*m+1 sequences, m+1 share a pipeline, D being those that can hold the last."""
    bound = 0.0
    room_before, seen = 0, 0
    for i in range(n):
        seen += count[i]
        room = 0
        for g in range(groups):
            if tokens[i] <= max_length[scheme_of[g]]:
                room += pipelines[g]
        if room == 0:
            return math.inf
        if seen <= room:
            continue
        if room_before != room or seen <= 3 * room + 8:
            together = (seen + room - 1) // room  # at least so many of them on one pipeline
            best = math.inf
            for g in range(groups):
                k = scheme_of[g]
                if tokens[i] <= max_length[k]:
                    v = (tokens[i] * together + max_length[k] - 1) // max_length[k]
                    mean = max(work[k, i], together * work[k, i] / max(1, together))
                    best = min(best, together * work[k, i] + v * c[k] + (pp[k] - 1) * (mean + c[k]))
            bound = max(bound, best)
        else:
            break
        room_before = room
    return bound


def strategy_bound(work, tokens, count, n, scheme_of, pipelines, groups, c, max_length, pp, rates, outer, inner, price):
    """Certified lower bound in ms on any plan under a strategy [Note: dispatch bound].

    work (schemes, n) ms; tokens, count (n,), longest first; group g has pipelines[g] pipelines of scheme
    scheme_of[g]. `price` (groups,) is warm start and result. Infinite when a sequence fits nowhere.
    """
    proven = longest_ms(work, tokens, n, scheme_of, groups, c, max_length, pp)
    if math.isinf(proven):
        return proven
    proven = max(proven, sharing_ms(work, tokens, count, n, scheme_of, pipelines, groups, c, max_length, pp))
    shares = np.empty((groups, n), dtype=np.float64)
    for g in range(groups):
        k = scheme_of[g]
        for i in range(n):
            shares[g, i] = BLOCKED
            if tokens[i] <= max_length[k]:
                shares[g, i] = work[k, i] + c[k] * tokens[i] / max_length[k]
    demand = np.empty(groups, dtype=np.float64)
    proven = max(proven, priced_ratio(shares, count, n, groups, pipelines, price, demand) * (1.0 - 1e-12))
    tau, failed = proven, math.inf
    for _ in range(outer):
        for g in range(groups):
            k = scheme_of[g]
            share_of_pipeline(tau, work[k], tokens, n, c[k], max_length[k], pp[k], rates[k], shares[g])
        ratio = search_prices(shares, count, n, groups, pipelines, price, inner)
        if ratio > 1.0 + 1e-9:
            proven = max(proven, tau)
            guess = tau * (min(ratio, 1.3) - 2e-4)
            if guess <= tau:
                guess = tau * (1.0 + 2e-4)
        else:
            failed = min(failed, tau)
            guess = tau * (ratio - 2e-4)
        if failed < math.inf:
            if proven >= failed * (1.0 - 5e-4):
                break
            if guess >= failed or guess <= proven:
                guess = 0.5 * (proven + failed)
        tau = guess
    return proven
