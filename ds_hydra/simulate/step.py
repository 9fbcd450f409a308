"""The simulation of one step: what every rank does and when, over links. Pure: no torch.

[Note: a step by ports and clocks]
It follows the runtime. On every rank pull, run and push of one phase come after those of the phase before:

  agree       messages that compare the plans: `fixed_ms` of the table's step costs, if it has them
  pull        all buckets' steps in the order of [Note: order of pulls], each as soon as what it sends has come
  run         the schedule's slots; the first forward waits for each layer's own bucket, the first backward for all that
              the rank still sends of its pulls [Note: memory of pulls]
  push        from the last backward on where the schedule allows it, else after the slots; all steps of one bucket
              before the next [Note: order of pushes], each when there is memory for it [Note: scratch memory]: for that
              it waits in the lane where there is one, else what finds none begins when the slots are done; adding up
              takes no time; in a step's last phase sums leave for who keeps copies of masters [Note: copies]
  norm        one all-gather over all ranks, so the latest decides
  optimizer   over the rank's own masters; where the host has them they come before pulls too, over a link of its own

A stage computes for as long as its costs say. Collectives of its tensor and sequence parallel ranks are in them, as far
as it waits for them [Note: how an entry is made].

What is not exact: the ranks of a stage are taken as one, since their collectives keep them in step: it begins a layer
when the last of them has it, and its messages take what the busiest of them sends. Layers take equal shares of a
stage's time, embeddings and head none of it. Pulls and pushes do not slow down messages between stages, nor computing.

The planner's costs are those of computing. What a step takes besides depends on the strategy: whoever holds more
parameters pulls and pushes longer, deep pipelines start while their last layers are still on their way, and gradients
that are complete only in the last backward leave late. It hardly depends on which sequences a step has, so a made-up
step tells it once for all.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.memory import JobMemory
from ds_hydra.pipe.placement import Pipeline, Stage, Strategy
from ds_hydra.pipe.schedules.registry import training_slots
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.simulate import schedule_batches, stretch
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan
from ds_hydra.report.calibration import StageLoad, StepCosts, folded, stage_loads
from ds_hydra.report.trace import Kind, Span, Stream
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import Exchanged, Floats, LinkModel, Parcels, Speed, Wires
from ds_hydra.simulate.pipeline import (
    BucketUse,
    PipelineTiming,
    StageTimes,
    StrategyTransfers,
    bucket_uses,
    memory_over_time,
)


@dataclass(frozen=True, eq=False)
class PhaseTimes:
    """One phase, in seconds; arrays are by rank. Buckets of `pulls` and `pushes` are those of the model's plan."""

    phase: Phase
    pipelines: tuple[tuple[StageTimes, ...], ...]
    begin: Floats
    started: Floats  # all pulls have been started
    pulled: Floats  # all that the rank pulls is there, and what others pull from it has left
    stop: Floats  # its pushes have left, and those to its masters have come; sums are copied
    pulls: tuple[tuple[Exchanged, ...], ...]  # by bucket: its steps
    pushes: Mapping[int, tuple[Exchanged, ...]]
    copies: Mapping[int, Exchanged]  # by bucket: a step's sums, to who keeps copies of masters

    @cached_property
    def slowest_s(self) -> float:
        """When the slowest pipeline is done with its schedule."""
        return max(times.stop for stages in self.pipelines for times in stages)

    def stages(self) -> Iterator[tuple[PipelinePlan, StageTimes, slice | list[int]]]:
        """Each stage with the plan of its pipeline, and its ranks."""
        for plan, stages in zip(self.phase.pipelines, self.pipelines, strict=True):
            for times in stages:
                yield plan, times, slice_of(times.stage.ranks)


def slice_of(ranks: tuple[int, ...]) -> slice | list[int]:
    """The ranks of a stage as an index of arrays; they follow each other but where several nodes share a stage."""
    follow = ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
    return slice(ranks[0], ranks[-1] + 1) if follow else list(ranks)


