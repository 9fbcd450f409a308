"""A step's lengths in, the best plan over all candidate strategies out, with a certified bound. Pure: no torch.

Every strategy gets a bound; strategies are tried best bound first, and left untried once their bound is no
better than the best plan found. The least bound over all strategies certifies the chosen plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from ds_hydra.cost_model import CostTable, SchemeCost
from ds_hydra.pipe.strategy import ParallelScheme, parse_strategy
from ds_hydra.planner import kernels
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.problem import Batch, Floats, Groups, Ints, SchemeArrays, check_sequences
from ds_hydra.planner.step_plan import PipelinePlan, StepPlan, load_plans
from ds_hydra.zero_hetero.errors import PlanError

_TINY_SEQUENCES = 8  # up to here 3^n subsets are cheaper than any search
_LEVEL_ROUNDS = 40
_PROOF_TARGETS = (0.001, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08)  # gaps tried, best first
_PROOF_DEPTH = 10
_PROOF_NODES = 300
_LEAN_TRIES = 3  # strategies tried by plain Python kernels


@dataclass(frozen=True)
class Assignment:
    """Sequences of a batch (longest first) on a strategy's pipelines (group by group), packed.

    owner[i] is sequence i's pipeline, bin_of[i] its micro-batch there; `ms` is the slowest pipeline's time.
    """

    groups: Groups
    owner: Ints
    bin_of: Ints
    ms: float


class Planner:
    """Plans steps: `plan(step, ids, lengths) -> StepPlan`. Same input and options give the same plan.

    `strategies` hold one scheme per pipeline, in rank order; all must have the same number of ranks. Raises
    PlanError when that fails or a scheme has no costs.
    """

    def __init__(
        self,
        cost_table: CostTable,
        strategies: Sequence[tuple[ParallelScheme, ...]],
        options: PlannerOptions | None = None,
    ) -> None:
        self.cost_table = cost_table
        self.options = options or PlannerOptions()
        self.strategies = tuple(tuple(strategy) for strategy in strategies)
        if not self.strategies:
            raise PlanError("the planner needs at least one strategy but was given none")
        self._groups = [Groups.of(strategy, cost_table) for strategy in self.strategies]
        ranks = {sum(scheme.num_ranks for scheme in strategy) for strategy in self.strategies}
        if len(ranks) > 1:
            listed = ", ".join(f"{g} ({sum(s.num_ranks for s in g.schemes)})" for g in self._groups)
            raise PlanError(f"strategies must all use the same number of ranks but use {sorted(ranks)}: {listed}")
        self.num_ranks = ranks.pop()
        self._arrays = SchemeArrays.of(cost_table)
        self._prices = [self._arrays.num_ranks[g.scheme_of].copy() for g in self._groups]
        self._replay = load_plans(self.options.replay_file) if self.options.replay_file else {}

    @property
    def max_length(self) -> int:
        """The longest sequence that some strategy can hold, in tokens."""
        return max(int(self._arrays.max_length[g.scheme_of].max()) for g in self._groups)

    def plan(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> StepPlan:
        """The plan of one step. PlanError for bad lengths and sequences that no strategy holds."""
        ids, tokens = check_sequences(sequence_ids, lengths)
        if self.options.choose == "replay":
            return self._replayed(step, ids, tokens)
        longest = max(range(len(tokens)), key=tokens.__getitem__)
        feasible = [i for i, g in enumerate(self._groups) if self._holds(g, tokens[longest])]
        if not feasible:
            raise PlanError(
                f"no strategy can hold sequence {ids[longest]} of {tokens[longest]} tokens: the largest MaxLen is "
                f"{self.max_length}; add a strategy with a larger tp or sp, or lower context_length"
            )
        if self.options.choose == "cycle":
            n = len(self._groups)
            feasible = [next(i for i in ((step + skip) % n for skip in range(n)) if i in feasible)]
        batch = Batch.of(tokens, self.cost_table)
        best, bound = Search(self, batch).best_of(feasible)
        return self._step_plan(step, ids, tokens, batch, best, bound)

    def _holds(self, groups: Groups, length: int) -> bool:
        return bool(length <= self._arrays.max_length[groups.scheme_of].max())

    def _replayed(self, step: int, ids: tuple[int, ...], tokens: tuple[int, ...]) -> StepPlan:
        plan = self._replay.get(step)
        if plan is None:
            raise PlanError(
                f"{self.options.replay_file} has no plan for step {step}: it holds {len(self._replay)} steps; "
                "replay no further than it was recorded, or use choose='best'"
            )
        if (plan.sequence_ids, plan.lengths) != (ids, tokens):
            raise PlanError(
                f"{self.options.replay_file}, step {step}: the plan is for {len(plan.lengths)} sequences of "
                f"{plan.num_tokens} tokens but the step has {len(tokens)} of {sum(tokens)}, or other ids; replay "
                "with the same data, seed and tokens_per_step"
            )
        if sum(p.scheme.num_ranks for p in plan.pipelines) != self.num_ranks:
            raise PlanError(
                f"{self.options.replay_file}, step {step}: strategy {plan.strategy!r} is not for {self.num_ranks} ranks"
            )
        return replace(plan, source="replay")

    def _step_plan(
        self,
        step: int,
        ids: tuple[int, ...],
        tokens: tuple[int, ...],
        batch: Batch,
        best: Assignment,
        bound: float,
    ) -> StepPlan:
        schemes = best.groups.schemes
        packed: list[dict[int, list[int]]] = [{} for _ in schemes]
        position, rank_order = batch.position.tolist(), best.groups.rank_order
        for i, (p, b) in enumerate(zip(best.owner.tolist(), best.bin_of.tolist(), strict=True)):
            packed[rank_order[p]].setdefault(b, []).append(position[i])
        pipelines = []
        for scheme, bins in zip(schemes, packed, strict=True):
            cost = self.cost_table[scheme]
            loaded = [(cost.load_ms([tokens[i] for i in bins[b]]), tuple(bins[b])) for b in sorted(bins)]
            ordered = order_microbatches(loaded)
            loads = [load for load, _ in ordered]
            ms = cost.paper_ms(loads) if self.options.objective == "paper" else cost.pipeline_ms(loads)
            pipelines.append(PipelinePlan(scheme, tuple(sequences for _, sequences in ordered), ms))
        predicted = max(pipeline.predicted_ms for pipeline in pipelines)
        source = "fast" if self.options.kernels == "pure" else "search"
        return StepPlan(step, ids, tokens, tuple(pipelines), predicted, min(bound, predicted), source)


def order_microbatches(loaded: list[tuple[float, tuple[int, ...]]]) -> list[tuple[float, tuple[int, ...]]]:
    """Micro-batches as (load ms, sequences) in the order with the smallest bubble: light, heavy, light.

    Warm-up and drain are then short while the heavy ones run in the steady state, which brings 1F1B within a
    fraction of a percent of the flow-shop time.
    """
    rising = sorted(loaded)
    return rising[0::2] + rising[1::2][::-1]


class Search:
    """One step's search; holds the batch's arrays and the incumbent."""

    def __init__(self, planner: Planner, batch: Batch) -> None:
        self._groups = planner._groups
        self._prices = planner._prices
        self._arrays = planner._arrays
        self._options = planner.options
        self._batch = batch
        self._kernels: SimpleNamespace = kernels.compiled() if planner.options.kernels == "compiled" else kernels.pure()
        self._paper = planner.options.objective == "paper"

    def best_of(self, candidates: Sequence[int]) -> tuple[Assignment, float]:
        """The best assignment over these strategies, and a lower bound on any (ms)."""
        lean = not self._kernels.is_compiled
        prices = {i: self._prices[i].copy() for i in candidates}
        bounds = {i: self.bound(self._groups[i], prices[i], 4, 8) for i in candidates}
        best: Assignment | None = None
        tried = 0
        tiny = self._batch.size <= _TINY_SEQUENCES
        for i in sorted(candidates, key=lambda i: (bounds[i], i)):
            if best is not None and bounds[i] * (1.0 + self._options.tolerance) >= best.ms:
                break
            if tiny:
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
        if not lean and not tiny:
            self._raise_bounds(bounds, prices, best.ms)
        return best, min(bounds.values())

    def _raise_bounds(self, bounds: dict[int, float], prices: dict[int, Floats], best_ms: float) -> None:
        """Prove better bounds for the strategies that could still beat the plan [Note: branching on the longest]."""
        if len(self._batch.merged_tokens) < self._batch.size:
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
        batch, arrays = self._batch, self._arrays
        deepest = min(_PROOF_DEPTH, batch.size)
        placed = np.empty(deepest, dtype=np.int64)
        nodes = self._kernels.refute(
            target, batch.work, batch.tokens, batch.size, groups.scheme_of, groups.count, len(groups.count), arrays.c,
            arrays.max_length, arrays.pp, batch.rates, price, deepest, 6, _PROOF_NODES, placed,
        )  # fmt: skip
        return bool(nodes > 0)

    def bound(self, groups: Groups, price: Floats, outer: int, inner: int) -> float:
        """Certified lower bound in ms on any plan under a strategy; `price` is warm start and result."""
        batch, arrays = self._batch, self._arrays
        return float(
            self._kernels.strategy_bound(
                batch.merged_work, batch.merged_tokens, batch.merged_count, len(batch.merged_tokens),
                groups.scheme_of, groups.count, len(groups.count), arrays.c, arrays.max_length, arrays.pp,
                batch.rates, outer, inner, price,
            )
        )  # fmt: skip

    def assign(self, groups: Groups, bound: float, price: Floats, ceiling: float) -> Assignment | None:
        """Dispatch, pack and repair under one strategy; None when some sequence found no place."""
        batch, arrays = self._batch, self._arrays
        constants = (arrays.c, arrays.max_length, arrays.util_length, arrays.pp)
        pipelines = int(groups.count.sum())
        owner = np.zeros(batch.size, dtype=np.int64)
        ms = np.zeros(pipelines)
        lean = not self._kernels.is_compiled
        effort, budget = (0, 0) if lean else (1 + self._options.effort, 200_000)
        ideal = self._kernels.dispatch(
            batch.work, batch.tokens, batch.size, groups.scheme_of, groups.count, len(groups.count), *constants,
            batch.rates, self._paper, bound, price, ceiling, 8, effort, budget, self._options.seed, owner, ms,
        )  # fmt: skip
        if math.isinf(ideal):
            return None
        bin_of = np.zeros(batch.size, dtype=np.int64)
        bins = np.zeros(pipelines, dtype=np.int64)
        scheme = groups.pipeline_schemes
        rounds = 0 if lean else _LEVEL_ROUNDS
        packed = self._kernels.pack_all(
            batch.work, batch.tokens, batch.size, scheme, pipelines, *constants, self._paper, rounds,
            owner, bin_of, ms, bins,
        )  # fmt: skip
        if not lean and packed > ideal * (1.0 + 1e-9):
            packed = self._kernels.repair(
                batch.work, batch.tokens, batch.size, scheme, pipelines, *constants, self._paper, rounds,
                bound, 400, owner, bin_of, ms, bins,
            )  # fmt: skip
        return Assignment(groups, owner, bin_of, float(packed))

    def solve_tiny(self, groups: Groups) -> Assignment | None:
        """The optimum under one strategy by dynamic programming over subsets; None when nothing fits."""
        batch, arrays = self._batch, self._arrays
        n = batch.size
        cost = np.full((len(arrays.c), 1 << n), math.inf)
        parts = np.zeros(1 << n, dtype=np.int64)
        for k in groups.scheme_of.tolist():
            self._kernels.subset_costs(
                batch.work[k], batch.tokens, n, arrays.c[k], arrays.max_length[k], arrays.util_length[k],
                arrays.pp[k], self._paper, cost[k], parts,
            )  # fmt: skip
        chosen = [x for x in range(len(groups.rank_order)) if self._worth_keeping(groups, x, n)]
        scheme = groups.pipeline_schemes[chosen]
        local = np.zeros(n, dtype=np.int64)
        ms = self._kernels.best_split(cost, scheme, len(chosen), n, local)
        if math.isinf(ms):
            return None
        owner = np.array(chosen, dtype=np.int64)[local]
        bin_of = np.zeros(n, dtype=np.int64)
        self._kernels.pack_tiny(
            batch.work, batch.tokens, n, groups.pipeline_schemes, len(groups.rank_order), arrays.c,
            arrays.max_length, arrays.util_length, arrays.pp, self._paper, owner, bin_of,
        )  # fmt: skip
        return Assignment(groups, owner, bin_of, float(ms))

    def _worth_keeping(self, groups: Groups, pipeline: int, n: int) -> bool:
        """Of equal pipelines, no more than there are sequences can be of use."""
        starts = np.cumsum(groups.count) - groups.count
        group = int(np.searchsorted(starts, pipeline, side="right")) - 1
        return bool(pipeline - starts[group] < n)


def warm_up() -> None:
    """Compile every kernel, or load it from numba's cache, by planning two made-up steps."""
    costs = tuple(SchemeCost(ParallelScheme(tp, pp), 1e-6, 0.1, 10.0, 400, 8) for tp, pp in ((1, 1), (2, 1), (1, 2)))
    table = CostTable(costs, "made up to warm the cache")
    planner = Planner(table, [parse_strategy("tp2 + 2*tp1"), parse_strategy("2*pp2")])
    for size in (3, 40):
        planner.plan(0, range(size), [(37 * i) % 300 + 1 for i in range(size)])
    kernels.mark_warm()
