"""Kernels of packing: the sequences of one pipeline in, micro-batches out. Plain Python that numba can compile.

Sequences come longest first: `work[i]` ms, `tokens[i]` tokens. A micro-batch pays c ms once and holds up to
MaxLen tokens. Times are the flow shop's, sum + (PP-1) * max, or Eq. 1's, max * (PP-1+V), as `schemes.paper` says.
"""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.planner.kernels.arrays import Floats, Ints, Scheme, Schemes


def scheme_at(schemes: Schemes, k: int) -> Scheme:
    """The constants of scheme k."""
    return Scheme(schemes.c[k], schemes.max_length[k], schemes.util_length[k], schemes.pp[k], schemes.paper)


def stage_ms(scheme: Scheme, total: float, widest: float, v: int) -> float:
    """Time of a pipeline with v micro-batches of `total` ms in all and `widest` ms at most, c excluded."""
    if scheme.paper:
        return (widest + scheme.c) * (scheme.pp - 1 + v)
    return total + v * scheme.c + (scheme.pp - 1) * (widest + scheme.c)


def ideal_ms(scheme: Scheme, total: float, tokens: int, widest: float) -> float:
    """Time of a pipeline whose micro-batches balance and fill perfectly: a lower bound on every packing."""
    if tokens == 0:
        return 0.0
    fewest = (tokens + scheme.max_length - 1) // scheme.max_length
    best = stage_ms(scheme, total, max(widest, total / fewest), fewest)
    if scheme.pp == 1:
        return best
    most = max(fewest, tokens // scheme.util_length)
    if widest > 0.0:
        most = max(fewest, min(most, math.ceil(total / widest)))
    v = most
    if scheme.c > 0.0:
        v = min(most, int(math.sqrt((scheme.pp - 1) * total / scheme.c)))
    for candidate in range(max(v, fewest), min(v + 1, most) + 1):
        best = min(best, stage_ms(scheme, total, max(widest, total / candidate), candidate))
    return best


def fill_bins(
    work: Floats, tokens: Ints, v: int, max_length: int, by_room: bool, bin_of: Ints, load: Floats, used: Ints
) -> bool:
    """Put the sequences, longest first, into v bins: the least loaded, or the fullest with room. False if stuck."""
    load[:v] = 0.0
    used[:v] = 0
    for i in range(len(tokens)):
        chosen = -1
        for j in range(v):
            if used[j] + tokens[i] > max_length:
                continue
            if chosen < 0 or (by_room and used[j] > used[chosen]) or (not by_room and load[j] < load[chosen]):
                chosen = j
        if chosen < 0:
            return False
        bin_of[i] = chosen
        load[chosen] += work[i]
        used[chosen] += tokens[i]
    return True


def level_bins(
    work: Floats,
    tokens: Ints,
    v: int,
    max_length: int,
    floor: float,
    rounds: int,
    bin_of: Ints,
    load: Floats,
    used: Ints,
) -> float:
    """Lower the heaviest bin by moves and swaps until it is at `floor` or nothing helps; its load in ms."""
    n = len(tokens)
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
                after = max(peak - work[i] + work[k], load[j] + work[i] - work[k])
                if after < best:
                    best, best_i, best_k, best_j = after, i, k, j
        if best_i < 0:
            return peak
        move_item(work, tokens, best_i, best_j, bin_of, load, used)
        if best_k >= 0:
            move_item(work, tokens, best_k, top, bin_of, load, used)
    return load[:v].max()


def move_item(work: Floats, tokens: Ints, i: int, to: int, bin_of: Ints, load: Floats, used: Ints) -> None:
    """Sequence i leaves its bin for bin `to`."""
    load[bin_of[i]] -= work[i]
    used[bin_of[i]] -= tokens[i]
    load[to] += work[i]
    used[to] += tokens[i]
    bin_of[i] = to


def squeeze_bins(
    work: Floats, tokens: Ints, v: int, max_length: int, rounds: int, bin_of: Ints, load: Floats, used: Ints
) -> bool:
    """Level the bins by tokens until none holds more than max_length: finds packings with hardly any room to spare."""
    n = len(tokens)
    as_work = tokens.astype(np.float64)
    no_limit = tokens.sum() + 1
    fill_bins(as_work, tokens, v, no_limit, False, bin_of, load, used)
    fullest = level_bins(as_work, tokens, v, no_limit, float(max_length), rounds, bin_of, load, used)
    load[:v] = 0.0
    for i in range(n):
        load[bin_of[i]] += work[i]
    return fullest <= max_length


def fewest_bins(tokens: Ints, max_length: int) -> int:
    """Fewest micro-batches that could hold the sequences: the L2 bound of bin packing (Martello and Toth)."""
    n = len(tokens)
    best = (tokens.sum() + max_length - 1) // max_length
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


def bins_needed(sizes: Floats, capacity: float) -> int:
    """The L2 bound of bin packing for sizes (n,), largest first, none above the capacity."""
    n = len(sizes)
    total = 0.0
    for i in range(n):
        total += sizes[i]
    best = math.ceil(total / capacity - 1e-9)
    for split in range(n):
        small = sizes[split]
        if 2.0 * small > capacity:
            continue
        large, middle, room, rest = 0, 0, 0.0, 0.0
        for i in range(n):
            if sizes[i] > capacity - small:
                large += 1
            elif 2.0 * sizes[i] > capacity:
                middle += 1
                room += capacity - sizes[i]
            elif sizes[i] >= small:
                rest += sizes[i]
        best = max(best, large + middle + math.ceil(max(0.0, rest - room) / capacity - 1e-9))
        if middle == 0 and large == 0:
            break
    return best


def least_peak(work: Floats, v: int, most: float) -> float:
    """Lower bound, up to `most`, on the largest of v micro-batches' work: mean, pigeonhole, L2 by bisection."""
    n, total = len(work), 0.0
    for i in range(n):
        total += work[i]
    low = max(work[0], total / v)
    for k in range(1, (n - 1) // v + 1):  # k+1 of the k*v+1 largest share a micro-batch
        together = 0.0
        for i in range(k * v - k, k * v + 1):
            together += work[i]
        low = max(low, together)
    high = most
    while high > low * 1.0005:
        middle = 0.5 * (low + high)
        if bins_needed(work, middle) > v:
            low = middle
        else:
            high = middle
    return low


def packing_bound(scheme: Scheme, work: Floats, tokens: Ints, best_v: int, best_ms: float) -> float:
    """Certified lower bound in ms on every packing of a pipeline, given the best one that `pack` found."""
    n = len(tokens)
    if n == 0:
        return 0.0
    total = 0.0
    for i in range(n):
        total += work[i]
    fewest = fewest_bins(tokens, scheme.max_length)
    bound = best_ms
    for v in range(fewest, max(min(n, tokens.sum() // scheme.util_length), best_v) + 1):
        if stage_ms(scheme, total, max(work[0], total / v), v) < bound:
            bound = min(bound, stage_ms(scheme, total, least_peak(work, v, total), v))
    return bound


def pack(scheme: Scheme, work: Floats, tokens: Ints, rounds: int, out_bin: Ints) -> tuple[int, float, float]:
    """Pack the sequences of one pipeline: (micro-batches, ms, lower bound ms); bins go to `out_bin`.

    Tries the numbers of micro-batches of appendix D, the one with the least bound first, and stops when the
    next bound is no better than what is found. More than appendix D's are tried only when none of them fits.
    """
    n = len(tokens)
    if n == 0:
        return 0, 0.0, 0.0
    max_length, total, widest = scheme.max_length, 0.0, work.max()
    for i in range(n):
        total += work[i]  # in order: numpy's own sum rounds differently
    fewest = fewest_bins(tokens, max_length)
    most = min(n, max(fewest, tokens.sum() // scheme.util_length))
    load = np.empty(n, dtype=np.float64)
    used = np.empty(n, dtype=np.int64)
    trial = np.empty(n, dtype=np.int64)
    bounds = np.empty(n + 1, dtype=np.float64)
    for v in range(fewest, n + 1):
        bounds[v] = stage_ms(scheme, total, max(widest, total / v), v)
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
        fits = fill_bins(work, tokens, v, max_length, False, trial, load, used)
        if not fits:
            fits = fill_bins(work, tokens, v, max_length, True, trial, load, used)
        if not fits and rounds > 0:
            fits = squeeze_bins(work, tokens, v, max_length, rounds, trial, load, used)
        if not fits:
            continue
        peak = load[:v].max()
        if scheme.pp > 1 or scheme.paper:
            floor = max(widest, total / v) * (1.0 + 1e-9)
            peak = level_bins(work, tokens, v, max_length, floor, rounds, trial, load, used)
        ms = stage_ms(scheme, total, peak, v)
        if ms < best:
            best, best_v = ms, v
            out_bin[:n] = trial
    return best_v, best, min(bound, best)


def pack_pipeline(
    schemes: Schemes, k: int, p: int, work: Floats, tokens: Ints, rounds: int, owner: Ints, bin_of: Ints
) -> tuple[int, float]:
    """Pack the sequences that `owner` gives to pipeline p of scheme k: (micro-batches, ms); fills their bin_of."""
    chosen = np.flatnonzero(owner == p)
    own_bins = np.empty(len(chosen), dtype=np.int64)
    v, ms, _ = pack(scheme_at(schemes, k), work[k][chosen], tokens[chosen], rounds, own_bins)
    bin_of[chosen] = own_bins
    return v, ms
