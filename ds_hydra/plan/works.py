"""A planned pipeline and its costs in, what its schedule and its simulation are made from out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.schedules.batches import Batches, Work
from ds_hydra.pipe.schedules.registry import WEIGHED
from ds_hydra.plan.phase import MicroBatchPlan, PipelinePlan

UNITS = 1000  # of memory in a token: whole numbers that are fine enough for what a slice keeps beside its tokens


def has_formula(pipeline: PipelinePlan) -> bool:
    """Whether the flow-shop formula is near its time: for whole sequences under 1F1B, and for nothing else."""
    return pipeline.schedule not in WEIGHED and not pipeline.in_slices


def schedule_batches(pipeline: PipelinePlan, table: CostTable) -> Batches:
    """What a pipeline's schedule is asked for, with all that it weighs. PlanError for slices that make no chain,
    or ranges of layers that make no V."""
    if has_formula(pipeline):
        return Batches.whole(len(pipeline.microbatches))
    shape, shares = pipeline.shape, table.shares(pipeline.shape)
    return batches_of(pipeline.microbatches, pipeline.chain, table[shape], shares, parts=shape.parts)


def batches_of(
    microbatches: Sequence[MicroBatchPlan], before: tuple[int, ...], cost: SchemeCost, shares: Shares, *, parts: int
) -> Batches:
    """Chains, times, memory and room of micro-batches, each with the one that it follows. PlanError for no chain.

    A stage of two ranges of layers takes half of the time in each, and keeps half.
    """
    followed = set(before)
    works = tuple(
        work_of(batch, cost, shares, parts=parts, followed=number in followed)
        for number, batch in enumerate(microbatches)
    )
    return Batches(before, parts, works, UNITS * cost.room)


def work_of(batch: MicroBatchPlan, cost: SchemeCost, shares: Shares, *, parts: int, followed: bool) -> Work:
    """What a micro-batch takes on one virtual stage; `followed`: a later one goes on with one of its sequences."""
    squares = sum(stop * stop - start * start for _, start, stop in batch.spans)
    terms = (cost.a * squares, cost.b * batch.num_tokens, cost.c)
    whole = sum(terms)
    forward, weight = (
        sum(share * term for share, term in zip(part, terms, strict=True)) for part in (shares.forward, shares.weight)
    )
    # A layer that is computed again gives its memory back until then, and has its weights' gradients computed at once.
    again, tokens = batch.recompute, batch.num_tokens
    contexts = tokens * shares.context * followed
    backward = whole - forward - weight + again * (forward + weight)
    waiting = ((1.0 - again) * tokens + contexts) * shares.until_weight
    return Work(
        forward=max(1, round(1e3 * forward / parts)),
        backward=max(1, round(1e3 * backward / parts)),
        weight=round(1e3 * (1.0 - again) * weight / parts),
        kept=round(UNITS * (tokens + contexts - again * (1.0 - shares.recomputed) * tokens) / parts),
        until_weight=int(UNITS * waiting / parts),
    )
