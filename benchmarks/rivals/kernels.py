"""The rivals' kernels, compiled with the planner's, which pack by Eq. 1 here. Pure: no torch."""

from __future__ import annotations

from benchmarks.rivals import algorithm_1, eq_1, interval_program
from ds_hydra.planner.kernels import Kernels, load

MODULES = (algorithm_1, interval_program, eq_1)


class RivalKernels(Kernels):
    """The planner's kernels by Eq. 1, and the rivals' own."""

    greedy_trials = staticmethod(algorithm_1.greedy_trials)
    program_counts = staticmethod(interval_program.program_counts)
    interval_program = staticmethod(interval_program.interval_program)


def compiled() -> RivalKernels:
    """As numba dispatchers; the first call of each compiles it unless the cache on disk holds it."""
    return RivalKernels(vars(load.compiled(*MODULES)), is_compiled=True)
