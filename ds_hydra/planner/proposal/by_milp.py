"""Whole numbers of pipelines for one batch by HiGHS: Eq. 4 with bubbles. Pure: no torch.

[Note: u = 1/tau]
The question is which counts of pipelines finish a batch soonest, sequences dealt out in fractions x. The share of a
pipeline that a sequence takes falls with the step's time tau, nearly as tau0/tau from a time tau0 nearby. A product
of tau and x is not linear; but divided by tau, with y = x/tau and u = 1/tau, it is: the least tau is the largest u.

Example: two sequences, each half of a pipeline at tau0 = 10 ms. On one pipeline: 0.5 * 10 * (y1 + y2) <= 1 with
y1 = y2 = u, so u = 1/10: 10 ms. On two pipelines u = 1/5: 5 ms.
"""

from __future__ import annotations

import math

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.planner.exact.highs import solve_milp
from ds_hydra.planner.kernels.arrays import Bools, Floats, Ints, Schemes
from ds_hydra.planner.kernels.bound import BLOCKED
from ds_hydra.planner.kernels.problem import Batch

_LENGTH_BINS = 24
_ALONE = 6  # longest sequences that get a bin of their own


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

    # Fewer ranks are needed the longer a step may take: double until it is long enough, then bisect.
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
    batch: Batch, arrays: Schemes, sizes: Ints, num_ranks: int, slack: float, node_limit: int
) -> tuple[int, ...] | None:
    """Pipelines of each scheme that finish a batch soonest, sequences dealt out in fractions; None if none found.

    Shares are taken at tau0 = slack * the continuous optimum. Maximise u [Note: u = 1/tau], in units of 1/tau0, with
    y[k, b] = u * (fraction of length bin b on scheme k), sum_k y[k, b] = u, sum_b share[k, b] * y[k, b] <= d[k],
    sum_k ranks[k] * d[k] = N, and whole numbers d[k] of pipelines.
    """
    tau0 = slack * continuous_ms(batch, arrays, sizes, num_ranks)
    if not math.isfinite(tau0):
        return None
    shares, fits = _in_bins(batch, shares_at(batch, arrays, tau0))
    num_schemes, bins = shares.shape
    columns = [(k, b) for k in range(num_schemes) for b in range(bins) if fits[k, b]]
    # columns: d[k], then y[k, b] where scheme k holds bin b, then u
    y0, u = num_schemes, num_schemes + len(columns)
    rows: list[list[tuple[int, float]]] = [[(k, -1.0)] for k in range(num_schemes)]
    rows += [[(u, -1.0)] for _ in range(bins)]
    for at, (k, b) in enumerate(columns):
        rows[k].append((y0 + at, float(shares[k, b])))
        rows[num_schemes + b].append((y0 + at, 1.0))
    rows.append([(k, float(sizes[k])) for k in range(num_schemes)])
    lower = [-math.inf] * num_schemes + [0.0] * bins + [float(num_ranks)]
    upper = [0.0] * num_schemes + [0.0] * bins + [float(num_ranks)]
    cost = np.zeros(u + 1)
    cost[u] = -1.0  # HiGHS minimises
    ceiling = np.full(u + 1, math.inf)
    ceiling[:num_schemes] = num_ranks // sizes
    solution = solve_milp(cost, ceiling, rows, lower, upper, integers=num_schemes, node_limit=node_limit, gap=0.002)
    if solution is None:
        return None
    return tuple(round(x) for x in solution.values[:num_schemes])


def _in_bins(batch: Batch, shares: Floats) -> tuple[Floats, Bools]:
    """Shares summed over bins of neighbouring lengths, and which schemes hold every length of a bin.

    The longest sequences stand alone, where whole pipelines matter; the rest is cut into bins of equal tokens. That
    keeps the program small: 30 columns for each scheme, however many sequences there are.
    """
    tokens, count = batch.merged.tokens, batch.merged.copies
    alone = min(_ALONE, len(tokens))
    below = np.cumsum((tokens * count)[alone:])
    total = float(below[-1]) if below.size else 1.0
    label = np.concatenate(
        [np.arange(alone), alone + np.minimum((below / total * _LENGTH_BINS).astype(np.int64), _LENGTH_BINS - 1)]
    )
    names, label = np.unique(label, return_inverse=True)
    sums = np.zeros((len(shares), len(names)))
    fits = np.ones((len(shares), len(names)), dtype=np.bool_)
    for k, share in enumerate(shares):
        blocked = share >= BLOCKED
        fits[k] = np.bincount(label, weights=blocked, minlength=len(names)) == 0
        sums[k] = np.bincount(label, weights=np.where(blocked, 0.0, share * count), minlength=len(names))
    return sums, fits
