"""The pipelines of a plan, made from what a search found; with sequences' loads, and pulls hidden. Pure: no torch.

[Note: light first micro-batches]
A pipeline of one stage pulls its layers during its first forward, a third of the first micro-batch's load. To the
search such a pipeline takes the sum of its loads, and what pulls add to a step is the same for all plans. Mostly it is.
But a sequence that fills a row by itself may have only a light micro-batch beside it. Pulls of 164 ms, and loads in ms:

                   loads          pulls beyond the first forward     in all
  pipeline 0       258, 2159      164 - 86 = 78                      2495
  the others       1200, 1210     none                               2410

The simulated step tells: 78 ms more than expected. So pulls take what explains them in pipeline 0, and sequences move
from the slowest pipeline to others, one after the other, for as long as the slower of the two gets sooner done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.loads import Counted, Load, Loads, dealt_us, first_ranks, loads_of
from ds_hydra.pipe.schedules.simulate import SHARES
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.simulate import has_formula, simulated_ms, slowest_of_whole
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan
from ds_hydra.plan.validate import check_room, modelled_ms
from ds_hydra.planner.chunked import Chunked, ChunkedSpace
from ds_hydra.planner.cutting import microbatches_of
from ds_hydra.planner.kernels.problem import Assignment, Batch, Floats, PipelineKinds, Problem, Schemes
from ds_hydra.zero_hetero.errors import PlanError


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


_FORWARD = SHARES["forward"]
_MOVES, _TARGETS = 100, 3  # at most; the pipelines that are sooner done than others, to which sequences move
_FEW = 60  # sequences of a pipeline, in the mean: with more each move takes long, and hardly a micro-batch is light
_Bins = tuple[tuple[int, ...], ...]  # sequences of each micro-batch, by their positions in the step's batch


@dataclass(frozen=True)
class _Pipeline:
    """A pipeline of one stage that runs whole sequences. Work (ms, without c) and tokens go by position."""

    cost: SchemeCost
    bins: _Bins
    work: Sequence[float]
    tokens: Sequence[int]

    def ms(self, pulls_ms: float) -> float:
        """What it takes, with what pulls of so many ms add."""
        computing, hiding = self._times()
        return computing + max(0.0, pulls_ms - hiding)

    def pulls_ms(self, taken_ms: float) -> float:
        """The pulls with which it takes so long."""
        computing, hiding = self._times()
        return taken_ms - computing + hiding

    def _times(self) -> tuple[float, float]:
        """Of all its micro-batches, and of the first forward, behind which pulls hide."""
        loads = [load for load, _ in longest_outside([(self._load(held), held) for held in self.bins])]
        return math.fsum(loads), _FORWARD * loads[0] if loads else 0.0

    def _load(self, held: Sequence[int]) -> float:
        return self.cost.packed_ms([self.work[i] for i in held])

    def without(self, sequence: int) -> _Pipeline:
        """The same with a sequence less."""
        bins = (tuple(i for i in held if i != sequence) for held in self.bins)
        return replace(self, bins=tuple(held for held in bins if held))

    def with_more(self, sequence: int) -> Iterator[_Pipeline]:
        """The same with a sequence more, in each micro-batch that has room for it, or in one of its own."""
        for number, held in enumerate(self.bins):
            if sum(self.tokens[i] for i in (*held, sequence)) <= self.cost.max_length:
                yield replace(self, bins=(*self.bins[:number], (*held, sequence), *self.bins[number + 1 :]))
        if self.tokens[sequence] <= self.cost.max_length:
            yield replace(self, bins=(*self.bins, (sequence,)))


def with_hidden_pulls(plan: StepPlan, table: CostTable, taken_ms: float) -> StepPlan | None:
    """The plan with sequences moved so that pulls are hidden, where its pipelines take so many ms with those; None
    where no move helps, or none is known to [Note: light first micro-batches]."""
    if len(plan.phases) > 1 or len(plan.lengths) > _FEW * len(plan.pipelines):
        return None
    held = plan.pipelines
    if any(pipeline.beside_ms for pipeline in held):
        return None  # what moves of sequences make of loads is not counted here
    own = {at: _of(one, table, plan.lengths) for at, one in enumerate(held) if one.shape.pp == 1 and has_formula(one)}
    if len(own) < 2:
        return None
    moved = dict(own)
    pulls_ms = min(one.pulls_ms(taken_ms) for one in own.values())
    taken = {at: one.ms(pulls_ms) for at, one in own.items()}
    for _ in range(_MOVES):
        by_time = sorted(taken, key=lambda at: (taken[at], at))
        slowest, targets = by_time[-1], by_time[: min(_TARGETS, len(by_time) - 1)]
        found = _best_move(moved, slowest, targets, pulls_ms)
        if found is None or found[0] >= taken[slowest]:
            break
        moved |= found[1]
        taken |= {at: one.ms(pulls_ms) for at, one in found[1].items()}
    if moved == own:
        return None
    phase = Phase(tuple(_planned(one, moved[at]) if at in moved else one for at, one in enumerate(held)))
    return replace(plan, phases=(phase,), predicted_ms=simulated_ms((phase,), table))


def _best_move(
    pipelines: dict[int, _Pipeline], slowest: int, targets: Sequence[int], pulls_ms: float
) -> tuple[float, dict[int, _Pipeline]] | None:
    """The move of a sequence to one of the targets after which the slower of the two takes least, and what that is."""
    best: tuple[float, dict[int, _Pipeline]] | None = None
    tried: set[int] = set()  # sequences of as many tokens are as good
    for sequence in (i for held in pipelines[slowest].bins for i in held):
        tokens = pipelines[slowest].tokens[sequence]
        if tokens in tried:
            continue
        tried.add(tokens)
        rest = pipelines[slowest].without(sequence)
        rest_ms = rest.ms(pulls_ms)
        for target in targets if best is None or rest_ms < best[0] else ():
            for more in pipelines[target].with_more(sequence):
                ms = max(rest_ms, more.ms(pulls_ms))
                if best is None or ms < best[0]:
                    best = ms, {slowest: rest, target: more}
    return best


def _of(planned: PipelinePlan, table: CostTable, tokens: Sequence[int]) -> _Pipeline:
    cost = table.paced(planned.shape, planned.paces)
    bins = tuple(tuple(sequence for sequence, _, _ in batch.spans) for batch in planned.microbatches)
    return _Pipeline(cost, bins, cost.sequence_ms(tokens).tolist(), tokens)


def _planned(before: PipelinePlan, found: _Pipeline) -> PipelinePlan:
    return whole_pipeline(before.shape, found.cost, found.bins, work=found.work, tokens=found.tokens).plan
