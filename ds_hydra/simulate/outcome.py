"""The times of a simulated step in, its figures out: bubbles, gap, exposed waits, memory. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_hydra.costs.memory import JobMemory
from ds_hydra.plan.phase import Phase, PipelinePlan
from ds_hydra.simulate.memory import memory_over_time
from ds_hydra.simulate.pipeline import StageTimes
from ds_hydra.simulate.wires import Exchanged, Floats


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
