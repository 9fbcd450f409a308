"""A step's lengths in, the best plan over all candidate strategies out, with a certified bound. Pure: no torch.

Every strategy gets a bound; strategies are tried best bound first, and left untried once their bound is no
better than the best plan found. The least bound over all strategies certifies the chosen plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.schedules.registry import WEIGHED
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.phase import MicroBatchPlan, Phase, PipelinePlan
from ds_hydra.plan.plan_file import load_plans
from ds_hydra.plan.runnable import check_runnable
from ds_hydra.plan.simulate import simulate_pipeline, simulated_ms, slowest_of_whole
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import check_complete
from ds_hydra.planner.kernels.problem import Assignment, Batch, PipelineKinds, check_sequences, scheme_arrays
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.search import Search
from ds_hydra.zero_hetero.errors import PlanError


class Planner:
    """Plans steps: `plan(step, ids, lengths) -> StepPlan`. Same input and options give the same plan.

    All `strategies` must have the same number of ranks. Raises PlanError when that fails, a pipeline has no costs,
    or plans to replay ask for what no runtime can run.
    """

    def __init__(
        self,
        cost_table: CostTable,
        strategies: Sequence[StrategyShape],
        options: PlannerOptions | None = None,
    ) -> None:
        self.cost_table = cost_table
        self.options = options or PlannerOptions()
        self.strategies = tuple(strategies)
        if not self.strategies:
            raise PlanError("the planner needs at least one strategy but was given none")
        self._kinds = [PipelineKinds.of(strategy, cost_table) for strategy in self.strategies]
        ranks = {strategy.num_ranks for strategy in self.strategies}
        if len(ranks) > 1:
            listed = ", ".join(f"{strategy} ({strategy.num_ranks})" for strategy in self.strategies)
            raise PlanError(f"strategies must all use the same number of ranks but use {sorted(ranks)}: {listed}")
        self.num_ranks = ranks.pop()
        self._schemes = scheme_arrays(cost_table, paper=self.options.objective == "paper")
        self._replay = load_plans(self.options.replay_file) if self.options.replay_file else {}
        for plan in self._replay.values():
            check_runnable(plan, no_slices=self.options.no_slices)
            check_complete(plan, self.num_ranks)

    @property
    def max_length(self) -> int:
        """The longest sequence that some strategy can hold, in tokens."""
        return max(int(self._schemes.max_length[kinds.shape.scheme].max()) for kinds in self._kinds)

    def plan(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> StepPlan:
        """The plan of one step. PlanError for bad lengths and sequences that no strategy holds."""
        ids, tokens = check_sequences(sequence_ids, lengths)
        if self.options.choose == "replay":
            return self._replayed(step, ids, tokens)
        longest = max(range(len(tokens)), key=tokens.__getitem__)
        feasible = [i for i, kinds in enumerate(self._kinds) if self._holds(kinds, tokens[longest])]
        if not feasible:
            raise PlanError(
                f"no strategy can hold sequence {ids[longest]} of {tokens[longest]} tokens: the largest MaxLen is "
                f"{self.max_length}; add a strategy with a larger tp or sp, or lower context_length"
            )
        if self.options.choose == "cycle":
            n = len(self._kinds)
            feasible = [next(i for i in ((step + skip) % n for skip in range(n)) if i in feasible)]
        batch = Batch.of(tokens, self.cost_table)
        best, bound = Search(self._kinds, self._schemes, self.options, batch).best_of(feasible)
        return self._step_plan(step, ids, tokens, batch, best, bound)

    def _holds(self, kinds: PipelineKinds, length: int) -> bool:
        return bool(length <= self._schemes.max_length[kinds.shape.scheme].max())

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
        shapes = best.kinds.strategy.pipelines
        packed: list[dict[int, list[int]]] = [{} for _ in shapes]
        position, rank_order = batch.position.tolist(), best.kinds.rank_order
        for i, (p, b) in enumerate(zip(best.owner.tolist(), best.bin_of.tolist(), strict=True)):
            packed[rank_order[p]].setdefault(b, []).append(position[i])
        pipelines, timed = [], []
        known: dict[ParallelScheme | PipelineShape, tuple[SchemeCost, list[float]]] = {}
        for shape, bins in zip(shapes, packed, strict=True):
            if shape.cost_key not in known:
                cost = self.cost_table[shape]
                known[shape.cost_key] = cost, cost.sequence_ms(tokens).tolist()
            cost, work = known[shape.cost_key]
            loaded = [(cost.packed_ms([work[i] for i in bins[b]]), tuple(bins[b])) for b in sorted(bins)]
            ordered = order_microbatches(loaded)
            loads = [load for load, _ in ordered]
            flow_shop = cost.pipeline_ms(loads)
            ms = cost.paper_ms(loads) if self.options.objective == "paper" else flow_shop
            batches = tuple([MicroBatchPlan.of_whole(sequences, tokens) for _, sequences in ordered])
            planned = PipelinePlan(shape, batches, ms)
            if shape.schedule in WEIGHED and batches:  # the formula is for 1F1B, and so is the bound
                planned, bound = replace(planned, predicted_ms=simulate_pipeline(planned, self.cost_table)), 0.0
            pipelines.append(planned)
            timed.append((flow_shop, shape, loads))
        phase = Phase(tuple(pipelines))
        weighed = any(shape.schedule in WEIGHED for shape in shapes)
        predicted = simulated_ms((phase,), self.cost_table) if weighed else slowest_of_whole(timed)
        source = "search" if kernels.select(self.options.kernels).is_compiled else "fast"
        return StepPlan(step, ids, tokens, (phase,), predicted, min(bound, phase.predicted_ms), source)


def order_microbatches(loaded: list[tuple[float, tuple[int, ...]]]) -> list[tuple[float, tuple[int, ...]]]:
    """Micro-batches as (load ms, sequences) in the order with the smallest bubble: light, heavy, light.

    Warm-up and drain are then short while the heavy ones run in the steady state, which brings 1F1B within a
    fraction of a percent of the flow-shop time.
    """
    rising = sorted(loaded)
    return rising[0::2] + rising[1::2][::-1]


def warm_up() -> None:
    """Compile every kernel, or load it from numba's cache, by planning two made-up steps."""
    costs = tuple(SchemeCost(ParallelScheme(tp, pp), 1e-6, 0.1, 10.0, 400, 8) for tp, pp in ((1, 1), (2, 1), (1, 2)))
    table = CostTable(costs, "made up to warm the cache")
    planner = Planner(
        table, [StrategyShape.parse(text) for text in ("tp2 + 2*tp1", "2*pp2")], PlannerOptions(kernels="compiled")
    )
    for size in (3, 40):
        planner.plan(0, range(size), [(37 * i) % 300 + 1 for i in range(size)])
    kernels.mark_warm()
