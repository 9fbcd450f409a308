"""Whole numbers of pipelines for one batch by HiGHS (Eq. 4 made bubble-aware, with u = 1/tau). Pure: no torch."""

from __future__ import annotations

import math

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.planner.exact.highs import solve_milp
from ds_hydra.planner.kernels.arrays import Bools, Floats, Ints, Schemes
from ds_hydra.planner.kernels.bound import BLOCKED
from ds_hydra.planner.kernels.problem import Batch, scheme_arrays

_BUCKETS = 24


def shares_at(batch: Batch, schemes: Schemes, tau: float) -> Floats:
    """Share of a pipeline of each scheme that each merged item takes in a step of tau ms: (schemes, items)."""
    shares = np.empty((len(schemes.c), len(batch.merged.tokens)))
    for k in range(len(schemes.c)):
        kernels.compiled().share_of_pipeline(schemes, k, batch.merged, tau, shares[k])
    return shares


def continuous_ms(batch: Batch, schemes: Schemes, sizes: Ints, num_ranks: int) -> float:
    """Least tau at which fractional pipelines suffice: a bound on every strategy there is (ms).

    sizes (schemes,) are the ranks of one pipeline.
    """

    def ranks_needed(tau: float) -> float:
        shares = shares_at(batch, schemes, tau)
        cheapest = np.where(shares < BLOCKED, shares * sizes[:, None], math.inf).min(axis=0)
        return float((cheapest * batch.merged.copies).sum())

    low, high = 1e-6, 1.0
    while ranks_needed(high) > num_ranks:
        low, high = high, 2.0 * high
        if high > 1e15:
            return math.inf
    while high > low * 1.0001:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if ranks_needed(middle) > num_ranks else (low, middle)
    return low


def counts_by_milp(
    batch: Batch, table: CostTable, sizes: Ints, num_ranks: int, slack: float, node_limit: int
) -> tuple[int, ...] | None:
    """Pipelines of each scheme that finish a batch soonest, sequences dealt out in fractions; None if none found.

    Shares are taken at tau0 = slack * the continuous optimum, then scaled as tau0/tau: maximise u = 1/tau with
    y[k, b] = u * (fraction of length bucket b on scheme k), sum_k y[k, b] = u, sum_b share[k, b]*tau0*y[k, b]
    <= d[k], sum_k ranks[k]*d[k] = N, d whole.
    """
    arrays = scheme_arrays(table)
    tau0 = slack * continuous_ms(batch, arrays, sizes, num_ranks)
    if not math.isfinite(tau0):
        return None
    shares, fits = _bucketed(batch, shares_at(batch, arrays, tau0))
    num_schemes, buckets = shares.shape
    columns = [(k, b) for k in range(num_schemes) for b in range(buckets) if fits[k, b]]
    y0, u = num_schemes, num_schemes + len(columns)
    rows: list[list[tuple[int, float]]] = [[(k, -1.0)] for k in range(num_schemes)]
    rows += [[(u, -1.0)] for _ in range(buckets)]
    for at, (k, b) in enumerate(columns):
        rows[k].append((y0 + at, float(shares[k, b])))
        rows[num_schemes + b].append((y0 + at, 1.0))
    rows.append([(k, float(sizes[k])) for k in range(num_schemes)])
    lower = [-math.inf] * num_schemes + [0.0] * buckets + [float(num_ranks)]
    upper = [0.0] * num_schemes + [0.0] * buckets + [float(num_ranks)]
    cost = np.zeros(u + 1)
    cost[u] = -1.0
    ceiling = np.full(u + 1, math.inf)
    ceiling[:num_schemes] = num_ranks // sizes
    solution = solve_milp(cost, ceiling, rows, lower, upper, integers=num_schemes, node_limit=node_limit, gap=0.002)
    if solution is None:
        return None
    return tuple(round(x) for x in solution.values[:num_schemes])


def _bucketed(batch: Batch, shares: Floats) -> tuple[Floats, Bools]:
    """Shares summed over runs of neighbouring lengths, and which schemes hold a whole run.

    The longest sequences stand alone, where whole pipelines matter; the rest is cut into equal tokens.
    """
    tokens, count = batch.merged.tokens, batch.merged.copies
    alone = min(6, len(tokens))
    below = np.cumsum((tokens * count)[alone:])
    total = float(below[-1]) if below.size else 1.0
    label = np.concatenate(
        [np.arange(alone), alone + np.minimum((below / total * _BUCKETS).astype(np.int64), _BUCKETS - 1)]
    )
    names, label = np.unique(label, return_inverse=True)
    sums = np.zeros((len(shares), len(names)))
    fits = np.ones((len(shares), len(names)), dtype=np.bool_)
    for k, share in enumerate(shares):
        blocked = share >= BLOCKED
        fits[k] = np.bincount(label, weights=blocked, minlength=len(names)) == 0
        sums[k] = np.bincount(label, weights=np.where(blocked, 0.0, share * count), minlength=len(names))
    return sums, fits
