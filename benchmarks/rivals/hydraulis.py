"""Steps as Hydraulis plans them: Algorithm 1 deals out, Eq. 1 packs and chooses the strategy. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from benchmarks.rivals import kernels
from benchmarks.rivals.dispatch import ComparedDispatch
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner.kernels.dispatch import empty_placement
from ds_hydra.planner.kernels.problem import Assignment, Batch, PipelineKinds, Problem, check_sequences, scheme_arrays
from ds_hydra.planner.pipelines import assigned_pipelines
from ds_hydra.zero_hetero.errors import PlanError

_LEVEL_ROUNDS = 40  # as many as our own plans get
_TOLERANCE = 0.001  # a strategy is not tried when its bound is within this share of the best plan found


class HydraulisPlanner:
    """Plans steps with the best of some strategies: `plan(step, ids, lengths) -> StepPlan`, as `Planner` does.

    Strategies that our certified bound rules out are not tried, which changes nothing but the time it takes: Eq. 1
    is never less than the flow shop, so the bound holds for it too. Plans state the flow shop's times.
    """

    def __init__(self, table: CostTable, strategies: Sequence[StrategyShape]) -> None:
        self._table, self._schemes = table, scheme_arrays(table)
        self._kinds = [PipelineKinds.of(strategy, table) for strategy in strategies]

    def plan(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> StepPlan:
        """The plan of one step. PlanError for bad lengths and sequences that no strategy holds."""
        ids, tokens = check_sequences(sequence_ids, lengths)
        batch, best = Batch.of(tokens, self._table), None
        for bound, kinds in sorted(self._bounds(batch, max(tokens)), key=itemgetter(0)):
            if best is not None and bound * (1.0 + _TOLERANCE) >= best.ms:
                break
            found = self._assign(batch, kinds)
            if found is not None and (best is None or found.ms < best.ms):
                best = found
        if best is None:
            raise PlanError(f"no strategy holds a sequence of {max(tokens)} tokens; add one with a larger tp")
        phase, ms = assigned_pipelines(batch, best, self._table, tokens)
        return StepPlan(step, ids, tokens, (phase,), ms)

    def _bounds(self, batch: Batch, longest: int) -> list[tuple[float, PipelineKinds]]:
        """The strategies that hold the longest sequence, each with a bound on its plans (ms)."""
        kernel, bounds = kernels.compiled(), []
        for kinds in self._kinds:
            if longest <= self._schemes.max_length[kinds.shape.scheme].max():
                problem = Problem(self._schemes, batch.merged, kinds.shape)
                bounds.append((kernel.strategy_bound(problem, 4, 8, kinds.num_ranks.copy()), kinds))
        return bounds

    def _assign(self, batch: Batch, kinds: PipelineKinds) -> Assignment | None:
        """Algorithm 1 on Eq. 3 with its 100 trials, then packing by Eq. 1; None when some sequence found no place."""
        owner = ComparedDispatch.of_batch(batch, kinds, self._schemes).by_algorithm_1()
        if owner is None:
            return None
        place = empty_placement(batch.size, len(kinds.rank_order))
        place.owner[:] = owner
        problem = Problem(self._schemes, batch.items, kinds.shape)
        ms = kernels.compiled().pack_all(problem, _LEVEL_ROUNDS, place)
        return Assignment(kinds, place.owner, place.bin_of, float(ms))
