"""Kernels of dispatch (Eq. 3): the slowest pipeline takes the least time. Plain Python for numba.

[Note: dispatch]
A pipeline's time here is `ideal_ms` of packing: what it takes if its micro-batches balance and fill perfectly.
`repair` then works on packed times. The running example, three sequences of 6, 5 and 4 ms on two equal pipelines
(PP = 1, c = 0), goes like this:

- Greedy: 6 to the first, 5 to the second, 4 to the one that is sooner done with it: 5 + 4 = 9 against 6 + 4 = 10.
- Multifit: name a time tau and fill pipelines up to it. At tau = 8 the 4 finds no place (10 or 9), at tau = 10 the 6
  and the 4 share a pipeline, the 5 is alone. Bisection between what failed and what was reached closes in on 9.
- Local search: of (6+4, 5) the slowest pipeline takes 10; moving the 4 gives (6, 5+4) and 9.

With pipelines of several kinds it matters which kind a sequence goes to, so multifit goes by the prices of the
bound: a price per pipeline of each kind, high where many sequences compete for few pipelines. A short sequence then
stays away from the pipelines that only the long ones need.

Sequences come longest first, and equal pipelines are filled one after the other, so that of several empty ones only
the first need be looked at.

Only exchanges with the slowest pipeline can make a step shorter. Both ends' new times follow from their sums, less
what leaves and plus what comes; the longest sequence that stays is known from the two longest of each pipeline.

[Note: repair]
Dispatch works with ideal times, as if micro-batches always filled to the last token. Often they cannot. With
MaxLen 10, sequences of 6, 6 and 6 tokens look as if two micro-batches held their 18 tokens, but no two of them fit
together: there must be three, and the pipeline pays c once more than dispatch counted. Trading one 6 for a 4 of
another pipeline cures that (6 + 4, 6). Only packing tells, so here both pipelines are packed anew for every exchange
that may help: by three sums of each, its ideal time is less than what the slowest takes. That is dear: the number of
packings is limited, and all repairs of a dispatch together do no more elementary work than the dispatch itself.
Nor is it worth it where what an exchange may save, a micro-batch's c, is nothing against the step: with a thousand
micro-batches in a pipeline repairs took twice as long as all else and changed no plan.
"""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.planner.kernels.bound import BLOCKED, share_of_pipeline
from ds_hydra.planner.kernels.packing import NEGLIGIBLE, ideal_ms, pack_pipeline, scheme_at
from ds_hydra.planner.kernels.problem import (
    Floats,
    Ints,
    Items,
    Placement,
    Problem,
    Prospect,
    Scheme,
    Schemes,
    SearchEffort,
    Shape,
)


def empty_placement(sequences: int, pipelines: int) -> Placement:
    """Every sequence on pipeline 0, in micro-batch 0, and all sums 0: to be filled."""
    return Placement(
        np.zeros(sequences, dtype=np.int64),
        np.zeros(sequences, dtype=np.int64),
        np.zeros(pipelines, dtype=np.float64),
        np.zeros(pipelines, dtype=np.int64),
        np.zeros(pipelines, dtype=np.float64),
        np.zeros(pipelines, dtype=np.float64),
        np.zeros(2, dtype=np.int64),
    )


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
        # The sum with c is no more than the ideal time and costs next to nothing: most pipelines fail it.
        if total[p] > fullest and total[p] + work + scheme.c <= tau:
            ms = ideal_ms(scheme, total[p] + work, held[p] + tokens, max(widest[p], work))
            if ms <= tau:
                fullest, slot = total[p], p
        if held[p] == 0:
            break  # those after the first empty one are empty too
    return slot


def place_by_price(problem: Problem, shares: Floats, price: Floats, tau: float, place: Placement) -> bool:
    """Multifit at target tau: each sequence to the cheapest priced kind where a pipeline still meets tau.

    shares (kinds, n), price (kinds,). False at the first sequence that meets tau nowhere.
    """
    clear(place)
    schemes, items, shape = problem
    work, tokens, scheme, pipelines = items.work, items.tokens, shape.scheme, shape.pipelines
    place.spent[0] += len(tokens) * len(shape.pipeline_scheme)  # at most
    kinds = len(pipelines)
    tried = np.empty(kinds, dtype=np.bool_)
    first = np.zeros(kinds, dtype=np.int64)
    for kind in range(1, kinds):
        first[kind] = first[kind - 1] + pipelines[kind - 1]
    for i in range(len(tokens)):
        tried[:] = False
        slot = -1
        while slot < 0:
            best, chosen = math.inf, -1
            for kind in range(kinds):
                if not tried[kind] and shares[kind, i] < BLOCKED and price[kind] * shares[kind, i] < best:
                    best, chosen = price[kind] * shares[kind, i], kind
            if chosen < 0:
                return False
            tried[chosen] = True
            k, at = scheme[chosen], first[chosen]
            one = scheme_at(schemes, k)
            slot = fullest_below(one, work[k, i], tokens[i], tau, at, at + pipelines[chosen], place)
            if slot >= 0:
                put(items, k, i, slot, place)
    return True


