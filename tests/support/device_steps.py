"""A device with a queue, without one; and stages and engines whose work on it is measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
from ds_hydra.zero_hetero.clock import Clock, Laps, Stopwatch
from tests.support.small_job import small_engine

# --- A device with a queue, without one: work that a host starts takes the device's time, and none of the
# host's. Values are computed at once on the CPU; only time is made up. So a whole engine can run on it.
LAUNCH_S = 1e-6  # of the host, for each operation
_READS = (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.cpu, Tensor.numpy)


class FakeDevice:
    """Two lines of time, in seconds: the host's, and the device's, which works through what the host has started."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.free_s = 0.0  # when the device will have done all that was started

    def launch(self, seconds: float) -> None:
        """The host starts work and goes on."""
        self.host_s += LAUNCH_S
        self.free_s = max(self.free_s, self.host_s) + seconds

    def stand_still_until(self, moment: float) -> None:
        """The host makes the queue wait for something that is there at `moment`, and goes on."""
        self.free_s = max(self.free_s, moment)

    def wait(self) -> None:
        """The host waits until the device has done everything."""
        self.host_s = max(self.host_s, self.free_s)


class FakeDeviceClock:
    """What a clock by events is for a real device. A moment that the host has not waited for cannot be read."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def now(self) -> float:
        return max(self.device.free_s, self.device.host_s)

    def seconds(self, begin: float, end: float) -> float:
        if end > self.device.host_s:
            raise RuntimeError(f"the device comes to {end:.6f} s; the host has waited until {self.device.host_s:.6f} s")
        return end - begin

    def wait(self) -> None:
        self.device.wait()


class Queued:
    """Within it every torch operation of this thread is work for the device, and reading a value waits for it.

    `launched` are the seconds of work by what `doing` returned when it was started.
    """

    def __init__(self, device: FakeDevice, each_s: float, doing: Callable[[], str]) -> None:
        self.device, self.each_s, self.doing = device, each_s, doing
        self.launched: dict[str, float] = defaultdict(float)
        self.waits = 0
        self._modes = (_Reads(self), _Launches(self))

    def launch(self) -> None:
        self.launched[self.doing()] += self.each_s
        self.device.launch(self.each_s)

    def __enter__(self) -> Queued:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Launches(TorchDispatchMode):
    def __init__(self, queued: Queued) -> None:
        super().__init__()
        self.queued = queued

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.queued.launch()
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    def __init__(self, queued: Queued) -> None:
        super().__init__()
        self.queued = queued

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _READS:
            self.queued.waits += 1
            self.queued.device.wait()
        return result


# --- A stage, and a whole engine, on a device with a queue: what was started, and what was measured of it.
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


def engine_steps(rank: int) -> list[Step]:
    """Two steps of a whole engine whose torch operations all run on a device with a queue."""
    device = FakeDevice()
    clock = FakeDeviceClock(device)
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
