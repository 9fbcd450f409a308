"""One batch in, the best assignment over the candidate strategies and a certified bound out. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.planner.exact.paper_problem import DispatchProblem
from ds_hydra.planner.exact.programs import repack_slowest
from ds_hydra.planner.kernels.arrays import LEAN, Floats, Ints, Problem, Prospect, Schemes, SearchEffort
from ds_hydra.planner.kernels.placing import empty_placement
from ds_hydra.planner.kernels.problem import Assignment, Batch, Groups, scheme_row
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.zero_hetero.errors import PlanError

_TINY_SEQUENCES = 8  # up to here 3^n subsets are cheaper than any search


_LEVEL_ROUNDS = 40


_MOVES = 200_000  # candidates that one local search looks at


_REPACKINGS = 400


_MORE_RESTARTS = 12


_PROOF_TARGETS = (0.001, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08)  # gaps tried, best first


_PROOF_DEPTH = 10


_PROOF_NODES = 300


_LEAN_TRIES = 3  # strategies tried by plain Python kernels


class Search:
    """One step's search; holds the batch's arrays and the incumbent."""

    def __init__(self, groups: Sequence[Groups], schemes: Schemes, options: PlannerOptions, batch: Batch) -> None:
        self._groups = groups
        self._schemes = schemes
        self._options = options
        self._batch = batch
        self._kernels = kernels.select(options.kernels)
        full = SearchEffort(1 + options.effort, _MOVES, _LEVEL_ROUNDS, _REPACKINGS, packs=True)
        self._effort = full if self._kernels.is_compiled else LEAN

    def best_of(self, candidates: Sequence[int]) -> tuple[Assignment, float]:
        """The best assignment over these strategies, and a lower bound on any (ms)."""
        lean = not self._kernels.is_compiled
        prices = {i: self._groups[i].num_ranks.copy() for i in candidates}
        bounds = {i: self.bound(self._groups[i], prices[i], 4, 8) for i in candidates}
        best: Assignment | None = None
        tried = 0
        tiny = self._batch.size <= _TINY_SEQUENCES and self._options.method != "paper"
        for i in sorted(candidates, key=lambda i: (bounds[i], i)):
            if best is not None and bounds[i] * (1.0 + self._options.tolerance) >= best.ms:
                break
            if self._options.method == "paper":
                found = self.assign_as_paper(self._groups[i])
            elif tiny:
                found = self.solve_tiny(self._groups[i])
            else:
                if not lean and len(candidates) > 1:
                    bounds[i] = max(bounds[i], self.bound(self._groups[i], prices[i], 10, 12))
                    if best is not None and bounds[i] * (1.0 + self._options.tolerance) >= best.ms:
                        continue
                found = self.assign(self._groups[i], bounds[i], prices[i], best.ms if best else math.inf)
            if tiny and found is not None:
                bounds[i] = found.ms
            if found is not None and (best is None or found.ms < best.ms):
                best = found
            tried += 1
            if lean and not tiny and tried == _LEAN_TRIES:
                break
        if best is None:
            raise PlanError("no strategy was found that holds every sequence")
        if self._options.method == "fast" and not lean and not tiny:
            best = self._look_again(best, bounds, prices)
        if self._options.method == "exact" and not tiny:
            best = self._improve_exactly(best, bounds)
        if not lean and not tiny:
            self._raise_bounds(bounds, prices, best.ms)
        return best, min(bounds.values())

    def _look_again(self, best: Assignment, bounds: dict[int, float], prices: dict[int, Floats]) -> Assignment:
        """More restarts, bent by other random numbers, for every strategy whose bound is still below the plan."""
        restarts = _MORE_RESTARTS * self._options.effort * 100 // max(200, self._batch.size)
        effort = self._effort._replace(restarts=restarts)
        for i in sorted(bounds, key=lambda i: (bounds[i], i)):
            if restarts and bounds[i] * (1.0 + self._options.tolerance) < best.ms:
                found = self.assign(self._groups[i], bounds[i], prices[i], best.ms, effort)
                if found is not None and found.ms < best.ms:
                    best = found
        return best

    def _raise_bounds(self, bounds: dict[int, float], prices: dict[int, Floats], best_ms: float) -> None:
        """Prove better bounds for the strategies that could still beat the plan [Note: branching on the longest]."""
        if self._batch.merged is not self._batch.items:
            return
        proven, refused = min(bounds.values()), best_ms
        for share in _PROOF_TARGETS:
            target = best_ms / (1.0 + share)
            if target <= proven:
                break
            if target < refused and all(
                self.refute(self._groups[i], target, prices[i]) for i in bounds if bounds[i] < target
            ):
                for i in bounds:
                    bounds[i] = max(bounds[i], target)
                break

    def refute(self, groups: Groups, target: float, price: Floats) -> bool:
        """Whether branching on the longest sequences proves that no plan under a strategy meets `target` ms."""
        depth = min(_PROOF_DEPTH, self._batch.size)
        problem = Problem(self._schemes, self._batch.items, groups.shape)
        return self._kernels.refute(problem, target, price, depth, 6, _PROOF_NODES) > 0

    def bound(self, groups: Groups, price: Floats, outer: int, inner: int) -> float:
        """Certified lower bound in ms on any plan under a strategy; `price` is warm start and result."""
        problem = Problem(self._schemes, self._batch.merged, groups.shape)
        return self._kernels.strategy_bound(problem, outer, inner, price)

    def assign(
        self, groups: Groups, bound: float, price: Floats, ceiling: float, effort: SearchEffort | None = None
    ) -> Assignment | None:
        """Dispatch, pack and repair under one strategy; None when some sequence found no place.

        Little is tried where `ceiling` ms looks out of reach.
        """
        problem = Problem(self._schemes, self._batch.items, groups.shape)
        place = empty_placement(self._batch.size, len(groups.rank_order))
        seed = self._options.seed + (effort is not None)
        prospect = Prospect(bound, price, ceiling)
        ms = self._kernels.dispatch(problem, prospect, effort or self._effort, seed, place)
        return None if math.isinf(ms) else Assignment(groups, place.owner, place.bin_of, float(ms))

    def pack(self, groups: Groups, owner: Ints) -> Assignment:
        """Pack a dispatch as it stands: owner[i] is the pipeline of sequence i."""
        problem = Problem(self._schemes, self._batch.items, groups.shape)
        place = empty_placement(self._batch.size, len(groups.rank_order))
        place.owner[:] = owner
        ms = self._kernels.pack_all(problem, self._effort.levels, place)
        return Assignment(groups, place.owner, place.bin_of, float(ms))

    def assign_as_paper(self, groups: Groups) -> Assignment | None:
        """Algorithm 1 on Eq. 3 with its 100 trials, then packing; None when a sequence fits nowhere."""
        problem = DispatchProblem.of_batch(self._batch, groups, self._schemes, self._kernels)
        owner = problem.by_paper(seed=self._options.seed)
        if owner is None:
            return None
        return self.pack(groups, owner)

    def _improve_exactly(self, best: Assignment, bounds: dict[int, float]) -> Assignment:
        """What HiGHS makes of the best plan's dispatch and of its slowest pipeline, if that is better."""
        groups, seconds = best.groups, self._options.seconds
        nodes = self._options.node_limit if seconds is None else None
        problem = DispatchProblem.of_batch(self._batch, groups, self._schemes, self._kernels)
        found = problem.by_highs(best.owner, 0.9 * min(bounds.values()), node_limit=nodes, seconds=seconds)
        if found is not None:
            best = min(best, self.pack(groups, found.owner), key=lambda plan: plan.ms)
        return repack_slowest(self._schemes, self._batch.items, best, node_limit=nodes, seconds=seconds)

    def solve_tiny(self, groups: Groups) -> Assignment | None:
        """The optimum under one strategy by dynamic programming over subsets; None when nothing fits."""
        items, schemes, kernel, n = self._batch.items, self._schemes, self._kernels, self._batch.size
        cost = np.full((len(schemes.c), 1 << n), math.inf)
        parts = np.zeros(1 << n, dtype=np.int64)
        for k in groups.shape.scheme.tolist():
            kernel.subset_costs(scheme_row(schemes, k), items.work[k], items.tokens, cost[k], parts)
        first = np.cumsum(groups.shape.pipelines) - groups.shape.pipelines
        useful = np.minimum(groups.shape.pipelines, n)  # of equal pipelines no more than there are sequences
        chosen = np.concatenate([np.arange(at, at + some) for at, some in zip(first, useful, strict=True)])
        local = np.zeros(n, dtype=np.int64)
        ms = kernel.best_split(cost, groups.shape.pipeline_scheme[chosen], n, local)
        if math.isinf(ms):
            return None
        owner, bin_of = chosen[local], np.zeros(n, dtype=np.int64)
        for p in range(len(groups.rank_order)):
            own = np.flatnonzero(owner == p)
            bins = np.zeros(len(own), dtype=np.int64)
            k = int(groups.shape.pipeline_scheme[p])
            kernel.pack_tiny(scheme_row(schemes, k), items.work[k][own], items.tokens[own], bins)
            bin_of[own] = bins
        return Assignment(groups, owner, bin_of, float(ms))
