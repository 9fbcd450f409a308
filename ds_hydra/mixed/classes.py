"""Jobs on devices of several classes: what they must say, their costs and memory, and strategies for them. Pure.

[Note: mixed proposal]
What a flat layout is to equal devices, four steps are here:

1. Groups. For each class a tensor parallel degree that the table has costs of: each node is cut into groups of so many
   ranks, and what is left into smaller ones, a node of seven into 4 + 2 + 1.
2. Pipelines. For each number of them the groups are dealt out, the fastest first, to the pipeline that is slowest so
   far; or each class makes pipelines of its own, of 1, 2, 4 ... groups. Slow devices with much memory come first in a
   pipeline, as early stages keep most micro-batches, and what was left of nodes comes last.
3. Layers. Stage i gets as many as it computes within T, and no more than its memory holds; T is the least for which
   all layers find a place.
4. Choice. Of all that this makes, those with the least estimated step are planned on sampled batches, and of those
   that fit by the memory model the best ones are kept: the best of all batches, then whichever gains most beside it.
5. Slices. Where shares of forward and backward were measured, the best ones with pipelines of several stages are tried
   in two more forms, too, in which sequences may run in slices: with the same stages under the list order, and as a V,
   whose stages hold as many layers in two ranges. They are among those that are kept where they take less.

Example: 32 H20 on four nodes and 16 H800 on two, tp4 on both: 12 groups, of which four are fast. For four pipelines
each gets one fast group and then two slow ones: 4*(tp4[0:11]@h20 > tp4[11:22]@h20 > tp4[22:60]@h800).
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile, check_job, read_table_file
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.costs.memory import Activations, JobMemory
from ds_hydra.costs.shape_costs import class_rows, of_class, price, priced
from ds_hydra.data.lengths import sample_batches
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import LayerRange, PipelineShape, StageShape, StrategyShape
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.propose import by_list, by_v, greedy_subset
from ds_hydra.planner.selection import Planner
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.nodes import Cluster, listed, node_of

_BATCHES = 4  # sampled, on which strategies are compared
_PLANNED = 16  # strategies that are
_DEEPEST = 16  # stages
_SLICED = 2  # strategies that are tried with slices
_AS_GOOD = 1.02  # times what was estimated with memory as it is about
_NO_LIMIT = 1 << 40  # tokens


@dataclass(frozen=True, slots=True)
class _Group:
    """A tensor parallel group: what stands on one stage."""

    shape: StageShape
    layer_ms: float  # one layer, one sequence of the usual length
    left_over: bool  # of a node that its class's degree does not divide


class _Job:
    """What all candidates are made for."""

    def __init__(self, cluster: Cluster, table: CostTable, memory: JobMemory, tokens: int) -> None:
        self.cluster, self.table, self.memory, self.tokens = cluster, table, memory, tokens
        self.layers = memory.plan.num_layers
        self.rows = {stage: min(rows.items())[1] for stage, rows in class_rows(table).items() if stage.sp == 1}
        numel = {p.name: p.numel for bucket in memory.plan.buckets for p in bucket.params}
        self.layer_params = max(sum(numel[name] for name in names) for names in memory.plan.layers)
        self.outer_params = max(sum(numel[name] for name in names) for names in (memory.plan.first, memory.plan.last))
        self.masters = (1 + memory.optimizer_states) * memory.master_bytes * sum(numel.values()) / memory.num_ranks

    @property
    def knows_shares(self) -> bool:
        """Whether all rows have the shares that slices are planned with."""
        return all(row.shares is not None for row in self.rows.values())

    def degrees(self, device: str) -> list[int]:
        return sorted(stage.tp for stage in self.rows if stage.device == device)

    def layer_ms(self, stage: StageShape) -> float:
        row = self.rows[stage]
        return row.scheme.pp * row.load_ms([self.tokens]) / self.layers

    def left(self, stage: StageShape, layers: int, *, end: bool) -> float:
        """Bytes that the states of so many layers leave to activations, about."""
        element, held = self.memory.element, layers * self.layer_params + end * self.outer_params
        return self.memory.capacity_on(stage.device) - self.masters - held * (element.param + element.grad) / stage.tp

    def most_layers(self, stage: StageShape, kept: int, *, end: bool) -> int:
        """Layers that a stage has memory for, with `kept` micro-batches of the usual length at once."""
        empty, one = self.left(stage, 0, end=end), self.left(stage, 1, end=end)
        if math.isinf(empty):
            return self.layers
        each = empty - one + kept * self.tokens * self.memory.activations[stage.tp, 1].layer
        return min(self.layers, int(max(0.0, empty) // each))

    def most_tokens(self, pipeline: PipelineShape) -> int:
        """Tokens of a micro-batch that all stages have memory for, about."""
        found = [_NO_LIMIT]
        for at, stage in enumerate(pipeline.stages):
            layers = stage.layers[0].last - stage.layers[0].first if stage.layers else self.layers
            left = self.left(stage, layers, end=at in (0, pipeline.pp - 1))
            kept = (pipeline.pp - at) * layers * self.memory.activations[stage.tp, stage.sp].layer
            found.append(int(min(_NO_LIMIT, max(0.0, left) / kept)) if kept else _NO_LIMIT)
        return min(found)


def propose_mixed(
    cluster: Cluster, table: CostTable, memory: JobMemory, lengths: Sequence[int], tokens_per_step: int,
    context_length: int, *, count: int = 6, seed: int = 0, exposed: Callable[[StrategyShape], float] = lambda _: 0.0,
    slices: bool = True,
) -> tuple[StrategyShape, ...]:  # fmt: skip
    """Up to `count` strategies whose stages name the classes of the cluster [Note: mixed proposal], best first;
    `exposed` tells what the messages of one add to a step, in ms; `slices`: whether sequences may run in some.

    One of them holds a sequence of `context_length` tokens. Raises PlanError where the table lacks a class, and where
    nothing that fits the devices holds the context.
    """
    for device in cluster.classes:
        if not any(stage.device == device and stage.sp == 1 for stage in class_rows(table)):
            raise PlanError(f"the cost table has no row of class {device!r} with sp1, which strategies are proposed by")
    usual = min(context_length, max(256, int(np.quantile(np.asarray(lengths), 0.9))))
    ranked: dict[StrategyShape, float] = {}
    for tokens in sorted({usual, context_length}):
        job = _Job(cluster, table, memory, tokens)
        for strategy in _candidates(job):
            ranked[strategy] = min(ranked.get(strategy, math.inf), _estimate(job, strategy, tokens_per_step))
    best = sorted(ranked, key=lambda one: (ranked[one], str(one)))
    drawn = sample_batches(lengths, tokens_per_step, _BATCHES, seed, context_length)
    batches = list(dict.fromkeys(tuple(sorted(batch.tolist())) for batch in drawn))  # those alike count once
    times = _planned(job, best, batches, exposed)
    fitting = _fitting(job, times, batches, context_length, count, exposed)
    if slices and job.knows_shares:
        fitting |= _sliced(job, fitting, batches, exposed)
    names = list(fitting)
    weights = np.full(len(batches), 1.0 / len(batches))
    chosen = greedy_subset({(at,): fitting[one] for at, one in enumerate(names)}, weights, count)
    return tuple(names[at] for (at,) in chosen)


def _planned(
    job: _Job, ranked: Sequence[StrategyShape], batches: Sequence[tuple[int, ...]],
    exposed: Callable[[StrategyShape], float],
) -> dict[StrategyShape, np.ndarray]:  # fmt: skip
    """What the first of these strategies take for each batch, in ms, with memory as it is about."""
    times: dict[StrategyShape, np.ndarray] = {}
    for strategy in ranked:
        if len(times) == _PLANNED:
            break
        most = {shape: job.most_tokens(shape) for shape in strategy.pipelines}
        if min(most.values()) >= 1:
            costs = [priced(shape, job.table, job.layers, limit) for shape, limit in most.items()]
            if (made := _times(strategy, costs, batches)) is not None:
                times[strategy] = made + exposed(strategy)
    return times


def _times(
    strategy: StrategyShape, costs: Sequence[SchemeCost], batches: Sequence[tuple[int, ...]]
) -> np.ndarray | None:
    """What a strategy takes for each batch, in ms; None where it does not hold all sequences."""
    planner = Planner(CostTable(tuple(costs)), [strategy], PlannerOptions(highs="off", effort=0))
    if planner.max_length < max(map(max, batches)):
        return None
    return np.array([planner.plan(0, range(len(batch)), batch).predicted_ms for batch in batches])


def _times_by_memory(
    job: _Job, strategy: StrategyShape, batches: Sequence[tuple[int, ...]]
) -> tuple[int, np.ndarray | None]:
    """The longest sequence that a strategy holds as the memory model counts, in tokens, and its `_times`; None where a
    pipeline holds nothing."""
    keys = dict.fromkeys(shape.cost_key for shape in strategy.pipelines)
    costs = [price(key, job.table, job.memory) for key in keys if isinstance(key, PipelineShape)]
    limits = [cost.max_length for cost in costs]
    return max(limits), None if min(limits) <= 1 else _times(strategy, costs, batches)


def _fitting(
    job: _Job, times: Mapping[StrategyShape, np.ndarray], batches: Sequence[tuple[int, ...]], context_length: int,
    count: int, exposed: Callable[[StrategyShape], float],
) -> dict[StrategyShape, np.ndarray]:  # fmt: skip
    """The best ones, as many as are wanted, and their times with memory as the memory model counts it; one of them
    holds the context. PlanError if none does."""
    found: dict[StrategyShape, np.ndarray] = {}
    as_good, holding = 0, False
    for strategy in sorted(times, key=lambda one: (float(times[one].mean()), str(one))):
        longest, made = _times_by_memory(job, strategy, batches)
        if made is None or (as_good >= count and longest < context_length):
            continue
        found[strategy] = made = made + exposed(strategy)
        holding = holding or longest >= context_length
        as_good += float(made.mean()) <= _AS_GOOD * float(times[strategy].mean())
        if as_good >= count and holding:
            return found
    if not holding:
        raise PlanError(
            f"no strategy was found that holds a sequence of {context_length} tokens in the devices' memory: list one "
            "with a larger tp or sp, or lower context_length"
        )
    return found


def _sliced(
    job: _Job, fitting: Mapping[StrategyShape, np.ndarray], batches: Sequence[tuple[int, ...]],
    exposed: Callable[[StrategyShape], float],
) -> dict[StrategyShape, np.ndarray]:  # fmt: skip
    """The best strategies in forms that may run slices, and what they take for each batch."""
    deep = [one for one in fitting if max(shape.pp for shape in one.pipelines) > 1]
    found: dict[StrategyShape, np.ndarray] = {}
    for strategy in sorted(deep, key=lambda one: (float(fitting[one].mean()), str(one)))[:_SLICED]:
        for form in (by_list, by_v):
            other = StrategyShape(tuple(form(shape) if shape.pp > 1 else shape for shape in strategy.pipelines))
            _, made = _times_by_memory(job, other, batches)
            if made is not None:
                found[other] = made + exposed(strategy)
    return found


def _candidates(job: _Job) -> Iterator[StrategyShape]:
    classes = list(job.cluster.classes)
    for degrees in itertools.product(*(job.degrees(device) for device in classes)):
        groups = [_groups(job, device, tp) for device, tp in zip(classes, degrees, strict=True)]
        if any(not of_class for of_class in groups):
            continue
        every = [group for of_class in groups for group in of_class]
        for number in range(1, len(every) + 1):
            yield from _strategy(job, _dealt(every, number))
        sizes = [[n for n in (1, 2, 3, 4, 6, 8) if n <= len(of_class)] for of_class in groups]
        for apart in itertools.product(*sizes):
            pipelines = [
                pipeline
                for of_class, size in zip(groups, apart, strict=True)
                for pipeline in _dealt(of_class, max(1, len(of_class) // size))
            ]
            yield from _strategy(job, pipelines)


def _groups(job: _Job, device: str, tp: int) -> list[_Group]:
    """A class's ranks as groups, node by node; none where the table has no costs of what is left."""
    known, found = job.degrees(device), []
    for _, ranks in itertools.groupby(job.cluster.classes[device], lambda r: node_of(r, job.cluster.node_size)):
        left, width = len(list(ranks)), tp
        while left:
            width = max((w for w in known if w <= min(left, width)), default=0)
            if not width:
                return []
            stage = StageShape(width, 1, (), device)
            found.append(_Group(stage, job.layer_ms(stage), width < tp))
            left -= width
    return found


