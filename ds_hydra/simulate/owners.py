"""Which ranks own the masters of which layers. Pure: no torch.

[Note: owners]
Masters that are cut evenly over all ranks are equally near to every strategy: each pulls from all ranks and pushes to
all. But where one pipeline spans all ranks, as a V does over nodes with slow links, each layer is computed by one group
of ranks in every step. If these ranks own its masters, nothing of it goes from node to node. Two nodes of four ranks,
eight layers, pp2sp4/v:

    layer                     0   1   2   3   4   5   6   7
    stage that computes it    0   0   1   1   1   1   0   0
    owners, even              ranks 0 to 7, half of them on the other node
    owners, by the V          0-3 0-3 4-7 4-7 4-7 4-7 0-3 0-3, on the node of the stage

Other strategies pay for it: under 2*sp4 all eight ranks pull a layer from four, whose links are twice as full. So
owners are chosen once, before step 0: those with which the planner's own steps for typical batches are the shortest.

Every rank must own about as much, as masters and the optimizer's states are most of what it holds. Embeddings and head
stay with all ranks, since one or two stages hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.selection import Planner
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.step import exposed_ms

_UNEVEN = 1.05  # times an even share: the most that a rank may own
_WORTH = 0.02  # of a step: less is not worth owners of their own


def owned_by_stages(plan: ModelPlan, strategy: Strategy) -> ModelPlan:
    """The plan whose layers are owned by the ranks that compute them under a strategy; the plan as it is, where these
    are all ranks, or some rank would own too much [Note: owners]."""
    stages = [stage for pipeline in strategy.pipelines for stage in pipeline.stages]
    of_ends = plan.first | plan.last

    def owners(names: frozenset[str]) -> tuple[int, ...]:
        """Ranks that compute with all of some parameters of layers."""
        found = sorted({rank for stage in stages if names <= plan.needed(stage) for rank in stage.ranks})
        return () if len(found) == strategy.num_ranks or names & of_ends else tuple(found)

    buckets = tuple(replace(one, owners=owners(frozenset(p.name for p in one.params))) for one in plan.buckets)
    owned, num_ranks = replace(plan, buckets=buckets), strategy.num_ranks
    uneven = any(
        owned.most_owned(num_ranks, trainable=kind) > _UNEVEN * plan.most_owned(num_ranks, trainable=kind)
        for kind in (True, False)
    )
    return plan if uneven else owned


def nearest_exposed_ms(job: SimulatedJob, strategy: StrategyShape, tokens_per_step: int) -> float:
    """What messages add to a step, as `exposed_ms`, with even owners or with those that suit the strategy best."""
    found = exposed_ms(job, strategy, tokens_per_step)
    owned = owned_by_stages(job.plan, place_strategy(strategy, strategy.num_ranks, job.plan.num_layers))
    if owned == job.plan:
        return found
    return min(found, exposed_ms(replace(job, plan=owned), strategy, tokens_per_step))


class Owned(NamedTuple):
    """Owners that are chosen: by the stages of which strategy, and what typical steps take with even ones and so."""

    by: StrategyShape
    even_ms: float
    ms: float


def best_owners(
    job: SimulatedJob,
    strategies: Sequence[StrategyShape],
    batches: Sequence[Sequence[int]],
    tokens_per_step: int,
    options: PlannerOptions,
) -> Owned | None:
    """The owners with which the steps of these batches are the shortest; None: even ones, or no others are worth it.

    PlanError where no strategy holds a batch.
    """

    def planned(plan: ModelPlan, among: Sequence[StrategyShape]) -> list[StepPlan]:
        exposed = [exposed_ms(replace(job, plan=plan), one, tokens_per_step) for one in among]
        planner = Planner(job.table, among, replace(options, highs="off"), exposed_ms=exposed)
        return [planner.plan(step, range(len(batch)), batch) for step, batch in enumerate(batches)]

    even = planned(job.plan, strategies)
    even_ms = fmean(plan.step_ms for plan in even)
    if fmean(plan.messages_ms for plan in even) < _WORTH * even_ms:
        return None
    chosen = [StrategyShape.parse(plan.strategy) for plan in even]
    ways: dict[ModelPlan, list[StrategyShape]] = {}
    for one in strategies:
        owned = owned_by_stages(job.plan, place_strategy(one, job.num_ranks, job.plan.num_layers))
        if owned != job.plan:
            ways.setdefault(owned, []).append(one)
    found = [
        Owned(own[0], even_ms, fmean(plan.step_ms for plan in planned(owned, [*dict.fromkeys((*own, *chosen))])))
        for owned, own in ways.items()
    ]
    best = min(found, key=lambda one: one.ms, default=None)
    return best if best is not None and best.ms < (1.0 - _WORTH) * even_ms else None