@dataclass(frozen=True, eq=False)
class RankTimes:
    """Seconds of each rank in a step; all are arrays by rank and add up over the phases.

    `bubble`: within its schedule, neither computing nor waiting for a pull. `wait`: its own schedule is done, but not
    that of the slowest pipeline. `pull`, `push`: waiting for them with nothing to compute, and not for that pipeline.
    """

    compute: Floats
    bubble: Floats
    pull: Floats
    wait: Floats
    push: Floats
    run: Floats  # from the begin of a phase to the end of its schedule


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """One simulated step; times in seconds from its begin."""

    phases: tuple[PhaseTimes, ...]
    num_ranks: int
    agreed_s: float
    norm_s: float  # the gradient's norm is known
    step_s: float
    memory: JobMemory | None = None

    @property
    def pushed_s(self) -> Floats:
        """When each rank is done with all phases."""
        *_, last = self.phases
        return last.stop

    @cached_property
    def ranks(self) -> RankTimes:
        """What each rank spends its time with."""
        total = RankTimes(*(np.zeros(self.num_ranks) for _ in range(6)))
        for phase in self.phases:
            for _, times, ranks in phase.stages():
                waits = sum(stop - start for start, stop in times.waits)
                compute = sum(stop - start for _, start, stop in times.actions) - times.waited_computing
                total.compute[ranks] += compute
                total.bubble[ranks] += times.stop - times.start - compute - waits
                total.run[ranks] += times.stop - phase.begin[ranks]
                late = np.maximum(phase.pulled[ranks] - times.stop, 0.0) if times.armed is None else 0.0
                total.pull[ranks] += times.start - phase.begin[ranks] + waits + late
                done = times.stop + late
                wait = np.maximum(np.minimum(phase.slowest_s, phase.stop[ranks]) - done, 0.0)
                total.wait[ranks] += wait
                total.push[ranks] += phase.stop[ranks] - done - wait
        return total

    @property
    def bubble_share(self) -> float:
        """Of the ranks' time in this step: idle within their schedules."""
        return float(self.ranks.bubble.sum() / (self.num_ranks * self.step_s))

    @property
    def gap(self) -> float:
        """Slowest minus fastest over slowest, of the ranks' times until their schedules are done."""
        run = self.ranks.run
        return float(1.0 - run.min() / run.max()) if run.max() > 0 else 0.0

    @property
    def exposed_s(self) -> float:
        """Mean over the ranks: waiting for pulls and pushes, and for the norm's all-gather."""
        return float((self.ranks.pull + self.ranks.push).mean()) + self.norm_s - float(self.pushed_s.max())

    @cached_property
    def peak_bytes(self) -> Floats | None:
        """The most that each rank holds at once; None where there is no memory model."""
        if self.memory is None:
            return None
        peak = np.zeros(self.num_ranks)
        for phase in self.phases:
            for plan, times, ranks in phase.stages():
                peak[ranks] = np.maximum(
                    peak[ranks], max(held for _, held in memory_over_time(self.memory, plan, times))
                )
        return peak


def step_spans(step: SimulatedStep, ranks: Container[int] | None = None) -> Iterator[Span]:
    """What every stream of these ranks (default: of all) does. A wait for a pull may lie within a forward."""
    for number, phase in enumerate(step.phases):
        of = f" of phase {number}" if len(step.phases) > 1 else ""
        for plan, times, _ in phase.stages():
            for rank in times.stage.ranks:
                if ranks is None or rank in ranks:
                    yield from _computing(rank, phase, plan, times, of)
                    yield from _messages(rank, times, of)
                    yield from _links(rank, phase, of)
    for rank in range(step.num_ranks):
        if ranks is None or rank in ranks:
            yield Span(rank, "compute", "control", "agree on the plan", 0.0, step.agreed_s)
            yield Span(rank, "compute", "norm", "norm", float(step.pushed_s[rank]), step.norm_s)
            yield Span(rank, "compute", "optimizer", "optimizer", step.norm_s, step.step_s)


def _computing(rank: int, phase: PhaseTimes, plan: PipelinePlan, times: StageTimes, of: str) -> Iterator[Span]:
    """What the rank itself does or waits for, from its pulls to its pushes."""
    yield Span(rank, "compute", "pull", f"start pulls{of}", float(phase.begin[rank]), float(phase.started[rank]))
    for action, start, stop in times.actions:
        kind: Kind = "forward" if action.kind == "forward" else "backward"
        again = plan.microbatches[action.microbatch].recompute and action.kind in ("backward", "input_gradient")
        yield Span(rank, "compute", kind, f"{action}{' recomputed' if again else ''}{of}", start, stop)
    for start, stop in times.waits:
        yield Span(rank, "compute", "pull", f"wait for parameters{of}", start, stop)
    pulled = times.stop if times.armed is not None else max(times.stop, float(phase.pulled[rank]))
    yield Span(rank, "compute", "pull", f"finish pulls{of}", times.stop, pulled)
    stop = float(phase.stop[rank])
    waited = max(pulled, min(phase.slowest_s, stop))
    yield Span(rank, "compute", "wait", f"wait for the slowest pipeline{of}", pulled, waited)
    yield Span(rank, "compute", "push", f"finish pushes{of}", waited, stop)


