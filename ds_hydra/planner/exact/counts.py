"""Whole numbers of pipelines for one batch by HiGHS, Eq. 4 with bubbles, and the strategy of them. Pure: no torch.

[Note: u = 1/tau]
The question is which counts of pipelines finish a batch soonest, sequences dealt out in fractions x. The share of a
pipeline that a sequence takes falls with the step's time tau, nearly as tau0/tau from a time tau0 nearby. A product
of tau and x is not linear; but divided by tau, with y = x/tau and u = 1/tau, it is: the least tau is the largest u.

Example: two sequences, each half of a pipeline at tau0 = 10 ms. On one pipeline: 0.5 * 10 * (y1 + y2) <= 1 with
y1 = y2 = u, so u = 1/10: 10 ms. On two pipelines u = 1/5: 5 ms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.planner.exact.highs import Solved, solve_milp
from ds_hydra.planner.kernels.bound import BLOCKED
from ds_hydra.planner.kernels.load import Kernels
from ds_hydra.planner.kernels.problem import Batch, Bools, Floats, Ints, Schemes

_LENGTH_BINS = 24
_ALONE = 6  # longest sequences that get a bin of their own
_GAP = 0.002  # of u: counts are whole, so hardly any two are nearer to each other


def shares_at(batch: Batch, schemes: Schemes, rows: Ints, tau: float, kernel: Kernels) -> Floats:
    """Share of a pipeline of each of these rows of the schemes that each merged item takes in a step of tau ms:
    (rows, items)."""
    shares = np.empty((len(rows), len(batch.merged.tokens)))
    for at, k in enumerate(rows.tolist()):
        kernel.share_of_pipeline(schemes, k, batch.merged, tau, shares[at])
    return shares


def continuous_ms(batch: Batch, schemes: Schemes, sizes: Ints, num_ranks: int) -> float:
    """Least tau at which fractional pipelines suffice: a bound on every strategy there is (ms).

    sizes (schemes,) are the ranks of one pipeline.
    """

    every = np.arange(len(sizes))

    def ranks_needed(tau: float) -> float:
        shares = shares_at(batch, schemes, every, tau, kernels.compiled())
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
    """`counts_at` slack * the continuous optimum; None if none were found, RuntimeError where HiGHS failed."""
    tau0 = slack * continuous_ms(batch, arrays, sizes, num_ranks)
    if not math.isfinite(tau0):
        return None
    shares = shares_at(batch, arrays, np.arange(len(sizes)), tau0, kernels.compiled())
    found = counts_at(tau0, batch, shares, sizes, num_ranks, node_limit=node_limit)
    return None if found.solved.point is None else found.counts


class CountsFound(NamedTuple):
    """Pipelines of each row, what HiGHS says that a step with them takes, and how it ended."""

    counts: tuple[int, ...]  # empty where it found none
    ms: float
    solved: Solved


def counts_at(
    tau0: float, batch: Batch, shares: Floats, sizes: Ints, num_ranks: int, *, node_limit: int
) -> CountsFound:
    """Pipelines of each row that finish a batch soonest, sequences dealt out in fractions.

    Shares (rows, merged items) are those in a step of tau0 ms; sizes (rows,) are the ranks of one pipeline. In units of
    1/tau0 the largest u is sought, see [Note: u = 1/tau], with y[k, b] = u * (fraction of length bin b on row k),
    sum_k y[k, b] = u, sum_b share[k, b] * y[k, b] <= d[k], sum_k ranks[k] * d[k] = N, and whole numbers d[k] of
    pipelines.
    """
    shares, fits = _in_bins(batch, shares)
    num_rows, bins = shares.shape
    columns = [(k, b) for k in range(num_rows) for b in range(bins) if fits[k, b]]
    # columns: d[k], then y[k, b] where row k holds bin b, then u
    y0, u = num_rows, num_rows + len(columns)
    rows: list[list[tuple[int, float]]] = [[(k, -1.0)] for k in range(num_rows)]
    rows += [[(u, -1.0)] for _ in range(bins)]
    for at, (k, b) in enumerate(columns):
        rows[k].append((y0 + at, float(shares[k, b])))
        rows[num_rows + b].append((y0 + at, 1.0))
    rows.append([(k, float(sizes[k])) for k in range(num_rows)])
    lower = [-math.inf] * num_rows + [0.0] * bins + [float(num_ranks)]
    upper = [0.0] * num_rows + [0.0] * bins + [float(num_ranks)]
    cost = np.zeros(u + 1)
    cost[u] = -1.0  # HiGHS minimises
    ceiling = np.full(u + 1, math.inf)
    ceiling[:num_rows] = num_ranks // sizes
    solved = solve_milp(cost, ceiling, rows, lower, upper, integers=num_rows, node_limit=node_limit, gap=_GAP)
    if solved.values is None or solved.values[u] <= 0.0:
        return CountsFound((), math.inf, solved)
    return CountsFound(tuple(round(x) for x in solved.values[:num_rows]), tau0 / float(solved.values[u]), solved)


def _in_bins(batch: Batch, shares: Floats) -> tuple[Floats, Bools]:
    """Shares summed over bins of neighbouring lengths, and which schemes hold every length of a bin.

    The longest sequences stand alone, where whole pipelines matter; the rest is cut into bins of equal tokens. That
    keeps the program small: 30 columns for each row, however many sequences there are.
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


def scheme_of(shape: PipelineShape) -> ParallelScheme:
    """The degrees of a pipeline whose stages are alike but for their layers."""
    first = shape.stages[0]
    return ParallelScheme(first.tp, shape.pp, first.sp, first.ep)


def _place_order(shape: PipelineShape) -> tuple[int, int, int, int]:
    """Sort key of pipelines in rank order: widest TP first keeps every TP group inside a node.

    With nodes of 8, tp4 + tp8 + tp4 would lay the tp8 over ranks 4 to 11, on two nodes. In the order tp8 + 2*tp4 every
    group begins at a multiple of its own width, as with powers of two all wider ones before it are multiples of that.
    """
    scheme = scheme_of(shape)
    return (-scheme.tp, -scheme.sp * scheme.tp, -scheme.pp, scheme.sp)


def counts_to_strategy(counts: Sequence[int], shapes: Sequence[ParallelScheme | PipelineShape]) -> StrategyShape:
    """Pipelines in rank order, from the number of pipelines of each scheme or shape, whose stages are alike."""
    each = [PipelineShape.of(shape) if isinstance(shape, ParallelScheme) else shape for shape in shapes]
    kinds = sorted(zip(each, counts, strict=True), key=lambda kind: _place_order(kind[0]))
    runs = [(shape,) * count for shape, count in kinds]
    return StrategyShape(tuple(itertools.chain.from_iterable(runs)))
