"""Mixed-integer linear programs in, HiGHS's solutions out: one thread, limits by nodes. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

Status = Literal["optimal", "target", "limit", "infeasible", "failed"]


@dataclass(frozen=True, slots=True)
class Solved:
    """How HiGHS ended, its bound on the optimum, the nodes that it looked at, and the best point that it found, if any.

    "optimal": the point is proven, within the gap. "target": it is as good as was asked for. "limit": nodes or seconds
    were up, with a point or without. "infeasible": there is none, which is proven. "failed": HiGHS solved nothing, and
    `why` says in its words what became of it.
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
    target: float | None = None,
    floor: np.ndarray | None = None,
    start: np.ndarray | None = None,
) -> Solved:
    """Minimise cost @ x over row_lower <= rows <= row_upper, floor <= x <= ceiling; the first `integers` are whole.

    `rows` lists (column, coefficient) pairs; `start` is a feasible point to begin from, and a point of `target` is good
    enough. Only `seconds` limits its time: nodes, gap and target give the same solution on a busy machine, and no other
    limit of HiGHS's bounds a program with whole numbers. Coefficients should be near 1: scale times before they come
    here.
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
    if target is not None:
        options["objective_target"] = target
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
        states.kObjectiveTarget: "target",
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
