"""Kernels of the certified bound, and of proofs that a time is impossible. Plain Python for numba.

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

[Note: subsets]
A set of sequences is a whole number: bit i says whether sequence i is in it. With three sequences 0b101 = 5 is the
set of the first and the last, 0b111 the full set, and `s ^ t` is what of s is not in its subset t. All subsets of s
come from counting down through its bits: t = (t - 1) & s, e.g. 101, 100, 001, 000. Over all sets of n sequences these
are 3^n pairs: 6,561 for eight sequences, which is less than any search looks at.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ds_hydra.planner.kernels.packing import stage_ms
from ds_hydra.planner.kernels.problem import Floats, Ints, Items, Problem, Scheme, Schemes

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
    # A pipeline is full by tokens or by time. Each alone gives a valid share, but it must be one of them for all
    # sequences of a V, as shares are added up. By tokens, if even V full micro-batches of the quickest tokens stay
    # below the cap. That is so up to some V, as the cap grows less than V. There the largest V at which a sequence
    # fits has the least share, so nearly all are done with the last one.
    by_time = first_v
    while (
        by_time < MOST_MICROBATCHES and by_time * max_length * rate < tau * by_time / (by_time + pp - 1) - by_time * c
    ):
        by_time += 1
    left = 0
    for i in range(len(out)):
        left += tokens[i] <= longest
    for v in range(by_time - 1, first_v - 1, -1):
        if left == 0:
            break
        mean_cap = tau * v / (v + pp - 1) - v * c
        for i in range(len(out)):
            cap = min(mean_cap, tau - v * c - (pp - 1) * (work[i] + c))
            if out[i] == BLOCKED and tokens[i] <= longest and work[i] <= cap:
                out[i] = tokens[i] / (v * max_length)
                left -= 1
    for v in range(by_time, MOST_MICROBATCHES + 1):
        mean_cap = tau * v / (v + pp - 1) - v * c
        if v == MOST_MICROBATCHES:
            mean_cap = tau - v * c  # stands for every larger V too
        if mean_cap > 0.0:
            for i in range(len(out)):
                cap = min(mean_cap, tau - v * c - (pp - 1) * (work[i] + c))
                if tokens[i] <= longest and work[i] <= cap:
                    out[i] = min(out[i], work[i] / cap)
        if v >= peak_v:
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


def sharing_ms(problem: Problem, least: Floats) -> float:
    """Pigeonhole: of the first D*m+1 sequences, m+1 share a pipeline, D being those that can hold the last.

    Example: three sequences of at least 4 ms on two pipelines: two of them share one, which takes 8 ms or more. `least`
    (schemes,) is for the work of any of those so far: a shorter sequence may have more [Note: loads].
    """
    least[:] = math.inf
    schemes, items, shape = problem
    bound = 0.0
    room_before, seen = 0, 0
    for i in range(len(items.tokens)):
        for k in shape.scheme:
            least[k] = min(least[k], items.work[k, i])
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
                work = least[k]
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
    proven = max(proven, sharing_ms(problem, np.empty(len(schemes.c), dtype=np.float64)))
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


def subset_costs(scheme: Scheme, work: Floats, tokens: Ints, cost: Floats, parts: Ints) -> None:
    """cost[S] = least ms of one pipeline that runs exactly the sequences in bit set S; parts[S] its V.

    peaks[S] is, for the current V, the least possible largest work of V micro-batches that hold S.
    """
    n = len(tokens)
    full = 1 << n
    # Work and tokens of every set: its lowest sequence and the set without that one, which is known already.
    sums = np.zeros(full, dtype=np.float64)
    held = np.zeros(full, dtype=np.int64)
    for s in range(1, full):
        low = 0
        while not (s >> low) & 1:
            low += 1
        rest = s & (s - 1)
        sums[s] = sums[rest] + work[low]
        held[s] = held[rest] + tokens[low]
        cost[s] = math.inf
        parts[s] = 0
    cost[0] = 0.0
    parts[0] = 0
    peaks = np.full(full, math.inf)
    peaks[0] = 0.0
    for v in range(1, n + 1):
        before = peaks.copy()  # with V - 1 micro-batches
        peaks[0] = math.inf
        for s in range(full - 1, 0, -1):
            peaks[s] = math.inf
            # The last micro-batch is t, the V - 1 others hold the rest. Micro-batches have no order, so it may be the
            # one with the lowest sequence of s: that spares half of the subsets.
            lowest = s & -s
            t = s
            while t > 0:
                if t & lowest and held[t] <= scheme.max_length:
                    peaks[s] = min(peaks[s], max(sums[t], before[s ^ t]))
                t = (t - 1) & s
            # Appendix D's largest V binds unless fewer micro-batches cannot hold the sequences
            if math.isinf(peaks[s]) or (v > max(1, held[s] // scheme.util_length) and parts[s] > 0):
                continue
            ms = stage_ms(scheme, sums[s], peaks[s], v)
            if ms < cost[s]:
                cost[s] = ms
                parts[s] = v


def best_split(cost: Floats, scheme: Ints, n: int, owner: Ints) -> float:
    """Least slowest pipeline (ms) over all ways to deal n sequences out to pipelines of these schemes.

    cost (schemes, 2^n) as `subset_costs` fills it; scheme (pipelines,). Fills owner (n,).
    """
    full, pipelines = 1 << n, len(scheme)
    # reach[p, s]: least slowest of the first p pipelines when they run the sequences in s; share: what the last runs.
    reach = np.full((pipelines + 1, full), math.inf)
    share = np.zeros((pipelines + 1, full), dtype=np.int64)
    reach[0, 0] = 0.0
    for p in range(pipelines):
        k = scheme[p]
        for s in range(full):
            t = s
            while True:
                ms = max(cost[k, t], reach[p, s ^ t])
                if ms < reach[p + 1, s]:
                    reach[p + 1, s] = ms
                    share[p + 1, s] = t
                if t == 0:
                    break
                t = (t - 1) & s
    # Walk back: what the last pipeline runs in the best solution, then the one before it, ...
    s = full - 1
    for p in range(pipelines, 0, -1):
        for i in range(n):
            if (share[p, s] >> i) & 1:
                owner[i] = p - 1
        s ^= share[p, s]
    return reach[pipelines, full - 1]


def pack_tiny(scheme: Scheme, work: Floats, tokens: Ints, bin_of: Ints) -> None:
    """The optimal micro-batches of one pipeline with few sequences; fills bin_of (n,)."""
    n = len(tokens)
    if n == 0:
        return
    cost = np.empty(1 << n, dtype=np.float64)
    parts = np.empty(1 << n, dtype=np.int64)
    subset_costs(scheme, work, tokens, cost, parts)
    v = parts[(1 << n) - 1]
    load, used = np.zeros(v), np.zeros(v, dtype=np.int64)
    trial = np.zeros(n, dtype=np.int64)
    least = math.inf
    # A counter over all ways to label the sequences with v bins. Bins have no order, so the last sequence may be in bin
    # 0, the one before it in 0 or 1, ...: three sequences and two bins take 2 * 2 * 1 labels, not 8.
    while True:
        load[:] = 0.0
        used[:] = 0
        for x in range(n):
            load[trial[x]] += work[x]
            used[trial[x]] += tokens[x]
        if used.min() > 0 and used.max() <= scheme.max_length and load.max() < least:
            least = load.max()
            bin_of[:n] = trial
        digit = 0
        while digit < n and trial[digit] == min(v - 1, n - 1 - digit):
            trial[digit] = 0
            digit += 1
        if digit == n:
            break
        trial[digit] += 1
