"""The search of one step: the best plan over all candidate strategies, with a certified bound. Pure: no torch.

Strategies of whole sequences under 1F1B are searched first (`search`), those with chunked pipelines then (`chunked`),
and the plan that is simulated to be done soonest wins. So chunked candidates never make a plan worse. Where
a run of micro-batches does not fit a stage, they compute layers again, as few as that takes: so a long sequence may run
where it is soonest done, and not only where there is room for all that it keeps.

What messages add is known for each strategy before any of its plans is (`simulate.exposed`), but it differs from plan
to plan: for V's of a 32B model on 32 GPUs between 102 and 196 ms of 3.7 s. So where a simulation of whole steps is at
hand, the best plans of either kind are simulated with their messages, several of the best chunked strategy, and the
soonest of these wins.

[Note: search]
Every strategy gets a cheap bound first, and strategies are tried in the order of their bounds. Three strategies with
bounds of 90, 96 and 120 ms: the first is searched and gives a plan of 95 ms. The second is then left out, for no plan
of it takes less than 96, and the third with it. Were the first plan 100 ms, the second would be searched too. The
least bound over all strategies, searched or not, certifies the plan: 95 against 90 is within 5.6 % of the optimum.

Where others than the best plan are asked for too, strategies are searched until their bounds are clearly above it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.loads import Counted, Lengths, loads_of
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.step_plan import Phase, StepPlan, load_plans
from ds_hydra.plan.validate import check_complete, check_runnable, validate_plan
from ds_hydra.planner.chunked import Chunked, ChunkedSearch, ChunkedSpace
from ds_hydra.planner.composing import (
    COMPOSED,
    WORTH,
    Composed,
    Composer,
    HighsShare,
    PlanBudget,
    budget_of,
    is_chunked,
)
from ds_hydra.planner.exact import DispatchProblem, repack_slowest
from ds_hydra.planner.kernels.dispatch import empty_placement
from ds_hydra.planner.kernels.problem import (
    LEAN,
    Assignment,
    Batch,
    Floats,
    Ints,
    PipelineKinds,
    Problem,
    Prospect,
    Schemes,
    SearchEffort,
    check_sequences,
    scheme_arrays,
    scheme_row,
)
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.pipelines import (
    Whole,
    assigned_pipelines,
    chunked_pipelines,
    loaded,
    lowered,
    overfull,
    with_hidden_pulls,
)
from ds_hydra.zero_hetero.errors import PlanError

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
        self.is_compiled = self._kernels.is_compiled
        self.effort = full if self.is_compiled else LEAN

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


_TINY_SEQUENCES = 8  # up to here 3^n subsets are cheaper than any search
_LEAN_TRIES = 3  # strategies tried by plain Python kernels
_MORE_RESTARTS = 12
_CLOSE = 0.01  # of the best plan's time: what other plans that are asked for may take more
_PROOF_TARGETS = (0.001, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08)  # gaps tried, best first


@dataclass
class _Candidates:
    """The strategies of one search by their index: what is known of each, and the best plan of each so far."""

    tolerance: float  # share of the best plan's time that is not worth another search; below 0: worse plans are too
    prices: dict[int, Floats]
    bounds: dict[int, float]  # of a step, with what each strategy's messages add
    shapes: dict[int, int]  # different ones of each strategy's pipelines
    simplest: float  # share of the best plan's time that a plan of fewer shapes may take more
    found: dict[int, Assignment] = field(default_factory=dict)

    @property
    def best_ms(self) -> float:
        """Of a step by the best plan so far; infinite without one."""
        return min((one.step_ms for one in self.found.values()), default=math.inf)

    def winners(self, count: int) -> list[Assignment]:
        """The best plan, and up to so many others of other strategies that are close to it, best first; none where no
        strategy gave one."""
        ranked = sorted(self.found, key=lambda index: self.found[index].step_ms)
        chosen = [index for index in ranked[:count] if self._within(index, _CLOSE)]
        simple = [i for i in ranked if self._within(i, self.simplest)]
        fewest = min(simple, key=self.shapes.__getitem__, default=0)
        if simple and self.shapes[fewest] < min(self.shapes[index] for index in chosen):
            chosen.append(fewest)
        return [self.found[index] for index in chosen]

    def _within(self, index: int, share: float) -> bool:
        """Whether the best plan of a strategy takes no more than this share longer than the best of all."""
        return self.found[index].step_ms <= (1.0 + share) * self.best_ms

    def is_simpler(self, index: int) -> bool:
        """Whether a strategy may give a plan of fewer shapes than all that are as good by the rule."""
        fewest = min((self.shapes[one] for one in self.found if self._within(one, self.simplest)), default=0)
        return self.shapes[index] < fewest and self.bounds[index] < (1.0 + self.simplest) * self.best_ms

    @property
    def least_bound(self) -> float:
        """No plan under any of the strategies is sooner done (ms)."""
        return min(self.bounds.values())

    def by_bound(self) -> list[int]:
        return sorted(self.bounds, key=lambda index: (self.bounds[index], index))

    def can_win(self, index: int) -> bool:
        return self.bounds[index] * (1.0 + self.tolerance) < self.best_ms or self.is_simpler(index)

    def worth_trying(self) -> Iterator[int]:
        """Strategies in the order of their bounds that can win, or give a simpler plan that is as good."""
        yield from (index for index in self.by_bound() if self.can_win(index))

    def offer(self, index: int, found: Assignment | None) -> None:
        if found is not None and (index not in self.found or found.step_ms < self.found[index].step_ms):
            self.found[index] = found


class Search:
    """One step's search over candidate strategies [Note: search]."""

    def __init__(self, kinds: Sequence[PipelineKinds], schemes: Schemes, options: PlannerOptions, batch: Batch) -> None:
        self._kinds = kinds
        self._options = options
        self._num_sequences = batch.size
        self._one = StrategySearch(schemes, options, batch)
        self.bounds: dict[int, float] = {}  # on steps by strategies of so many shapes, once they were searched

    def best_of(self, candidates: Sequence[int], count: int = 1) -> tuple[list[Assignment], float]:
        """The best assignment over these strategies, none where no strategy holds every sequence, and a lower bound on
        the step of any (ms).

        With a larger `count` up to so many, each of another strategy and little worse than the best, which is first.
        """
        prices = {index: self._kinds[index].num_ranks.copy() for index in candidates}
        bounds = {index: self._bound(index, prices[index], 4, 8) for index in candidates}
        shapes = {index: len(set(self._kinds[index].strategy.pipelines)) for index in candidates}
        tolerance = self._options.tolerance if count == 1 else -_CLOSE
        known = _Candidates(tolerance, prices, bounds, shapes, self._options.simplest)
        if self._num_sequences <= _TINY_SEQUENCES:
            self._by_subsets(known)
        elif self._one.is_compiled:
            self._fully(known)
        else:
            self._leanly(known)
        for index, bound in known.bounds.items():
            self.bounds[shapes[index]] = min(bound, self.bounds.get(shapes[index], math.inf))
        return known.winners(count), known.least_bound

    def _bound(self, index: int, price: Floats, outer: int, inner: int) -> float:
        kinds = self._kinds[index]
        return self._one.bound(kinds, price, outer, inner) + kinds.exposed_ms

    def _prospect(self, index: int, known: _Candidates) -> Prospect:
        """Of the strategy's pipelines, whose times do not count what messages add."""
        share = max(-known.tolerance, known.simplest if known.is_simpler(index) else 0.0, 0.0)
        exposed_ms, ceiling = self._kinds[index].exposed_ms, known.best_ms * (1.0 + share)
        return Prospect(known.bounds[index] - exposed_ms, known.prices[index], ceiling - exposed_ms)

    def _fully(self, known: _Candidates) -> None:
        """The usual mode: compiled kernels search every strategy whose bound, made tighter first, can win."""
        for index in known.worth_trying():
            if len(known.bounds) > 1:
                self._tighten(index, known)
                if not known.can_win(index):
                    continue
            known.offer(index, self._one.assign(self._kinds[index], self._prospect(index, known)))
        if self._options.method == "highs":
            self._exactly(known)
        else:
            self._look_again(known)
        self._raise_bounds(known)

    def _exactly(self, known: _Candidates) -> None:
        if not known.found:
            return
        index, best = min(known.found.items(), key=lambda item: item[1].step_ms)
        known.offer(index, self._one.improve_exactly(best, known.least_bound - best.kinds.exposed_ms))

    def _leanly(self, known: _Candidates) -> None:
        """Without compiled kernels: few strategies are tried, and one placement of each."""
        for index in islice(known.worth_trying(), _LEAN_TRIES):
            known.offer(index, self._one.assign(self._kinds[index], self._prospect(index, known)))
        if self._options.method == "highs":
            self._exactly(known)

    def _by_subsets(self, known: _Candidates) -> None:
        """Few sequences: the optimum of every strategy that can win, which is its bound too."""
        for index in known.worth_trying():
            found = self._one.solve_tiny(self._kinds[index])
            if found is not None:
                known.bounds[index] = found.step_ms
            known.offer(index, found)

    def _tighten(self, index: int, known: _Candidates) -> None:
        """Improve a strategy's bound from the prices of the first one, which may save the search, which costs more."""
        again = self._bound(index, known.prices[index], 10, 12)
        known.bounds[index] = max(known.bounds[index], again)

    def _look_again(self, known: _Candidates) -> None:
        """More restarts, with prices perturbed by another seed, for every strategy whose bound is below the plan."""
        # Fewer for larger batches: each restart costs more there, and the many short sequences leave less to gain.
        restarts = _MORE_RESTARTS * self._options.effort * 100 // max(200, self._num_sequences)
        effort = self._one.effort._replace(restarts=restarts)
        for index in known.by_bound() if restarts else ():
            if known.can_win(index):
                known.offer(index, self._one.assign(self._kinds[index], self._prospect(index, known), effort))

    def _raise_bounds(self, known: _Candidates) -> None:
        """Prove better bounds for the strategies that could still beat the plan [Note: branching on the longest].

        A target within 0.1 % of the plan is tried first, then 0.5 %, ...: the first one that is refuted for all
        strategies with a bound below it becomes their bound.
        """
        best_ms, proven = known.best_ms, known.least_bound
        if not known.found or not self._one.can_refute:
            return
        for share in _PROOF_TARGETS:
            target = best_ms / (1.0 + share)
            if target <= proven:
                return
            open_ones = [(index, self._kinds[index]) for index in known.bounds if known.bounds[index] < target]
            if all(self._one.refute(one, target - one.exposed_ms, known.prices[index]) for index, one in open_ones):
                for index in known.bounds:
                    known.bounds[index] = max(known.bounds[index], target)
                return