def _messages(rank: int, times: StageTimes, of: str) -> Iterator[Span]:
    """The messages between stages, while they hold the rank's ports."""
    for action, start, stop in times.out:
        yield Span(rank, "stages out", "send", f"{action}{of}", start, stop)
    for action, start, stop in times.into:
        yield Span(rank, "stages in", "receive", f"{action}{of}", start, stop)


def _links(rank: int, phase: PhaseTimes, of: str) -> Iterator[Span]:
    """Pulls, pushes and copies of sums, while they hold the rank's ports."""
    for bucket, hops in enumerate(phase.pulls):
        for number, hop in enumerate(hops):
            yield from _ports(rank, "pull", f"pull {bucket}{_step(number)}{of}", hop, among_twins=number > 0)
    for bucket, hops in phase.pushes.items():
        for number, hop in enumerate(hops):
            among_twins = number < len(hops) - 1
            yield from _ports(rank, "push", f"push {bucket}{_step(number)}{of}", hop, among_twins=among_twins)
    for bucket, hop in phase.copies.items():
        yield from _ports(rank, "push", f"copy {bucket}{of}", hop, among_twins=False)


def _step(number: int) -> str:
    return f", step {number + 1}" if number else ""


def _ports(rank: int, kind: Kind, name: str, moved: Exchanged, *, among_twins: bool) -> Iterator[Span]:
    out: Stream = "twins out" if among_twins else "links out"
    into: Stream = "twins in" if among_twins else "links in"
    yield Span(rank, out, kind, name, float(moved.left_from[rank]), float(moved.left[rank]))
    yield Span(rank, into, kind, name, float(moved.came_from[rank]), float(moved.came[rank]))


_NORM_BYTES = 8  # of each rank's sum of squares, FP64