def _dealt(groups: Sequence[_Group], number: int) -> list[list[_Group]]:
    """The groups in so many pipelines: the fastest first, to the one that is slowest so far."""
    pipelines: list[list[_Group]] = [[] for _ in range(number)]
    speed = [0.0] * number
    slowest = [(0.0, 0, at) for at in range(number)]  # a heap; of pipelines that are as slow the shortest is first
    for group in sorted(groups, key=lambda one: one.layer_ms):
        at = slowest[0][2]
        pipelines[at].append(group)
        speed[at] += 1.0 / group.layer_ms
        heapq.heapreplace(slowest, (round(speed[at], 9), len(pipelines[at]), at))  # a hair of a difference is none
    return pipelines


def _strategy(job: _Job, pipelines: Sequence[Sequence[_Group]]) -> Iterator[StrategyShape]:
    """The strategy of these pipelines, if each fits its layers; widest pipelines first, alike ones together."""
    made = {groups: _pipeline(job, groups) for groups in dict.fromkeys(map(tuple, pipelines))}
    shapes = [made[tuple(pipeline)] for pipeline in pipelines]
    if all(shape is not None for shape in shapes):
        known = sorted((shape for shape in shapes if shape is not None), key=lambda one: (-one.num_ranks, str(one)))
        yield StrategyShape(tuple(known))


