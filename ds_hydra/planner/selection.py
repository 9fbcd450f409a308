"""A step's lengths in, the best plan over all candidate strategies out, with a certified bound. Pure: no torch.

Every strategy gets a bound; strategies are tried best bound first, and left untried once their bound is no
better than the best plan found. The least bound over all strategies certifies the chosen plan.

Strategies of whole sequences under 1F1B are searched first (`search`), those with chunked pipelines then (`chunked`),
and the plan that is simulated to be done soonest wins. So chunked candidates never make a plan worse. Where
a run of micro-batches does not fit a stage, they compute layers again, as few as that takes: so a long sequence may run
where it is soonest done, and not only where there is room for all that it keeps.

What messages add is known for each strategy before any of its plans is (`simulate.exposed`), but it differs from plan
to plan: for V's of a 32B model on 32 GPUs between 102 and 196 ms of 3.7 s. So where a simulation of whole steps is at
hand, the best plans of either kind are simulated with their messages, several of the best chunked strategy, and the
soonest of these wins.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.plan_file import load_plans
from ds_hydra.plan.runnable import check_runnable
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import check_complete, validate_plan
from ds_hydra.planner.budget import PlanBudget, budget_of
from ds_hydra.planner.chunked_space import ChunkedSpace, is_chunked
from ds_hydra.planner.composing import COMPOSED, WORTH, Composer, HighsShare
from ds_hydra.planner.hidden_pulls import with_hidden_pulls
from ds_hydra.planner.kernels.problem import PipelineKinds, check_sequences, scheme_arrays
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.step_search import Pool, StepSearch
from ds_hydra.zero_hetero.errors import PlanError

logger = logging.getLogger(__name__)
_FINALISTS = 4  # plans of whole sequences, and as many chunked ones, that are simulated with messages on
_FEW_RANKS = 256  # at most; on 1024 one simulation takes 0.4 s, and there is one of each kind
_USUAL, _TURNS = 0.005, 2  # of a plan's time: more of messages is worth such moves; how often they are sought

Room = Callable[[StrategyShape], str]
"""Why the training side cannot run a strategy that is no candidate; "" where it can."""


class Made(NamedTuple):
    """A step's plan, and what HiGHS did for it; None where it had nothing to do."""

    plan: StepPlan
    highs: HighsShare | None


