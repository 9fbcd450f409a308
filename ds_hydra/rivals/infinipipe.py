"""InfiniPipe, which ours builds on, as published: equal pipelines of many stages that run chunks. Pure: no torch.

Sequences are cut by a mesh, the lengths of equally dear slices of the longest one; what is left of a sequence behind
its last whole mesh slice, its tail, is filled up with short sequences, which also make chunks of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.simulate import has_formula, simulated_ms
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, Span, StepPlan
from ds_hydra.plan.validate import check_room, modelled_ms
from ds_hydra.rivals.costs import NODE, Setting, Way, powers_of_two, table_of
from ds_hydra.rivals.static import Configuration, Lengths, PlanStep, by_load
from ds_hydra.zero_hetero.errors import PlanError


@dataclass
class _Bucket:
    """A chunk that is being filled: a tail or nothing, and short sequences."""

    spans: list[Span] = field(default_factory=list)
    ms: float = 0.0
    tokens: int = 0

    def add(self, span: Span, ms: float) -> None:
        self.spans.append(span)
        self.ms += ms
        self.tokens += span.stop - span.start


def mesh_of(longest: int, slices: int, cost: SchemeCost) -> list[int]:
    """Lengths of the slices that cut a sequence into parts of equal time, the longest first.

    A later slice attends to all before it and so is shorter: with a = 1 and b = 0 two slices of 100 tokens take equally
    long when the first one has 71.
    """
    total = float(cost.sequence_ms([longest])[0])
    ends = [round(cost.tokens_in(total * part / slices)) for part in range(slices)] + [longest]
    return [stop - start for start, stop in itertools.pairwise(ends) if stop > start]


def chunks(
    positions: Sequence[int], lengths: Sequence[int], mesh: Sequence[int], cost: SchemeCost
) -> tuple[MicroBatchPlan, ...]:
    """Algorithm 1 for some sequences of a step: split chunks with their tails, longest sequences first, then others."""
    most_tokens = mesh[0]
    most_ms = float(cost.sequence_ms([mesh[0]])[0])
    chains: list[tuple[list[Span], _Bucket]] = []
    short: list[tuple[float, int]] = []
    for position in sorted(positions, key=lambda at: (-lengths[at], at)):
        if lengths[position] <= most_tokens:
            short.append((float(cost.sequence_ms([lengths[position]])[0]), position))
            continue
        spans = _split(position, lengths[position], mesh)
        tail = _Bucket()
        tail.add(spans[-1], float(cost.slices_ms([(spans[-1].start, spans[-1].stop)])[0]))
        chains.append((spans[:-1], tail))
    buckets = [tail for _, tail in chains]
    for ms, position in short:
        span = Span(position, 0, lengths[position])
        # A bucket that has room for the tokens, the one with least time for its tokens first; the bound on time gives
        # way where none has time left.
        fitting = [bucket for bucket in buckets if bucket.tokens + lengths[position] <= most_tokens]
        if not fitting:
            buckets.append(_Bucket())
            buckets[-1].add(span, ms)
            continue
        quick = [bucket for bucket in fitting if bucket.ms + ms <= most_ms]
        if not quick:
            most_ms = min(bucket.ms for bucket in fitting) + ms
            quick = [bucket for bucket in fitting if bucket.ms + ms <= most_ms]
        min(quick, key=lambda bucket: bucket.ms / bucket.tokens).add(span, ms)
    made: list[MicroBatchPlan] = []
    for whole, tail in chains:
        made += [MicroBatchPlan((span,)) for span in whole] + [MicroBatchPlan(tuple(tail.spans))]
    made += [MicroBatchPlan(tuple(bucket.spans)) for bucket in buckets[len(chains) :]]
    return tuple(made)


def _split(position: int, length: int, mesh: Sequence[int]) -> list[Span]:
    """The slices of a sequence by the mesh, the rest as the last."""
    spans, start = [], 0
    for slice_tokens in mesh:
        if start + slice_tokens >= length:
            break
        spans.append(Span(position, start, start + slice_tokens))
        start += slice_tokens
    return [*spans, Span(position, start, length)]


_STAGES = (8, 16)
_SLICES = (1, 2, 4, 8)
_RECOMPUTED = (0.0, 0.25, 0.5, 0.75, 1.0)


def infinipipe(setting: Setting) -> Iterator[Configuration]:
    """InfiniPipe: chunks of equal time through equal pipelines, TP or Ulysses inside nodes and stages between.

    Chunks by its Algorithm 1 with the number of slices that suits each step best, in 1F1B with the last slice's
    backward first; data parallel pipelines get equal work. Where a stage has not room for its chunks, all of them
    compute a share of their layers again, the least of a few that fits; its program chooses it for each chunk.
    Parameters are gathered inside nodes only, which counts as hidden.
    """
    way = Way(powers_of_two(NODE), ulysses=True, zero_3=True, hidden_gathers=True, stages=_STAGES)
    table = table_of(setting, way)
    for cost in table.costs:
        scheme = cost.uniform
        if setting.gpus % scheme.num_ranks or scheme.tp * scheme.sp > NODE or cost.room < setting.context:
            continue
        strategy = StrategyShape.of([scheme] * (setting.gpus // scheme.num_ranks))
        yield Configuration(str(strategy), table, _in_chunks(strategy, cost, table))


def _in_chunks(strategy: StrategyShape, cost: SchemeCost, table: CostTable) -> PlanStep:
    def plan(step: int, lengths: Lengths) -> StepPlan:
        dealt = by_load(lengths, cost, len(strategy.pipelines))
        found = []
        for slices in _SLICES:
            mesh = mesh_of(max(lengths), slices, cost)
            if mesh[0] > cost.max_length:
                continue
            made = [_pipeline(strategy.pipelines[0], chunks(own, lengths, mesh, cost), table) for own in dealt]
            pipelines = [one for one in made if one is not None]
            if len(pipelines) == len(made):
                phase = Phase(tuple(pipelines))
                ms, ids = simulated_ms((phase,), table), tuple(range(len(lengths)))
                found.append(StepPlan(step, ids, tuple(lengths), (phase,), ms))
        if not found:
            raise PlanError(f"{strategy} has no room for a sequence of {max(lengths)} tokens in chunks")
        return min(found, key=lambda one: one.predicted_ms)

    return plan


def _pipeline(shape: PipelineShape, batches: Sequence[MicroBatchPlan], table: CostTable) -> PipelinePlan | None:
    """A pipeline of these chunks with no more layers computed again than memory asks for; None where it has no room."""
    for share in _RECOMPUTED:
        tried = PipelinePlan(shape, tuple(replace(batch, recompute=share) for batch in batches), 0.0)
        if has_room(tried, table):
            return replace(tried, predicted_ms=modelled_ms(tried, table))
    return None


def has_room(pipeline: PipelinePlan, table: CostTable) -> bool:
    """Whether each stage holds all that its schedule keeps at once; whole sequences under 1F1B always fit."""
    if has_formula(pipeline):
        return True
    try:
        check_room(pipeline, table, str(pipeline.shape))
    except PlanError:
        return False
    return True
