"""Mixed-integer linear programs in, HiGHS's solutions out: one thread, limits by nodes. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class MilpSolution:
    """The best point found, HiGHS's bound on the optimum, and whether the two are proven to meet."""

    values: np.ndarray
    bound: float
    optimal: bool


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
) -> MilpSolution | None:
    """Minimise cost @ x over row_lower <= rows <= row_upper, floor <= x <= ceiling; the first `integers` are whole.

    `rows` lists (column, coefficient) pairs; `start` is a feasible point to begin from. None when HiGHS found
    no feasible point within its limits, RuntimeError when it did not run. Only `seconds` limits its time: a limit in
    nodes gives the same solution on a busy machine. Coefficients should be near 1: scale times before they come here.
    """
    import highspy  # here, as only proposals and exact plans need it

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
    solver = highspy.Highs()
    options: dict[str, bool | int | float] = {"output_flag": False, "threads": 1, "mip_rel_gap": gap, "random_seed": 0}
    if node_limit is not None:
        options["mip_max_nodes"] = node_limit
    if seconds is not None:
        options["time_limit"] = float(seconds)
    for name, option in options.items():
        solver.setOptionValue(name, option)
    solver.passModel(lp)
    if start is not None:
        point = highspy.HighsSolution()
        point.col_value = [float(x) for x in start]
        solver.setSolution(point)
    states = highspy.HighsModelStatus
    solver.run()
    if solver.getModelStatus() == states.kNotset:
        # HiGHS has one pool of threads for a whole process and refuses to run with another number of them than before.
        # A script may have used it with more.
        highspy.Highs.resetGlobalScheduler(True)
        solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    if info.primal_solution_status != 2:  # kSolutionStatusFeasible
        ended = [states.kInfeasible, states.kUnboundedOrInfeasible, states.kSolutionLimit]
        if status not in [*ended, *([] if seconds is None else [states.kTimeLimit])]:
            raise RuntimeError(f"HiGHS solved no program: its status is {solver.modelStatusToString(status)!r}")
        return None
    optimal = status == states.kOptimal
    # HiGHS keeps no dual bound for a program without whole numbers: its optimum is its bound.
    bound = info.mip_dual_bound if integers else info.objective_function_value
    values = np.array(solver.getSolution().col_value)
    return MilpSolution(values, bound if math.isfinite(bound) else -math.inf, optimal)
