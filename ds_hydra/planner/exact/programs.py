"""Dispatch (Eq. 3) and packing (Eq. 1) as integer programs for HiGHS, from a heuristic's solution on. Pure: no torch.

[Note: naming equal pipelines]
Two equal pipelines may swap names, and a plan on d of them has up to d! twins, all of which branch and bound would
have to look at. So equal pipelines, and micro-batches, are named by their longest sequence: sequence i, longest first
and counted from 0, may only go to the first i+1 of them. With three sequences on two equal pipelines, the longest is
on pipeline 0 by name; what is left are 2 * 2 = 4 dispatches instead of 8.

Times are scaled by a bound, so that coefficients are near 1: HiGHS's tolerances are absolute.

T(l) carries c for every sequence here, as printed. Planning itself charges c once per micro-batch. With c = 1 ms and
two sequences of 3 ms in one micro-batch, Eq. 3 counts 8 ms and planning 7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ds_hydra.planner.exact.highs import solve_milp
from ds_hydra.planner.kernels.packing import ideal_ms, stage_ms, widest_counts
from ds_hydra.planner.kernels.problem import Assignment, Batch, Floats, Ints, Items, PipelineKinds, Schemes, scheme_row


@dataclass(frozen=True, slots=True)
class ExactResult:
    """owner[i] is the pipeline (or micro-batch) of sequence i; `ms` the objective; `bound_ms` HiGHS's bound."""

    owner: Ints
    ms: float
    bound_ms: float
    optimal: bool


def relabel(owner: Ints, first: Ints, count: Ints) -> Ints:
    """The same placement with equal pipelines named in the order of their longest sequence.

    Kind x has the pipelines first[x] .. first[x]+count[x]-1; sequences come longest first. Example with one kind of
    three: owners 2, 0, 2, 1 become 0, 1, 0, 2.
    """
    names: dict[int, int] = {}
    used = np.zeros(len(first), dtype=np.int64)
    kind_of = np.repeat(np.arange(len(first)), count)
    for p in owner.tolist():
        if p not in names:
            kind = kind_of[p]
            names[p] = int(first[kind] + used[kind])
            used[kind] += 1
    return np.array([names[p] for p in owner.tolist()], dtype=np.int64)


def dispatch_exactly(
    times: Floats,
    tokens: Ints,
    max_length: Ints,
    pp: Floats,
    kind_sizes: Ints,
    start: Ints,
    bound_ms: float,
    *,
    node_limit: int | None = None,
    seconds: float | None = None,
    gap: float = 0.0,
) -> ExactResult | None:
    """Eq. 3 by HiGHS: times (pipelines, n) in ms, sequences longest first, pipelines kind by kind.

    `kind_sizes` (kinds,) are the pipelines of each kind; `start` is a feasible owner (n,) and `bound_ms` > 0 a valid
    lower bound. None when HiGHS found nothing.
    """
    pipelines, n = times.shape
    first = np.cumsum(kind_sizes) - kind_sizes
    nth = np.arange(pipelines) - np.repeat(first, kind_sizes)  # of its kind
    scaled = times / bound_ms
    pairs = [(i, j) for i in range(n) for j in range(pipelines) if tokens[i] <= max_length[j] and nth[j] <= i]
    bubbles = [j for j in range(pipelines) if pp[j] > 1]
    # Minimise tau over x (one column for each pair that may meet), the bubble b_j of each pipeline that has any, and
    # tau itself, the last column:
    #   rows    sum_j x_ij = 1                          sequence i is on one pipeline
    #   loads   sum_i T_ij x_ij + b_j - tau <= 0        pipeline j is done by tau
    #   drains  (PP_j - 1) T_ij x_ij - b_j <= 0         its bubble is that of its longest sequence
    tau, columns = len(pairs) + len(bubbles), len(pairs) + len(bubbles) + 1
    rows: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    loads: list[list[tuple[int, float]]] = [[(tau, -1.0)] for _ in range(pipelines)]
    drains: list[list[tuple[int, float]]] = []
    bubble_of = {j: len(pairs) + at for at, j in enumerate(bubbles)}
    for at, (i, j) in enumerate(pairs):
        rows[i].append((at, 1.0))
        loads[j].append((at, float(scaled[j, i])))
        if j in bubble_of:
            drains.append([(at, float(scaled[j, i] * (pp[j] - 1))), (bubble_of[j], -1.0)])
    for j, column in bubble_of.items():
        loads[j].append((column, 1.0))
    cost = np.zeros(columns)
    cost[tau] = 1.0
    ceiling = np.ones(columns)
    ceiling[len(pairs) :] = np.inf
    floor = np.zeros(columns)
    floor[tau] = 1.0 - 1e-9
    named = relabel(start, first, kind_sizes)
    solution = solve_milp(
        cost, ceiling, rows + loads + drains,
        [1.0] * n + [-np.inf] * (pipelines + len(drains)), [1.0] * n + [0.0] * (pipelines + len(drains)),
        integers=len(pairs), node_limit=node_limit, seconds=seconds, gap=gap, floor=floor,
        start=_start_point(named, scaled, pp, pairs, bubble_of, columns),
    )  # fmt: skip
    if (point := solution.point) is None:
        return None
    owner = _owner_of(point, pairs, n)
    return ExactResult(owner, dispatch_ms(times, pp, owner), solution.bound * bound_ms, solution.status == "optimal")