def _pipeline(job: _Job, groups: Sequence[_Group]) -> PipelineShape | None:
    """The stages of a pipeline with their layers; None where they do not fit."""
    if not 1 <= len(groups) <= min(_DEEPEST, job.layers):
        return None
    bytes_of = job.memory.class_bytes
    ordered = sorted(groups, key=lambda one: (one.left_over, -one.layer_ms * one.shape.tp,
                                              -bytes_of.get(one.shape.device, 0.0), -one.shape.tp))  # fmt: skip
    stages = len(ordered)
    most = [job.most_layers(one.shape, stages - at, end=at in (0, stages - 1)) for at, one in enumerate(ordered)]
    layers = split_by_speed(job.layers, [one.layer_ms for one in ordered], most)
    if layers is None:
        return None
    ends = list(itertools.accumulate(layers, initial=0))
    held = [(LayerRange(first, last),) for first, last in itertools.pairwise(ends)]
    return PipelineShape(tuple(
        StageShape(one.shape.tp, 1, () if stages == 1 else own, one.shape.device)
        for one, own in zip(ordered, held, strict=True)
    ))  # fmt: skip


def split_by_speed(num_layers: int, layer_ms: Sequence[float], most: Sequence[int]) -> tuple[int, ...] | None:
    """Layers of each stage so that the slowest takes as little as can be; None if they do not fit.

    A stage takes `layer_ms` for a layer and holds at least one and at most `most` of them. Example: 10 layers on
    stages of 3 and 1 ms a layer are 2 and 8, of which the slower takes 8 ms; 3 and 7 would take 9.
    """
    if min(most) < 1 or sum(most) < num_layers or len(most) > num_layers:
        return None
    # One after the other to the stage that would be done first with it.
    held = [1] * len(most)
    ends = [(2 * layer_ms[at], -at) for at in range(len(most)) if most[at] > 1]
    heapq.heapify(ends)
    for _ in range(num_layers - len(most)):
        at = -ends[0][1]
        held[at] += 1
        if held[at] < most[at]:
            heapq.heapreplace(ends, ((held[at] + 1) * layer_ms[at], -at))
        else:
            heapq.heappop(ends)
    return tuple(held)