class Simulator:
    """Simulates steps of one job; what it learns of a strategy's transfers is kept for the next step."""

    def __init__(self, job: SimulatedJob):
        self.job = job
        self._step = StepCosts.of(job.found.step)
        self._loads: dict[ParallelScheme | PipelineShape, tuple[StageLoad, ...]] = {}
        self._strategies: dict[object, tuple[Strategy, StrategyTransfers]] = {}
        self._uses: dict[object, tuple[tuple[tuple[BucketUse, ...], ...], list[list[int]]]] = {}

    def step(self, plan: StepPlan) -> SimulatedStep:
        """One step. PlanError for a plan of other ranks, or of a shape that the table has no costs for."""
        job, clock = self.job, np.full(self.job.num_ranks, self._step.fixed_ms / 1e3)
        wires = Networks.of(job.num_ranks, job.links)
        phases = []
        for number, phase in enumerate(plan.phases):
            phases.append(self._phase(phase, clock, wires, last=number == len(plan.phases) - 1))
            clock = phases[-1].stop
        ranks = range(job.num_ranks)
        norm_stop = clock.max() + job.links.collective_s("all_gather", ranks, _NORM_BYTES * job.num_ranks)
        stop = norm_stop + job.update_s(self._step.update_ms_per_element * job.owned / 1e3)
        return SimulatedStep(tuple(phases), job.num_ranks, self._step.fixed_ms / 1e3, norm_stop, stop, job.memory)

    def step_ms(self, plan: StepPlan) -> float:
        """What one step takes, in ms. PlanError as `step`."""
        return 1e3 * self.step(plan).step_s

    def computing_s(self, plan: StepPlan) -> float:
        """The same until the gradient's norm is known, if pulls and pushes took no time. PlanError as `step`."""
        job, stop = self.job, self._step.fixed_ms / 1e3
        for phase in plan.phases:
            began = np.full(job.num_ranks, stop)
            arrived = np.full((len(job.plan.buckets), job.num_ranks), stop)
            placed = self._placed(phase).pipelines
            timings = [
                self._pipeline(planned, one, began, arrived, began)
                for planned, one in zip(phase.pipelines, placed, strict=True)
            ]
            stop = max(stage.stop for timing in timings for stage in timing)
        return stop + job.links.collective_s("all_gather", range(job.num_ranks), _NORM_BYTES * job.num_ranks)

    def _phase(self, phase: Phase, clock: Floats, wires: Networks, *, last: bool) -> PhaseTimes:
        strategy, transfers = self._strategy(phase)
        begin, clock = clock, clock + self.job.fetch_s
        pulls = pull_in_order(transfers, clock, wires, lanes=self.job.lanes)
        arrived = np.array([np.max([hop.came for hop in hops], axis=0) for hops in pulls])
        for enter, *gather in pulls if not self.job.lanes else ():
            # A rank computes nothing before it has begun all of its gathers, each when what it gathers has entered.
            for step in gather:
                arrived = np.maximum(arrived, np.where(step.came != enter.came, enter.came, 0.0))
        done = np.maximum(arrived, [np.max([hop.left for hop in hops], axis=0) for hops in pulls]).max(axis=0)
        timings = [
            self._pipeline(planned, placed, clock, arrived, done)
            for planned, placed in zip(phase.pipelines, strategy.pipelines, strict=True)
        ]
        stages = [stage for timing in timings for stage in timing]
        ready, computed = _push_ready(stages, transfers, done)
        copies = transfers.copies if last else {}
        pushes, copied = push_in_order(transfers, ready, computed, wires, lanes=self.job.lanes, copies=copies)
        stop = computed
        for hops in (*pushes.values(), *((hop,) for hop in copied.values())):
            stop = np.maximum(stop, _over(hops))
        return PhaseTimes(phase, tuple(map(tuple, timings)), begin, clock, done, stop, pulls, pushes, copied)

    def _strategy(self, phase: Phase) -> tuple[Strategy, StrategyTransfers]:
        job, key = self.job, phase.shape
        if key not in self._strategies:
            strategy = self._placed(phase)
            transfers = StrategyTransfers.of(job.plan, strategy, job.links, job.elements, shift=job.shift)
            self._strategies[key] = strategy, transfers
        return self._strategies[key]

    def _placed(self, phase: Phase) -> Strategy:
        strategy = self.job.placed(phase.shape)
        self.job.plan.check(strategy)
        return strategy

    def _pipeline(
        self, planned: PipelinePlan, placed: Pipeline, started: Floats, arrived: Floats, done: Floats
    ) -> tuple[StageTimes, ...]:
        stages = []
        for index, stage in enumerate(placed.stages):
            ranks = slice_of(stage.ranks)
            uses, rows = self._bucket_uses(stage)
            ready = tuple(tuple(arrived[_at(part, ranks)].max(axis=1).tolist()) for part in rows)
            start, pulled = float(started[ranks].max()), float(done[ranks].max())
            stages.append(StageTimes(stage, index, uses, start, ready, pulled))
        batches, table, shape = planned.microbatches, self.job.table, planned.shape
        more = [stretch(batch, table[shape], table.shares(shape)) / 1e3 for batch in batches]
        loads = [
            [
                pace * scale * cost.load_ms(batch.lengths, batch.starts)
                for scale, batch in zip(more, batches, strict=True)
            ]
            for cost, pace in zip(self._stage_loads(shape), planned.stage_paces, strict=True)
        ]
        known = schedule_batches(planned, table)
        beside = [ms / 1e3 for ms in planned.beside_ms]
        slots = [training_slots(planned.schedule, known, len(stages), index) for index in range(len(stages))]
        PipelineTiming(
            placed,
            slots,
            loads,
            stages,
            batches=known,
            links=self.job.links,
            token_bytes=[batch.num_tokens * self.job.hidden * self.job.element_bytes for batch in batches],
            token_sharding=self.job.plan.token_sharding,
            beside=beside,
        ).run()
        return tuple(stages)

    def _bucket_uses(self, stage: Stage) -> tuple[tuple[tuple[BucketUse, ...], ...], list[list[int]]]:
        """The buckets of each part of a stage, with and without their shares."""
        layers = stage.ranges
        if layers not in self._uses:
            uses = tuple(bucket_uses(self.job.plan, stage.part(part)) for part in range(len(layers)))
            self._uses[layers] = uses, [[use.bucket for use in part] for part in uses]
        return self._uses[layers]

    def _stage_loads(self, shape: PipelineShape) -> tuple[StageLoad, ...]:
        key = shape.cost_key
        if key not in self._loads:
            self._loads[key] = stage_loads(self.job.table[shape], self.job.plan.num_layers, self.job.found)
        return folded(self._loads[key], shape.parts)


