"""Kernels that pack the sequences of one pipeline into micro-batches, whole or in slices. Plain Python for numba.

Sequences come longest first: `work[i]` ms, `tokens[i]` tokens. A micro-batch pays c ms once and holds up to
MaxLen tokens. Times are the flow shop's, sum + (PP-1) * max.

[Note: number of micro-batches]
More micro-batches make the largest one smaller, and with it the bubble of PP-1 of them, but each costs c. Take
12 ms of work, c = 1 ms and PP = 4. If all micro-batches were equal, V of them would take 12 + V + 3 * (12/V + 1):

    V = 2: 35     V = 4: 28     V = 6: 27     V = 8: 27.5

The least lies at V = sqrt((PP-1) * work / c) = sqrt(36) = 6. With PP = 1 there is no bubble, so as few
micro-batches as hold the tokens are best. Real sequences do not divide evenly, so a few V must be packed: those
whose ideal time is less than the best packing found.

[Note: slots]
Micro-batches are made to a profile of target loads. The first forward is how long the last stage waits and the last
backward how long the first one does, so slots are small first, grow, and are smaller at the end; few and large ones pay
c less often. A profile is (slots, first, growth, last, begin): targets first, first*growth, first*growth^2 and so on up
to 1, the last of them no more than `last`, and all scaled to add up to the work. Six slots of 280 ms of work, with
first = 0.3, growth = 1.5, last = 0.7:

  relative   0.30   0.45   0.68   1.00   0.85   0.70        the last but one is midway between 1 and `last`
  ms           21     32     48     70     60     49

A sequence of more than 1.3 of the largest target is cut, from slot `begin` on into slots in a row: each slice ends
where its slot's target is reached. No slice is shorter than UtilLen, and a rest of less than 0.6 of that joins the
slice before. Then the whole sequences go, longest first, where the load is the smallest share of the target; beside a
last slice too, but beside no earlier one, where they would live as long as the sequence.

[Note: layers of a run]
Under the list order a run [Note: chains] reserves its memory at once, and runs do not share any. So what a run has too
much is saved within it, and what costs the least is: the micro-batches with the least forward for what they save, which
of slices are the first ones [Note: layers computed again]. All of their layers, one micro-batch after the other; of the
last one as many as are still needed. That is off the least cost by a part of one micro-batch's layers at most.

While a layer is computed again it keeps everything for a moment. A run that has any keeps room for the largest one.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from ds_hydra.costs.stage_work import UNITS, stage_work
from ds_hydra.planner.kernels.problem import Bins, Floats, Ints, Pieces, Pipe, Problem, Profile, Scheme, Schemes


def scheme_at(schemes: Schemes, k: int) -> Scheme:
    """The constants of scheme k."""
    return Scheme(schemes.c[k], schemes.max_length[k], schemes.util_length[k], schemes.pp[k], schemes.floor[k])


def stage_ms(scheme: Scheme, total: float, widest: float, v: int) -> float:
    """Time of a pipeline with v micro-batches of `total` ms in all and `widest` ms at most, c excluded.

    Where some of them are above the floor and others below it, it is a lower bound.
    """
    return max(total + v * scheme.c + (scheme.pp - 1) * (widest + scheme.c), (v + scheme.pp - 1) * scheme.floor)


NEGLIGIBLE = 1e-4  # of a pipeline's time: what is not looked for further
PATIENCE = 8  # numbers of micro-batches that fail before one is skipped after each failure, after as many more two, ...


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
    best, best_v, bound, failed = math.inf, 0, math.inf, 0
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
        if bounds[v] >= best * (1.0 - NEGLIGIBLE):
            break
        done[v] = True
        # Three ways to get everything in, each better at tight fits and worse at balance than the one before it.
        fits = fill_bins(work, tokens, v, max_length, False, bins)
        if not fits:
            fits = fill_bins(work, tokens, v, max_length, True, bins)
        if not fits and rounds > 0 and max(scheme.c, scheme.floor) > NEGLIGIBLE * bounds[v]:
            fits = squeeze_bins(work, tokens, v, max_length, rounds, bins)
        if not fits:
            # Where many numbers fail, those just above need not be tried one by one.
            failed += 1
            done[v : min(n, v + 1 + failed // PATIENCE)] = True
            continue
        peak = load[:v].max()
        if widest_counts(scheme):
            floor = max(widest, total / v) + NEGLIGIBLE * bounds[v] / max(1, scheme.pp - 1)
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


LONG = 1.3  # largest targets: what takes more is cut
SHORT_REST = 0.6  # of UtilLen: what is left over and shorter joins the slice before
MORE, MORE_WHOLE = 0.7, 0.5  # of the largest target: a further slot for a slice, for a whole sequence


def empty_pieces(pieces: int, slots: int) -> Pieces:
    """Nothing yet, with room for so many."""
    return Pieces(
        np.zeros(pieces, dtype=np.int64),
        np.zeros(pieces, dtype=np.int64),
        np.zeros(pieces, dtype=np.int64),
        np.zeros(pieces, dtype=np.int64),
        np.zeros(slots, dtype=np.int64),
        np.zeros(slots, dtype=np.int64),
        np.zeros(slots, dtype=np.float64),
        np.zeros(2, dtype=np.int64),
    )


def most_slots(pipe: Pipe, tokens: Ints, slots: int) -> int:
    """More micro-batches than a profile of so many slots can ever need."""
    most = slots + 2
    for length in tokens:
        most += length // pipe.util_length + 2
    return most


def copy_pieces(source: Pieces, target: Pieces) -> None:
    """Make `target` equal to `source`."""
    pieces, slots = source.counts
    target.item[:pieces] = source.item[:pieces]
    target.start[:pieces] = source.start[:pieces]
    target.stop[:pieces] = source.stop[:pieces]
    target.slot[:pieces] = source.slot[:pieces]
    target.before[:slots] = source.before[:slots]
    target.held[:slots] = source.held[:slots]
    target.again[:slots] = source.again[:slots]
    target.counts[:] = source.counts


def copied(source: Pieces) -> Pieces:
    """A deep copy."""
    made = empty_pieces(len(source.item), len(source.before))
    copy_pieces(source, made)
    return made


def add_piece(pieces: Pieces, item: int, start: int, stop: int, slot: int) -> None:
    """One more slice, or whole sequence, in a slot."""
    at = pieces.counts[0]
    pieces.item[at] = item
    pieces.start[at] = start
    pieces.stop[at] = stop
    pieces.slot[at] = slot
    pieces.held[slot] += stop - start
    pieces.counts[0] = at + 1


def set_targets(profile: Profile, work: float, target: Floats) -> float:
    """Fill target (at least slots,) in ms; the largest of them."""
    slots, relative = profile.slots, profile.first
    for s in range(slots):
        target[s] = min(1.0, relative)
        relative *= profile.growth
    if slots > 3:
        target[slots - 1] = min(target[slots - 1], profile.last)
    if slots > 5:
        target[slots - 2] = min(target[slots - 2], (1.0 + profile.last) / 2)
    total = 0.0
    for s in range(slots):
        total += target[s]
    largest = 0.0
    for s in range(slots):
        target[s] *= work / total
        largest = max(largest, target[s])
    return largest


def slot_after(slots: int, more: float, target: Floats, pieces: Pieces) -> int:
    """A further slot with a target of `more` ms; how many there are then."""
    target[slots] = more
    pieces.before[slots] = -1
    pieces.held[slots] = 0
    return slots + 1


def cut_one(pipe: Pipe, item: int, length: int, at: int, more: float, target: Floats, load: Floats,
            limit: Ints, pieces: Pieces) -> int:  # fmt: skip
    """Put a sequence's slices into slots from `at` on; the slot after its last one. `limit`: tokens of each slot."""
    a, b = pipe.costs.ms.a, pipe.costs.ms.b
    start, done, earlier, states = 0, 0.0, -1, 0.0
    while start < length:
        while pieces.counts[1] <= at:
            pieces.counts[1] = slot_after(pieces.counts[1], more, target, pieces)
        until = done + target[at]
        # The length whose work is `until`: the root of a*l^2 + b*l in the form that does not divide by a.
        stop = max(int(2.0 * until / (b + math.sqrt(b * b + 4.0 * a * until))), start + pipe.util_length)
        if length - stop < SHORT_REST * pipe.util_length:
            stop = length
        stop = min(stop, start + pipe.max_length)
        ms = a * stop * stop + b * stop
        add_piece(pieces, item, start, stop, at)
        load[at] += ms - done
        pieces.before[at] = earlier
        # Nothing stands beside a slice that others follow. Beside the last one there is the room that all leave: they
        # live together.
        others = math.ceil(start * (1.0 + pipe.costs.context) + states) + 1
        limit[at] = 0 if stop < length else min(pipe.max_length, pipe.room // UNITS - others)
        start, done, earlier, at, states = stop, ms, at, at + 1, states + pipe.costs.state
    return at


def cut(pipe: Pipe, profile: Profile, work: Floats, tokens: Ints, pieces: Pieces) -> bool:
    """Micro-batches to a profile [Note: slots] for sequences longest first; False where one fits nowhere.

    work (sequences,) ms, tokens (sequences,). Fills `pieces`, which has room for `most_slots`.
    """
    n, most = len(tokens), len(pieces.before)
    target = np.zeros(most, dtype=np.float64)
    load = np.zeros(most, dtype=np.float64)
    limit = np.full(most, pipe.max_length)
    total = 0.0
    for i in range(n):
        total += work[i]
    unit = set_targets(profile, total, target)
    pieces.counts[0], pieces.counts[1] = 0, profile.slots
    pieces.before[: profile.slots] = -1
    pieces.held[: profile.slots] = 0
    at = profile.begin
    for i in range(n):
        if pipe.slices and (work[i] > LONG * unit or tokens[i] > pipe.max_length):
            at = cut_one(pipe, i, tokens[i], at, MORE * unit, target, load, limit, pieces)
    for i in range(n):
        if pipe.slices and (work[i] > LONG * unit or tokens[i] > pipe.max_length):
            continue
        if tokens[i] > pipe.max_length:
            return False
        chosen, least = -1, math.inf
        for s in range(pieces.counts[1]):
            if pieces.held[s] + tokens[i] <= limit[s] and (load[s] + work[i]) / target[s] < least:
                chosen, least = s, (load[s] + work[i]) / target[s]
        if chosen < 0:
            chosen = pieces.counts[1]
            pieces.counts[1] = slot_after(chosen, MORE_WHOLE * unit, target, pieces)
        add_piece(pieces, i, 0, tokens[i], chosen)
        load[chosen] += work[i]
    leave_out_empty(pieces)
    return True


def leave_out_empty(pieces: Pieces) -> None:
    """Number the slots that hold something 0, 1, 2, ..."""
    slots = pieces.counts[1]
    number = np.full(slots, -1, dtype=np.int64)
    used = 0
    for s in range(slots):
        if pieces.held[s] > 0:
            number[s] = used
            used += 1
    for s in range(slots):
        if number[s] >= 0:
            earlier = pieces.before[s]
            pieces.held[number[s]] = pieces.held[s]
            pieces.before[number[s]] = number[earlier] if earlier >= 0 else -1
    for at in range(pieces.counts[0]):
        pieces.slot[at] = number[pieces.slot[at]]
    pieces.counts[1] = used


def unfolded(pipe: Pipe, tokens: int) -> int:
    """Units of a stage that a layer takes more while it is computed again for so many tokens."""
    costs = pipe.costs
    return math.ceil(UNITS * (1.0 - costs.recomputed) * tokens / (costs.parts * pipe.layers))


def spare(pipe: Pipe, pieces: Pieces, squares: Ints, after: Ints, works: Ints, begin: int, stop: int) -> bool:
    """Let layers of the run of micro-batches begin, ..., stop - 1 be computed again until it fits the room.

    Fills `pieces.again` and the works (at least 4, slots) with that. False if it does not fit with all layers.
    """
    count, parts = stop - begin, pipe.costs.parts
    most, held = 0, 0
    saved = np.zeros(count, dtype=np.int64)
    for m in range(begin, stop):
        every = stage_work(pipe.costs, squares[m], pieces.held[m], after[m] >= 0, 1.0)
        saved[m - begin] = works[3, m] - every[3]
        held += works[3, m]
        most = max(most, pieces.held[m])
    # Works are rounded: a unit for each micro-batch makes up for that.
    missing = held + count - (pipe.room - unfolded(pipe, most)) // parts
    while missing > 0:
        cheapest = -1
        for m in range(begin, stop):
            at = m - begin
            # Less than the cheapest so far, of forward over what is saved; without a division, as all is whole.
            if saved[at] > 0 and (
                cheapest < 0 or works[0, m] * saved[cheapest - begin] < works[0, cheapest] * saved[at]
            ):
                cheapest = m
        if cheapest < 0:
            return False
        saves = saved[cheapest - begin]
        layers = min(pipe.layers, math.ceil(missing * pipe.layers / saves))
        pieces.again[cheapest] = layers / pipe.layers
        saved[cheapest - begin] = 0
        missing -= saves * layers // pipe.layers
    for m in range(begin, stop):
        work = stage_work(pipe.costs, squares[m], pieces.held[m], after[m] >= 0, pieces.again[m])
        works[0, m], works[1, m], works[2, m], works[3, m], works[4, m] = work
    return True