def _owner_of(point: Floats, pairs: list[tuple[int, int]], n: int) -> Ints:
    """owner[i] = j for the pairs (i, j) that a point chose; the first columns are the pairs', near 0 or 1."""
    owner = np.zeros(n, dtype=np.int64)
    for at, (i, j) in enumerate(pairs):
        if point[at] > 0.5:
            owner[i] = j
    return owner


def dispatch_ms(times: Floats, pp: Floats, owner: Ints) -> float:
    """Eq. 3 of a placement: slowest pipeline of sum T + (PP-1) * T of its longest sequence, in ms."""
    slowest = 0.0
    for j in range(len(times)):
        own = times[j][owner == j]
        if own.size:
            slowest = max(slowest, float(own.sum() + (pp[j] - 1) * own.max()))
    return slowest


def _start_point(
    owner: Ints, scaled: Floats, pp: Floats, pairs: list[tuple[int, int]], bubble_of: dict[int, int], columns: int
) -> Floats:
    """The placement as a point of the program, every column filled, so that HiGHS begins with a solution."""
    point = np.zeros(columns)
    for at, (i, j) in enumerate(pairs):
        point[at] = float(owner[i] == j)
    for j, column in bubble_of.items():
        own = scaled[j][owner == j]
        point[column] = (pp[j] - 1) * own.max() if own.size else 0.0
    point[-1] = dispatch_ms(scaled, pp, owner)
    return point


def pack_exactly(
    work: Floats,
    tokens: Ints,
    v: int,
    max_length: int,
    start: Ints | None,
    *,
    node_limit: int | None = None,
    seconds: float | None = None,
    gap: float = 0.0,
) -> ExactResult | None:
    """The v micro-batches of at most max_length tokens with the least largest work, by HiGHS (Eq. 1 for one V).

    work (n,) ms and tokens (n,), longest first; `start` (n,) a feasible packing. `ms` excludes c. None when HiGHS
    found no packing.
    """
    n = len(work)
    floor_ms = max(float(work.max()), float(work.sum()) / v)
    # Minimise tau, the last column, over x: every sequence is in one micro-batch, and each micro-batch keeps to tau of
    # work and to its tokens. Here nothing drains: the bubble follows from tau.
    pairs = [(i, j) for i in range(n) for j in range(min(v, i + 1))]
    tau, columns = len(pairs), len(pairs) + 1
    rows: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    loads: list[list[tuple[int, float]]] = [[(tau, -1.0)] for _ in range(v)]
    rooms: list[list[tuple[int, float]]] = [[] for _ in range(v)]
    for at, (i, j) in enumerate(pairs):
        rows[i].append((at, 1.0))
        loads[j].append((at, float(work[i] / floor_ms)))
        rooms[j].append((at, float(tokens[i] / max_length)))
    cost, ceiling, floor = np.zeros(columns), np.ones(columns), np.zeros(columns)
    cost[tau], ceiling[tau], floor[tau] = 1.0, np.inf, 1.0 - 1e-9
    point = None
    if start is not None:
        named = relabel(start, np.zeros(1, dtype=np.int64), np.array([v]))
        point = np.array([float(named[i] == j) for i, j in pairs] + [0.0])
        point[tau] = max(float(work[named == j].sum()) for j in range(v)) / floor_ms
    solution = solve_milp(
        cost, ceiling, rows + loads + rooms,
        [1.0] * n + [-np.inf] * (2 * v), [1.0] * n + [0.0] * v + [1.0] * v,
        integers=len(pairs), node_limit=node_limit, seconds=seconds, gap=gap, floor=floor, start=point,
    )  # fmt: skip
    if (point := solution.point) is None:
        return None
    owner = _owner_of(point, pairs, n)
    largest = max(float(work[owner == j].sum()) for j in range(v))
    return ExactResult(owner, largest, solution.bound * floor_ms, solution.status == "optimal")


