"""Published systems as configurations, each with the plans of its steps; and fixed layouts with our assignment. Pure.

A fixed layout is one scheme on as many pipelines as the GPUs hold, and must hold a sequence of the whole context, as a
job that is set up before its data is seen must. InfiniPipe, which ours builds on, runs chunks through equal pipelines
of many stages: sequences are cut by a mesh, the lengths of equally dear slices of the longest one; what is left of a
sequence behind its last whole mesh slice, its tail, is filled up with short sequences, which also make chunks of their
own. `hindsight` finds the configuration that suits given batches best.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.simulate import has_formula, simulated_ms
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, Span, StepPlan
from ds_hydra.plan.validate import check_room, modelled_ms
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.fixed_layout import packed, packed_in_turn, step_plan
from ds_hydra.report.calibration import StageLoad
from ds_hydra.rivals.costs import NODE, Setting, Way, powers_of_two, table_of
from ds_hydra.rivals.waits import WaitingCost
from ds_hydra.simulate.step import Simulator
from ds_hydra.zero_hetero.errors import PlanError


@dataclass(frozen=True)
class _RowLoad(StageLoad):
    """Coefficients of a stage whose ranks share sequences: each micro-batch waits as its row does."""

    cost: WaitingCost | None = None

    def load_ms(self, lengths: Sequence[int], starts: Sequence[int] | None = None) -> float:
        """See `StageLoad`."""
        assert self.cost is not None, "made below, of one"
        waits = self.cost.in_rows.load_ms(lengths) - self.cost.without_waits.load_ms(lengths)
        return StageLoad.load_ms(self, lengths, starts) + waits


class RowSimulator(Simulator):
    """A simulator that knows what messages of shared sequences leave exposed: pulls go on meanwhile."""

    def _stage_loads(self, shape: PipelineShape) -> tuple[StageLoad, ...]:
        loads, cost = super()._stage_loads(shape), self.job.table[shape]
        return tuple(_RowLoad(**vars(one), cost=cost) for one in loads) if isinstance(cost, WaitingCost) else loads


Lengths = Sequence[int]
PlanStep = Callable[[int, Lengths], StepPlan]


class StepMs(Protocol):
    """What a step takes by a plan and the costs that it was made with."""

    def __call__(self, plan: StepPlan, table: CostTable) -> float: ...


class PlansSteps(Protocol):
    """Plans steps, as `Planner` does."""

    def plan(self, step: int, sequence_ids: Sequence[int], lengths: Sequence[int]) -> StepPlan: ...


class Configuration(NamedTuple):
    """One way to set a system up: a text for readers, its costs, and how it plans a step of these lengths."""

    text: str
    table: CostTable
    plan: PlanStep


def planned_by(text: str, table: CostTable, planner: PlansSteps) -> Configuration:
    """A configuration whose steps such a planner plans."""
    return Configuration(text, table, lambda step, lengths: planner.plan(step, range(len(lengths)), lengths))


class Chosen(NamedTuple):
    """A system's configuration and what it made of each batch."""

    configuration: Configuration
    plans: tuple[StepPlan, ...]


_SCREENED = 5  # batches on which configurations are compared first, at even ranks of their longest sequence
_FINALISTS = 4
_CLOSE = 1.1  # finalists take at most so many times the least, on the few batches


def hindsight(
    configurations: Iterable[Configuration], batches: Sequence[Lengths], ms: StepMs, *, finalists: int = _FINALISTS
) -> Chosen:
    """The configuration whose steps take the least `ms` in the mean. PlanError when none holds all batches.

    All are compared on a few of the batches, that with the longest sequence among them, and `finalists` on all. One
    is left when its plans alone, without transfers, take clearly more on most of the few than the best so far in all.
    """
    # The longest sequences come first: what cannot hold them is left at once.
    order = sorted(range(len(batches)), key=lambda step: (-max(batches[step]), step))
    last = len(order) - 1
    few = list(dict.fromkeys(order[round(last * part / (_SCREENED - 1))] for part in range(_SCREENED)))
    ranked: list[tuple[float, int, Configuration, dict[int, StepPlan]]] = []
    best: dict[int, float] = {}  # what the best so far takes for each of the few
    refused: PlanError | None = None
    for number, configuration in enumerate(configurations):
        plans: dict[int, StepPlan] = {}
        try:
            for step in few:
                plans[step] = configuration.plan(step, batches[step])
                known = sum(best.get(one, math.inf) for one in plans)
                alone = sum(plan.predicted_ms for plan in plans.values())
                if 2 * len(plans) > len(few) and alone > _CLOSE * known:
                    break
            else:
                taken = {step: ms(plan, configuration.table) for step, plan in plans.items()}
                ranked.append((sum(taken.values()), number, configuration, plans))
                if not best or sum(taken.values()) < sum(best.values()):
                    best = taken
        except PlanError as error:
            refused = error
    last_ones: list[Chosen] = []
    for of_few, _, configuration, plans in sorted(ranked, key=lambda row: row[:2])[:finalists]:
        if last_ones and of_few > _CLOSE * sum(best.values()):
            break
        try:
            plans |= {step: configuration.plan(step, batches[step]) for step in order if step not in plans}
        except PlanError as error:
            refused = error
            continue
        last_ones.append(Chosen(configuration, tuple(plans[step] for step in range(len(batches)))))
    if not last_ones:
        raise PlanError(f"no configuration holds these batches: {refused}")
    if len(last_ones) == 1:
        return last_ones[0]
    return min(last_ones, key=lambda one: sum(ms(plan, one.configuration.table) for plan in one.plans))


