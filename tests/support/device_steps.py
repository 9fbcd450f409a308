"""A stage, and a whole engine, on a device with a queue: what was started, and what was measured of it."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.pipe.runtime import StageRuntime
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import training_slots
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.ranks import world
from ds_hydra.ranks.rank_stats import RankStats
from ds_hydra.report.record import StepRecord
from ds_hydra.step.outcome import StepOutcome
from ds_hydra.watchdog import Activity
from ds_hydra.zero_hetero.clock import Clock, HostClock, Laps, Stopwatch
from tests.support.fake_device import FakeDevice, FakeDeviceClock, Queued
from tests.support.small_job import small_engine

EACH_S = 1e-3  # of the device, for each operation
EXPECTED_STAGE_S = {"forward": 6.0, "receive": 24.0 + 25.0, "backward": 10.0, "send": 0.0}
"""3 3 | until 30 | 5 | until 60 | 5: own seconds of `stage_times`."""


class _Layer(torch.autograd.Function):
    """3 s forward, 5 s backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, device: FakeDevice) -> Tensor:
        ctx.device = device
        device.launch(3.0)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.device.launch(5.0)
        return gradients[0], None


class FirstStage:
    """The first of two stages: a parameter that stands for the hidden states of two tokens."""

    weight_gradients = None  # none is put off

    class place:
        is_last = turns = False
        token_sharding, shards = False, 1

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.weight = device, torch.ones(1, 2, 4, requires_grad=True)

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        return _Layer.apply(self.weight, self.device)

    def take_router_loss(self) -> None:
        """It has no routers."""

    def take_imbalances(self) -> tuple[float, ...]:
        """Nor experts."""
        return ()


class SlowNeighbour:
    """Gradients come at 30 and 60 s; sends are gone at once."""

    serial = False

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.arrivals = device, iter((30.0, 60.0))

    def exchange(self, sends: Any, recvs: Any, tag: int = 0) -> Any:
        for _, buffer in recvs:
            buffer.fill_(1.0)
        arrival = next(self.arrivals) if recvs else 0.0
        return mock.Mock(wait=lambda: self.device.stand_still_until(arrival))


def stage_times(clock: Clock, device: FakeDevice) -> dict[str, float]:
    """Own seconds by kind of a first stage that runs two micro-batches."""
    watch = Stopwatch(clock)
    pipeline = place_pipeline(PipelineShape.of(ParallelScheme(pp=2)), 0, 2)
    stage: Any = FirstStage(device)
    runtime = StageRuntime(
        [stage], pipeline, 0, SlowNeighbour(device), [(4, 4)], torch.device("cpu"), torch.float32,
        activity=Activity(), watch=watch,
    )  # fmt: skip
    batches = [MicroBatch(Pack((2,), 0, 1, None), torch.zeros(1, 2), torch.zeros(1, 2), None, None)] * 2
    runtime.run(training_slots("1f1b", Batches.whole(2), 2, 0), batches)
    laps = watch.take()
    device.wait()
    return {kind: seconds.own_s for kind, seconds in laps.spent().items()}


class Step(NamedTuple):
    """One step of an engine on a device with a queue; seconds."""

    launched: dict[str, float]  # work, by the activity in which it was started
    stats: RankStats  # what was measured
    record: StepRecord
    laps: list[tuple[str, float, float]]  # kind, begin and end, in seconds after the first begin


def engine_steps(rank: int, by_host: bool) -> list[Step]:
    """Two steps of a whole engine whose torch operations all run on a device with a queue."""
    device = FakeDevice()
    clock: Clock = HostClock(lambda: device.host_s) if by_host else FakeDeviceClock(device)
    with mock.patch.object(world, "clock_of", return_value=clock):
        engine = small_engine(rank, strategies=["tp1"])
    run = engine.crew.stepper.run
    outcomes: list[StepOutcome] = []

    def kept(*args: Any, **options: Any) -> StepOutcome:
        outcomes.append(run(*args, **options))
        return outcomes[-1]

    engine.crew.stepper.run = kept
    steps: list[Step] = []
    dated: list[tuple[str, float, float]] = []

    def keep(step: int, laps: Laps) -> None:
        origin = laps.laps[0].begin
        dated[:] = [(lap.kind, clock.seconds(origin, lap.begin), clock.seconds(origin, lap.end)) for lap in laps.laps]

    engine.crew.stepper.keep_laps = keep
    for _ in range(2):
        with Queued(device, EACH_S, lambda: engine.crew.activity.now) as queue:
            engine.train_batch()
        steps.append(Step(dict(queue.launched), next(outcomes[-1].stats), engine.last_step, list(dated)))
    engine.destroy()
    return steps
