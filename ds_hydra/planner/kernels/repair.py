"""A dispatch that its packing does not fit in, one that does out: the moves that relieve a full pipeline."""

from __future__ import annotations

from ds_hydra.planner.kernels.arrays import Ints, Items, Placement, Schemes, Shape
from ds_hydra.planner.kernels.packing import pack_pipeline


def repair(
    schemes: Schemes,
    items: Items,
    shape: Shape,
    rounds: int,
    goal: float,
    budget: int,
    place: Placement,
    bin_of: Ints,
) -> float:
    """Local search on packed times: relieve the slowest pipeline by moves and swaps, packing both ends anew.

    `budget` caps the packings. Only owner, ms and bin_of are kept up. Returns the slowest pipeline's ms.
    """
    trial, trial_bins = place.owner.copy(), bin_of.copy()
    while budget > 0:
        slow = int(place.ms.argmax())
        if place.ms[slow] <= goal:
            break
        spent = relieve(schemes, items, shape, rounds, slow, budget, trial, trial_bins, place, bin_of)
        if spent < 0:
            break
        budget -= spent
    return place.ms.max()


def relieve(
    schemes: Schemes,
    items: Items,
    shape: Shape,
    rounds: int,
    slow: int,
    budget: int,
    trial: Ints,
    trial_bins: Ints,
    place: Placement,
    bin_of: Ints,
) -> int:
    """One step of `repair`: the first exchange that helps. Returns the packings spent, -1 when none helps."""
    n, pipelines, ks = len(items.tokens), len(shape.pipeline_scheme), shape.pipeline_scheme[slow]
    peak = place.ms[slow]
    spent = 0
    for i in range(n):
        if place.owner[i] != slow:
            continue
        for j in range(-pipelines, n):  # negative: a move to pipeline -j-1; else a swap with sequence j
            q = -j - 1 if j < 0 else place.owner[j]
            kq = shape.pipeline_scheme[q]
            if q == slow or items.tokens[i] > schemes.max_length[kq]:
                continue
            gain, extra = items.work[ks, i], items.work[kq, i]
            if j >= 0:
                gain -= items.work[ks, j]
                extra -= items.work[kq, j]
                if items.tokens[j] > schemes.max_length[ks] or (gain <= 0.0 and kq == ks):
                    continue
            if gain <= -schemes.pp[ks] * schemes.c[ks] or place.ms[q] + extra >= peak:
                continue
            if spent >= budget:
                return -1
            spent += 1
            trial[i] = q
            if j >= 0:
                trial[j] = slow
            _, to_ms = pack_pipeline(schemes, kq, q, items.work, items.tokens, rounds, trial, trial_bins)
            from_ms = peak
            if to_ms < peak * (1.0 - 1e-9):
                _, from_ms = pack_pipeline(schemes, ks, slow, items.work, items.tokens, rounds, trial, trial_bins)
            if from_ms < peak * (1.0 - 1e-9):
                place.owner[:] = trial
                bin_of[:] = trial_bins
                place.ms[slow], place.ms[q] = from_ms, to_ms
                return spent
            trial[:] = place.owner
            trial_bins[:] = bin_of
    return -1
