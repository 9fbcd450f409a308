"""Kernels of dispatch (Eq. 3): sequences to pipelines, slowest pipeline least. Plain Python that numba can compile.

A pipeline's time here is `ideal_ms` of packing: what it takes if its micro-batches balance and fill perfectly.
`repair` then works on packed times.
"""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.planner.kernels.arrays import Effort, Floats, Ints, Items, Placement, Scheme, Schemes, Shape
from ds_hydra.planner.kernels.bound import BLOCKED, share_of_pipeline
from ds_hydra.planner.kernels.packing import ideal_ms, pack_pipeline, scheme_at
from ds_hydra.planner.kernels.repair import repair


def clear(place: Placement) -> None:
    """No sequence on any pipeline."""
    place.total[:] = 0.0
    place.held[:] = 0
    place.widest[:] = 0.0


def put(items: Items, k: int, i: int, p: int, place: Placement) -> None:
    """Sequence i, on no pipeline yet, goes to pipeline p of scheme k."""
    place.owner[i] = p
    place.total[p] += items.work[k, i]
    place.held[p] += items.tokens[i]
    place.widest[p] = max(place.widest[p], items.work[k, i])


def fullest_below(scheme: Scheme, work: float, tokens: int, tau: float, first: int, last: int, place: Placement) -> int:
    """Of pipelines first..last-1, of one scheme, the fullest that takes a sequence within tau; -1 if none does."""
    total, held, widest = place.total, place.held, place.widest
    fullest, slot = -1.0, -1
    for p in range(first, last):
        if total[p] > fullest and total[p] + work + scheme.c <= tau:
            ms = ideal_ms(scheme, total[p] + work, held[p] + tokens, max(widest[p], work))
            if ms <= tau:
                fullest, slot = total[p], p
        if held[p] == 0:
            break  # those after the first empty one are empty too
    return slot


def place_by_price(
    schemes: Schemes, items: Items, shape: Shape, shares: Floats, price: Floats, tau: float, place: Placement
) -> bool:
    """Multifit at target tau: each sequence to the cheapest priced group where a pipeline still meets tau.

    shares (groups, n), price (groups,). False at the first sequence that meets tau nowhere.
    """
    clear(place)
    work, tokens, scheme, pipelines = items.work, items.tokens, shape.scheme, shape.pipelines
    groups = len(pipelines)
    tried = np.empty(groups, dtype=np.bool_)
    first = np.zeros(groups, dtype=np.int64)
    for g in range(1, groups):
        first[g] = first[g - 1] + pipelines[g - 1]
    for i in range(len(tokens)):
        tried[:] = False
        slot = -1
        while slot < 0:
            best, chosen = math.inf, -1
            for g in range(groups):
                if not tried[g] and shares[g, i] < BLOCKED and price[g] * shares[g, i] < best:
                    best, chosen = price[g] * shares[g, i], g
            if chosen < 0:
                return False
            tried[chosen] = True
            k, at = scheme[chosen], first[chosen]
            one = scheme_at(schemes, k)
            slot = fullest_below(one, work[k, i], tokens[i], tau, at, at + pipelines[chosen], place)
            if slot >= 0:
                put(items, k, i, slot, place)
    return True


def place_greedily(schemes: Schemes, items: Items, shape: Shape, place: Placement) -> bool:
    """Longest first, each to the pipeline that would be done soonest with it. False if one fits nowhere."""
    clear(place)
    work, tokens, total, held, widest = items.work, items.tokens, place.total, place.held, place.widest
    for i in range(len(tokens)):
        soonest, slot, first = math.inf, -1, 0
        for g in range(len(shape.pipelines)):
            k = shape.scheme[g]
            one = scheme_at(schemes, k)
            if tokens[i] <= one.max_length:
                for p in range(first, first + shape.pipelines[g]):
                    if total[p] < soonest:
                        more = work[k, i]
                        ms = ideal_ms(one, total[p] + more, held[p] + tokens[i], max(widest[p], more))
                        if ms < soonest:
                            soonest, slot = ms, p
                    if held[p] == 0:
                        break
            first += shape.pipelines[g]
        if slot < 0:
            return False
        put(items, shape.pipeline_scheme[slot], i, slot, place)
    return True


def find_longest(owner: Ints, longest: Ints, second: Ints) -> None:
    """Positions of the longest and second longest sequence of every pipeline; n where there is none."""
    n = len(owner)
    longest[:] = n
    second[:] = n
    for i in range(n):
        p = owner[i]
        if longest[p] == n:
            longest[p] = i
        elif second[p] == n:
            second[p] = i


