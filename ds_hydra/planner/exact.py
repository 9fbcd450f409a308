"""Integer programs of the planner, solved by HiGHS: counts of pipelines, dispatch and packing. Pure: no torch.

`counts_at` says how many pipelines of each shape suit a batch (Eq. 4 with bubbles), `DispatchProblem` deals sequences
out to them (Eq. 3), and `pack_exactly` fills micro-batches (Eq. 1), both from a heuristic's solution on.

[Note: u = 1/tau]
The question is which counts of pipelines finish a batch soonest, sequences dealt out in fractions x. The share of a
pipeline that a sequence takes falls with the step's time tau, nearly as tau0/tau from a time tau0 nearby. A product
of tau and x is not linear; but divided by tau, with y = x/tau and u = 1/tau, it is: the least tau is the largest u.

Example: two sequences, each half of a pipeline at tau0 = 10 ms. On one pipeline: 0.5 * 10 * (y1 + y2) <= 1 with
y1 = y2 = u, so u = 1/10: 10 ms. On two pipelines u = 1/5: 5 ms.

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

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.planner.kernels.bound import BLOCKED
from ds_hydra.planner.kernels.load import Kernels
from ds_hydra.planner.kernels.packing import ideal_ms, stage_ms, widest_counts
from ds_hydra.planner.kernels.problem import (
    Assignment,
    Batch,
    Bools,
    Floats,
    Ints,
    Items,
    PipelineKinds,
    Schemes,
    scheme_row,
)

Status = Literal["optimal", "limit", "infeasible", "failed"]


@dataclass(frozen=True, slots=True)
class Solved:
    """How HiGHS ended, its bound on the optimum, the nodes that it looked at, and the best point that it found, if any.

    "optimal": the point is proven, within the gap. "limit": nodes or seconds were up, with a point or without.
    "infeasible": there is none, which is proven. "failed": HiGHS solved nothing, and `why` says in its words what
    became of it.
    """

    status: Status
    values: np.ndarray | None = None
    bound: float = -math.inf
    nodes: int = 0
    why: str = ""

    @property
    def point(self) -> np.ndarray | None:
        """The best point; None where there is none. RuntimeError where HiGHS failed, which says nothing of points."""
        if self.status == "failed":
            raise RuntimeError(f"HiGHS solved no program: {self.why}")
        return self.values


def solve_milp(
    cost: np.ndarray,
    ceiling: np.ndarray,
    rows: Sequence[Sequence[tuple[int, float]]],
    row_lower: Sequence[float],
    row_upper: Sequence[float],
    *,
    integers: int,
    node_limit: int | None = None,
    seconds: float | None = None,
    gap: float = 0.0,
    floor: np.ndarray | None = None,
    start: np.ndarray | None = None,
) -> Solved:
    """Minimise cost @ x over row_lower <= rows <= row_upper, floor <= x <= ceiling; the first `integers` are whole.

    `rows` lists (column, coefficient) pairs; `start` is a feasible point to begin from. Only `seconds` limits its time:
    nodes and gap give the same solution on a busy machine, and no other limit of HiGHS's bounds a program with whole
    numbers. Coefficients should be near 1: scale times before they come here.
    """
    import highspy  # here: it takes a tenth of a second, and not every process needs it

    columns = len(cost)
    # The matrix by rows, as HiGHS stores it: row r has the entries starts[r] .. starts[r+1]-1. Rows (x0 + 2*x2), (x1)
    # give starts 0, 2, 3, index 0, 2, 1 and value 1, 2, 1.
    starts = np.cumsum([0] + [len(row) for row in rows], dtype=np.int32)
    index = np.array([at for row in rows for at, _ in row], dtype=np.int32)
    value = np.array([x for row in rows for _, x in row], dtype=np.float64)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, len(rows)
    lp.col_cost_ = np.asarray(cost, dtype=np.float64)
    lp.col_lower_ = np.zeros(columns) if floor is None else np.asarray(floor, dtype=np.float64)
    lp.col_upper_ = np.asarray(ceiling, dtype=np.float64)
    lp.row_lower_ = np.asarray(row_lower, dtype=np.float64)
    lp.row_upper_ = np.asarray(row_upper, dtype=np.float64)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = starts, index, value
    whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    lp.integrality_ = [whole] * integers + [real] * (columns - integers)
    # One thread and a fixed seed: the same program gives the same solution on every machine.
    options: dict[str, bool | int | float] = {"output_flag": False, "threads": 1, "mip_rel_gap": gap, "random_seed": 0}
    if node_limit is not None:
        options["mip_max_nodes"] = node_limit
    if seconds is not None:
        options["time_limit"] = float(seconds)
    point = None
    if start is not None:
        point = highspy.HighsSolution()
        point.col_value = [float(x) for x in start]
    solver = _run(lp, options, point)
    if solver.getModelStatus() == highspy.HighsModelStatus.kUnboundedOrInfeasible:
        solver = _run(lp, {**options, "presolve": "off"}, point)  # which of the two, only the search itself tells
    return _solved(solver, has_integers=integers > 0)


@cache
def _silent_solver_class() -> type[Any]:
    import highspy

    class Silent(highspy.Highs):
        """Since 1.16 HiGHS prints its name and licence as its constructor enables callbacks, before any option."""

        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    return Silent


def _run(lp: Any, options: dict[str, Any], point: Any) -> Any:
    """A solver that has run."""
    import highspy

    solver = _silent_solver_class()()
    for name, option in options.items():
        solver.setOptionValue(name, option)
    solver.passModel(lp)
    if point is not None:
        solver.setSolution(point)
    solver.run()
    # HiGHS has one pool of threads for a whole process and refuses to run with another number of them than before. The
    # script's own programs may have used it with more, and may want to again.
    if solver.getModelStatus() == highspy.HighsModelStatus.kNotset:
        highspy.Highs.resetGlobalScheduler(True)
        solver.run()
    highspy.Highs.resetGlobalScheduler(True)
    return solver


def _solved(solver: Any, *, has_integers: bool) -> Solved:
    import highspy

    states = highspy.HighsModelStatus
    known: dict[Any, Status] = {
        states.kOptimal: "optimal",
        states.kSolutionLimit: "limit",
        states.kTimeLimit: "limit",
        states.kInfeasible: "infeasible",
    }
    status, info = solver.getModelStatus(), solver.getInfo()
    if status not in known:
        return Solved("failed", why=f"its status is {solver.modelStatusToString(status)!r}")
    nodes = max(0, int(info.mip_node_count))
    if known[status] == "infeasible" or info.primal_solution_status != 2:  # kSolutionStatusFeasible
        return Solved(known[status], nodes=nodes)
    # HiGHS keeps no dual bound for a program without whole numbers: its optimum is its bound.
    bound = info.mip_dual_bound if has_integers else info.objective_function_value
    values = np.array(solver.getSolution().col_value)
    return Solved(known[status], values, bound if math.isfinite(bound) else -math.inf, nodes)


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
        integers=len(pairs), node_limit=node_limit, seconds=seconds, floor=floor, start=point,
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
        """Eq. 3 by HiGHS from `start` on, a feasible owner (n,); `bound_ms` > 0 is a valid lower bound. None when HiGHS
        found nothing."""
        times, pp, kind_sizes = self.times, self.pp, self.kinds.shape.pipelines
        tokens, max_length = self.items.tokens, self.max_length
        pipelines, n = times.shape
        first = np.cumsum(kind_sizes) - kind_sizes
        nth = np.arange(pipelines) - np.repeat(first, kind_sizes)  # of its kind
        scaled = times / bound_ms
        pairs = [(i, j) for i in range(n) for j in range(pipelines) if tokens[i] <= max_length[j] and nth[j] <= i]
        bubbles = [j for j in range(pipelines) if pp[j] > 1]
        # Minimise tau over x (one column for each pair that may meet), the bubble b_j of each pipeline that has any,
        # and tau itself, the last column:
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
            integers=len(pairs), node_limit=node_limit, seconds=seconds, floor=floor,
            start=_start_point(named, scaled, pp, pairs, bubble_of, columns),
        )  # fmt: skip
        if (point := solution.point) is None:
            return None
        owner = _owner_of(point, pairs, n)
        return ExactResult(
            owner, dispatch_ms(times, pp, owner), solution.bound * bound_ms, solution.status == "optimal"
        )
