"""Kernels of dispatch (Eq. 3): sequences to pipelines, slowest pipeline least. Plain Python that numba can compile.

Sequences come longest first and pipelines group by group; `owner[i]` is the pipeline of sequence i. A pipeline's
time here is `ideal_ms` of packing: what it takes if its micro-batches balance and fill perfectly.
"""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.planner.bound_kernel import BLOCKED, share_of_pipeline
from ds_hydra.planner.packing_kernel import ideal_ms, pack


def pipeline_ms(k, total, held, widest, c, max_length, util_length, pp, paper):
    """`ideal_ms` with scheme k's constants."""
    return ideal_ms(total, held, widest, c[k], max_length[k], util_length[k], pp[k], paper)


def place_by_price(
    tau, shares, price, work, tokens, n, scheme_of, first, last, groups, c, max_length, util_length, pp, paper,
    owner, total, held, widest,
):  # fmt: skip
    """Multifit at target tau: each sequence to the cheapest priced group where a pipeline still meets tau.

    Within the group the fullest pipeline that still meets tau takes it. Returns False at the first sequence
    that meets tau nowhere.
    """
    for p in range(last[groups - 1]):
        total[p] = 0.0
        held[p] = 0
        widest[p] = 0.0
    tried = np.empty(groups, dtype=np.bool_)
    for i in range(n):
        for g in range(groups):
            tried[g] = False
        placed = False
        while not placed:
            best, chosen = math.inf, -1
            for g in range(groups):
                if not tried[g] and shares[g, i] < BLOCKED and price[g] * shares[g, i] < best:
                    best, chosen = price[g] * shares[g, i], g
            if chosen < 0:
                return False
            tried[chosen] = True
            k = scheme_of[chosen]
            fullest, slot = -1.0, -1
            for p in range(first[chosen], last[chosen]):
                if total[p] <= fullest:
                    continue
                ms = pipeline_ms(
                    k, total[p] + work[k, i], held[p] + tokens[i], max(widest[p], work[k, i]),
                    c, max_length, util_length, pp, paper,
                )  # fmt: skip
                if ms <= tau:
                    fullest, slot = total[p], p
                if held[p] == 0:
                    break  # the pipelines after the first empty one are empty too
            if slot >= 0:
                owner[i] = slot
                total[slot] += work[k, i]
                held[slot] += tokens[i]
                widest[slot] = max(widest[slot], work[k, i])
                placed = True
    return True


def place_greedily(
    work, tokens, n, scheme_of, first, last, groups, c, max_length, util_length, pp, paper,
    owner, total, held, widest,
):  # fmt: skip
    """Longest first, each sequence to the pipeline that would be done soonest with it. False if one fits nowhere."""
    for p in range(last[groups - 1]):
        total[p] = 0.0
        held[p] = 0
        widest[p] = 0.0
    for i in range(n):
        soonest, slot = math.inf, -1
        for g in range(groups):
            k = scheme_of[g]
            if tokens[i] > max_length[k]:
                continue
            for p in range(first[g], last[g]):
                ms = pipeline_ms(
                    k, total[p] + work[k, i], held[p] + tokens[i], max(widest[p], work[k, i]),
                    c, max_length, util_length, pp, paper,
                )  # fmt: skip
                if ms < soonest:
                    soonest, slot = ms, p
                if held[p] == 0:
                    break
        if slot < 0:
            return False
        for g in range(groups):
            if first[g] <= slot < last[g]:
                k = scheme_of[g]
        owner[i] = slot
        total[slot] += work[k, i]
        held[slot] += tokens[i]
        widest[slot] = max(widest[slot], work[k, i])
    return True


def two_longest(owner, n, p):
    """Positions of the longest and the second longest sequence of pipeline p; n where there is none."""
    one = n
    for i in range(n):
        if owner[i] == p:
            if one < n:
                return one, i
            one = i
    return one, n


def work_at(work, k, i, n):
    """Work of sequence i under scheme k; 0 for the position n, which stands for none."""
    return work[k, i] if i < n else 0.0