class Planner:
    """Plans steps: `plan(step, ids, lengths) -> StepPlan`. Same input and options give the same plan.

    All `strategies` must have the same number of ranks. Raises PlanError when that fails, a pipeline has no costs,
    or plans to replay ask for what no runtime can run.

    `exposed_ms` says what each strategy's pulls, pushes and messages add to a step (`simulate.exposed`): the plan is
    that of the shortest step, and its gap to the bound is that of the step. Without it they add nothing. `step_ms` says
    what a plan's step really takes with them, and decides among the best plans.

    `room` refuses composed strategies that the training side cannot run; `budget` None: one that does not look at the
    steps' time. `cpu_s` reads a clock for the record alone.
    """

    def __init__(
        self,
        cost_table: CostTable,
        strategies: Sequence[StrategyShape],
        options: PlannerOptions | None = None,
        *,
        exposed_ms: Sequence[float] = (),
        step_ms: Callable[[StepPlan], float] | None = None,
        room: Room = lambda _: "",
        budget: PlanBudget | None = None,
        cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.cost_table = cost_table
        self.options = options or PlannerOptions()
        self.strategies = tuple(strategies)
        if not self.strategies:
            raise PlanError("the planner needs at least one strategy but was given none")
        exposed = list(exposed_ms) or [0.0] * len(self.strategies)
        cost_table = cost_table.for_strategies(self.strategies)  # with rows of pipelines that have slow ranks
        self._exposed = dict(zip(map(str, self.strategies), exposed, strict=True))
        self._whole = [index for index, one in enumerate(self.strategies) if not is_chunked(one)]
        self._kinds = [PipelineKinds.of(self.strategies[index], cost_table, exposed[index]) for index in self._whole]
        self._chunked = [index for index in range(len(self.strategies)) if index not in set(self._whole)]
        chunked = [self.strategies[index] for index in self._chunked]
        slices, of_chunked = not self.options.no_slices, [exposed[index] for index in self._chunked]
        self._space = ChunkedSpace(
            cost_table, chunked, slices=slices, layers=self.options.layers, exposed_ms=of_chunked
        )
        ranks = {strategy.num_ranks for strategy in self.strategies}
        if len(ranks) > 1:
            listed = ", ".join(f"{strategy} ({strategy.num_ranks})" for strategy in self.strategies)
            raise PlanError(f"strategies must all use the same number of ranks but use {sorted(ranks)}: {listed}")
        self.num_ranks = ranks.pop()
        self._step_ms, self._room, self._cpu_s = step_ms, room, cpu_s
        self._schemes = scheme_arrays(cost_table)
        row = {cost.scheme: k for k, cost in enumerate(cost_table.costs) if not cost.paces}
        self._pool = Pool(
            cost_table, self.options, self._schemes, self.num_ranks,
            budget or budget_of(cost_table, self.strategies, self.options.effort),
            _FINALISTS if step_ms is not None and self.num_ranks <= _FEW_RANKS else 1,
            frozenset(map(str, self.strategies)),
            {row[shape.cost_key]: shape for kinds in self._kinds for shape in kinds.strategy.pipelines},
        )  # fmt: skip
        limits = [int(self._schemes.max_length[kinds.shape.scheme].max()) for kinds in self._kinds]
        limits += [self._space.longest(kinds) for kinds in self._space.kinds]
        self._longest = dict(zip((*self._whole, *self._chunked), limits, strict=True))  # by number of the strategy
        self._replay = load_plans(self.options.replay_file) if self.options.replay_file else {}
        for plan in self._replay.values():
            check_runnable(plan, no_slices=self.options.no_slices)
            check_complete(plan, self.num_ranks)

    @property
    def max_length(self) -> int:
        """The longest sequence that some strategy can hold, in tokens."""
        return max(self._longest.values())

    def plan(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> StepPlan:
        """The plan of one step. PlanError for bad lengths and sequences that no strategy holds."""
        return self.made(step, sequence_ids, lengths).plan

    def made(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> Made:
        """The plan of one step, and HiGHS's share in it. PlanError as `plan`."""
        ids, tokens = check_sequences(sequence_ids, lengths)
        if self.options.choose == "replay":
            return Made(self._replayed(step, ids, tokens), None)
        longest = max(range(len(tokens)), key=tokens.__getitem__)
        feasible = [i for i in range(len(self.strategies)) if tokens[longest] <= self._longest[i]]
        if not feasible:
            raise PlanError(
                f"no strategy can hold sequence {ids[longest]} of {tokens[longest]} tokens: the largest MaxLen is "
                f"{self.max_length}; add a strategy with a larger tp or sp, or lower context_length"
            )
        if self.options.choose == "cycle":
            n = len(self.strategies)
            feasible = [next(i for i in ((step + skip) % n for skip in range(n)) if i in feasible)]
        search = StepSearch(self._pool, self._space, step, ids, tokens)
        found, bound = search.whole([kinds for i, kinds in zip(self._whole, self._kinds, strict=True) if i in feasible])
        below_ms = min((self._estimated(plan).step_ms for plan in found), default=math.inf)
        chunked, bound_of_chunked = search.chunked(
            [kinds for i, kinds in zip(self._chunked, self._space.kinds, strict=True) if i in feasible], below_ms
        )
        found += chunked
        if not found:
            raise PlanError(
                "no strategy was found that holds every sequence; add one with a larger tp or sp, or lower "
                "context_length"
            )
        best = min(map(self._estimated, found), key=_of_step)
        several = self._step_ms is not None and len(found) > 1
        if several:
            best = min((self._hiding(self._simulated(plan)) for plan in found), key=_of_step)
        # The bound is over all candidates, so that of plans which lost counts too. It is one of steps, and a plan
        # states what it leaves to the plan's own pipelines.
        bound = min(bound, bound_of_chunked) - self._exposed_ms(best)
        best = replace(best, lower_bound_ms=max(0.0, min(bound, best.searched_ms)))
        # Where a composed pipeline would stand, and so whether it has a slow rank, is not known while it is composed.
        if self.options.highs == "off" or self.options.choose != "best" or self.cost_table.slow.paces:
            return Made(best, None)
        return self._composed(search, best, simulated=several)

    def _composed(self, search: StepSearch, best: StepPlan, *, simulated: bool) -> Made:
        """The best plan, whose step may have been simulated, or that of a composed strategy where that is worth it
        [Note: composed strategies]."""
        began = self._cpu_s()
        composed = search.composed(Composer(self.num_ranks, kernels.select(self.options.kernels), self._pool.budget),
                                   best.predicted_ms)  # fmt: skip
        share = HighsShare(composed.asked, composed.nodes, 1e3 * (self._cpu_s() - began))
        if composed.failed:
            logger.warning("planner: step %d: HiGHS composed nothing: %s", best.step + 1, composed.failed)
        if not composed.strategies:
            return Made(best, share)
        # What the messages of a new strategy add is not known, but hardly differs from those of the best one; where
        # whole steps are simulated, they are.
        exposed_ms = self._exposed_ms(best)
        plans, bound = search.of_composed(composed.strategies, exposed_ms, self._estimated(best).step_ms)
        if self._step_ms is not None:
            best, plans = best if simulated else self._simulated(best), list(map(self._simulated, plans))
        else:
            plans = [replace(plan, messages_ms=self._exposed.get(plan.strategy, exposed_ms)) for plan in plans]
        best = self._sooner(best, [plan for plan in plans if plan.strategy in self._exposed])
        plans = [plan for plan in plans if plan.strategy not in self._exposed]
        offers = sorted([(1.0 - plan.step_ms / best.step_ms, plan) for plan in plans], key=lambda offer: -offer[0])
        worth = [(gain, plan) for gain, plan in offers if gain >= WORTH]
        if not worth:
            return Made(best, share)
        runs = self.options.highs == "composes"
        allowed = [(gain, plan) for gain, plan in worth if runs and not self._room(StrategyShape.parse(plan.strategy))]
        gain, plan = (allowed or worth)[0]
        share = share._replace(gain=gain, new_strategy=bool(allowed), strategy=plan.strategy)
        if not allowed:
            return Made(best, share)
        bound = min(best.lower_bound_ms, bound - self._exposed_ms(best), plan.searched_ms)
        return Made(replace(plan, source=COMPOSED, lower_bound_ms=max(0.0, bound)), share)

    def _sooner(self, best: StepPlan, plans: Sequence[StepPlan]) -> StepPlan:
        """The soonest of these plans of candidates, with the bound that holds for the best one before."""
        sooner = min([best, *plans], key=_of_step)
        bound = best.lower_bound_ms + self._exposed_ms(best) - self._exposed_ms(sooner)
        return replace(sooner, lower_bound_ms=max(0.0, min(bound, sooner.searched_ms)))

    def _estimated(self, plan: StepPlan) -> StepPlan:
        """The plan with what messages usually add under its strategy."""
        return replace(plan, messages_ms=self._exposed_ms(plan))

    def _simulated(self, plan: StepPlan) -> StepPlan:
        """The plan with what messages add by a simulation of the whole step."""
        assert self._step_ms is not None, "it is asked for where steps are simulated"
        return replace(plan, messages_ms=self._step_ms(plan) - plan.predicted_ms)

    def _hiding(self, plan: StepPlan) -> StepPlan:
        """The simulated plan, or one that hides its messages better where they add more than they usually do."""
        for _ in range(_TURNS):
            taken_ms = plan.step_ms - self._exposed_ms(plan)
            if taken_ms <= (1.0 + _USUAL) * plan.predicted_ms:
                break
            found = with_hidden_pulls(plan, self._pool.table, taken_ms)
            if found is None or (found := self._simulated(found)).step_ms >= plan.step_ms:
                break
            plan = found
        return plan

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
        validate_plan(plan, self.cost_table, self.num_ranks)
        return replace(plan, source="replay")


def _of_step(plan: StepPlan) -> float:
    return plan.step_ms


def warm_up() -> None:
    """Compile every kernel that plans need, or load it from numba's cache, by planning a few made-up steps."""
    costs = tuple(
        SchemeCost(ParallelScheme(tp, pp), 1e-6, 0.1, 10.0, 400, 8, Shares.usual())
        for tp, pp in ((1, 1), (2, 1), (1, 2))
    )
    table, options = CostTable(costs, "made up to warm the cache"), PlannerOptions(kernels="compiled")
    # Few sequences and many go different ways, and so do strategies with chunked pipelines where others may win too.
    for texts in (("tp2 + 2*tp1", "2*pp2", "2*pp2/list"), ("tp2 + pp2/list",)):
        planner = Planner(table, [StrategyShape.parse(text) for text in texts], options)
        for size in (3, 20):
            planner.plan(0, range(size), [(37 * i) % 300 + 1 for i in range(size)])
