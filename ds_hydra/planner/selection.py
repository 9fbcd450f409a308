"""A step's lengths in, the best plan over all candidate strategies out, with a certified bound. Pure: no torch.

Every strategy gets a bound; strategies are tried best bound first, and left untried once their bound is no
better than the best plan found. The least bound over all strategies certifies the chosen plan.

Strategies of whole sequences under 1F1B are searched first (`search`), those with elastic pipelines then (`elastic`),
and the plan that is simulated to be done soonest wins. So elastic candidates never make a plan worse. Only for a batch
whose longest sequence no strategy holds, elastic pipelines compute layers again.

What messages add is known for each strategy before any of its plans is (`simulate.exposed`), but it differs from plan
to plan: for V's of a 32B model on 32 GPUs between 102 and 196 ms of 3.7 s. So where a simulation of whole steps is at
hand, the best plans of either kind are simulated with their messages, and the soonest of these wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.phase import Phase
from ds_hydra.plan.plan_file import load_plans
from ds_hydra.plan.runnable import check_runnable
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import check_complete, validate_plan
from ds_hydra.planner.elastic import ElasticSearch
from ds_hydra.planner.elastic_refine import Elastic
from ds_hydra.planner.elastic_space import ElasticSpace, is_elastic
from ds_hydra.planner.kernels.problem import Assignment, Batch, PipelineKinds, check_sequences, scheme_arrays
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.pipelines import elastic_pipelines, whole_phase
from ds_hydra.planner.search import Search
from ds_hydra.zero_hetero.errors import PlanError

_TRIES = 900  # of a step's elastic search for each unit of effort, and
_TRIES_EACH = 150  # as many more for each pipeline of
_COUNTED = 96  # at most: more of them differ little
_FINALISTS = 2  # plans of whole sequences, and as many elastic ones, that are simulated with messages on
_FEW_RANKS = 256  # at most; on 1024 one simulation takes 0.4 s, and there is one of each kind
_LEAN_TRIES = 1  # of plain Python and without effort: dispatches and cuts once


class Planner:
    """Plans steps: `plan(step, ids, lengths) -> StepPlan`. Same input and options give the same plan.

    All `strategies` must have the same number of ranks. Raises PlanError when that fails, a pipeline has no costs,
    or plans to replay ask for what no runtime can run.

    `exposed_ms` says what each strategy's pulls, pushes and messages add to a step (`simulate.exposed`): the plan is
    that of the shortest step, and its gap to the bound is that of the step. Without it they add nothing. `step_ms` says
    what a plan's step really takes with them, and decides among the best plans.
    """

    def __init__(
        self,
        cost_table: CostTable,
        strategies: Sequence[StrategyShape],
        options: PlannerOptions | None = None,
        *,
        exposed_ms: Sequence[float] = (),
        step_ms: Callable[[StepPlan], float] | None = None,
    ) -> None:
        self.cost_table = cost_table
        self.options = options or PlannerOptions()
        self.strategies = tuple(strategies)
        if not self.strategies:
            raise PlanError("the planner needs at least one strategy but was given none")
        exposed = list(exposed_ms) or [0.0] * len(self.strategies)
        self._exposed = dict(zip(map(str, self.strategies), exposed, strict=True))
        self._whole = [index for index, one in enumerate(self.strategies) if not is_elastic(one)]
        self._kinds = [PipelineKinds.of(self.strategies[index], cost_table, exposed[index]) for index in self._whole]
        self._elastic = [index for index in range(len(self.strategies)) if index not in set(self._whole)]
        elastic = [self.strategies[index] for index in self._elastic]
        slices, of_elastic = not self.options.no_slices, [exposed[index] for index in self._elastic]
        self._space = ElasticSpace(cost_table, elastic, slices=slices, exposed_ms=of_elastic)
        self._again = ElasticSpace(
            cost_table, elastic, slices=slices, layers=self.options.layers, exposed_ms=of_elastic
        )
        ranks = {strategy.num_ranks for strategy in self.strategies}
        if len(ranks) > 1:
            listed = ", ".join(f"{strategy} ({strategy.num_ranks})" for strategy in self.strategies)
            raise PlanError(f"strategies must all use the same number of ranks but use {sorted(ranks)}: {listed}")
        self.num_ranks = ranks.pop()
        self._step_ms = step_ms
        self._count = _FINALISTS if step_ms is not None and self.num_ranks <= _FEW_RANKS else 1
        self._schemes = scheme_arrays(cost_table, paper=self.options.objective == "paper")
        limits = [int(self._schemes.max_length[kinds.shape.scheme].max()) for kinds in self._kinds]
        limits += [self._space.longest(kinds) for kinds in self._space.kinds]
        self._longest = dict(zip((*self._whole, *self._elastic), limits, strict=True))  # by number of the strategy
        self._replay = load_plans(self.options.replay_file) if self.options.replay_file else {}
        for plan in self._replay.values():
            check_runnable(plan, no_slices=self.options.no_slices)
            check_complete(plan, self.num_ranks)

    @property
    def max_length(self) -> int:
        """The longest sequence that some strategy can hold, in tokens."""
        return max([*self._longest.values(), *map(self._again.longest, self._again.kinds)])

    def plan(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> StepPlan:
        """The plan of one step. PlanError for bad lengths and sequences that no strategy holds."""
        ids, tokens = check_sequences(sequence_ids, lengths)
        if self.options.choose == "replay":
            return self._replayed(step, ids, tokens)
        longest = max(range(len(tokens)), key=tokens.__getitem__)
        feasible = [i for i in range(len(self.strategies)) if tokens[longest] <= self._longest[i]]
        space = self._space if feasible else self._again
        if not feasible:
            holding = zip(self._elastic, space.kinds, strict=True)
            feasible = [i for i, kinds in holding if tokens[longest] <= space.longest(kinds)]
        if not feasible:
            raise PlanError(
                f"no strategy can hold sequence {ids[longest]} of {tokens[longest]} tokens: the largest MaxLen is "
                f"{self.max_length}; add a strategy with a larger tp or sp, or lower context_length"
            )
        if self.options.choose == "cycle":
            n = len(self.strategies)
            feasible = [next(i for i in ((step + skip) % n for skip in range(n)) if i in feasible)]
        whole, bound_of_whole = self._plan_whole(step, ids, tokens, feasible)
        elastic, bound_of_elastic = self._plan_elastic(step, ids, tokens, feasible, whole, space)
        found = [*whole, *elastic]
        if not found:
            raise PlanError(
                "no strategy was found that holds every sequence; add one with a larger tp or sp, or lower "
                "context_length"
            )
        best = min(found, key=self._estimated_ms)
        if self._step_ms is not None and len(found) > 1:
            best = min(found, key=self._step_ms)
        # The bound is over all candidates, so that of plans which lost counts too. It is one of steps, and a plan
        # states what it leaves to the plan's own pipelines.
        bound = min(bound_of_whole, bound_of_elastic) - self._exposed_ms(best)
        return replace(best, lower_bound_ms=max(0.0, min(bound, best.searched_ms)))

    def _estimated_ms(self, plan: StepPlan) -> float:
        return plan.predicted_ms + self._exposed_ms(plan)

    def _exposed_ms(self, plan: StepPlan) -> float:
        return self._exposed[plan.strategy]

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
        validate_plan(plan, self.cost_table, self.num_ranks, self.options.objective)
        return replace(plan, source="replay")

    @property
    def _source(self) -> str:
        return "search" if kernels.select(self.options.kernels).is_compiled else "fast"

    def _plan_whole(
        self, step: int, ids: tuple[int, ...], tokens: tuple[int, ...], feasible: Sequence[int]
    ) -> tuple[list[StepPlan], float]:
        """The best plans of whole sequences, none without a strategy for it, and a bound on steps."""
        numbers = [number for number, index in enumerate(self._whole) if index in feasible]
        if not numbers:
            return [], math.inf
        batch = Batch.of(tokens, self.cost_table)
        found, bound = Search(self._kinds, self._schemes, self.options, batch).best_of(numbers, self._count)
        phases = [self._whole_phase(tokens, batch, one) for one in found]
        return [StepPlan(step, ids, tokens, (phase,), ms, source=self._source) for phase, ms in phases], bound

    def _whole_phase(self, tokens: tuple[int, ...], batch: Batch, best: Assignment) -> tuple[Phase, float]:
        """The pipelines of an assignment, and their simulated time."""
        shapes = best.kinds.strategy.pipelines
        packed: list[dict[int, list[int]]] = [{} for _ in shapes]
        position, rank_order = batch.position.tolist(), best.kinds.rank_order
        for i, (p, b) in enumerate(zip(best.owner.tolist(), best.bin_of.tolist(), strict=True)):
            packed[rank_order[p]].setdefault(b, []).append(position[i])
        held = [[bins[b] for b in sorted(bins)] for bins in packed]
        return whole_phase(shapes, held, self.cost_table, tokens, paper=self.options.objective == "paper")

    def _plan_elastic(
        self,
        step: int,
        ids: tuple[int, ...],
        tokens: tuple[int, ...],
        feasible: Sequence[int],
        whole: Sequence[StepPlan],
        space: ElasticSpace,
    ) -> tuple[list[StepPlan], float]:
        """The best plans over strategies with elastic pipelines, none without any or where nothing must be gained, and
        a bound on steps."""
        numbers = [number for number, index in enumerate(self._elastic) if index in feasible]
        kernel = kernels.select(self.options.kernels)
        # Plain Python is too slow to search in: then it only helps out.
        if not numbers or (whole and not (kernel.is_compiled and self.options.effort)):
            return [], math.inf
        most = max(len(space.strategies[number].pipelines) for number in numbers)
        effort = self.options.effort if kernel.is_compiled else 0
        tries = effort * (_TRIES + _TRIES_EACH * min(most, _COUNTED)) or _LEAN_TRIES
        batch = space.batch(tokens)
        search = ElasticSearch(space, kernel, batch, num_ranks=self.num_ranks, tries=tries, seed=self.options.seed)
        bound = search.bound(numbers)
        found: list[Elastic] = []
        if not whole or bound < min(map(self._estimated_ms, whole)):
            found = search.best_of(numbers, self._count)
        paper = self.options.objective == "paper"
        phases = [elastic_pipelines(space, batch, one, tokens, paper) for one in found]
        return [StepPlan(step, ids, tokens, (phase,), ms, source=self._source) for phase, ms in phases], bound


def warm_up() -> None:
    """Compile every kernel that plans need, or load it from numba's cache, by planning a few made-up steps."""
    costs = tuple(
        SchemeCost(ParallelScheme(tp, pp), 1e-6, 0.1, 10.0, 400, 8, Shares.usual())
        for tp, pp in ((1, 1), (2, 1), (1, 2))
    )
    table, options = CostTable(costs, "made up to warm the cache"), PlannerOptions(kernels="compiled")
    # Few sequences and many go different ways, and so do strategies with elastic pipelines where others may win too.
    for texts in (("tp2 + 2*tp1", "2*pp2", "2*pp2/list"), ("tp2 + pp2/list",)):
        planner = Planner(table, [StrategyShape.parse(text) for text in texts], options)
        for size in (3, 20):
            planner.plan(0, range(size), [(37 * i) % 300 + 1 for i in range(size)])
