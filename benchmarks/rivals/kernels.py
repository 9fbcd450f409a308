"""The rivals' kernels, compiled with the planner's, which pack by Eq. 1 here. Pure: no torch."""

from __future__ import annotations

from typing import Protocol, cast

from benchmarks.rivals import algorithm_1, eq_1, interval_program
from benchmarks.rivals.interval_program import Choices
from ds_hydra.planner.kernels import Kernels, load
from ds_hydra.planner.kernels.problem import Floats, Ints

MODULES = (algorithm_1, interval_program, eq_1)


class RivalKernels(Kernels, Protocol):
    """The planner's kernels by Eq. 1, and the rivals' own."""

    def greedy_trials(
        self, times: Floats, tokens: Ints, max_length: Ints, pp: Floats, trials: int, seed: int, owner: Ints
    ) -> float: ...

    def interval_program(
        self, work_below: Floats, cover: Ints, unit_gpus: Ints, best: Floats, choices: Choices
    ) -> None: ...

    def program_counts(self, choices: Choices, unit_gpus: Ints, n: int, l: int, tenths: Ints) -> None: ...


def compiled() -> RivalKernels:
    """As numba dispatchers; the first call of each compiles it unless the cache on disk holds it."""
    return cast("RivalKernels", load.compiled(*MODULES))
