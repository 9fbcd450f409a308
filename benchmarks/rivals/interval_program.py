"""Kernels of the strategy proposal of Hydraulis (Eq. 4). Plain Python that numba can compile.

[Note: interval program]
Lengths are cut into steps 1..S, and so much work is known up to each step. A solution deals intervals of lengths to
schemes: the longest lengths to one scheme, the next to another, and so on; each scheme gets some GPUs for its
interval and takes work / pipelines. F(n, l) is the least time in which n units of GPUs do the lengths up to step l:

    F(n, l) = min over the scheme, the tenths d of a pipeline, and where its interval begins (rest < l), of
              max(F(n - d * units of the scheme, rest), work of the interval / d)

Example: 100 ms of short sequences and 60 ms of long ones, four GPUs, TP1 for the short and TP2 for all. One pipeline
of TP2 for the long ones takes 60 ms, two of TP1 for the short ones 100 / 2 = 50 ms: F = 60.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ds_hydra.planner.kernels.problem import Floats, Ints


class Choices(NamedTuple):
    """How each value of the program came about, (units + 1, steps + 1) each."""

    scheme: Ints  # that takes the last interval of lengths; -1 where the last unit of GPUs stays idle
    tenths: Ints  # of a pipeline that it takes it with
    rest: Ints  # length step at which that interval begins


def interval_program(work_below: Floats, cover: Ints, unit_gpus: Ints, best: Floats, choices: Choices) -> None:
    """Eq. 4 over n = 0.. units of GPUs and l = 0.. length steps, with d in tenths of a pipeline.

    work_below[k, l] is the sum of T over the data up to length step l, cover[k] the largest step that scheme k holds,
    unit_gpus[k] the GPU units of a tenth of a pipeline. Fills `best`, F of [Note: interval program] with shape
    (units + 1, steps + 1), and the choices that led there.
    """
    units, steps = best.shape[0] - 1, best.shape[1] - 1
    best[:, :] = math.inf
    best[:, 0] = 0.0
    for n in range(1, units + 1):
        for l in range(1, steps + 1):
            value = best[n - 1, l]  # the unit stays idle
            take_k, take_d, take_l = -1, 0, 0
            for k in range(len(cover)):
                if l > cover[k]:
                    continue
                most = n // unit_gpus[k]
                for rest in range(l):
                    if most < 1:
                        break
                    work = (work_below[k, l] - work_below[k, rest]) * 10.0
                    if work / most >= value:
                        continue
                    # More tenths make this interval shorter and leave less for the rest: one term falls with d, the
                    # other rises, so the best d is where they cross. Bisection finds the smallest d whose own share is
                    # no longer the larger term; the best is that or the one before it.
                    low, high = 1, most
                    while low < high:
                        middle = (low + high) // 2
                        if work / middle <= best[n - middle * unit_gpus[k], rest]:
                            high = middle
                        else:
                            low = middle + 1
                    for d in range(max(1, low - 1), low + 1):
                        t = max(best[n - d * unit_gpus[k], rest], work / d)
                        if t < value:
                            value, take_k, take_d, take_l = t, k, d, rest
            best[n, l] = value
            choices.scheme[n, l] = take_k
            choices.tenths[n, l] = take_d
            choices.rest[n, l] = take_l


def program_counts(choices: Choices, unit_gpus: Ints, n: int, l: int, tenths: Ints) -> None:
    """Tenths of a pipeline of each scheme in the solution at (n, l); fills tenths (schemes,)."""
    tenths[:] = 0
    while l > 0 and n > 0:
        k = choices.scheme[n, l]
        if k < 0:
            n -= 1
            continue
        taken = choices.tenths[n, l]
        tenths[k] += taken
        l, n = choices.rest[n, l], n - taken * unit_gpus[k]
