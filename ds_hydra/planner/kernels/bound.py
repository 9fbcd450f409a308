"""Kernels of the certified bound: no plan under a strategy can finish sooner. Plain Python that numba can compile.

[Note: dispatch bound]
Suppose a step of tau ms exists. A pipeline with V micro-batches, work W (ms, c excluded) and L tokens then has
W <= tau*V/(V+PP-1) - V*c (its largest load is at least the mean), and, if sequence i is on it,
W <= tau - V*c - (PP-1)*(w_i + c), and L <= V*MaxLen. So with cap_i the smaller of the first two,
sum w_i/cap_i <= 1 and sum l_i/(V*MaxLen) <= 1 over its sequences: sequence i takes the share w_i/cap_i of a
pipeline, or l_i/(V*MaxLen). Take for every sequence and kind of pipelines the cheapest such share over V; give each
kind a price. If, with every sequence in its cheapest kind, the priced shares exceed the priced number of pipelines,
tau is impossible: by duality, for any prices. Prices are found by Rprop, tau is raised on every proof.

Example without prices: sequences of 6, 5 and 4 ms, two equal pipelines, PP = 1, c = 0. At tau = 7 they ask for
6/7 + 5/7 + 4/7 = 2.14 pipelines, but there are two: 7 ms are impossible. At tau = 7.5 they ask for exactly two, and
this argument ends, as it deals sequences out in fractions. Three sequences on two pipelines mean that two share one,
though: at least 5 + 4 = 9 ms, of which `sharing_ms`, which takes the third longest twice, proves 8.

Example with prices: one pipeline A that holds everything, three pipelines B that hold only short sequences. A long
sequence takes 0.9 of A, each of ten short ones 0.3 of A or 0.32 of B. At prices of 1 and 1 the short ones all choose
A, and 0.9 + 3.0 = 3.9 of 4 pipelines look enough. At 1.07 for A they choose B: 1.07 * 0.9 + 10 * 0.32 = 4.16 of
1.07 + 3 = 4.07 are needed, so tau is impossible. The dearer A shows that the long sequence leaves no room there.
"""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.planner.kernels.arrays import Floats, Ints, Items, Problem, Schemes

BLOCKED = 1e30
MOST_MICROBATCHES = 64


def share_of_pipeline(schemes: Schemes, k: int, items: Items, tau: float, out: Floats) -> None:
    """out[i] = least share of a pipeline of scheme k that sequence i takes in any step of tau ms; BLOCKED if none."""
    out[:] = BLOCKED
    c, max_length, pp, rate = schemes.c[k], schemes.max_length[k], schemes.pp[k], items.rates[k]
    work, tokens, longest = items.work[k], items.tokens, schemes.longest[k]
    # The first cap, tau*V/(V+PP-1) - V*c, rises with V while smaller bubbles outweigh more c, then falls. Its slope
    # tau*(PP-1)/(V+PP-1)^2 - c is zero at the root below.
    peak_v = MOST_MICROBATCHES
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
        # A pipeline is full by tokens or by time. Each alone gives a valid share, but it must be one of them for all
        # sequences of a V, as shares are added up. By tokens, if even V full micro-batches of the quickest tokens stay
        # below the cap.
        by_tokens = v < MOST_MICROBATCHES and v * max_length * rate < mean_cap
        for i in range(len(out)):
            cap = min(mean_cap, tau - v * c - (pp - 1) * (work[i] + c))
            if tokens[i] <= longest and work[i] <= cap:
                share = tokens[i] / (v * max_length) if by_tokens else work[i] / cap
                out[i] = min(out[i], share)
        if not by_tokens and v >= peak_v:
            return  # both caps only fall from here on


def priced_ratio(shares: Floats, count: Ints, pipelines: Ints, price: Floats, load: Floats) -> float:
    """Priced demand over priced pipelines; load[x] gets the pipelines' worth that kind x is asked for.

    shares (kinds, n), count (n,), pipelines and price (kinds,). Infinite when a sequence is BLOCKED everywhere.
    """
    kinds, n = shares.shape
    total, supply = 0.0, 0.0
    for kind in range(kinds):
        load[kind] = 0.0
        supply += price[kind] * pipelines[kind]
    for i in range(n):
        best, chosen = math.inf, -1
        for kind in range(kinds):
            if shares[kind, i] < BLOCKED and price[kind] * shares[kind, i] < best:
                best, chosen = price[kind] * shares[kind, i], kind
        if chosen < 0:
            return math.inf
        load[chosen] += shares[chosen, i] * count[i]
        total += best * count[i]
    return total / supply