_LEAN_CUTS = 1  # of plain Python and without effort: dispatches and cuts once
_PROMISING = 0.99  # of what the best strategy takes as it is dispatched: a composed one must take less


@dataclass(frozen=True)
class Pool:
    """The candidates as searches see them, the same in every step."""

    table: CostTable
    options: PlannerOptions
    schemes: Schemes  # of the table
    num_ranks: int
    budget: PlanBudget
    finalists: int  # plans of either kind that are wanted
    names: frozenset[str]  # of all candidates
    whole: dict[int, PipelineShape]  # pipelines of the candidates of whole sequences, by their rows in the table


class StepSearch:
    """The searches of one step: for a batch, over candidates and then over what HiGHS composes for it."""

    def __init__(
        self, pool: Pool, space: ChunkedSpace, step: int, sequence_ids: tuple[int, ...], lengths: tuple[int, ...]
    ) -> None:
        self._pool, self._space = pool, space
        self._step, self._ids, self._tokens, self._loads = step, sequence_ids, lengths, loads_of(lengths)
        self._kernel = kernels.select(pool.options.kernels)
        self._chunked: ChunkedSearch | None = None
        self._best_chunked: PipelineKinds | None = None
        self.bounds: dict[int, float] = {}  # of candidates of whole sequences, by their number of shapes

    def whole(self, kinds: Sequence[PipelineKinds]) -> tuple[list[StepPlan], float]:
        """The best plans of whole sequences, none without a strategy for it, and a bound on steps."""
        if not kinds:
            return [], math.inf
        batch = self._whole.batch
        search = Search(kinds, self._whole.schemes, self._pool.options, batch)
        count = _FINALISTS if self._loads else self._pool.finalists  # with loads the search's times are estimates
        found, searched = search.best_of(range(len(kinds)), count)
        bound = self._whole.bound(kinds, self._kernel.strategy_bound, searched)
        self.bounds = search.bounds if not self.bounds else self.bounds
        table = self._pool.table
        return [self._plan(*assigned_pipelines(batch, one, table, self._tokens)) for one in found], bound

    def chunked(self, kinds: Sequence[PipelineKinds], below_ms: float) -> tuple[list[StepPlan], float]:
        """The best plans over strategies with chunked pipelines, none without any or where nothing must be gained, and
        a bound on steps. `below_ms` is the step of the best plan so far; infinite where there is none."""
        # Plain Python is too slow to search in: then it only helps out.
        if not kinds or (below_ms < math.inf and not self._searches):
            return [], math.inf
        pool = self._pool
        loads = Counted.of(self._loads, self._tokens, self._space.costs, pool.num_ranks) if self._loads else None
        self._chunked = ChunkedSearch(
            self._space, self._kernel, self._chunked_batch, num_ranks=pool.num_ranks, seed=pool.options.seed,
            tries=(pool.budget.tries if self._kernel.is_compiled else 0) or _LEAN_CUTS,
            simplest=pool.options.simplest, loads=loads,
        )  # fmt: skip
        bound = self._chunked.bound(kinds)
        if bound >= below_ms:
            return [], bound
        found = self._chunked.best_of(kinds, pool.finalists)
        self._best_chunked = found[0].kinds if found else None
        return self._as_plans(found), bound

    def composed(self, composer: Composer, pipelines_ms: float) -> Composed:
        """What HiGHS composes where the slowest pipeline of the best plan takes so long: of chunked pipelines where
        their search has seen what they take."""
        if self._chunked is not None and self._chunked.known is not None:
            return self._chunked.composed(composer, pipelines_ms, self._pool.names)
        pool = self._pool
        return composer.compose(self._whole.batch, self._whole.schemes, pool.whole, pipelines_ms, pool.names)

    def of_composed(
        self, strategies: Collection[StrategyShape], exposed_ms: float, below_ms: float
    ) -> tuple[list[StepPlan], float]:
        """The best plans under composed strategies, whose messages add about so much, and a bound on steps.

        Where they are searched, so are the best candidates, whose plans may be among them: tries of either are worth as
        much.
        """
        table, space = self._pool.table, self._space
        whole = [PipelineKinds.of(one, table, exposed_ms) for one in strategies if not is_chunked(one)]
        chunked = [space.kinds_of(one, exposed_ms) for one in strategies if is_chunked(one)]
        plans, bound = self.whole(whole)
        if not chunked or not self._searches or self._chunked is None or self._best_chunked is None:
            return plans, bound
        chunked = self._chunked.promising(chunked, self._best_chunked, _PROMISING)
        bound_of_chunked = self._chunked.bound(chunked)
        if chunked and bound_of_chunked < below_ms:
            found = self._chunked.beside(chunked, self._pool.budget.tries // 2)
            plans += self._as_plans(found[: self._pool.finalists + 1])
        return plans, min(bound, bound_of_chunked)

    @property
    def _searches(self) -> bool:
        """Whether chunked strategies are searched for all they are worth."""
        return self._kernel.is_compiled and self._pool.options.effort > 0

    @functools.cached_property
    def _whole(self) -> Whole:
        return Whole.of(self._tokens, self._pool.table, self._pool.schemes, self._pool.num_ranks)

    @functools.cached_property
    def _chunked_batch(self) -> Batch:
        return self._space.batch(self._tokens)

    def _as_plans(self, found: Sequence[Chunked]) -> list[StepPlan]:
        batch = self._chunked_batch
        return [self._plan(*chunked_pipelines(self._space, batch, one, self._tokens)) for one in found]

    def _plan(self, phase: Phase, ms: float) -> StepPlan:
        if self._loads:
            phase, ms = loaded(phase, self._loads, self._pool.table, self._tokens)
        source = "search" if self._kernel.is_compiled else "fast"
        return StepPlan(self._step, self._ids, self._tokens, (phase,), ms, source=source)


logger = logging.getLogger(__name__)
_FINALISTS = 4  # plans of whole sequences, and as many chunked ones, that are simulated with messages on
_FEW_RANKS = 256  # at most; on 1024 one simulation takes 0.4 s, and there is one of each kind
_USUAL, _TURNS = 0.005, 2  # of a plan's time: more of messages is worth such moves; how often they are sought

Room = Callable[[StrategyShape], str]
"""Why the training side cannot run a strategy that is no candidate; "" where it can."""


class MadePlan(NamedTuple):
    """A step's plan, and what HiGHS did for it; None where it had nothing to do."""

    plan: StepPlan
    highs: HighsShare | None
    simpler_ms: float | None = None  # of the best plan's step with fewer shapes, or what it takes at least


class Planner:
    """Plans steps: `plan(step, ids, lengths) -> StepPlan`. Same input and options give the same plan.

    `cost_table` has the costs of every replica, in ms, and `strategies` are the layouts to choose from, all of the same
    number of ranks. Raises PlanError where that fails, a replica has no costs, or plans to replay cannot be run.

    `exposed_ms` says what all-gathers, reduce-scatters and messages of each layout add to a step, in ms: the plan is
    that of the shortest step, and its gap to the bound is that of the step. Without it they add nothing. `step_ms` says
    what a plan's step takes with them, and decides among the best plans.

    `room` refuses layouts, made for one step, that do not fit in memory. `budget` bounds the time of a plan by that of
    the steps; None: it does not. `cpu_s` reads a clock, for the record alone.
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
        self._by = functools.partial(Planner, strategies=strategies, options=options, exposed_ms=exposed_ms,
                                     step_ms=step_ms, room=room, budget=budget, cpu_s=cpu_s)  # fmt: skip
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
        """The plan of one step. PlanError for bad lengths and sequences that no layout holds."""
        return self.made(step, sequence_ids, lengths).plan

    def made(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> MadePlan:
        """The plan of one step, and HiGHS's share in it. `Lengths` have loads, too. PlanError as `plan`."""
        found = self._made(step, sequence_ids, lengths)
        if not overfull(found.plan, self.cost_table):
            return found
        return lowered(self.cost_table, lengths, lambda table: self._by(table)._made(step, sequence_ids, lengths))

    def _made(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> MadePlan:
        ids, tokens = check_sequences(sequence_ids, lengths)
        known = Lengths.of(tokens, loads_of(lengths))
        if self.options.choose == "replay":
            return MadePlan(self._replayed(step, ids, tokens), None)
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
        search = StepSearch(self._pool, self._space, step, ids, known)
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
        several = self._step_ms is not None and len(found) > 1
        found = [self._hiding(self._simulated(plan)) if several else self._estimated(plan) for plan in found]
        best = self._simplest(found)
        # The bound is over all candidates, so that of plans which lost counts too. It is one of steps, and a plan
        # states what it leaves to the plan's own pipelines.
        bound = min(bound, bound_of_chunked) - self._exposed[best.strategy]
        best = replace(best, lower_bound_ms=max(0.0, min(bound, best.searched_ms)))
        # Where a composed pipeline would stand, and so whether it has a slow rank, is not known while it is composed.
        made = MadePlan(best, None)
        if self.options.highs != "off" and self.options.choose == "best" and not self.cost_table.slow.paces:
            made = self._composed(search, best, simulated=several)
        shapes = _shapes(made.plan)
        of_plans = [plan.step_ms for plan in found if _shapes(plan) < shapes]
        of_bounds = [bound for count, bound in search.bounds.items() if count < shapes and math.isfinite(bound)]
        return made._replace(simpler_ms=min(of_plans or of_bounds, default=None))

    def _simplest(self, plans: Sequence[StepPlan]) -> StepPlan:
        """The plan of fewest shapes of those that are as good as the best one by the rule; the soonest of them."""
        most = (1.0 + self.options.simplest) * min(plan.step_ms for plan in plans)
        return min((plan for plan in plans if plan.step_ms <= most), key=lambda plan: (_shapes(plan), plan.step_ms))

    def _composed(self, search: StepSearch, best: StepPlan, *, simulated: bool) -> MadePlan:
        """The best plan, whose step may have been simulated, or that of a composed strategy where that is worth it
        [Note: composed strategies]."""
        began = self._cpu_s()
        composed = search.composed(Composer(self.num_ranks, kernels.select(self.options.kernels), self._pool.budget),
                                   best.predicted_ms)  # fmt: skip
        share = HighsShare(composed.asked, composed.nodes, 1e3 * (self._cpu_s() - began))
        if composed.failed:
            logger.warning("planner: step %d: HiGHS composed nothing: %s", best.step + 1, composed.failed)
        if not composed.strategies:
            return MadePlan(best, share)
        # What the messages of a new strategy add is not known, but hardly differs from those of the best one; where
        # whole steps are simulated, they are.
        exposed_ms = self._exposed[best.strategy]
        plans, bound = search.of_composed(composed.strategies, exposed_ms, self._estimated(best).step_ms)
        if self._step_ms is not None:
            best, plans = best if simulated else self._simulated(best), list(map(self._simulated, plans))
        else:
            plans = [replace(plan, messages_ms=self._exposed.get(plan.strategy, exposed_ms)) for plan in plans]
        best = self._sooner(best, [plan for plan in plans if plan.strategy in self._exposed])
        plans = [plan for plan in plans if plan.strategy not in self._exposed]
        offers = sorted([(1.0 - plan.step_ms / best.step_ms, plan) for plan in plans], key=lambda offer: -offer[0])
        worth = [
            (gain, plan)
            for gain, plan in offers
            if gain >= (max(WORTH, self.options.simplest) if _shapes(plan) > _shapes(best) else WORTH)
        ]
        if not worth:
            return MadePlan(best, share)
        runs = self.options.highs == "composes"
        allowed = [(gain, plan) for gain, plan in worth if runs and not self._room(StrategyShape.parse(plan.strategy))]
        gain, plan = (allowed or worth)[0]
        share = share._replace(gain=gain, new_strategy=bool(allowed), strategy=plan.strategy)
        if not allowed:
            return MadePlan(best, share)
        bound = min(best.lower_bound_ms, bound - self._exposed[best.strategy], plan.searched_ms)
        return MadePlan(replace(plan, source=COMPOSED, lower_bound_ms=max(0.0, bound)), share)

    def _sooner(self, best: StepPlan, plans: Sequence[StepPlan]) -> StepPlan:
        """The soonest of these plans of candidates, with the bound that holds for the best one before."""
        sooner = self._simplest([best, *plans])
        bound = best.lower_bound_ms + self._exposed[best.strategy] - self._exposed[sooner.strategy]
        return replace(sooner, lower_bound_ms=max(0.0, min(bound, sooner.searched_ms)))

    def _estimated(self, plan: StepPlan) -> StepPlan:
        """The plan with what messages usually add under its strategy."""
        return replace(plan, messages_ms=self._exposed[plan.strategy])

    def _simulated(self, plan: StepPlan) -> StepPlan:
        """The plan with what messages add by a simulation of the whole step."""
        assert self._step_ms is not None, "it is asked for where steps are simulated"
        return replace(plan, messages_ms=self._step_ms(plan) - plan.predicted_ms)

    def _hiding(self, plan: StepPlan) -> StepPlan:
        """The simulated plan, or one that hides its messages better where they add more than they usually do."""
        for _ in range(_TURNS):
            taken_ms = plan.step_ms - self._exposed[plan.strategy]
            if taken_ms <= (1.0 + _USUAL) * plan.predicted_ms:
                break
            found = with_hidden_pulls(plan, self._pool.table, taken_ms)
            if found is None or (found := self._simulated(found)).step_ms >= plan.step_ms:
                break
            plan = found
        return plan

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


def _shapes(plan: StepPlan) -> int:
    """How many different shapes its pipelines have."""
    return len({(pipeline.shape, pipeline.schedule) for pipeline in plan.pipelines})
