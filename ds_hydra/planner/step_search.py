"""One step's sequences in, the best plans under some strategies and a bound on any out. Pure: no torch.

`selection` says which strategies are asked for; here each kind of them has its search, and a search its plans.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.phase import Phase
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner.budget import PlanBudget
from ds_hydra.planner.chunked import ChunkedSearch
from ds_hydra.planner.chunked_refine import Chunked
from ds_hydra.planner.chunked_space import ChunkedSpace, is_chunked
from ds_hydra.planner.composing import Composed, Composer
from ds_hydra.planner.kernels.arrays import Schemes
from ds_hydra.planner.kernels.problem import Batch, PipelineKinds
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.pipelines import assigned_pipelines, chunked_pipelines
from ds_hydra.planner.search import Search

_LEAN_TRIES = 1  # of plain Python and without effort: dispatches and cuts once
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
        self._step, self._ids, self._tokens = step, sequence_ids, lengths
        self._kernel = kernels.select(pool.options.kernels)
        self._chunked: ChunkedSearch | None = None
        self._best_chunked: PipelineKinds | None = None

    def whole(self, kinds: Sequence[PipelineKinds]) -> tuple[list[StepPlan], float]:
        """The best plans of whole sequences, none without a strategy for it, and a bound on steps."""
        if not kinds:
            return [], math.inf
        batch = self._whole_batch
        found, bound = Search(kinds, self._pool.schemes, self._pool.options, batch).best_of(
            range(len(kinds)), self._pool.finalists
        )
        table = self._pool.table
        return [self._plan(*assigned_pipelines(batch, one, table, self._tokens)) for one in found], bound

    def chunked(self, kinds: Sequence[PipelineKinds], below_ms: float) -> tuple[list[StepPlan], float]:
        """The best plans over strategies with chunked pipelines, none without any or where nothing must be gained, and
        a bound on steps. `below_ms` is the step of the best plan so far; infinite where there is none."""
        # Plain Python is too slow to search in: then it only helps out.
        if not kinds or (below_ms < math.inf and not self._searches):
            return [], math.inf
        self._chunked = self._chunked_search()
        bound = self._chunked.bound(kinds)
        if bound >= below_ms:
            return [], bound
        found = self._chunked.best_of(kinds, self._pool.finalists)
        self._best_chunked = found[0].kinds if found else None
        return self._as_plans(found), bound

    def composed(self, composer: Composer, pipelines_ms: float) -> Composed:
        """What HiGHS composes where the slowest pipeline of the best plan takes so long: of chunked pipelines where
        their search has seen what they take."""
        if self._chunked is not None and self._chunked.known is not None:
            return self._chunked.composed(composer, pipelines_ms, self._pool.names)
        pool = self._pool
        return composer.compose(self._whole_batch, pool.schemes, pool.whole, pipelines_ms, pool.names)

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
    def _whole_batch(self) -> Batch:
        return Batch.of(self._tokens, self._pool.table)

    @functools.cached_property
    def _chunked_batch(self) -> Batch:
        return self._space.batch(self._tokens)

    def _chunked_search(self) -> ChunkedSearch:
        pool = self._pool
        return ChunkedSearch(
            self._space, self._kernel, self._chunked_batch,
            num_ranks=pool.num_ranks, tries=(pool.budget.tries if self._kernel.is_compiled else 0) or _LEAN_TRIES,
            seed=pool.options.seed,
        )  # fmt: skip

    def _as_plans(self, found: Sequence[Chunked]) -> list[StepPlan]:
        batch = self._chunked_batch
        return [self._plan(*chunked_pipelines(self._space, batch, one, self._tokens)) for one in found]

    def _plan(self, phase: Phase, ms: float) -> StepPlan:
        source = "search" if self._kernel.is_compiled else "fast"
        return StepPlan(self._step, self._ids, self._tokens, (phase,), ms, source=source)
