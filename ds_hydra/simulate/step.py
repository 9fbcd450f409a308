"""A step's plan, a cost table and links in; what every rank does and when, out: the simulation of one step. Pure.

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
  optimizer   over the rank's own masters

A stage computes for as long as its costs say. Collectives of its tensor and sequence parallel ranks are in them, as far
as it waits for them [Note: how an entry is made].

What is not exact: the ranks of a stage are taken as one, since their collectives keep them in step: it begins a layer
when the last of them has it, and its messages take what the busiest of them sends. Layers take equal shares of a
stage's time, embeddings and head none of it. Pulls and pushes do not slow down messages between stages, nor computing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.pipe.placement import Pipeline, Stage, Strategy
from ds_hydra.pipe.schedules.registry import training_slots
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.plan.phase import Phase, PipelinePlan
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.works import schedule_batches, stretch
from ds_hydra.report.calibration import StageLoad, StepCosts, folded, stage_loads
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.outcome import PhaseTimes, SimulatedStep, slice_of
from ds_hydra.simulate.pipeline import PipelineTiming, StageTimes
from ds_hydra.simulate.transfers import BucketUse, StrategyTransfers, bucket_uses
from ds_hydra.simulate.wires import Exchanged, Floats, Parcels, Wires

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
        owned = sum(b.numel for b in job.plan.buckets if b.trainable) / job.num_ranks
        stop = norm_stop + self._step.update_ms_per_element * owned / 1e3
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
        return PhaseTimes(phase, tuple(map(tuple, timings)), clock, clock, done, stop, pulls, pushes, copied)

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
