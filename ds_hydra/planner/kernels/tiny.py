"""Kernels that solve tiny steps exactly by dynamic programming over subsets. Plain Python that numba can compile.

[Note: subsets]
A set of sequences is a whole number: bit i says whether sequence i is in it. With three sequences 0b101 = 5 is the
set of the first and the last, 0b111 the full set, and `s ^ t` is what of s is not in its subset t. All subsets of s
come from counting down through its bits: t = (t - 1) & s, e.g. 101, 100, 001, 000. Over all sets of n sequences these
are 3^n pairs: 6,561 for eight sequences, which is less than any search looks at.
"""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.planner.kernels.arrays import Floats, Ints, Scheme
from ds_hydra.planner.kernels.packing import stage_ms


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