def place_greedily(problem: Problem, place: Placement) -> bool:
    """Longest first, each to the pipeline that would be done soonest with it. False if one fits nowhere."""
    clear(place)
    schemes, items, shape = problem
    work, tokens, total, held, widest = items.work, items.tokens, place.total, place.held, place.widest
    place.spent[0] += len(tokens) * len(shape.pipeline_scheme)  # at most
    for i in range(len(tokens)):
        soonest, slot, first = math.inf, -1, 0
        for kind in range(len(shape.pipelines)):
            k = shape.scheme[kind]
            one = scheme_at(schemes, k)
            if tokens[i] <= schemes.longest[k]:
                for p in range(first, first + shape.pipelines[kind]):
                    if total[p] < soonest:
                        more = work[k, i]
                        ms = ideal_ms(one, total[p] + more, held[p] + tokens[i], max(widest[p], more))
                        if ms < soonest:
                            soonest, slot = ms, p
                    if held[p] == 0:
                        break  # the empty pipelines after it are its equals
            first += shape.pipelines[kind]
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


def improve(problem: Problem, goal: float, budget: int, place: Placement) -> float:
    """Local search: moves and swaps that relieve the slowest pipeline, until it meets `goal` or nothing helps.

    `budget` caps the candidates that are looked at. Returns the slowest pipeline's ideal time in ms.
    """
    schemes, items, shape = problem
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
        i, q, j, spent = find_exchange(problem, slow, goal, budget - looked, longest, second, place)
        looked += spent
        place.spent[0] += spent + 3 * len(place.owner)  # sequences are gone through here, in the exchange, and after it
        if i < 0:
            return peak
        exchange(items, shape, i, slow, j, q, place)
        find_longest(place.owner, longest, second)
        retime(schemes, shape, slow, place)
        retime(schemes, shape, q, place)


MOST_PASSED = 3_000_000  # candidates for one exchange that plain sums settle, after which it is the best so far


def find_exchange(
    problem: Problem, slow: int, goal: float, budget: int, longest: Ints, second: Ints, place: Placement
) -> tuple[int, int, int, int]:
    """A move of i from `slow` to q (j = -1) or a swap with j of q after which both are sooner done than `slow` is.

    The best one, the first that is half way to `goal`, or the best until `budget` candidates are looked at and those of
    one sequence to its end. Returns (i, q, j, candidates looked at); i = -1: none.
    """
    schemes, items, shape = problem
    work, tokens, scheme, longest_held = items.work, items.tokens, shape.pipeline_scheme, schemes.longest
    owner, total, held, widest = place.owner, place.total, place.held, place.widest
    n, ks, peak = len(tokens), scheme[slow], place.ms[slow]  # ks, kq: scheme of the slowest pipeline, of pipeline q
    one = scheme_at(schemes, ks)
    enough = 0.5 * (peak + goal)  # a good step now is worth more than the best one after looking at all
    best, best_i, best_q, best_j, looked, passed = peak * (1.0 - 1e-9), -1, -1, -1, 0, 0
    for i in range(n):
        if owner[i] != slow:
            continue
        if looked >= budget or passed >= MOST_PASSED:
            break
        rest = other_work(work, ks, longest[slow], second[slow], i)
        left, left_held = total[slow] - work[ks, i], held[slow] - tokens[i]
        without = ideal_ms(one, left, left_held, rest)
        if without >= best:
            continue  # even without i, and nothing in its place, this pipeline takes too long
        for q in range(len(scheme)):
            kq = scheme[q]
            # The plain sums are no more than the times and settle most candidates without computing a time.
            if q == slow or tokens[i] > longest_held[kq] or total[q] + work[kq, i] >= best:
                continue
            looked += 1
            wider = max(widest[q], work[kq, i])
            after = ideal_ms(scheme_at(schemes, kq), total[q] + work[kq, i], held[q] + tokens[i], wider)
            if max(without, after) < best:
                best, best_i, best_q, best_j = max(without, after), i, q, -1
                if best <= enough:
                    return best_i, best_q, best_j, looked
        passed += n
        for j in range(n):
            q = owner[j]
            kq = scheme[q]
            there = total[q] + work[kq, i] - work[kq, j]
            if q == slow or there >= best or left + work[ks, j] >= best or tokens[j] == tokens[i]:
                continue
            if tokens[i] > longest_held[kq] or tokens[j] > longest_held[ks]:
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
    """Sequence i goes from pipeline p to q, and j, unless it is -1, from q to p; both sums are made anew.

    Anew, because adding and subtracting leaves rounding errors behind, which would pile up over many exchanges.
    """
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