def other_work(work: Floats, k: int, longest: int, second: int, i: int) -> float:
    """Work under scheme k of a pipeline's longest sequence apart from i, given its two longest; 0 if none."""
    other = second if longest == i else longest
    return work[k, other] if other < work.shape[1] else 0.0


def retime(schemes: Schemes, shape: Shape, p: int, place: Placement) -> None:
    """Set place.ms[p] from the pipeline's sums."""
    one = scheme_at(schemes, shape.pipeline_scheme[p])
    place.ms[p] = ideal_ms(one, place.total[p], place.held[p], place.widest[p])


def improve(schemes: Schemes, items: Items, shape: Shape, goal: float, budget: int, place: Placement) -> float:
    """Local search: moves and swaps that relieve the slowest pipeline, until it meets `goal` or nothing helps.

    `budget` caps the candidates that are looked at. Returns the slowest pipeline's ideal time in ms.
    """
    pipelines = len(shape.pipeline_scheme)
    longest = np.empty(pipelines, dtype=np.int64)
    second = np.empty(pipelines, dtype=np.int64)
    find_longest(place.owner, longest, second)
    for p in range(pipelines):
        retime(schemes, shape, p, place)
    looked = 0
    while True:
        slow = int(place.ms.argmax())
        peak = place.ms[slow]
        if peak <= goal or looked >= budget:
            return peak
        i, q, j, spent = find_exchange(schemes, items, shape, slow, goal, longest, second, place)
        looked += spent
        if i < 0:
            return peak
        exchange(items, shape, i, slow, j, q, place)
        find_longest(place.owner, longest, second)
        retime(schemes, shape, slow, place)
        retime(schemes, shape, q, place)


def find_exchange(
    schemes: Schemes,
    items: Items,
    shape: Shape,
    slow: int,
    goal: float,
    longest: Ints,
    second: Ints,
    place: Placement,
) -> tuple[int, int, int, int]:
    """A move of i from `slow` to q (j = -1) or a swap with j of q after which both are sooner done than `slow` is.

    The best one, or the first that is half way to `goal`. Returns (i, q, j, candidates looked at); i = -1: none.
    """
    work, tokens, scheme, max_length = items.work, items.tokens, shape.pipeline_scheme, schemes.max_length
    owner, total, held, widest = place.owner, place.total, place.held, place.widest
    n, ks, peak = len(tokens), scheme[slow], place.ms[slow]
    one = scheme_at(schemes, ks)
    enough = 0.5 * (peak + goal)
    best, best_i, best_q, best_j, looked = peak * (1.0 - 1e-9), -1, -1, -1, 0
    for i in range(n):
        if owner[i] != slow:
            continue
        rest = other_work(work, ks, longest[slow], second[slow], i)
        left, left_held = total[slow] - work[ks, i], held[slow] - tokens[i]
        without = ideal_ms(one, left, left_held, rest)
        if without >= best:
            continue
        for q in range(len(scheme)):
            kq = scheme[q]
            if q == slow or tokens[i] > max_length[kq] or total[q] + work[kq, i] >= best:
                continue
            looked += 1
            wider = max(widest[q], work[kq, i])
            after = ideal_ms(scheme_at(schemes, kq), total[q] + work[kq, i], held[q] + tokens[i], wider)
            if max(without, after) < best:
                best, best_i, best_q, best_j = max(without, after), i, q, -1
                if best <= enough:
                    return best_i, best_q, best_j, looked
        for j in range(n):
            q = owner[j]
            kq = scheme[q]
            there = total[q] + work[kq, i] - work[kq, j]
            if q == slow or there >= best or left + work[ks, j] >= best or tokens[j] == tokens[i]:
                continue
            if tokens[i] > max_length[kq] or tokens[j] > one.max_length:
                continue
            looked += 1
            here = ideal_ms(one, left + work[ks, j], left_held + tokens[j], max(rest, work[ks, j]))
            if here >= best:
                continue
            wider = max(other_work(work, kq, longest[q], second[q], j), work[kq, i])
            after = ideal_ms(scheme_at(schemes, kq), there, held[q] - tokens[j] + tokens[i], wider)
            if max(here, after) < best:
                best, best_i, best_q, best_j = max(here, after), i, q, j
                if best <= enough:
                    return best_i, best_q, best_j, looked
    return best_i, best_q, best_j, looked