def improve(
    work, tokens, n, scheme, pipelines, c, max_length, util_length, pp, paper, goal, budget,
    owner, total, held, widest, ms,
):  # fmt: skip
    """Local search: moves and swaps that relieve the slowest pipeline, until it meets `goal` or nothing helps.

    `budget` caps the candidates that are looked at. Returns the slowest pipeline's ideal time in ms.
    """
    longest = np.empty(pipelines, dtype=np.int64)
    second = np.empty(pipelines, dtype=np.int64)
    for p in range(pipelines):
        longest[p], second[p] = two_longest(owner, n, p)
        ms[p] = pipeline_ms(scheme[p], total[p], held[p], widest[p], c, max_length, util_length, pp, paper)
    looked = 0
    while True:
        slow = 0
        for p in range(1, pipelines):
            if ms[p] > ms[slow]:
                slow = p
        peak = ms[slow]
        if peak <= goal or looked >= budget:
            return peak
        ks = scheme[slow]
        best, best_i, best_q, best_j = peak * (1.0 - 1e-9), -1, -1, -1
        for i in range(n):
            if owner[i] != slow:
                continue
            left = second[slow] if longest[slow] == i else longest[slow]
            left_widest = work_at(work, ks, left, n)
            without = pipeline_ms(
                ks,
                total[slow] - work[ks, i],
                held[slow] - tokens[i],
                left_widest,
                c,
                max_length,
                util_length,
                pp,
                paper,
            )
            if without >= best:
                continue
            for q in range(pipelines):
                kq = scheme[q]
                if q == slow or tokens[i] > max_length[kq] or total[q] * 1.0 >= best:
                    continue
                if held[q] == 0 and q > 0 and held[q - 1] == 0 and scheme[q - 1] == kq and q - 1 != slow:
                    continue
                looked += 1
                after = pipeline_ms(
                    kq, total[q] + work[kq, i], held[q] + tokens[i], max(widest[q], work[kq, i]),
                    c, max_length, util_length, pp, paper,
                )  # fmt: skip
                if max(after, without) < best:
                    best, best_i, best_q, best_j = max(after, without), i, q, -1
            for j in range(n):
                q = owner[j]
                kq = scheme[q]
                if q == slow or tokens[i] > max_length[kq] or tokens[j] > max_length[ks]:
                    continue
                if tokens[j] == tokens[i] or total[q] + work[kq, i] - work[kq, j] >= best:
                    continue
                if work[ks, j] >= work[ks, i] and kq == ks:
                    continue
                gone = total[slow] - work[ks, i] + work[ks, j]
                if gone >= best:
                    continue
                looked += 1
                here = pipeline_ms(
                    ks, gone, held[slow] - tokens[i] + tokens[j], max(left_widest, work[ks, j]),
                    c, max_length, util_length, pp, paper,
                )  # fmt: skip
                if here >= best:
                    continue
                other = second[q] if longest[q] == j else longest[q]
                after = pipeline_ms(
                    kq, total[q] - work[kq, j] + work[kq, i], held[q] - tokens[j] + tokens[i],
                    max(work_at(work, kq, other, n), work[kq, i]), c, max_length, util_length, pp, paper,
                )  # fmt: skip
                if max(here, after) < best:
                    best, best_i, best_q, best_j = max(here, after), i, q, j
        if best_i < 0:
            return peak
        apply_exchange(work, tokens, n, scheme, owner, total, held, widest, slow, best_i, best_q, best_j)
        for p in (slow, best_q):
            longest[p], second[p] = two_longest(owner, n, p)
            ms[p] = pipeline_ms(scheme[p], total[p], held[p], widest[p], c, max_length, util_length, pp, paper)


def apply_exchange(work, tokens, n, scheme, owner, total, held, widest, p, i, q, j):
    """Sequence i goes from pipeline p to q, and j, unless it is -1, from q to p; both sums are made anew."""
    owner[i] = q
    if j >= 0:
        owner[j] = p
    for r in (p, q):
        total[r] = 0.0
        held[r] = 0
        widest[r] = 0.0
    for x in range(n):
        r = owner[x]
        if r == p or r == q:
            total[r] += work[scheme[r], x]
            held[r] += tokens[x]
            widest[r] = max(widest[r], work[scheme[r], x])


def dispatch(
    work, tokens, n, scheme_of, pipelines, groups, c, max_length, util_length, pp, rates, paper,
    bound, price, ceiling, steps, restarts, budget, seed, owner, ms,
):  # fmt: skip
    """Best of the greedy placement and `restarts` priced multifits, each after local search.

    Stops early at `bound`. Placements whose time is `ceiling` or more are not refined. Fills `owner` (n,) and
    `ms` (pipelines in all); returns the slowest pipeline's ideal time in ms, infinite when none was found.
    """
    first = np.empty(groups, dtype=np.int64)
    last = np.empty(groups, dtype=np.int64)
    count = 0
    for g in range(groups):
        first[g] = count
        count += pipelines[g]
        last[g] = count
    scheme = np.empty(count, dtype=np.int64)
    for g in range(groups):
        scheme[first[g] : last[g]] = scheme_of[g]
    total = np.zeros(count, dtype=np.float64)
    held = np.zeros(count, dtype=np.int64)
    widest = np.zeros(count, dtype=np.float64)
    trial = np.zeros(n, dtype=np.int64)
    trial_ms = np.zeros(count, dtype=np.float64)
    shares = np.empty((groups, n), dtype=np.float64)
    bent = np.empty(groups, dtype=np.float64)
    goal = bound * (1.0 + 1e-6)
    best = math.inf
    if place_greedily(
        work, tokens, n, scheme_of, first, last, groups, c, max_length, util_length, pp, paper,
        trial, total, held, widest,
    ):  # fmt: skip
        best = improve(
            work, tokens, n, scheme, count, c, max_length, util_length, pp, paper, goal, budget,
            trial, total, held, widest, trial_ms,
        )  # fmt: skip
        owner[:n] = trial
        ms[:count] = trial_ms
    state = seed
    for restart in range(restarts):
        if best <= goal:
            break
        for g in range(groups):
            bent[g] = price[g]
            if restart > 0:
                state = (state * 1103515245 + 12345) % 2147483648
                bent[g] *= 1.0 + 0.16 * (state / 2147483648.0 - 0.5)
        low, high = bound, best
        fresh = False
        for step in range(steps):
            tau = low * (1.0 + 0.002) if step == 0 else 0.5 * (low + high)
            if tau >= high or high - low < 2e-4 * low:
                break
            for g in range(groups):
                k = scheme_of[g]
                share_of_pipeline(tau, work[k], tokens, n, c[k], max_length[k], pp[k], rates[k], shares[g])
            if place_by_price(
                tau, shares, bent, work, tokens, n, scheme_of, first, last, groups, c, max_length, util_length,
                pp, paper, trial, total, held, widest,
            ):  # fmt: skip
                after = improve(
                    work, tokens, n, scheme, count, c, max_length, util_length, pp, paper, goal, budget,
                    trial, total, held, widest, trial_ms,
                )  # fmt: skip
                high = min(tau, after)
                if after < best:
                    best = after
                    owner[:n] = trial
                    ms[:count] = trial_ms
                if best <= goal:
                    break
            else:
                low = tau
    return best


