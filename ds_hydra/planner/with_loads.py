"""What the search of whole sequences works with, where these have loads and where they have none. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.loads import Counted, dealt_us, first_ranks, loads_of
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import check_room
from ds_hydra.planner.kernels.problem import Batch, Floats, PipelineKinds, Problem, Schemes
from ds_hydra.zero_hetero.errors import PlanError

Found = TypeVar("Found")
StrategyBound = Callable[[Problem, int, int, Floats], float]


class Whole(NamedTuple):
    """A step's sequences with their loads [Note: loads], and costs of pipelines that drain without these."""

    batch: Batch
    schemes: Schemes
    least: Batch | None = None  # with the least that each sequence takes besides; None: there are no loads
    draining: Schemes | None = None  # over the least share that text has of any sequence

    @classmethod
    def of(cls, lengths: Sequence[int], table: CostTable, schemes: Schemes, num_ranks: int) -> Whole:
        """Of a step's sequences and the costs of a table."""
        text = Batch.of(lengths, table)
        if not (loads := loads_of(lengths)):
            return cls(text, schemes)
        counted = Counted.of(loads, lengths, table.costs, num_ranks)
        batch, least = text.with_more(counted.usual), text.with_more(counted.least)
        # Pipelines drain over their largest micro-batch as it is of text: over a share of all its work, in the mean.
        shares = text.items.work.sum(axis=1) / batch.items.work.sum(axis=1)
        no_more = (text.items.work / least.items.work).min(axis=1)
        return cls(batch, _draining(schemes, shares), least, _draining(schemes, no_more))

    def bound(self, kinds: Sequence[PipelineKinds], strategy_bound: StrategyBound, searched: float) -> float:
        """No step under these strategies is sooner done (ms): with loads, which are dealt out evenly for it, and
        without any what the search has found."""
        if self.least is None or self.draining is None:
            return searched
        return min(
            strategy_bound(Problem(self.draining, self.least.merged, one.shape), 4, 8, one.num_ranks.copy())
            + one.exposed_ms
            for one in kinds
        )


def overfull(plan: StepPlan, table: CostTable) -> bool:
    """Whether a micro-batch of a plan has tokens and images for which a stage has no memory."""
    if not plan.beside:
        return False
    try:
        for pipeline in plan.pipelines:
            cost = table[pipeline.shape]
            if any(
                one.num_tokens + cost.tokens_beside(one.beside_us) > cost.most_held for one in pipeline.microbatches
            ):
                return True
            check_room(pipeline, table, "")
    except PlanError:
        return True
    return False


def lowered(table: CostTable, lengths: Sequence[int], made: Callable[[CostTable], Found]) -> Found:
    """What is made with a MaxLen at which no micro-batch of these sequences is overfull, whichever of them it has: by
    the sequence whose images keep most for each of its tokens. PlanError as `made`, with what that is."""
    costs = []
    for cost in table.costs:
        us = (dealt_us(units, first_ranks(cost.scheme)) for units in loads_of(lengths))
        most = max(cost.beside * one / length for one, length in zip(us, lengths, strict=True))
        held = min(cost.max_length, max(1, int((cost.most_held - 1) / (1.0 + most))))  # 1: what is kept is rounded up
        costs.append(replace(cost, max_length=held, util_length=min(cost.util_length, held)))
    try:
        return made(replace(table, costs=tuple(costs)))
    except PlanError as error:
        raise PlanError(
            f"{error}. In this step the largest MaxLen is {max(cost.max_length for cost in costs)}, of "
            f"{table.max_length} without images: what its images keep for the backward takes the rest; hand in fewer "
            "or smaller images in a sequence"
        ) from None


def _draining(schemes: Schemes, shares: Floats) -> Schemes:
    """Costs of pipelines that drain over these shares of their largest micro-batch, (schemes,)."""
    return schemes._replace(pp=1.0 + (schemes.pp - 1.0) * shares)
