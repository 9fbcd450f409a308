"""Kernels that solve tiny steps exactly by dynamic programming over subsets. Plain Python that numba can compile."""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.planner.packing_kernel import stage_ms


def subset_costs(work, tokens, n, c, max_length, util_length, pp, paper, cost, parts):
    """cost[S] = least time in ms of one pipeline that runs exactly the sequences in bit set S; parts[S] its V.

    peaks[S] is, for the current V, the least possible largest work of V micro-batches that hold S.
    """
    full = 1 << n
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
        before = peaks.copy()
        for s in range(full - 1, 0, -1):
            peaks[s] = math.inf
            lowest = s & -s
            t = s
            while t > 0:
                if t & lowest and held[t] <= max_length:
                    peaks[s] = min(peaks[s], max(sums[t], before[s ^ t]))
                t = (t - 1) & s
            if math.isinf(peaks[s]):
                continue
            # appendix D's largest V binds unless fewer micro-batches cannot hold the sequences
            if v > max(1, held[s] // util_length) and parts[s] > 0:
                continue
            ms = stage_ms(sums[s], peaks[s], v, c, pp, paper)
            if ms < cost[s]:
                cost[s] = ms
                parts[s] = v
        peaks[0] = math.inf


def best_split(cost, scheme, pipelines, n, owner):
    """Least slowest pipeline over all ways to deal n sequences out; cost (schemes, 2^n). Fills owner (n,)."""
    full = 1 << n
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
    s = full - 1
    for p in range(pipelines, 0, -1):
        for i in range(n):
            if (share[p, s] >> i) & 1:
                owner[i] = p - 1
        s ^= share[p, s]
    return reach[pipelines, full - 1]


def pack_tiny(work, tokens, n, scheme, pipelines, c, max_length, util_length, pp, paper, owner, bin_of):
    """The optimal micro-batches of each pipeline of a tiny step; fills bin_of (n,)."""
    for p in range(pipelines):
        k = scheme[p]
        size = 0
        for i in range(n):
            if owner[i] == p:
                size += 1
        if size == 0:
            continue
        chosen = np.empty(size, dtype=np.int64)
        own_work = np.empty(size, dtype=np.float64)
        own_tokens = np.empty(size, dtype=np.int64)
        at = 0
        for i in range(n):
            if owner[i] == p:
                chosen[at] = i
                own_work[at] = work[k, i]
                own_tokens[at] = tokens[i]
                at += 1
        cost = np.empty(1 << size, dtype=np.float64)
        parts = np.empty(1 << size, dtype=np.int64)
        subset_costs(own_work, own_tokens, size, c[k], max_length[k], util_length[k], pp[k], paper, cost, parts)
        v = parts[(1 << size) - 1]
        found, load, used = np.empty(size, dtype=np.int64), np.zeros(v), np.zeros(v, dtype=np.int64)
        trial = np.zeros(size, dtype=np.int64)
        least = math.inf
        # all ways to deal `size` sequences into v micro-batches, as a counter in base v
        while True:
            peak, fits, filled = 0.0, True, 0
            for j in range(v):
                load[j] = 0.0
                used[j] = 0
            for x in range(size):
                load[trial[x]] += own_work[x]
                used[trial[x]] += own_tokens[x]
            for j in range(v):
                fits = fits and used[j] <= max_length[k] and used[j] > 0
                peak = max(peak, load[j])
            if fits and peak < least:
                least = peak
                found[:] = trial
            digit = 0
            while digit < size and trial[digit] == min(v - 1, size - 1 - digit):
                trial[digit] = 0
                digit += 1
            if digit == size:
                break
            trial[digit] += 1
        for x in range(size):
            bin_of[chosen[x]] = found[x]