def search_prices(shares: Floats, count: Ints, pipelines: Ints, price: Floats, rounds: int) -> float:
    """Raise the priced ratio by Rprop on log-prices; `price` ends at the best. Returns that ratio.

    Rprop takes only the sign of each slope and keeps a step length for each price: the ratio is made of straight
    pieces, so the size of a slope says nothing about how far off the corner is.
    """
    kinds = len(pipelines)
    load = np.empty(kinds, dtype=np.float64)
    log_price = np.empty(kinds, dtype=np.float64)
    for kind in range(kinds):
        log_price[kind] = math.log(price[kind])
    step = np.full(kinds, 0.12)
    before = np.zeros(kinds, dtype=np.float64)
    trial = price.copy()
    best = 0.0
    for _ in range(rounds):
        ratio = priced_ratio(shares, count, pipelines, trial, load)
        if ratio > best:
            best = ratio
            price[:] = trial
        if kinds == 1 or math.isinf(ratio):
            break  # with one kind its price cancels out; infinite is proof enough
        for kind in range(kinds):
            # A kind that is asked for more than the average is too cheap.
            slope = load[kind] / pipelines[kind] - ratio
            if slope * before[kind] > 0.0:
                step[kind] = min(step[kind] * 1.3, 1.0)
            elif slope * before[kind] < 0.0:
                step[kind] = max(step[kind] * 0.45, 1e-5)
            before[kind] = slope
            if slope > 0.0:
                log_price[kind] += step[kind]
            elif slope < 0.0:
                log_price[kind] -= step[kind]
            trial[kind] = math.exp(log_price[kind])
    return best


def longest_ms(problem: Problem) -> float:
    """Time that the longest sequence alone takes at best; infinite when no pipeline can hold it."""
    schemes, items, shape = problem
    best = math.inf
    for k in shape.scheme:
        if items.tokens[0] <= schemes.longest[k]:
            best = min(best, schemes.pp[k] * (items.work[k, 0] + schemes.c[k]))
    return best


def sharing_ms(problem: Problem) -> float:
    """Pigeonhole: of the first D*m+1 sequences, m+1 share a pipeline, D being those that can hold the last.

    Example: three sequences of at least 4 ms on two pipelines: two of them share one, which takes 8 ms or more.
    """
    schemes, items, shape = problem
    bound = 0.0
    room_before, seen = 0, 0
    for i in range(len(items.tokens)):
        seen += items.copies[i]
        room = 0
        for kind in range(len(shape.pipelines)):
            if items.tokens[i] <= schemes.longest[shape.scheme[kind]]:
                room += shape.pipelines[kind]
        if seen <= room:
            continue
        # Where the same pipelines hold this sequence as the one before, and some sequences share each of them already,
        # the bound by fractions says more than one more pigeon.
        if room_before == room and seen > 3 * room + 8:
            break
        together = (seen + room - 1) // room  # at least so many of them on one pipeline
        best = math.inf
        for k in shape.scheme:
            if items.tokens[i] <= schemes.longest[k]:
                v = (items.tokens[i] * together + schemes.max_length[k] - 1) // schemes.max_length[k]
                work = items.work[k, i]
                best = min(best, together * work + v * schemes.c[k] + (schemes.pp[k] - 1) * (work + schemes.c[k]))
        bound = max(bound, best)
        room_before = room
    return bound


def strategy_bound(problem: Problem, outer: int, inner: int, price: Floats) -> float:
    """Certified lower bound in ms on any plan under a strategy [Note: dispatch bound].

    `price` (kinds,) is warm start and result; `outer` times are tried with `inner` price updates each. Infinite
    when a sequence fits nowhere.
    """
    schemes, items, shape = problem
    kinds, n = len(shape.pipelines), len(items.tokens)
    proven = longest_ms(problem)
    if math.isinf(proven):
        return proven
    proven = max(proven, sharing_ms(problem))
    # The bound to begin with: work, and the least c that the tokens cost, dealt out in fractions without any bubble.
    # Then shares are plain ms, and the priced ratio is a time.
    shares = np.full((kinds, n), BLOCKED)
    for kind in range(kinds):
        k = shape.scheme[kind]
        for i in range(n):
            if items.tokens[i] <= schemes.longest[k]:
                shares[kind, i] = items.work[k, i] + schemes.c[k] * items.tokens[i] / schemes.max_length[k]
    demand = np.empty(kinds, dtype=np.float64)
    fluid = priced_ratio(shares, items.copies, shape.pipelines, price, demand)
    proven = max(proven, fluid * (1.0 - 1e-12))
    # From there tau goes up. `proven` is impossible, `failed` the least time for which no proof was found (it may be
    # impossible all the same). A ratio of 1.1 at tau says that about 1.1 * tau will be needed: that is the next guess,
    # a little less so that it can be proven too. Once something failed, guesses stay between the two.
    tau, failed = proven, math.inf
    for _ in range(outer):
        for kind in range(kinds):
            share_of_pipeline(schemes, shape.scheme[kind], items, tau, shares[kind])
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