def _estimate(job: _Job, strategy: StrategyShape, tokens_per_step: int) -> float:
    """About what a step takes, in ms: pipelines that end at the same time, with as many sequences of the usual length
    as each has done by then."""
    batches = max(1.0, tokens_per_step / job.tokens)
    slowest, fills = [], []
    for pipeline in strategy.pipelines:
        each = [
            job.layer_ms(StageShape(one.tp, 1, (), one.device)) * (one.layers[0].last - one.layers[0].first
                                                                   if one.layers else job.layers)
            for one in pipeline.stages
        ]  # fmt: skip
        slowest.append(max(each))
        fills.append(sum(each) - max(each))
    # All that take part end at T: sum((T - fill) / slowest) = batches. Those that fill longer than T take no part.
    order = sorted(range(len(fills)), key=lambda at: fills[at])
    best = math.inf
    for count in range(1, len(order) + 1):
        own = order[:count]
        rate = sum(1.0 / slowest[at] for at in own)
        best = min(best, (batches + sum(fills[at] / slowest[at] for at in own)) / rate)
    return best


def check_classes(config: HydraConfig, cluster: Cluster, num_layers: int) -> None:
    """ConfigError for devices of several classes without costs of each, and for strategies that the cluster has not the
    devices for."""
    if cluster.mixed and config.cost_table is None:
        alike = sorted(set.intersection(*(set(re.split("[-_]", name)) for name in cluster.classes)))
        raise ConfigError(
            f"the job has devices of {len(cluster.classes)} classes: {listed(cluster)}. Plans without costs of each "
            "would give them equal shares, and the faster ones would wait: measure a table on a device of each class "
            f"and name both, 'hydra.cost_table': {{{', '.join(f'{name!r}: ...' for name in cluster.classes)}}}; start "
            "ranks of one class only; or, to let them train at the pace of the slowest, call them alike in "
            "hydra.cluster" + (f" (such as {alike[0]!r})" if alike else ", by a word that all their names have")
        )
    for index, shape in enumerate(config.shapes):
        try:
            place_strategy(shape, cluster.num_ranks, num_layers, cluster)
        except PlanError as error:
            raise ConfigError(f"config: hydra.strategies[{index}]: {error}") from None