def exchange(items: Items, shape: Shape, i: int, p: int, j: int, q: int, place: Placement) -> None:
    """Sequence i goes from pipeline p to q, and j, unless it is -1, from q to p; both sums are made anew."""
    place.owner[i] = q
    if j >= 0:
        place.owner[j] = p
    for r in (p, q):
        place.total[r] = 0.0
        place.held[r] = 0
        place.widest[r] = 0.0
    owner = place.owner
    for x in range(len(owner)):
        r = owner[x]
        if r == p or r == q:  # noqa: SIM109 (numba builds no tuple here)
            put(items, shape.pipeline_scheme[r], x, r, place)


def dispatch(
    schemes: Schemes,
    items: Items,
    shape: Shape,
    bound: float,
    price: Floats,
    ceiling: float,
    effort: Effort,
    seed: int,
    place: Placement,
    bin_of: Ints,
) -> float:
    """Best of the greedy placement and some priced multifits with bisection, each after local search and packing.

    Prices (groups,) are the bound's; every restart but the first bends them at random. Stops early at `bound`,
    and a restart is given up at once when it cannot meet `ceiling`, the time that would be of use. Fills `place`
    and bin_of (n,); returns the slowest pipeline's time in ms, infinite when nothing was found.
    """
    groups, n, pipelines = len(shape.pipelines), len(items.tokens), len(shape.pipeline_scheme)
    trial = Placement(
        np.zeros(n, dtype=np.int64),
        np.zeros(pipelines, dtype=np.float64),
        np.zeros(pipelines, dtype=np.int64),
        np.zeros(pipelines, dtype=np.float64),
        np.zeros(pipelines, dtype=np.float64),
    )
    shares = np.empty((groups, n), dtype=np.float64)
    bent = np.empty(groups, dtype=np.float64)
    goal = bound * (1.0 + 1e-6)
    best, best_ideal = math.inf, math.inf
    if place_greedily(schemes, items, shape, trial):
        best_ideal = improve(schemes, items, shape, goal, effort.moves, trial)
        best = finish(schemes, items, shape, best_ideal, best, goal, effort, trial, place, bin_of)
    state = seed + 1
    for restart in range(effort.restarts):
        bent[:] = price
        if restart > 0:
            for g in range(groups):
                state = (state * 1103515245 + 12345) % 2147483648
                bent[g] *= 1.0 + 0.16 * (state / 2147483648.0 - 0.5)
        low, high = bound, min(best, best_ideal if restart == 0 else best)
        for step in range(8):
            tau = low * (1.0 + 0.002) if step == 0 else 0.5 * (low + high)
            if step == 0 and low < ceiling < high:
                tau = ceiling * (1.0 - 1e-3)
            if best <= goal or tau >= high or high - low < 2e-4 * low:
                break
            for g in range(groups):
                share_of_pipeline(schemes, shape.scheme[g], items, tau, shares[g])
            if place_by_price(schemes, items, shape, shares, bent, tau, trial):
                high = improve(schemes, items, shape, goal, effort.moves, trial)
                best = finish(schemes, items, shape, high, best, goal, effort, trial, place, bin_of)
            elif step == 0 and tau < ceiling < high:
                break
            else:
                low = tau
    return best


def finish(
    schemes: Schemes,
    items: Items,
    shape: Shape,
    ideal: float,
    best: float,
    goal: float,
    effort: Effort,
    trial: Placement,
    place: Placement,
    bin_of: Ints,
) -> float:
    """Pack and repair a trial whose ideal time is less than the best; the best time. A better trial becomes `place`."""
    if ideal >= best:
        return best
    bins, ms = np.zeros(len(bin_of), dtype=np.int64), ideal
    if effort.packs:
        ms = pack_all(schemes, items, shape, effort.levels, trial, bins)
        if ms > ideal * (1.0 + 1e-9) and ms < best * 1.05:
            ms = repair(schemes, items, shape, effort.levels, goal, effort.repackings, trial, bins)
    if ms >= best:
        return best
    place.owner[:] = trial.owner
    place.total[:] = trial.total
    place.held[:] = trial.held
    place.widest[:] = trial.widest
    place.ms[:] = trial.ms
    bin_of[:] = bins
    return ms


def pack_all(schemes: Schemes, items: Items, shape: Shape, rounds: int, place: Placement, bin_of: Ints) -> float:
    """Pack every pipeline's sequences. Fills bin_of (n,) and place.ms; returns the slowest in ms."""
    for p in range(len(shape.pipeline_scheme)):
        k = shape.pipeline_scheme[p]
        _, place.ms[p] = pack_pipeline(schemes, k, p, items.work, items.tokens, rounds, place.owner, bin_of)
    return place.ms.max()