def repair(problem: Problem, rounds: int, goal: float, packings: int, place: Placement) -> float:
    """Local search on packed times: relieve the slowest pipeline by moves and swaps, packing both ends anew.

    `packings` caps how often. Returns the slowest pipeline's ms.
    """
    while packings > 0 and place.ms.max() > goal:
        slow = int(place.ms.argmax())
        one = scheme_at(problem.schemes, problem.shape.pipeline_scheme[slow])
        if one.pp * max(one.c, one.floor) < NEGLIGIBLE * place.ms[slow]:
            break  # what an exchange may save is a micro-batch
        made = relieve(problem, rounds, packings, place)
        if made < 0:
            break
        packings -= made
    return place.ms.max()


MOST_FRUITLESS = 32  # packings for one exchange, after which none is expected any more


def relieve(problem: Problem, rounds: int, packings: int, place: Placement) -> int:
    """An exchange that makes the slowest pipeline sooner done, made. Returns the packings spent; -1 if none.

    Of each sequence there, the longest first, the exchange that looks best is packed.
    """
    owner, spent, n, slow = place.owner, place.spent, len(place.owner), int(place.ms.argmax())
    better = place.ms[slow] * (1.0 - 0.1 * NEGLIGIBLE)
    longest = np.empty(len(place.ms), dtype=np.int64)
    second = longest.copy()
    find_longest(owner, longest, second)
    trial_owner, trial_bins = owner.copy(), place.bin_of.copy()
    work = problem.items.work[problem.shape.pipeline_scheme[slow]]
    made = 0
    spent[1] += 3 * n
    for i in range(n):
        # What leaves the slowest pipeline makes it sooner done by no more than its own work.
        if owner[i] != slow or place.ms[slow] - work[i] >= better:
            continue
        if spent[1] >= spent[0]:
            return -1
        q, j = likeliest(problem, slow, i, better, longest, second, place)
        if q < 0:
            continue
        if made >= min(packings, MOST_FRUITLESS):
            return -1
        made += 1
        trial_owner[i] = q
        if j >= 0:
            trial_owner[j] = slow
        there, looks = pack_pipeline(problem, q, rounds, trial_owner, trial_bins)
        spent[1] += looks
        here = better
        if there < better:  # else the second packing would be for nothing
            here, looks = pack_pipeline(problem, slow, rounds, trial_owner, trial_bins)
            spent[1] += looks
        if here < better:
            exchange(problem.items, problem.shape, i, slow, j, q, place)
            place.bin_of[:] = trial_bins
            place.ms[slow], place.ms[q] = here, there
            return made
        trial_owner[:] = owner
        trial_bins[:] = place.bin_of
    return -1


def likeliest(
    problem: Problem, slow: int, i: int, better: float, longest: Ints, second: Ints, place: Placement
) -> tuple[int, int]:
    """Where sequence i may best go, and what may come for it (-1: nothing), if neither end needs another micro-batch.

    (-1, -1) where no exchange may bring both ends below `better` ms: ideal times of their new sums tell.
    """
    schemes, items, shape = problem
    work, tokens, owner = items.work, items.tokens, place.owner
    ks = shape.pipeline_scheme[slow]  # ks, kq: scheme of the slowest pipeline, of pipeline q
    one, rest = scheme_at(schemes, ks), other_work(work, ks, longest[slow], second[slow], i)
    best, best_q, best_j = better, -1, -1
    for j in range(-len(shape.pipeline_scheme), len(tokens)):  # negative: a move to pipeline -j-1; else a swap
        q = -j - 1 if j < 0 else owner[j]
        kq = shape.pipeline_scheme[q]
        if q == slow or tokens[i] > schemes.max_length[kq]:
            continue
        gain, extra = work[ks, i], work[kq, i]  # ms off here, ms on there
        held, here_widest, there_widest = tokens[i], rest, place.widest[q]
        if j >= 0:
            if tokens[j] > schemes.max_length[ks]:
                continue
            gain -= work[ks, j]
            extra -= work[kq, j]
            held -= tokens[j]
            here_widest = max(rest, work[ks, j])
            there_widest = other_work(work, kq, longest[q], second[q], j)
        # An exchange that adds work here may still pay if it saves a micro-batch: its c, in all PP stages at most.
        # There is no hope where the work alone makes the other pipeline too late.
        place.spent[1] += 1
        if gain <= -one.pp * one.c or place.ms[q] + extra >= best:
            continue
        here = ideal_ms(one, place.total[slow] - gain, place.held[slow] - held, here_widest)
        if here >= best:
            continue
        its = scheme_at(schemes, kq)
        there = ideal_ms(its, place.total[q] + extra, place.held[q] + held, max(there_widest, work[kq, i]))
        after = max(here, there, place.ms[q] + extra, place.ms[slow] - gain)
        if after < best:
            best, best_q, best_j = after, q, max(j, -1)
    return best_q, best_j


