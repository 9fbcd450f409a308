"""Clocks that tell how long work took where it was done, and a stopwatch that times a rank's activities by one.

[Note: time on a device]
A GPU works through a queue. The host puts kernels into it and goes on at once, so the host's clock tells how long the
putting took. Example: the kernels of a forward take 40 ms and are launched in 2, those of a backward take 80 ms and are
launched in 4; then the host waits for the gradient's norm. The host's clock would say 2 ms, 4 ms, and 114 ms for the
norm. A device's moment is therefore an event: a mark in the queue, which the device dates when it comes to it. The
marks around the forward are 40 ms apart. A wait for a message is a time in which the queue stands still, and is dated
in the same way.

An event can be read only after the device has passed it. So nothing is read while a step runs: its laps are kept, and
read after the one moment of a step at which the host waits for the device anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch

Moment = Any
"""What a clock's `now` returns; only the clock itself can tell what is in it."""


class Clock(Protocol):
    """Dates the work of one rank; the seam where tests and emulations let time pass as they like."""

    def now(self) -> Moment:
        """The moment at which all work that was started so far is done, and the next begins."""

    def seconds(self, begin: Moment, end: Moment) -> float:
        """Seconds from one moment to a later one; the device must have come to both."""

    def wait(self) -> None:
        """Hold up the host until the device has come to this moment."""


@dataclass(frozen=True)
class HostClock:
    """For work that is done when the call returns, as on a CPU; `read` returns seconds."""

    read: Callable[[], float] = time.perf_counter

    def now(self) -> float:
        return self.read()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self) -> None:
        """Work is done already."""


@dataclass(frozen=True)
class DeviceClock:
    """For a CUDA device: events on the stream that is current when they are made."""

    device: torch.device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


def clock_of(device: torch.device) -> Clock:
    """The clock that dates the work of a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


Computing = Literal["forward", "backward", "input_gradient", "weight_gradient"]
COMPUTING: tuple[Computing, ...] = get_args(Computing)
Kind = Literal[Computing, "run", "receive", "send", "pull", "push", "optimizer"]
"""What a lap may be: computing, a stage's whole schedule, or what holds it up. Waits count as far as they are exposed:
a message that travels while its rank computes has no lap."""


@dataclass(eq=False, slots=True)
class Lap:
    """One activity of a rank from its begin to its end; laps within a lap are those that began and ended in it."""

    kind: Kind
    stage: int | None  # of the rank's pipeline
    microbatch: int | None
    begin: Moment
    inside: Lap | None  # the innermost lap around this one
    end: Moment = None
    part: int = 0  # of a stage that holds two ranges of layers


class Spent(NamedTuple):
    """Seconds of all laps of one kind."""

    whole_s: float  # from begin to end
    own_s: float  # without the laps within them


class Laps(NamedTuple):
    """Laps in the order in which they began. The device must have passed them before they are read."""

    clock: Clock
    laps: Sequence[Lap]

    def spent(self) -> dict[Kind, Spent]:
        """Seconds by kind; a kind that did not occur is missing.

        A forward of 5 s that waits for a pull for 2 s in its middle: 5 and 3 s of "forward", 2 and 2 s of "pull".
        """
        whole: dict[Kind, float] = {}
        within: dict[Kind, float] = {}
        for lap in self.laps:
            seconds = self.clock.seconds(lap.begin, lap.end)
            whole[lap.kind] = whole.get(lap.kind, 0.0) + seconds
            if lap.inside is not None:
                within[lap.inside.kind] = within.get(lap.inside.kind, 0.0) + seconds
        return {kind: Spent(seconds, seconds - within.get(kind, 0.0)) for kind, seconds in whole.items()}


class Stopwatch:
    """Times what a rank does, lap by lap, until the laps are taken. Without a clock it times nothing."""

    def __init__(self, clock: Clock | None) -> None:
        self.clock = clock
        self._laps: list[Lap] = []
        self._open: Lap | None = None

    @contextmanager
    def lap(
        self, kind: Kind, *, stage: int | None = None, microbatch: int | None = None, part: int = 0
    ) -> Iterator[None]:
        """Time the block as one lap."""
        if self.clock is None:
            yield
            return
        around = self._open
        self._open = lap = Lap(kind, stage, microbatch, self.clock.now(), around, part=part)
        self._laps.append(lap)
        try:
            yield
        finally:
            lap.end = self.clock.now()
            self._open = around

    def take(self) -> Laps:
        """The laps since they were last taken; they may still be on their way through the device."""
        assert self._open is None, "laps are taken between two activities"
        laps, self._laps = self._laps, []
        return Laps(self.clock or HostClock(), laps)