class Networks(NamedTuple):
    """The ports of all ranks for pulls and pushes, which go over two communicators [Note: ports]."""

    links: Wires  # to and from the owners of masters
    teams: Wires  # among twins

    @classmethod
    def of(cls, num_ranks: int, links: LinkModel) -> Networks:
        """All of them free."""
        return cls(*Wires.pair(num_ranks, links))


def pull_in_order(
    transfers: StrategyTransfers, clock: Floats, wires: Networks, *, lanes: bool
) -> tuple[tuple[Exchanged, ...], ...]:
    """All steps of all buckets from `clock` (ranks,) on, each when the one before has come, in the order of
    [Note: order of pulls]."""
    pulls, done = transfers.pulls, list[list[Exchanged]]()
    for bucket, pull in enumerate(pulls):
        done.append([wires.links.exchange(pull[0], clock)])
        if lanes and bucket:
            _gather(pulls[bucket - 1], done[bucket - 1], wires)
    for pull, steps in zip(pulls, done, strict=True):  # what is left
        _gather(pull, steps, wires)
    return tuple(map(tuple, done))


def _gather(pull: Sequence[Parcels], steps: list[Exchanged], wires: Networks) -> None:
    """Add to the steps of a pull those that are left."""
    for parcels in pull[len(steps) :]:
        steps.append(wires.teams.exchange(parcels, steps[-1].came))


def push_in_order(
    transfers: StrategyTransfers,
    ready: Floats,
    computed: Floats,
    wires: Networks,
    *,
    lanes: bool,
    copies: Mapping[int, Parcels] = MappingProxyType({}),
) -> tuple[dict[int, tuple[Exchanged, ...]], dict[int, Exchanged]]:
    """The steps of each bucket's push, twins' trade before anything leaves; `ready` is (buckets, ranks), and at
    `computed` (ranks,) the slots are done. See [Note: order of pushes]. And, by bucket, what sends its sums on, where
    there are `copies`."""
    done: dict[int, tuple[Exchanged, ...]] = {}
    copied: dict[int, Exchanged] = {}
    ranks = np.arange(len(computed))
    over = np.zeros((len(transfers.turns) + 1, len(computed)))  # when the first 0, 1, 2 ... pushes are over
    lane = np.zeros(len(computed))  # when what was begun in it is done
    pushes = {bucket: _of_trained(transfers.pushes[bucket], wires) for bucket in transfers.order}
    begun: dict[int, Exchanged] = {}
    for bucket, turns in zip(transfers.order, transfers.turns, strict=True):
        if lanes or turns.any():
            break
        # On a host pushes with memory from the start begin in the backward, before any comes to its second step.
        (first, ports), *_ = pushes[bucket]
        begun[bucket] = ports.exchange(first, ready[bucket])
    for number, (bucket, turns) in enumerate(zip(transfers.order, transfers.turns, strict=True)):
        begin = np.maximum(ready[bucket], over[turns, ranks])
        begin = np.maximum(begin, lane if lanes else np.where(turns > 0, computed, 0.0))
        (first, ports), *more = pushes[bucket]
        found = [begun.get(bucket) or ports.exchange(first, begin)]
        lane = np.maximum(begin, found[0].came) if more else begin
        for parcels, ports in more:
            # What the first step brings may be there before the rank comes to the second, on a host when it has
            # computed, and the pushes before are over. On a device the next push stands behind this second step.
            second = lane if lanes else np.maximum(lane, np.maximum(computed, over[number]))
            found.append(ports.exchange(parcels, second))
        done[bucket] = tuple(found)
        over[number + 1] = np.maximum(over[number], _over(found))
        if copies and lanes and number:
            lane, before = np.maximum(lane, over[number]), transfers.order[number - 1]
            copied[before] = wires.links.exchange(copies[before], lane)
    for number, bucket in enumerate(transfers.order if copies else ()):
        if bucket not in copied:
            copied[bucket] = wires.links.exchange(copies[bucket], np.maximum(computed, over[number + 1]))
    return done, copied


