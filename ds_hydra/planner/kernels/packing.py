"""Kernels of packing: the sequences of one pipeline in, micro-batches out. Plain Python that numba can compile.

Sequences come longest first: `work[i]` ms, `tokens[i]` tokens. A micro-batch pays c ms once and holds up to
MaxLen tokens. Times are the flow shop's, sum + (PP-1) * max.

[Note: number of micro-batches]
More micro-batches make the largest one smaller, and with it the bubble of PP-1 of them, but each costs c. Take
12 ms of work, c = 1 ms and PP = 4. If all micro-batches were equal, V of them would take 12 + V + 3 * (12/V + 1):

    V = 2: 35     V = 4: 28     V = 6: 27     V = 8: 27.5

The least lies at V = sqrt((PP-1) * work / c) = sqrt(36) = 6. With PP = 1 there is no bubble, so as few
micro-batches as hold the tokens are best. Real sequences do not divide evenly, so a few V must be packed: those
whose ideal time is less than the best packing found.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from ds_hydra.planner.kernels.arrays import Bins, Floats, Ints, Problem, Scheme, Schemes


def scheme_at(schemes: Schemes, k: int) -> Scheme:
    """The constants of scheme k."""
    return Scheme(schemes.c[k], schemes.max_length[k], schemes.util_length[k], schemes.pp[k], schemes.floor[k])


def stage_ms(scheme: Scheme, total: float, widest: float, v: int) -> float:
    """Time of a pipeline with v micro-batches of `total` ms in all and `widest` ms at most, c excluded.

    Where some of them are above the floor and others below it, it is a lower bound.
    """
    return max(total + v * scheme.c + (scheme.pp - 1) * (widest + scheme.c), (v + scheme.pp - 1) * scheme.floor)


def widest_counts(scheme: Scheme) -> bool:
    """Whether `stage_ms` depends on the largest micro-batch: with PP = 1 it is a plain sum."""
    return scheme.pp > 1


def ideal_ms(scheme: Scheme, total: float, tokens: int, widest: float) -> float:
    """Time of a pipeline whose micro-batches balance and fill perfectly: a lower bound on every packing.

    It needs three sums of the pipeline and no sequence, which is what makes local search over dispatches cheap.
    """
    if tokens == 0:
        return 0.0
    fewest = (tokens + scheme.max_length - 1) // scheme.max_length
    best = stage_ms(scheme, total, max(widest, total / fewest), fewest)
    if scheme.pp == 1:
        return best
    most = max(fewest, tokens // scheme.util_length)
    # Past total / widest the longest sequence alone is the largest micro-batch: more of them only cost c.
    if widest > 0.0:
        most = max(fewest, min(most, math.ceil(total / widest)))
    # The time over V falls, then rises: its least whole V is a neighbour of the root [Note: number of micro-batches].
    v = most
    if scheme.c > 0.0:
        v = min(most, int(math.sqrt((scheme.pp - 1) * total / scheme.c)))
    for candidate in range(max(v, fewest), min(v + 1, most) + 1):
        best = min(best, stage_ms(scheme, total, max(widest, total / candidate), candidate))
    if scheme.floor > 0.0:
        # The floors' sum rises with V, so the least of both may lie at fewer, where the time still falls.
        last = math.inf
        for candidate in range(min(v, most), fewest, -1):
            ms = stage_ms(scheme, total, max(widest, total / candidate), candidate)
            if ms >= last:
                break
            last = ms
        best = min(best, last)
    return best


def fill_bins(work: Floats, tokens: Ints, v: int, max_length: int, by_room: bool, bins: Bins) -> bool:
    """Put the sequences, longest first, into v bins: the least loaded, or the fullest with room. False if stuck."""
    bin_of, load, used, spent = bins
    spent[0] += 4 * len(tokens)  # a heap looks at a few bins for each sequence
    load[:v] = 0.0
    used[:v] = 0
    # The bins that may have room, first the one to fill next; and those that had none, first the one with most room.
    # Sequences get shorter, so a bin goes from one heap to the other at most once for each sequence that it is given.
    ready = [(0.0, j) for j in range(v)]
    full = [(0, 0) for j in range(0)]
    for i in range(len(tokens)):
        while len(full) > 0 and full[0][0] + tokens[i] <= max_length:
            _, j = heapq.heappop(full)
            heapq.heappush(ready, (-float(used[j]) if by_room else load[j], j))
        while len(ready) > 0 and used[ready[0][1]] + tokens[i] > max_length:
            _, j = heapq.heappop(ready)
            heapq.heappush(full, (used[j], j))
        if len(ready) == 0:
            return False
        _, j = heapq.heappop(ready)
        bin_of[i] = j
        load[j] += work[i]
        used[j] += tokens[i]
        heapq.heappush(ready, (-float(used[j]) if by_room else load[j], j))
    return True


def level_bins(work: Floats, tokens: Ints, v: int, max_length: int, floor: float, rounds: int, bins: Bins) -> float:
    """Lower the heaviest bin by moves and swaps until it is at `floor` or nothing helps; its load in ms.

    Example: bins of 6+4 and 5+2 ms. No move out of the first helps (10 becomes 11 or 13 elsewhere), but swapping
    the 6 for the 5 gives 9 and 8.
    """
    bin_of, load, used, spent = bins
    n = len(tokens)
    first = np.empty(v, dtype=np.int64)  # of each bin's sequences, the longest; after the last one comes n
    following = np.empty(n, dtype=np.int64)
    for _ in range(rounds):
        top = int(load[:v].argmax())
        peak = load[top]
        if peak <= floor:
            return peak
        first[:] = n
        for i in range(n - 1, -1, -1):
            following[i] = first[bin_of[i]]
            first[bin_of[i]] = i
        spent[0] += n
        # The best single exchange is made, not the first: there are few sequences in a bin, and rounds are limited.
        # A hair below the peak, or rounding could swap two equal sequences for ever. The lightest bins come first: an
        # exchange leaves at least half of what it and the heaviest have together, and soon no other can do better.
        best = peak * (1.0 - 1e-12)
        best_i, best_k, best_j = -1, -1, -1
        for j in load[:v].argsort(kind="mergesort"):
            if 0.5 * (peak + load[j]) >= best:
                break
            i = first[top]
            while i < n and j != top:
                if used[j] + tokens[i] <= max_length:
                    after = max(peak - work[i], load[j] + work[i])
                    if after < best:
                        best, best_i, best_k, best_j = after, i, -1, j
                k = first[j]
                while k < n:
                    spent[0] += 1
                    # Only shorter sequences, which come later, make the heaviest bin lighter when swapped in.
                    if k > i and used[j] - tokens[k] + tokens[i] <= max_length:
                        after = max(peak - work[i] + work[k], load[j] + work[i] - work[k])
                        if after < best:
                            best, best_i, best_k, best_j = after, i, k, j
                    k = following[k]
                i = following[i]
        if best_i < 0:
            return peak
        move_item(work, tokens, best_i, best_j, bins)
        if best_k >= 0:
            move_item(work, tokens, best_k, top, bins)
    return load[:v].max()


def move_item(work: Floats, tokens: Ints, i: int, to: int, bins: Bins) -> None:
    """Sequence i leaves its bin for bin `to`."""
    bin_of, load, used, _ = bins
    load[bin_of[i]] -= work[i]
    used[bin_of[i]] -= tokens[i]
    load[to] += work[i]
    used[to] += tokens[i]
    bin_of[i] = to


def squeeze_bins(work: Floats, tokens: Ints, v: int, max_length: int, rounds: int, bins: Bins) -> bool:
    """Level the bins by tokens until none holds more than max_length: finds packings with hardly any room to spare.

    Filling one bin after the other gets stuck where everything fits only just. So the limit is dropped, tokens are
    dealt out as if they were the work, and the fullest bin is levelled until the limit holds again.
    """
    n = len(tokens)
    as_work = tokens.astype(np.float64)
    no_limit = tokens.sum() + 1
    fill_bins(as_work, tokens, v, no_limit, False, bins)
    fullest = level_bins(as_work, tokens, v, no_limit, float(max_length), rounds, bins)
    bins.load[:v] = 0.0
    for i in range(n):
        bins.load[bins.bin_of[i]] += work[i]
    return fullest <= max_length


def bins_needed(sizes: Ints | Floats, capacity: float, slack: float) -> int:
    """Fewest bins that could hold sizes (n,), largest first: the L2 bound of bin packing (Martello and Toth, 1990).

    Sizes are tokens, with a slack of 0, or ms, with the slack by which a quotient may miss a whole number by
    rounding. None may exceed the capacity. Whole numbers below 2^52 give exact quotients.

    Example: sizes 6, 6, 6, 2 and capacity 10. Together they are 20, so the sum asks for two bins. But no two of the
    6s share a bin: three are needed.
    """
    n, halves = len(sizes), 0
    before = np.zeros(n + 1, dtype=np.float64)  # sum of the sizes before each
    for i in range(n):
        before[i + 1] = before[i] + sizes[i]
        halves += sizes[i] + sizes[i] > capacity
    best = math.ceil(before[n] / capacity - slack)
    large = halves
    for split in range(halves, n):
        # Leave out what is smaller than `small`; what is left needs no more bins than all do. Then
        # - large ones (over capacity - small) share a bin with nothing that is left,
        # - middle ones (over half of the capacity) never share one with each other or with a large one,
        # - the rest fills the room beside the middle ones; what is over needs bins of its own.
        small = sizes[split]
        while large > 0 and sizes[large - 1] <= capacity - small:
            large -= 1
        room = (halves - large) * capacity - (before[halves] - before[large])
        rest = before[split + 1] - before[halves]
        best = max(best, halves + math.ceil(max(0.0, rest - room) / capacity - slack))
        if halves == 0:
            break  # nothing is over half of the capacity: the sum is the bound, whatever is left out
    return best


def least_peak(work: Floats, v: int, most: float) -> float:
    """Lower bound, up to `most`, on the largest of v micro-batches' work: mean, pigeonhole, L2 by bisection.

    Example: 6, 5 and 4 ms in two micro-batches. Mean: 7.5. Pigeonhole: of three sequences in two micro-batches two
    share one, and the two least are 5 + 4 = 9. L2: at a capacity of 8.9 three are needed. So 9.
    """
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
        if bins_needed(work, middle, 1e-9) > v:
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
    fewest = bins_needed(tokens, scheme.max_length, 0.0)
    bound = best_ms
    for v in range(fewest, max(min(n, tokens.sum() // scheme.util_length), best_v) + 1):
        if stage_ms(scheme, total, max(work[0], total / v), v) < bound:
            bound = min(bound, stage_ms(scheme, total, least_peak(work, v, total), v))
    return bound


def pack(scheme: Scheme, work: Floats, tokens: Ints, rounds: int, out_bin: Ints) -> tuple[int, float, float, int]:
    """Pack the sequences of one pipeline: (micro-batches, ms, lower bound ms, elementary work); bins go to `out_bin`.

    Tries the numbers of micro-batches of appendix D, the one with the least bound first, and stops when the
    next bound is no better than what is found. More than appendix D's are tried only when none of them fits.
    """
    n = len(tokens)
    if n == 0:
        return 0, 0.0, 0.0, 0
    max_length, total, widest = scheme.max_length, 0.0, work.max()
    for i in range(n):
        total += work[i]  # in order: numpy's own sum rounds differently
    fewest = bins_needed(tokens, max_length, 0.0)
    most = min(n, max(fewest, tokens.sum() // scheme.util_length))
    load = np.empty(n, dtype=np.float64)
    used = np.empty(n, dtype=np.int64)
    trial = np.empty(n, dtype=np.int64)
    bins = Bins(trial, load, used, np.zeros(1, dtype=np.int64))
    bounds = np.empty(n + 1, dtype=np.float64)  # of each V: its micro-batches all equal, or one as long as the longest
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
            most += 1  # no V up to appendix D's fits; with V = n every sequence is alone, which always does
            continue
        bound = min(bound, bounds[v])
        if bounds[v] >= best:
            break
        done[v] = True
        # Three ways to get everything in, each better at tight fits and worse at balance than the one before it.
        fits = fill_bins(work, tokens, v, max_length, False, bins)
        if not fits:
            fits = fill_bins(work, tokens, v, max_length, True, bins)
        if not fits and rounds > 0:
            fits = squeeze_bins(work, tokens, v, max_length, rounds, bins)
        if not fits:
            continue
        peak = load[:v].max()
        if widest_counts(scheme):
            floor = max(widest, total / v) * (1.0 + 1e-9)
            peak = level_bins(work, tokens, v, max_length, floor, rounds, bins)
        ms = stage_ms(scheme, total, peak, v)
        if ms < best:
            best, best_v = ms, v
            out_bin[:n] = trial
    return best_v, best, min(bound, best), bins.spent[0]


def pack_pipeline(problem: Problem, p: int, rounds: int, owner: Ints, bin_of: Ints) -> tuple[float, int]:
    """Pack the sequences that `owner` gives to pipeline p: (ms, elementary work); fills their bin_of."""
    k = problem.shape.pipeline_scheme[p]
    chosen = np.flatnonzero(owner == p)
    own_bins = np.empty(len(chosen), dtype=np.int64)
    work, tokens = problem.items.work[k][chosen], problem.items.tokens[chosen]
    _, ms, _, spent = pack(scheme_at(problem.schemes, k), work, tokens, rounds, own_bins)
    bin_of[chosen] = own_bins
    return ms, spent + len(owner)
