"""The inner loops of the planner, as plain Python and compiled by numba; `load` says how. Pure: no torch."""

from ds_hydra.planner.kernels.load import compiled, is_warm, mark_warm, pure, select

__all__ = ["compiled", "is_warm", "mark_warm", "pure", "select"]