OPTIONS = PlannerOptions(kernels="compiled", no_slices="other systems run whole sequences", layers=0)


def megatron(setting: Setting, ways: Iterable[Way] | None = None) -> Iterator[Configuration]:
    """Megatron-LM: TP, PP and CP by rings or all-to-alls, with any recomputation, or what `ways` say.

    Its all-to-alls (`cp_comm_type` "a2a") are Ulysses, which nothing hides. Sequences are packed first fit decreasing
    to the context, or to all that memory holds, and the packs dealt out in turn (Hydraulis, section 8.4: "max-length
    packing and even dispatching").
    """
    return _packed_full(setting, _megatron_ways(setting) if ways is None else ways)


def deepspeed(setting: Setting) -> Iterator[Configuration]:
    """DeepSpeed: Ulysses and ZeRO-3, with any recomputation; packed and dealt out as Megatron-LM's batches."""
    return _packed_full(setting, _ulysses_ways(setting))


def batch_rebalance(setting: Setting) -> Iterator[Configuration]:
    """Hugging Face's `batch_rebalance` (transformers, pull request 47340) over DeepSpeed's layouts.

    A step's sequences are dealt so that all data parallel ranks get equal work, and packed to what memory holds; its
    sampler pads and balances tokens, this one balances times and packs, which is better.
    """
    for text, table, cost, strategy in _layouts(setting, _ulysses_ways(setting)):
        yield Configuration(text, table, _rebalanced(strategy, cost, table))


def with_our_assignment(strategy: StrategyShape, table: CostTable) -> Configuration:
    """A fixed layout whose sequences our planner deals out and packs."""
    return planned_by(str(strategy), table, Planner(table, [strategy], OPTIONS))


def balanced(setting: Setting) -> Iterator[Configuration]:
    """Every layout of Megatron-LM's kinds, with our assignment: none of them need be the best where packs are dealt out
    in turn."""
    for text, table, _, strategy in _layouts(setting, _megatron_ways(setting)):
        yield with_our_assignment(strategy, table)._replace(text=text)


def _megatron_ways(setting: Setting) -> Iterator[Way]:
    for ulysses in (False, True):
        yield from _with_recomputation(setting, Way(powers_of_two(setting.gpus), ulysses=ulysses))


def _ulysses_ways(setting: Setting) -> Iterator[Way]:
    return _with_recomputation(setting, Way(powers_of_two(setting.gpus), ulysses=True, zero_3=True))


def _with_recomputation(setting: Setting, way: Way) -> Iterator[Way]:
    """A way with nothing computed again, and with all that may be."""
    return (replace(way, again=again) for again in setting.of_model.forms)


def _layouts(setting: Setting, ways: Iterable[Way]) -> Iterator[tuple[str, CostTable, SchemeCost, StrategyShape]]:
    """(text, table, costs, strategy) of every scheme that divides the GPUs and holds the context, each once."""
    known: set[tuple[StrategyShape, Way]] = set()
    for way in ways:
        table = table_of(setting, way)
        for cost in table.costs:
            scheme = cost.uniform
            # ZeRO-3 stands instead of TP and PP; TP reaches out of a node only where it fills several.
            if way.zero_3 and (scheme.tp, scheme.pp) != (1, 1):
                continue
            if setting.gpus % scheme.num_ranks or cost.max_length < setting.context:
                continue
            strategy = StrategyShape.of([scheme] * (setting.gpus // scheme.num_ranks))
            # Where nobody shares a sequence it does not matter how that would be done.
            shared = scheme.sp > 1
            one = strategy, way if shared else replace(way, ulysses=way.zero_3)
            if one not in known:
                known.add(one)
                how = f" {'Ulysses' if way.ulysses else 'ring'}" if shared else ""
                yield f"{strategy}{how}{way.again.value}", table, cost, strategy


def _packed_full(setting: Setting, ways: Iterable[Way]) -> Iterator[Configuration]:
    """Every layout with sequences packed to the context, and to all that memory holds, and dealt out in turn."""
    for text, table, cost, strategy in _layouts(setting, ways):
        for capacity in sorted({setting.context, cost.max_length}):
            plan = partial(packed_in_turn, strategy=strategy, table=table, capacity=capacity)
            yield Configuration(f"{text}, packed to {capacity}", table, plan)


def _rebalanced(strategy: StrategyShape, cost: SchemeCost, table: CostTable) -> PlanStep:
    def plan(step: int, lengths: Sequence[int]) -> StepPlan:
        dealt = by_load(lengths, cost, len(strategy.pipelines))
        bins = [packed(own, lengths, cost.max_length) for own in dealt]
        return step_plan(step, lengths, strategy, bins, table)

    return plan


def by_load(lengths: Sequence[int], cost: SchemeCost, pipelines: int) -> list[list[int]]:
    """Each sequence, the dearest first, to the pipeline with the least work so far: positions by pipeline."""
    work = cost.sequence_ms(lengths)
    dealt: list[list[int]] = [[] for _ in range(pipelines)]
    loads = [(0.0, index) for index in range(pipelines)]
    for position in sorted(range(len(lengths)), key=lambda at: (-work[at], at)):
        load, index = heapq.heappop(loads)
        dealt[index].append(position)
        heapq.heappush(loads, (load + float(work[position]), index))
    return dealt


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
