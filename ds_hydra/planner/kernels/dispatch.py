"""Kernels of dispatch (Eq. 3): sequences to pipelines, slowest pipeline least. Plain Python that numba can compile.

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
"""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.planner.kernels.arrays import Placement, Problem, Prospect, SearchEffort
from ds_hydra.planner.kernels.bound import share_of_pipeline
from ds_hydra.planner.kernels.improve import improve
from ds_hydra.planner.kernels.packing import pack_pipeline
from ds_hydra.planner.kernels.placing import empty_placement, place_by_price, place_greedily
from ds_hydra.planner.kernels.repair import repair


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
        if ms > ideal * (1.0 + 1e-9) and ms < best * 1.05:
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
