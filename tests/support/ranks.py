"""Run a function on several forked gloo ranks, as the tests do it."""

from ds_hydra.ranks.forked import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]
