"""Laps: seconds by kind, waits within work counted once, and what a device does charged to who has started it."""

from __future__ import annotations

import pytest

from ds_hydra.zero_hetero.clock import Clock, HostClock, Stopwatch
from tests.support.fake_device import FakeDevice, FakeDeviceClock


def two_laps(clock: Clock, device: FakeDevice) -> Stopwatch:
    """A forward of 40 s and a backward of 80 s that waits in its middle until a message comes at 100 s."""
    watch = Stopwatch(clock)
    with watch.lap("run"):
        with watch.lap("forward", stage=1, microbatch=7):
            device.launch(40.0)
        with watch.lap("backward", stage=1, microbatch=7):
            device.launch(30.0)
            with watch.lap("pull"):
                device.stand_still_until(100.0)
            device.launch(50.0)
    return watch


def test_work_is_charged_to_the_lap_that_started_it() -> None:
    device = FakeDevice()
    laps = two_laps(FakeDeviceClock(device), device).take()
    device.wait()
    spent = laps.spent()
    assert spent["forward"] == pytest.approx((40.0, 40.0), abs=1e-3)
    assert spent["pull"] == pytest.approx((30.0, 30.0), abs=1e-3)
    assert spent["backward"] == pytest.approx((110.0, 80.0), abs=1e-3)
    assert spent["run"] == pytest.approx((150.0, 0.0), abs=1e-3)


def test_the_hosts_clock_would_see_launches() -> None:
    device = FakeDevice()
    laps = two_laps(HostClock(lambda: device.host_s), device).take()
    device.wait()
    assert sum(seconds.own_s for seconds in laps.spent().values()) < 1e-3


def test_laps_are_named_and_in_the_order_of_their_begins() -> None:
    device = FakeDevice()
    laps = two_laps(HostClock(lambda: device.host_s), device).take().laps
    assert [(lap.kind, lap.stage, lap.microbatch) for lap in laps] == [
        ("run", None, None), ("forward", 1, 7), ("backward", 1, 7), ("pull", None, None)
    ]  # fmt: skip
    assert [lap.inside and lap.inside.kind for lap in laps] == [None, "run", "run", "backward"]


def test_nothing_is_read_before_the_device_has_passed_it() -> None:
    device = FakeDevice()
    laps = two_laps(FakeDeviceClock(device), device).take()
    with pytest.raises(RuntimeError, match="the device comes to"):
        laps.spent()


def test_laps_are_taken_once() -> None:
    device = FakeDevice()
    watch = two_laps(HostClock(lambda: device.host_s), device)
    assert len(watch.take().laps) == 4
    assert not watch.take().spent()


def test_an_error_ends_its_laps() -> None:
    watch = Stopwatch(HostClock())
    with pytest.raises(ZeroDivisionError), watch.lap("run"), watch.lap("forward"):
        _ = 1 / 0
    assert [lap.end is None for lap in watch.take().laps] == [False, False]


def test_without_a_clock_nothing_is_kept() -> None:
    device = FakeDevice()
    watch = Stopwatch(None)
    with watch.lap("run"):
        device.launch(1.0)
    assert not watch.take().laps
