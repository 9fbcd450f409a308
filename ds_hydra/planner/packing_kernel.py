"""Kernels of packing: the sequences of one pipeline in, micro-batches out. Plain Python that numba can compile.

Sequences come longest first: `work[i]` ms, `tokens[i]` tokens. A micro-batch pays `c` ms once and holds up to
`max_length` tokens. `paper` selects Eq. 1, max * (PP-1+V), in place of the flow shop, sum + (PP-1) * max.
"""

from __future__ import annotations

import math

import numpy as np


def stage_ms(total, widest, v, c, pp, paper):
    """Time of a pipeline with v micro-batches of `total` ms in all and `widest` ms at most, c excluded."""
    if paper:
        return (widest + c) * (pp - 1 + v)
    return total + v * c + (pp - 1) * (widest + c)


def ideal_ms(total, tokens, widest, c, max_length, util_length, pp, paper):
    """Time of a pipeline whose micro-batches balance and fill perfectly: a lower bound on every packing."""
    if tokens == 0:
        return 0.0
    fewest = (tokens + max_length - 1) // max_length
    best = stage_ms(total, max(widest, total / fewest), fewest, c, pp, paper)
    if pp == 1:
        return best
    most = max(fewest, tokens // util_length)
    if widest > 0.0:
        most = max(fewest, min(most, int(math.ceil(total / widest))))
    v = most
    if c > 0.0:
        v = min(most, int(math.sqrt((pp - 1) * total / c)))
    for candidate in range(max(v, fewest), min(v + 1, most) + 1):
        best = min(best, stage_ms(total, max(widest, total / candidate), candidate, c, pp, paper))
    return best


def fill_bins(work, tokens, n, v, max_length, by_room, bin_of, load, used):
    """Put n sequences, longest first, into v bins: the least loaded, or the fullest with room. False if stuck."""
    for j in range(v):
        load[j] = 0.0
        used[j] = 0
    for i in range(n):
        chosen = -1
        for j in range(v):
            if used[j] + tokens[i] <= max_length and (
                chosen < 0 or (by_room and used[j] > used[chosen]) or (not by_room and load[j] < load[chosen])
            ):
                chosen = j
        if chosen < 0:
            return False
        bin_of[i] = chosen
        load[chosen] += work[i]
        used[chosen] += tokens[i]
    return True


def level_bins(work, tokens, n, v, max_length, floor, rounds, bin_of, load, used):
    """Lower the heaviest bin by moves and swaps until it is at `floor` or nothing helps; its load."""
    for _ in range(rounds):
        top = 0
        for j in range(1, v):
            if load[j] > load[top]:
                top = j
        peak = load[top]
        if peak <= floor:
            return peak
        best = peak * (1.0 - 1e-12)
        best_i, best_k, best_j = -1, -1, -1
        for i in range(n):
            if bin_of[i] != top:
                continue
            for j in range(v):
                if j != top and used[j] + tokens[i] <= max_length:
                    after = max(peak - work[i], load[j] + work[i])
                    if after < best:
                        best, best_i, best_k, best_j = after, i, -1, j
            for k in range(i + 1, n):
                j = bin_of[k]
                if j == top or used[j] - tokens[k] + tokens[i] > max_length:
                    continue
                if used[top] - tokens[i] + tokens[k] > max_length:
                    continue
                after = max(peak - work[i] + work[k], load[j] + work[i] - work[k])
                if after < best:
                    best, best_i, best_k, best_j = after, i, k, j
        if best_i < 0:
            return peak
        load[top] -= work[best_i]
        used[top] -= tokens[best_i]
        load[best_j] += work[best_i]
        used[best_j] += tokens[best_i]
        bin_of[best_i] = best_j
        if best_k >= 0:
            load[best_j] -= work[best_k]
            used[best_j] -= tokens[best_k]
            load[top] += work[best_k]
            used[top] += tokens[best_k]
            bin_of[best_k] = top
    top_load = 0.0
    for j in range(v):
        top_load = max(top_load, load[j])
    return top_load


def fewest_bins(tokens, n, max_length):
    """Least micro-batches that can hold the sequences: the L2 bound of bin packing (Martello and Toth)."""
    total = 0
    for i in range(n):
        total += tokens[i]
    best = (total + max_length - 1) // max_length
    for split in range(n):
        small = tokens[split]  # sequences shorter than `small` do not count
        if 2 * small > max_length:
            continue
        large, middle, room, rest = 0, 0, 0, 0
        for i in range(n):
            if tokens[i] > max_length - small:
                large += 1
            elif 2 * tokens[i] > max_length:
                middle += 1
                room += max_length - tokens[i]
            elif tokens[i] >= small:
                rest += tokens[i]
        over = max(0, rest - room)
        best = max(best, large + middle + (over + max_length - 1) // max_length)
        if middle == 0 and large == 0:
            break
    return best


def pack(work, tokens, n, c, max_length, util_length, pp, paper, rounds, out_bin):
    """Pack the n sequences of one pipeline. Returns (micro-batches, ms, lower bound ms); bins go to `out_bin`.

    Tries the numbers of micro-batches of appendix D, the one with the least bound first, and stops when the
    next bound is no better than what is found. More than appendix D's are tried only when none of them fits.
    """
    if n == 0:
        return 0, 0.0, 0.0
    total, total_tokens = 0.0, 0
    for i in range(n):
        total += work[i]
        total_tokens += tokens[i]
    widest = work[0]
    for i in range(1, n):
        widest = max(widest, work[i])
    fewest = fewest_bins(tokens, n, max_length)
    most = min(n, max(fewest, total_tokens // util_length))
    load = np.empty(n, dtype=np.float64)
    used = np.empty(n, dtype=np.int64)
    trial = np.empty(n, dtype=np.int64)
    bounds = np.empty(n + 1, dtype=np.float64)
    for v in range(fewest, n + 1):
        bounds[v] = stage_ms(total, max(widest, total / v), v, c, pp, paper)
    best, best_v, bound = math.inf, 0, math.inf
    done = np.zeros(n + 1, dtype=np.bool_)
    while True:
        v = -1
        for candidate in range(fewest, most + 1):
            if not done[candidate] and (v < 0 or bounds[candidate] < bounds[v]):
                v = candidate
        if v < 0:
            if best_v > 0 or most == n:
                break
            most += 1
            continue
        bound = min(bound, bounds[v])
        if bounds[v] >= best:
            break
        done[v] = True
        floor = max(widest, total / v)
        fits = fill_bins(work, tokens, n, v, max_length, False, trial, load, used)
        if not fits:
            fits = fill_bins(work, tokens, n, v, max_length, True, trial, load, used)
        if not fits:
            continue
        peak = 0.0
        if pp > 1 or paper:
            peak = level_bins(work, tokens, n, v, max_length, floor * (1.0 + 1e-9), rounds, trial, load, used)
        ms = stage_ms(total, peak, v, c, pp, paper)
        if ms < best:
            best, best_v = ms, v
            for i in range(n):
                out_bin[i] = trial[i]
    return best_v, best, min(bound, best)