def check_rows(table: CostTable, cluster: Cluster, place: str) -> None:
    """ConfigError where a table has no costs of a class that the job has."""
    known = {stage.device for stage in class_rows(table)}
    if missing := [name for name in cluster.classes if name not in known]:
        has = "those of " + ", ".join(map(repr, sorted(known))) if known else "rows without a class"
        raise ConfigError(
            f"the cost table {place} has no costs of devices of class {', '.join(map(repr, missing))}, which the job "
            f"has; it has {has}. Name a table of each class in hydra.cost_table, or rows by their class, as 'tp4@h20'"
        )


def class_tables(files: Mapping[str, str], job: JobFingerprint, own: str, cluster: Cluster) -> TableFile:
    """The tables that were measured on each class as one, whose rows name it. ConfigError for a class that the job has
    not, and where this rank's class was measured for another job."""
    if unknown := [name for name in files if name not in cluster.classes]:
        raise ConfigError(
            f"config: hydra.cost_table names the class {unknown[0]!r}, but the job "
            + (f"has {listed(cluster)}" if cluster.mixed else "has devices of one class: name its one file")
        )
    found = {name: read_table_file(path) for name, path in files.items()}
    if own in found:
        check_job(found[own], job, repr(files[own]))
    try:
        tables = [of_class(one.table, name) for name, one in found.items()]
    except PlanError as error:
        raise ConfigError(f"config: hydra.cost_table: {error}") from None
    links = {name: one.links for name, one in found.items() if one.links}
    return TableFile(
        CostTable(tuple(cost for table in tables for cost in table.costs), ", ".join(files.values())),
        links={"classes": links} if links else None,
        step=_most([one.step for one in found.values() if one.step]),
        activations=_largest([one.activations for one in found.values() if one.activations]),
        repairs=tuple(line for one in found.values() for line in one.repairs),
    )


def of_cluster(memory: JobMemory, cluster: Cluster, class_bytes: Mapping[str, float]) -> JobMemory:
    """The memory model of a job whose devices hold so much each."""
    return replace(memory, cluster=cluster, class_bytes=class_bytes)


def propose_for(
    cluster: Cluster, table: CostTable, memory: JobMemory, lengths: Sequence[int], config: HydraConfig
) -> str:
    """Strategies for "strategies": "auto" on such a cluster, a line each. PlanError as `propose_mixed`."""
    seed = config.planner_options().seed
    slices = config.chunks == "auto" and not memory.plan.no_slices
    found = propose_mixed(
        cluster, table, memory, lengths, config.tokens_per_step, max(lengths), seed=seed, slices=slices
    )
    return "\n".join(map(str, found))


def _most(steps: Sequence[Mapping[str, float]]) -> Mapping[str, float] | None:
    # The update waits for the slowest rank.
    return {name: max(one.get(name, 0.0) for one in steps) for step in steps for name in step} or None


def _largest(figures: Sequence[Mapping[tuple[int, int], Activations]]) -> Mapping[tuple[int, int], Activations] | None:
    found: dict[tuple[int, int], Activations] = {}
    for one in figures:
        for degrees, kept in one.items():
            found[degrees] = max(found.get(degrees, kept), kept, key=lambda each: each.layer)
    return found or None
