"""Kernel of the paper's strategy proposal (Eq. 4). Plain Python that numba can compile."""

from __future__ import annotations

import math

from ds_hydra.planner.kernels.arrays import Floats, Ints


def interval_program(
    work_below: Floats,
    cover: Ints,
    unit_gpus: Ints,
    gpu_units: int,
    steps: int,
    best: Floats,
    choice_k: Ints,
    choice_d: Ints,
    choice_l: Ints,
) -> None:
    """Eq. 4 over n = 0..gpu_units units of GPUs and l = 0..steps length steps, with d in tenths of a pipeline.

    work_below[k, l] is sum of T over the data up to length step l, cover[k] the largest step that scheme k holds,
    unit_gpus[k] the GPU units of a tenth of a pipeline. For fixed l' the first term of the max rises with d and
    the second falls, so the best d is found by bisection. Fills best (n, l) and the choices that led there.
    """
    best[:, :] = math.inf
    best[:, 0] = 0.0
    for n in range(1, gpu_units + 1):
        for l in range(1, steps + 1):
            value = best[n - 1, l]
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
                    low, high = 1, most  # smallest d whose own share is no longer the larger term
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
            choice_k[n, l] = take_k
            choice_d[n, l] = take_d
            choice_l[n, l] = take_l


def program_counts(
    choice_k: Ints, choice_d: Ints, choice_l: Ints, unit_gpus: Ints, n: int, l: int, tenths: Ints
) -> None:
    """Tenths of a pipeline of each scheme in the solution at (n, l); fills tenths (schemes,)."""
    tenths[:] = 0
    while l > 0 and n > 0:
        k = choice_k[n, l]
        if k < 0:
            n -= 1
            continue
        tenths[k] += choice_d[n, l]
        l, n = choice_l[n, l], n - choice_d[n, l] * unit_gpus[k]
