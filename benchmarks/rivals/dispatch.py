"""Eq. 3 of Hydraulis by its Algorithm 1, and by our search, beside HiGHS. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import ds_hydra.planner.kernels as product
from benchmarks.rivals import kernels
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner.exact import DispatchProblem, dispatch_ms
from ds_hydra.planner.kernels.dispatch import empty_placement
from ds_hydra.planner.kernels.problem import Batch, Ints, PipelineKinds, Problem, Prospect, SearchEffort, scheme_arrays

TRIALS = 100  # of Algorithm 1, as published


@dataclass(frozen=True)
class ComparedDispatch(DispatchProblem):
    """The problem with ways to solve it that no plan is made by."""

    @classmethod
    def of(cls, lengths: Sequence[int], strategy: StrategyShape, table: CostTable) -> ComparedDispatch:
        return cls.of_batch(Batch.of(lengths, table), PipelineKinds.of(strategy, table), scheme_arrays(table))

    def ms(self, owner: Ints) -> float:
        """The objective of a placement."""
        return dispatch_ms(self.times, self.pp, owner)

    def by_algorithm_1(self, trials: int = TRIALS, seed: int = 0) -> Ints | None:
        """Algorithm 1 as printed; None when a sequence fits nowhere."""
        owner, tokens = np.zeros(len(self.items.tokens), dtype=np.int64), self.items.tokens
        ms = kernels.compiled().greedy_trials(self.times, tokens, self.max_length, self.pp, trials, seed, owner)
        return owner if np.isfinite(ms) else None

    def by_search(self, restarts: int = 40, budget: int = 200_000, seed: int = 0) -> tuple[Ints, float] | None:
        """Our search, and the certified bound in ms; None when a sequence fits nowhere."""
        kernel, problem = product.compiled(), Problem(self.schemes, self.items, self.kinds.shape)
        price = self.kinds.num_ranks.copy()
        bound = kernel.strategy_bound(problem, 12, 14, price)
        place = empty_placement(len(self.items.tokens), len(self.kinds.rank_order))
        effort = SearchEffort(restarts, budget, 0, 0, packs=False)
        ms = kernel.dispatch(problem, Prospect(bound, price, np.inf), effort, seed, place)
        return (place.owner, bound) if np.isfinite(ms) else None