def dispatch(problem: Problem, prospect: Prospect, effort: SearchEffort, seed: int, place: Placement) -> float:
    """Best of the greedy placement and some priced multifits with bisection, each after local search and packing.

    Every restart but the first changes the bound's prices at random by up to 8 %. Stops early at the bound, and a
    restart is given up at once when it cannot meet the ceiling. Fills `place`; returns the slowest pipeline's time in
    ms, infinite when nothing was found.
    """
    schemes, items, shape = problem
    bound, ceiling = prospect.bound, prospect.ceiling
    kinds = len(shape.pipelines)
    trial = empty_placement(len(items.tokens), len(shape.pipeline_scheme))
    shares = np.empty((kinds, len(items.tokens)), dtype=np.float64)
    price = np.empty(kinds, dtype=np.float64)
    goal = bound * (1.0 + 1e-6)
    best, best_ideal = math.inf, math.inf
    if place_greedily(problem, trial):
        best_ideal = improve(problem, goal, effort.moves, trial)
        best = finish(problem, best_ideal, best, goal, effort, trial, place)
    state = seed + 1
    for restart in range(effort.restarts):
        price[:] = prospect.price
        if restart > 0:
            for kind in range(kinds):
                # A linear congruential generator: the same numbers with numba and without, on every machine.
                state = (state * 1103515245 + 12345) % 2147483648
                price[kind] *= 1.0 + 0.16 * (state / 2147483648.0 - 0.5)
        # `low` is a time that was not reached with these prices, `high` one that was. The first restart does not let
        # packing spoil its upper end; later ones only look below the best packed plan.
        low, high = bound, min(best, best_ideal if restart == 0 else best)
        for turn in range(8):
            # The first try is next to the bound, since good prices often reach it. Where a ceiling lies between, the
            # first try is just below that: a failure there says that this restart leads nowhere.
            tau = low * (1.0 + 0.002) if turn == 0 else 0.5 * (low + high)
            if turn == 0 and low < ceiling < high:
                tau = ceiling * (1.0 - 1e-3)
            if best <= goal or tau >= high or high - low < 2e-4 * low:
                break
            for kind in range(kinds):
                share_of_pipeline(schemes, shape.scheme[kind], items, tau, shares[kind])
            if place_by_price(problem, shares, price, tau, trial):
                high = improve(problem, goal, effort.moves, trial)
                best = finish(problem, high, best, goal, effort, trial, place)
            elif turn == 0 and tau < ceiling < high:
                break
            else:
                low = tau
    return best


def finish(
    problem: Problem,
    ideal: float,
    best: float,
    goal: float,
    effort: SearchEffort,
    trial: Placement,
    place: Placement,
) -> float:
    """Pack and repair a trial whose ideal time is less than the best; the best time. A better trial becomes `place`."""
    if ideal >= best:
        return best  # packing only adds to the ideal time
    ms = ideal
    if effort.packs:
        ms = pack_all(problem, effort.levels, trial)
        # Repair is dear: not where packing reached the ideal, nor where it is too far behind the best to catch up.
        if ms > ideal * (1.0 + NEGLIGIBLE) and ms < best * 1.05:
            ms = repair(problem, effort.levels, goal, effort.repackings, trial)
    if ms >= best:
        return best
    place.owner[:] = trial.owner
    place.bin_of[:] = trial.bin_of
    place.total[:] = trial.total
    place.held[:] = trial.held
    place.widest[:] = trial.widest
    place.ms[:] = trial.ms
    return ms


def pack_all(problem: Problem, rounds: int, place: Placement) -> float:
    """Pack every pipeline's sequences. Fills place.bin_of and place.ms; returns the slowest in ms."""
    for p in range(len(problem.shape.pipeline_scheme)):
        place.ms[p], spent = pack_pipeline(problem, p, rounds, place.owner, place.bin_of)
        place.spent[0] += spent
    return place.ms.max()