def _of_trained(hops: Sequence[Parcels] | None, wires: Networks) -> list[tuple[Parcels, Wires]]:
    """The steps of a push, each with the ports that it goes through."""
    assert hops is not None, "it is trained"
    return list(zip(hops, [wires.teams, wires.links][-len(hops) :], strict=True))


def _at(rows: list[int], ranks: slice | list[int]) -> Any:
    """The index of these rows of an array, and in them of these ranks."""
    return (rows, ranks) if isinstance(ranks, slice) else np.ix_(rows, ranks)


def _over(hops: Sequence[Exchanged]) -> Floats:
    """When all steps have come and left, by rank."""
    return np.max([np.maximum(hop.came, hop.left) for hop in hops], axis=0)


def _push_ready(stages: list[StageTimes], transfers: StrategyTransfers, done: Floats) -> tuple[Floats, Floats]:
    """When each rank has the gradients of each bucket's push and of those before it, (buckets, ranks); and when it is
    done with computing and its pulls, (ranks,)."""
    ready, computed = np.zeros((len(transfers.pushes), len(done))), done.copy()
    order = list(transfers.order)
    for times in stages:
        ranks = slice_of(times.stage.ranks)
        computed[ranks] = np.maximum(done[ranks], times.stop)
        if times.armed is None:
            ready[:, ranks] = computed[ranks]
            continue
        own = np.full(len(ready), times.armed)
        own[list(times.gradients)] = list(times.gradients.values())
        ready[_at(order, ranks)] = np.maximum.accumulate(own[order])[:, None]
    return ready, computed


_NO_TIME = Speed(0.0, 1e18)
_EACH_STAGE = 2  # micro-batches of a made-up pipeline of several stages, at least
_FIRST = 0.4  # of the largest micro-batch: the first; half of them are smaller than it
_SHORT = 1024  # tokens of a sequence, about


def exposed_ms(job: SimulatedJob, strategy: StrategyShape, tokens_per_step: int) -> float:
    """What pulls, pushes and messages between stages add to a step of so many tokens, in ms: the simulated step less
    the same with links that take no time. PlanError for a pipeline without costs.

    With transfers of 300 ms of which computing hides 240, it is 60. A strategy of fewer ranks than the job's has its
    share of the tokens.
    """
    plan = _made_up(strategy, job.table, tokens_per_step * strategy.num_ranks / job.num_ranks)
    job = replace(job, num_ranks=strategy.num_ranks)
    links = LinkModel(job.links.node_size, _NO_TIME, _NO_TIME)
    taken, computing = Simulator(job).step(plan).norm_s, Simulator(replace(job, links=links)).computing_s(plan)
    return 1e3 * (taken - computing)


def _made_up(strategy: StrategyShape, table: CostTable, tokens: float) -> StepPlan:
    """A step of short sequences, with as many tokens for a pipeline as it is fast."""
    rates = [1.0 / (cost.b or cost.a) for cost in (table[shape] for shape in strategy.pipelines)]
    lengths: list[int] = []
    pipelines = []
    for shape, rate in zip(strategy.pipelines, rates, strict=True):
        batches = []
        for size in _sizes(shape.pp, tokens * rate / sum(rates), table[shape].max_length):
            spread = max(1, round(size / _SHORT))
            positions = range(len(lengths), len(lengths) + spread)
            lengths += [max(1, round(size / spread))] * spread
            batches.append(MicroBatchPlan.of_whole(positions, lengths))
        pipelines.append(PipelinePlan(shape, tuple(batches), 0.0))
    return StepPlan(0, tuple(range(len(lengths))), tuple(lengths), (Phase(tuple(pipelines)),), 0.0)


def _sizes(num_stages: int, tokens: float, max_length: int) -> list[float]:
    """Tokens of the micro-batches of a pipeline. One stage has as few as hold them. More stages begin with small ones,
    as the planner's orders do, so that the last stage begins soon; there is little to hide its pulls behind."""
    fewest = max(1, math.ceil(tokens / max_length))
    if num_stages == 1:
        return [tokens / fewest] * fewest
    count = max(_EACH_STAGE * num_stages, fewest)
    shares = [min(1.0, _FIRST + (1.0 - _FIRST) * index / (count / 2)) for index in range(count)]
    return [tokens * share / sum(shares) for share in shares]
