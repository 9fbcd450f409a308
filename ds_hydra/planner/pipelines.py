"""What a search has found in, the pipelines of a plan out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.loads import Load, Loads, dealt_us, first_ranks
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.simulate import simulated_ms, slowest_of_whole
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan
from ds_hydra.plan.validate import modelled_ms
from ds_hydra.planner.chunked import Chunked
from ds_hydra.planner.chunked_space import ChunkedSpace
from ds_hydra.planner.cutting import microbatches_of
from ds_hydra.planner.kernels.problem import Assignment, Batch


class TimedPipeline(NamedTuple):
    """A pipeline that runs whole sequences, with what its simulation is made from."""

    plan: PipelinePlan
    flow_shop: float  # ms
    loads: list[float]  # ms of each micro-batch
    cost: SchemeCost


def whole_pipeline(
    shape: PipelineShape,
    cost: SchemeCost,
    bins: Sequence[Sequence[int]],
    *,
    work: Sequence[float],
    tokens: Sequence[int],
) -> TimedPipeline:
    """A pipeline of micro-batches that hold whole sequences, by their positions in the step's batch.

    `work` (ms, without c) and `tokens` go by position.
    """
    if any(stage.sp > 1 for stage in shape.stages):
        bins = [row_order(held, tokens) for held in bins]
    loaded = [(cost.packed_ms([work[i] for i in held]), tuple(held)) for held in bins]
    ordered = order_microbatches(loaded) if shape.pp > 1 else longest_outside(loaded)
    loads = [load for load, _ in ordered]
    flow_shop = cost.pipeline_ms(loads)
    batches = tuple([MicroBatchPlan.of_whole(sequences, tokens) for _, sequences in ordered])
    return TimedPipeline(PipelinePlan(shape, batches, flow_shop, cost.paces), flow_shop, loads, cost)


def whole_phase(
    shapes: Sequence[PipelineShape], held: Sequence[Sequence[Sequence[int]]], table: CostTable, tokens: Sequence[int]
) -> tuple[Phase, float]:
    """Pipelines of whole sequences with the micro-batches `held` by each, and their simulated time in ms."""
    timed: list[TimedPipeline] = []
    work: dict[object, list[float]] = {}  # by what the costs are of: ms of every sequence
    for shape, paces, bins in zip(shapes, table.slow.of(StrategyShape(tuple(shapes))), held, strict=True):
        cost = table.paced(shape, paces)
        if (key := (cost.scheme, paces)) not in work:
            work[key] = cost.sequence_ms(tokens).tolist()
        timed.append(whole_pipeline(shape, cost, bins, work=work[key], tokens=tokens))
    return Phase(tuple(one.plan for one in timed)), _slowest(timed)


def assigned_pipelines(batch: Batch, best: Assignment, table: CostTable, tokens: Sequence[int]) -> tuple[Phase, float]:
    """The pipelines of an assignment of whole sequences, and their simulated time in ms."""
    shapes = best.kinds.strategy.pipelines
    packed: list[dict[int, list[int]]] = [{} for _ in shapes]
    position, rank_order = batch.position.tolist(), best.kinds.rank_order
    for i, (p, b) in enumerate(zip(best.owner.tolist(), best.bin_of.tolist(), strict=True)):
        packed[rank_order[p]].setdefault(b, []).append(position[i])
    return whole_phase(shapes, [[bins[b] for b in sorted(bins)] for bins in packed], table, tokens)


def chunked_pipelines(space: ChunkedSpace, batch: Batch, found: Chunked, tokens: Sequence[int]) -> tuple[Phase, float]:
    """The pipelines of a plan with chunked ones, and their simulated time in ms."""
    position, rows = batch.position.tolist(), found.kinds.shape.pipeline_scheme.tolist()
    plans: list[PipelinePlan | None] = [None] * len(rows)
    whole: list[TimedPipeline] = []
    work: dict[int, list[float]] = {}  # by row: ms of every sequence
    slowest = 0.0
    for p, (k, timed) in enumerate(zip(rows, found.timed, strict=True)):
        own = [position[i] for i in np.flatnonzero(found.owner == p).tolist()]
        shape, cost, at = space.rows[k].shape, space.rows[k].cost, found.kinds.rank_order[p]
        if timed.cutting is not None:
            slowest = max(slowest, timed.ms)
            plans[at] = PipelinePlan(shape, microbatches_of(timed.cutting.pieces, own), timed.ms, cost.paces)
            continue
        bins: dict[int, list[int]] = {}
        for i, b in zip(own, () if timed.bins is None else timed.bins.tolist(), strict=True):
            bins.setdefault(b, []).append(i)
        if k not in work:
            work[k] = cost.sequence_ms(tokens).tolist()
        one = whole_pipeline(shape, cost, [bins[b] for b in sorted(bins)], work=work[k], tokens=tokens)
        plans[at] = one.plan
        whole.append(one)
    phase = Phase(tuple(plan for plan in plans if plan is not None))
    return phase, max(slowest, _slowest(whole))


def loaded(phase: Phase, loads: Loads, table: CostTable, tokens: Sequence[int]) -> tuple[Phase, float]:
    """A phase with what sequences take besides their tokens [Note: loads], and its simulated time in ms."""
    pipelines = []
    for pipeline in phase.pipelines:
        ranks = first_ranks(pipeline.shape)
        batches = tuple(
            replace(batch, beside_us=round(dealt_us(_units(batch, loads, tokens), ranks)))
            for batch in pipeline.microbatches
        )
        one = replace(pipeline, microbatches=batches)
        pipelines.append(replace(one, predicted_ms=modelled_ms(one, table)) if batches else one)
    made = Phase(tuple(pipelines))
    return made, simulated_ms((made,), table)


def _units(batch: MicroBatchPlan, loads: Loads, tokens: Sequence[int]) -> list[Load]:
    """Loads of the units of a micro-batch; of a slice the part that its tokens are of the sequence's."""
    parts = ((at, (stop - start) / tokens[at]) for at, start, stop in batch.spans)
    return [Load(part * one.us, part * one.more) for at, part in parts for one in loads[at]]


def _slowest(timed: Sequence[TimedPipeline]) -> float:
    return slowest_of_whole((one.flow_shop, one.plan.shape, one.loads, one.cost) for one in timed)


def order_microbatches(loaded: list[tuple[float, tuple[int, ...]]]) -> list[tuple[float, tuple[int, ...]]]:
    """Micro-batches as (load ms, sequences) in the order with the smallest bubble: light, heavy, light.

    Warm-up and drain are then short while the heavy ones run in the steady state, which brings 1F1B within a
    fraction of a percent of the flow-shop time.
    """
    rising = sorted(loaded)
    return rising[0::2] + rising[1::2][::-1]


def longest_outside(loaded: list[tuple[float, tuple[int, ...]]]) -> list[tuple[float, tuple[int, ...]]]:
    """Micro-batches of one stage as (load ms, sequences) in the order that hides most of its messages.

    Layers are pulled during the first forward, and gradients, which are more bytes where twins do not add them up,
    pushed during the last backward. So the heaviest comes last and the second heaviest first.
    """
    rising = sorted(loaded)
    return [*rising[-2:-1], *rising[:-2], *rising[-1:]]


def row_order(held: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """A micro-batch's sequences as two nodes that share it send each other little: short, long, short.

    Half of the tokens are then half of the work, so each computes nearly all that it holds [Note: heads inside a node].
    """
    return [i for _, (i,) in order_microbatches([(tokens[i], (i,)) for i in held])]