def repack_slowest(
    schemes: Schemes,
    items: Items,
    plan: Assignment,
    *,
    node_limit: int | None = None,
    seconds: float | None = None,
) -> Assignment:
    """The plan with its slowest pipeline's micro-batches packed by HiGHS, if that is better.

    One V is solved for: the one that the pipeline has, for which the packing is a start. Nothing is done where
    that pipeline is already at its bound.
    """
    slowest, at = 0.0, -1
    for p in range(len(plan.kinds.rank_order)):
        ms = _pipeline_ms(schemes, items, plan, p, plan.bin_of)
        if ms > slowest:
            slowest, at = ms, p
    one = scheme_row(schemes, int(plan.kinds.shape.pipeline_scheme[at]))
    own = np.flatnonzero(plan.owner == at)
    work = items.work[plan.kinds.shape.pipeline_scheme[at]][own]
    floor = ideal_ms(one, float(work.sum()), int(items.tokens[own].sum()), float(work.max()))
    # At its bound nothing can be gained, and where the largest micro-batch does not count, packing changes nothing.
    if slowest <= floor * (1.0 + 1e-6) or not widest_counts(one):
        return plan
    v = int(plan.bin_of[own].max()) + 1
    found = pack_exactly(
        work, items.tokens[own], v, one.max_length, plan.bin_of[own], node_limit=node_limit, seconds=seconds
    )
    if found is None:
        return plan
    bin_of = plan.bin_of.copy()
    bin_of[own] = found.owner
    if _pipeline_ms(schemes, items, plan, at, bin_of) >= slowest:
        return plan
    # Another pipeline may be the slowest now.
    times = [_pipeline_ms(schemes, items, plan, p, bin_of) for p in range(len(plan.kinds.rank_order))]
    return replace(plan, bin_of=bin_of, ms=max(times))


def _pipeline_ms(schemes: Schemes, items: Items, plan: Assignment, p: int, bin_of: Ints) -> float:
    """Time of one pipeline under given micro-batches."""
    k = int(plan.kinds.shape.pipeline_scheme[p])
    own = np.flatnonzero(plan.owner == p)
    if not own.size:
        return 0.0
    loads = np.bincount(bin_of[own], weights=items.work[k][own])
    return float(stage_ms(scheme_row(schemes, k), float(loads.sum()), float(loads.max()), len(loads)))


Made = TypeVar("Made", bound="DispatchProblem")


@dataclass(frozen=True)
class DispatchProblem:
    """Pipelines kind by kind, largest MaxLen first, and sequences with c in each."""

    kinds: PipelineKinds
    items: Items  # work is T(l) with c
    schemes: Schemes  # c is 0

    @classmethod
    def of_batch(cls: type[Made], batch: Batch, kinds: PipelineKinds, schemes: Schemes) -> Made:
        """From what a step's search already has."""
        # c moves from the micro-batch into each sequence. UtilLen is 1, so that it limits no number of micro-batches:
        # Eq. 3 knows none.
        work = batch.items.work + schemes.c[:, None]
        items = Items(work, batch.items.tokens, batch.items.copies, (work / batch.items.tokens).min(axis=1))
        free = schemes._replace(c=np.zeros_like(schemes.c), util_length=np.ones_like(schemes.util_length))
        return cls(kinds, items, free)

    @property
    def times(self) -> Floats:
        """T(l_i, P_j) in ms: (pipelines, n)."""
        return np.ascontiguousarray(self.items.work[self.kinds.shape.pipeline_scheme])

    @property
    def pp(self) -> Floats:
        return self.schemes.pp[self.kinds.shape.pipeline_scheme]

    @property
    def max_length(self) -> Ints:
        return self.schemes.max_length[self.kinds.shape.pipeline_scheme]

    def by_highs(
        self, start: Ints, bound_ms: float, *, node_limit: int | None = None, seconds: float | None = None
    ) -> ExactResult | None:
        """HiGHS from `start` on; see `dispatch_exactly`."""
        return dispatch_exactly(
            self.times, self.items.tokens, self.max_length, self.pp, self.kinds.shape.pipelines, start, bound_ms,
            node_limit=node_limit, seconds=seconds,
        )  # fmt: skip
