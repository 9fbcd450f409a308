"""A batch and one strategy in; a bound, a proof or the strategy's best assignment out. Pure: no torch.

`search` asks these questions about many strategies and keeps the best answer.
"""

from __future__ import annotations

import math

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.planner.exact.dispatch_problem import DispatchProblem
from ds_hydra.planner.exact.programs import repack_slowest
from ds_hydra.planner.kernels.arrays import LEAN, Floats, Ints, Problem, Prospect, Schemes, SearchEffort
from ds_hydra.planner.kernels.placing import empty_placement
from ds_hydra.planner.kernels.problem import Assignment, Batch, PipelineKinds, scheme_row
from ds_hydra.planner.options import PlannerOptions

_LEVEL_ROUNDS = 40
_MOVES = 200_000  # candidates that one local search looks at
_REPACKINGS = 400
_PROOF_DEPTH = 10  # longest sequences that a proof places whole
_PROOF_ROUNDS = 6  # price updates at each partial placement
_PROOF_NODES = 300


class StrategySearch:
    """What can be found out about single strategies for one batch."""

    def __init__(self, schemes: Schemes, options: PlannerOptions, batch: Batch) -> None:
        self._schemes = schemes
        self._options = options
        self._batch = batch
        self._kernels = kernels.select(options.kernels)
        full = SearchEffort(1 + options.effort, _MOVES, _LEVEL_ROUNDS, _REPACKINGS, packs=True)
        self.effort = full if self.is_compiled else LEAN

    @property
    def is_compiled(self) -> bool:
        return self._kernels.is_compiled

    @property
    def can_refute(self) -> bool:
        """Whether the batch is small enough that its sequences stand one by one in bounds too."""
        return self._batch.merged is self._batch.items

    def bound(self, kinds: PipelineKinds, price: Floats, outer: int, inner: int) -> float:
        """Certified lower bound in ms on any plan under a strategy; `price` is warm start and result."""
        problem = Problem(self._schemes, self._batch.merged, kinds.shape)
        return self._kernels.strategy_bound(problem, outer, inner, price)

    def refute(self, kinds: PipelineKinds, target: float, price: Floats) -> bool:
        """Whether branching on the longest sequences proves that no plan under a strategy meets `target` ms."""
        problem = Problem(self._schemes, self._batch.items, kinds.shape)
        depth = min(_PROOF_DEPTH, self._batch.size)
        return self._kernels.refute(problem, target, price, depth, _PROOF_ROUNDS, _PROOF_NODES) > 0

    def assign(self, kinds: PipelineKinds, prospect: Prospect, effort: SearchEffort | None = None) -> Assignment | None:
        """Dispatch, pack and repair under one strategy; None when some sequence found no place.

        Little is tried where the prospect's ceiling looks out of reach. With an effort of its own, a search draws
        other random numbers than the usual one, so that it does not repeat what that has tried.
        """
        problem = Problem(self._schemes, self._batch.items, kinds.shape)
        place = empty_placement(self._batch.size, len(kinds.rank_order))
        seed = self._options.seed + (effort is not None)
        ms = self._kernels.dispatch(problem, prospect, effort or self.effort, seed, place)
        return None if math.isinf(ms) else Assignment(kinds, place.owner, place.bin_of, float(ms))

    def pack(self, kinds: PipelineKinds, owner: Ints) -> Assignment:
        """Pack a dispatch as it stands: owner[i] is the pipeline of sequence i."""
        problem = Problem(self._schemes, self._batch.items, kinds.shape)
        place = empty_placement(self._batch.size, len(kinds.rank_order))
        place.owner[:] = owner
        ms = self._kernels.pack_all(problem, self.effort.levels, place)
        return Assignment(kinds, place.owner, place.bin_of, float(ms))

    def improve_exactly(self, best: Assignment, bound: float) -> Assignment:
        """What HiGHS makes of a plan's dispatch and then of its slowest pipeline, where that is better.

        `bound` ms is a lower bound on plans. The dispatch that HiGHS solves is Eq. 3, with c in every sequence, so its
        optimum may pack worse than what the search found; then the search's stays.
        """
        kinds, seconds = best.kinds, self._options.seconds
        nodes = self._options.node_limit if seconds is None else None
        problem = DispatchProblem.of_batch(self._batch, kinds, self._schemes)
        # Eq. 3 is never below a bound that holds even where sequences share a c; the tenth is margin.
        found = problem.by_highs(best.owner, 0.9 * bound, node_limit=nodes, seconds=seconds)
        if found is not None:
            best = min(best, self.pack(kinds, found.owner), key=lambda plan: plan.ms)
        return repack_slowest(self._schemes, self._batch.items, best, node_limit=nodes, seconds=seconds)

    def solve_tiny(self, kinds: PipelineKinds) -> Assignment | None:
        """The optimum under one strategy by dynamic programming over subsets; None when nothing fits."""
        items, schemes, kernel, n = self._batch.items, self._schemes, self._kernels, self._batch.size
        cost = np.full((len(schemes.c), 1 << n), math.inf)
        parts = np.zeros(1 << n, dtype=np.int64)
        for k in kinds.shape.scheme.tolist():
            kernel.subset_costs(scheme_row(schemes, k), items.work[k], items.tokens, cost[k], parts)
        first = np.cumsum(kinds.shape.pipelines) - kinds.shape.pipelines
        useful = np.minimum(kinds.shape.pipelines, n)  # of equal pipelines no more than there are sequences
        chosen = np.concatenate([np.arange(at, at + some) for at, some in zip(first, useful, strict=True)])
        local = np.zeros(n, dtype=np.int64)  # pipeline of each sequence, among the chosen ones
        ms = kernel.best_split(cost, kinds.shape.pipeline_scheme[chosen], n, local)
        if math.isinf(ms):
            return None
        owner, bin_of = chosen[local], np.zeros(n, dtype=np.int64)
        # The program knows the optimal times only; the micro-batches that reach them are found for each pipeline.
        for p in range(len(kinds.rank_order)):
            own = np.flatnonzero(owner == p)
            bins = np.zeros(len(own), dtype=np.int64)
            k = int(kinds.shape.pipeline_scheme[p])
            kernel.pack_tiny(scheme_row(schemes, k), items.work[k][own], items.tokens[own], bins)
            bin_of[own] = bins
        return Assignment(kinds, owner, bin_of, float(ms))
