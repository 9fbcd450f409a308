"""Whole numbers of pipelines for one batch by HiGHS (Eq. 4 made bubble-aware, with u = 1/tau). Pure: no torch."""

from __future__ import annotations

import math

import numpy as np

from ds_hydra.cost_model import CostTable
from ds_hydra.planner import kernels
from ds_hydra.planner.bound_kernel import BLOCKED
from ds_hydra.planner.highs import solve_milp
from ds_hydra.planner.problem import Batch, SchemeArrays

_BUCKETS = 24


def shares_at(batch: Batch, arrays: SchemeArrays, tau: float) -> np.ndarray:
    """Share of a pipeline of each scheme that each (merged) sequence takes in a step of tau ms; BLOCKED if none."""
    kernel = kernels.compiled()
    n = len(batch.merged_tokens)
    shares = np.empty((len(arrays.c), n))
    for k in range(len(arrays.c)):
        kernel.share_of_pipeline(
            tau, batch.merged_work[k], batch.merged_tokens, n, arrays.c[k], arrays.max_length[k], arrays.pp[k],
            batch.rates[k], shares[k],
        )  # fmt: skip
    return shares


def continuous_ms(batch: Batch, arrays: SchemeArrays, num_ranks: int) -> float:
    """Least tau at which fractional pipelines suffice: a bound on every strategy there is (ms)."""
    low, high = 1e-6, 1.0
    while _ranks_needed(batch, arrays, high) > num_ranks:
        low, high = high, 2.0 * high
        if high > 1e15:
            return math.inf
    for _ in range(40):
        middle = 0.5 * (low + high)
        if _ranks_needed(batch, arrays, middle) > num_ranks:
            low = middle
        else:
            high = middle
    return low


def _ranks_needed(batch: Batch, arrays: SchemeArrays, tau: float) -> float:
    shares = shares_at(batch, arrays, tau)
    cheapest = np.where(shares < BLOCKED, shares * arrays.num_ranks[:, None], math.inf).min(axis=0)
    return float((cheapest * batch.merged_count).sum())


def counts_by_milp(
    batch: Batch, table: CostTable, sizes: np.ndarray, num_ranks: int, slack: float, node_limit: int
) -> tuple[int, ...] | None:
    """Pipelines of each scheme that finish a batch soonest, sequences dealt out in fractions; None if none found.

    Shares are taken at tau0 = slack * the continuous optimum, then scaled as tau0/tau: maximise u = 1/tau with
    y[k, b] = u * (fraction of length bucket b on scheme k), sum_k y[k, b] = u, sum_b share[k, b]*tau0*y[k, b]
    <= d[k], sum_k ranks[k]*d[k] = N, d whole.
    """
    arrays = SchemeArrays.of(table)
    tau0 = slack * continuous_ms(batch, arrays, num_ranks)
    if not math.isfinite(tau0):
        return None
    shares, fits = _bucketed(batch, shares_at(batch, arrays, tau0))
    schemes, buckets = shares.shape
    columns = [(k, b) for k in range(schemes) for b in range(buckets) if fits[k, b]]
    y0, u = schemes, schemes + len(columns)
    rows: list[list[tuple[int, float]]] = [[(k, -1.0)] for k in range(schemes)]
    rows += [[(u, -1.0)] for _ in range(buckets)]
    for at, (k, b) in enumerate(columns):
        rows[k].append((y0 + at, float(shares[k, b])))
        rows[schemes + b].append((y0 + at, 1.0))
    rows.append([(k, float(sizes[k])) for k in range(schemes)])
    lower = [-math.inf] * schemes + [0.0] * buckets + [float(num_ranks)]
    upper = [0.0] * schemes + [0.0] * buckets + [float(num_ranks)]
    cost = np.zeros(u + 1)
    cost[u] = -1.0
    ceiling = np.full(u + 1, math.inf)
    ceiling[:schemes] = num_ranks // sizes
    solution = solve_milp(cost, ceiling, rows, lower, upper, integers=schemes, node_limit=node_limit, gap=0.002)
    if solution is None:
        return None
    return tuple(round(x) for x in solution.values[:schemes])


def _bucketed(batch: Batch, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares summed over runs of neighbouring lengths, and which schemes hold a whole run.

    The longest sequences stand alone, where whole pipelines matter; the rest is cut into equal tokens.
    """
    tokens, count = batch.merged_tokens, batch.merged_count
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
