"""Run a function on several forked gloo ranks, as the tests do it."""

from ds_hydra.ranks.forked import RankError, rank_environment, run_ranks

__all__ = ["RankError", "rank_environment", "run_ranks"]
