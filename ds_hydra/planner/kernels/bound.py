"""Kernels of the certified bound: no plan under a strategy can finish sooner. Plain Python that numba can compile.

[Note: dispatch bound]
Suppose a step of tau ms exists. A pipeline with V micro-batches, work W (ms, c excluded) and L tokens then has
W <= tau*V/(V+PP-1) - V*c (its largest load is at least the mean), and, if sequence i is on it,
W <= tau - V*c - (PP-1)*(w_i + c), and L <= V*MaxLen. So with cap_i the smaller of the first two,
sum w_i/cap_i <= 1 and sum l_i/(V*MaxLen) <= 1 over its sequences. Take for every sequence and group of equal
pipelines the cheapest such share over V; give each group a price. If, with every sequence in its cheapest
group, the priced shares exceed the priced number of pipelines, tau is impossible: by duality, for any prices.
Prices are found by Rprop, tau is raised on every proof. Eq. 1 is never less than the flow shop, so the bound
holds for it too.
"""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.planner.kernels.arrays import Floats, Ints, Items, Schemes, Shape

BLOCKED = 1e30
MOST_MICROBATCHES = 64


def share_of_pipeline(schemes: Schemes, k: int, items: Items, tau: float, out: Floats) -> None:
    """out[i] = least share of a pipeline of scheme k that sequence i takes in any step of tau ms; BLOCKED if none."""
    out[:] = BLOCKED
    c, max_length, pp, rate = schemes.c[k], schemes.max_length[k], schemes.pp[k], items.rates[k]
    work, tokens = items.work[k], items.tokens
    peak_v = MOST_MICROBATCHES  # from here on the first cap falls with V
    if pp == 1:
        peak_v = 1
    elif c > 0.0:
        peak_v = min(peak_v, max(1, math.ceil(math.sqrt(tau * (pp - 1) / c) - (pp - 1))))
    first_v = 1 if c > 0.0 else MOST_MICROBATCHES  # without c, many micro-batches cost nothing
    for v in range(first_v, MOST_MICROBATCHES + 1):
        mean_cap = tau * v / (v + pp - 1) - v * c
        if v == MOST_MICROBATCHES:
            mean_cap = tau - v * c  # stands for every larger V too
        if mean_cap <= 0.0:
            if v >= peak_v:
                return
            continue
        by_tokens = v < MOST_MICROBATCHES and v * max_length * rate < mean_cap
        for i in range(len(out)):
            cap = min(mean_cap, tau - v * c - (pp - 1) * (work[i] + c))
            if tokens[i] <= max_length and work[i] <= cap:
                share = tokens[i] / (v * max_length) if by_tokens else work[i] / cap
                out[i] = min(out[i], share)
        if not by_tokens and v >= peak_v:
            return


def priced_ratio(shares: Floats, count: Ints, pipelines: Ints, price: Floats, load: Floats) -> float:
    """Priced demand over priced pipelines; load[g] gets the pipelines' worth that group g is asked for.

    shares (groups, n), count (n,), pipelines and price (groups,). Infinite when a sequence is BLOCKED everywhere.
    """
    groups, n = shares.shape
    total, supply = 0.0, 0.0
    for g in range(groups):
        load[g] = 0.0
        supply += price[g] * pipelines[g]
    for i in range(n):
        best, chosen = math.inf, -1
        for g in range(groups):
            if shares[g, i] < BLOCKED and price[g] * shares[g, i] < best:
                best, chosen = price[g] * shares[g, i], g
        if chosen < 0:
            return math.inf
        load[chosen] += shares[chosen, i] * count[i]
        total += best * count[i]
    return total / supply


def search_prices(shares: Floats, count: Ints, pipelines: Ints, price: Floats, rounds: int) -> float:
    """Raise the priced ratio by Rprop on log-prices; `price` ends at the best. Returns that ratio."""
    groups = len(pipelines)
    load = np.empty(groups, dtype=np.float64)
    log_price = np.empty(groups, dtype=np.float64)
    for g in range(groups):
        log_price[g] = math.log(price[g])
    step = np.full(groups, 0.12)
    before = np.zeros(groups, dtype=np.float64)
    trial = price.copy()
    best = 0.0
    for _ in range(rounds):
        ratio = priced_ratio(shares, count, pipelines, trial, load)
        if ratio > best:
            best = ratio
            price[:] = trial
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


def longest_ms(schemes: Schemes, items: Items, shape: Shape) -> float:
    """Time that the longest sequence alone takes at best; infinite when no pipeline can hold it."""
    best = math.inf
    for k in shape.scheme:
        if items.tokens[0] <= schemes.max_length[k]:
            best = min(best, schemes.pp[k] * (items.work[k, 0] + schemes.c[k]))
    return best


def sharing_ms(schemes: Schemes, items: Items, shape: Shape) -> float:
    """Pigeonhole: of the first D*m+1 sequences, m+1 share a pipeline, D being those that can hold the last."""
    bound = 0.0
    room_before, seen = 0, 0
    for i in range(len(items.tokens)):
        seen += items.copies[i]
        room = 0
        for g in range(len(shape.pipelines)):
            if items.tokens[i] <= schemes.max_length[shape.scheme[g]]:
                room += shape.pipelines[g]
        if seen <= room:
            continue
        if room_before == room and seen > 3 * room + 8:
            break
        together = (seen + room - 1) // room  # at least so many of them on one pipeline
        best = math.inf
        for k in shape.scheme:
            if items.tokens[i] <= schemes.max_length[k]:
                v = (items.tokens[i] * together + schemes.max_length[k] - 1) // schemes.max_length[k]
                work = items.work[k, i]
                best = min(best, together * work + v * schemes.c[k] + (schemes.pp[k] - 1) * (work + schemes.c[k]))
        bound = max(bound, best)
        room_before = room
    return bound


def strategy_bound(schemes: Schemes, items: Items, shape: Shape, outer: int, inner: int, price: Floats) -> float:
    """Certified lower bound in ms on any plan under a strategy [Note: dispatch bound].

    `price` (groups,) is warm start and result; `outer` times are tried with `inner` price updates each. Infinite
    when a sequence fits nowhere.
    """
    groups, n = len(shape.pipelines), len(items.tokens)
    proven = longest_ms(schemes, items, shape)
    if math.isinf(proven):
        return proven
    proven = max(proven, sharing_ms(schemes, items, shape))
    shares = np.full((groups, n), BLOCKED)
    for g in range(groups):
        k = shape.scheme[g]
        for i in range(n):
            if items.tokens[i] <= schemes.max_length[k]:
                shares[g, i] = items.work[k, i] + schemes.c[k] * items.tokens[i] / schemes.max_length[k]
    demand = np.empty(groups, dtype=np.float64)
    fluid = priced_ratio(shares, items.copies, shape.pipelines, price, demand)  # ms with nothing but work and c
    proven = max(proven, fluid * (1.0 - 1e-12))
    tau, failed = proven, math.inf
    for _ in range(outer):
        for g in range(groups):
            share_of_pipeline(schemes, shape.scheme[g], items, tau, shares[g])
        ratio = search_prices(shares, items.copies, shape.pipelines, price, inner)
        guess = tau * (min(ratio, 1.3) - 2e-4)
        if ratio > 1.0 + 1e-9:
            proven = max(proven, tau)
            guess = max(guess, tau * (1.0 + 2e-4))
        else:
            failed = min(failed, tau)
        if failed < math.inf:
            if proven >= failed * (1.0 - 5e-4):
                break
            if guess >= failed or guess <= proven:
                guess = 0.5 * (proven + failed)
        tau = guess
    return proven
