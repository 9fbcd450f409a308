"""Kernels of packing by Eq. 1 of Hydraulis, in place of the planner's of these names. Plain Python for numba.

A pipeline of V micro-batches takes largest * (PP - 1 + V): as if all were as long as the largest. Never less than the
flow shop's time, so bounds hold for it too.
"""

from __future__ import annotations

from ds_hydra.planner.kernels.problem import Scheme


def stage_ms(scheme: Scheme, total: float, widest: float, v: int) -> float:
    """Time of a pipeline with v micro-batches of `widest` ms at most, c excluded; `total` does not count."""
    return (widest + scheme.c) * (scheme.pp - 1 + v)


def widest_counts(scheme: Scheme) -> bool:
    """Whether `stage_ms` depends on the largest micro-batch: with any PP."""
    return True
