"""A planned pipeline and its costs in, what its schedule and its simulation are made from out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.costs.stage_work import UNITS, stage_costs, stage_work
from ds_hydra.pipe.schedules.batches import Batches, Work
from ds_hydra.pipe.schedules.registry import weighs
from ds_hydra.plan.phase import MicroBatchPlan, PipelinePlan


def has_formula(pipeline: PipelinePlan) -> bool:
    """Whether the flow-shop formula is near its time: for whole sequences under 1F1B that recompute nothing, and for
    nothing else."""
    return not weighs(pipeline.schedule) and not pipeline.in_slices and not pipeline.recomputes


def schedule_batches(pipeline: PipelinePlan, table: CostTable) -> Batches:
    """What a pipeline's schedule is asked for, with all that it weighs. PlanError for slices that make no chain,
    or ranges of layers that make no V."""
    if has_formula(pipeline):
        return Batches.whole(len(pipeline.microbatches))
    shape, shares = pipeline.shape, table.shares(pipeline.shape)
    cost = table.paced(shape, pipeline.paces)
    return batches_of(pipeline.microbatches, pipeline.chain, cost, shares, parts=shape.parts)


def batches_of(
    microbatches: Sequence[MicroBatchPlan], before: tuple[int, ...], cost: SchemeCost, shares: Shares, *, parts: int
) -> Batches:
    """Chains, times, memory and room of micro-batches, each with the one that it follows. PlanError for no chain."""
    followed = set(before)
    works = tuple(
        work_of(batch, cost, shares, parts=parts, followed=number in followed)
        for number, batch in enumerate(microbatches)
    )
    return Batches(before, parts, works, UNITS * cost.room)


def work_of(batch: MicroBatchPlan, cost: SchemeCost, shares: Shares, *, parts: int, followed: bool) -> Work:
    """What a micro-batch takes on one virtual stage; `followed`: a later one goes on with one of its sequences."""
    squares = sum(stop * stop - start * start for _, start, stop in batch.spans)
    costs = stage_costs(cost, shares, parts)
    return Work(*stage_work(costs, squares, batch.num_tokens, followed, float(batch.recompute)))


def stretch(batch: MicroBatchPlan, cost: SchemeCost, shares: Shares) -> float:
    """How many times as long a micro-batch takes with the layers that it computes again as without; 1 for none."""
    if not batch.recompute:
        return 1.0
    both = (work_of(one, cost, shares, parts=1, followed=False) for one in (batch, replace(batch, recompute=0.0)))
    some, none = (work.forward + work.takes("backward") for work in both)
    return some / none