def pack_all(
    work, tokens, n, scheme, pipelines, c, max_length, util_length, pp, paper, rounds, owner, bin_of, ms, bins
):
    """Pack every pipeline's sequences. Fills bin_of (n,), ms and bins (pipelines,); returns the slowest in ms."""
    slowest = 0.0
    for p in range(pipelines):
        ms[p], bins[p] = pack_one(
            work, tokens, n, scheme[p], p, c, max_length, util_length, pp, paper, rounds, owner, bin_of
        )
        slowest = max(slowest, ms[p])
    return slowest


def pack_one(work, tokens, n, k, p, c, max_length, util_length, pp, paper, rounds, owner, bin_of):
    """Pack the sequences that `owner` gives to pipeline p of scheme k; (ms, micro-batches)."""
    size = 0
    for i in range(n):
        if owner[i] == p:
            size += 1
    chosen = np.empty(size, dtype=np.int64)
    own_work = np.empty(size, dtype=np.float64)
    own_tokens = np.empty(size, dtype=np.int64)
    own_bins = np.empty(size, dtype=np.int64)
    at = 0
    for i in range(n):
        if owner[i] == p:
            chosen[at] = i
            own_work[at] = work[k, i]
            own_tokens[at] = tokens[i]
            at += 1
    v, ms, _ = pack(own_work, own_tokens, size, c[k], max_length[k], util_length[k], pp[k], paper, rounds, own_bins)
    for x in range(size):
        bin_of[chosen[x]] = own_bins[x]
    return ms, v


def repair(
    work, tokens, n, scheme, pipelines, c, max_length, util_length, pp, paper, rounds, bound, budget,
    owner, bin_of, ms, bins,
):  # fmt: skip
    """Local search on the packed times: relieve the slowest pipeline by moves and swaps, packing both ends anew.

    `budget` caps the packings. Returns the slowest pipeline's packed time in ms.
    """
    trial = np.empty(n, dtype=np.int64)
    trial_bins = np.empty(n, dtype=np.int64)
    packed = 0
    while True:
        slow = 0
        for p in range(1, pipelines):
            if ms[p] > ms[slow]:
                slow = p
        peak = ms[slow]
        if peak <= bound * (1.0 + 1e-6) or packed >= budget:
            return peak
        ks = scheme[slow]
        helped = False
        for i in range(n):
            if owner[i] != slow or helped:
                continue
            for j in range(-pipelines, n):
                # negative j: a move to pipeline -j-1; else a swap with sequence j
                q = -j - 1 if j < 0 else owner[j]
                kq = scheme[q]
                if q == slow or tokens[i] > max_length[kq] or ms[q] >= peak:
                    continue
                gain = work[ks, i]
                extra = work[kq, i]
                if j >= 0:
                    if tokens[j] > max_length[ks]:
                        continue
                    gain -= work[ks, j]
                    extra -= work[kq, j]
                    if gain <= 0.0 and kq == ks:
                        continue
                if peak - gain - pp[ks] * c[ks] >= peak or ms[q] + extra >= peak:
                    continue
                for x in range(n):
                    trial[x] = owner[x]
                    trial_bins[x] = bin_of[x]
                trial[i] = q
                if j >= 0:
                    trial[j] = slow
                packed += 1
                to_ms, to_v = pack_one(
                    work, tokens, n, kq, q, c, max_length, util_length, pp, paper, rounds, trial, trial_bins
                )
                if to_ms < peak * (1.0 - 1e-9):
                    from_ms, from_v = pack_one(
                        work, tokens, n, ks, slow, c, max_length, util_length, pp, paper, rounds, trial, trial_bins
                    )
                    if from_ms < peak * (1.0 - 1e-9):
                        for x in range(n):
                            owner[x] = trial[x]
                            bin_of[x] = trial_bins[x]
                        ms[slow], bins[slow] = from_ms, from_v
                        ms[q], bins[q] = to_ms, to_v
                        helped = True
                        break
                if packed >= budget:
                    return peak
        if not helped:
            return peak
