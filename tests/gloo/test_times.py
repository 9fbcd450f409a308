"""Times of a step on a device with a queue: work is charged to who started it, in a stage and in a whole engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from ds_hydra.step.strategy_runtime import PeakMemory
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.clock import HostClock
from tests.support.device_steps import (
    EACH_S,
    EXPECTED_STAGE_S,
    FakeDevice,
    FakeDeviceClock,
    Step,
    engine_steps,
    stage_times,
)
from tests.support.small_job import small_engine


def test_a_stage_is_charged_its_kernels_and_its_waits() -> None:
    device = FakeDevice()
    assert stage_times(FakeDeviceClock(device), device) == pytest.approx(EXPECTED_STAGE_S, abs=1e-3)


def test_a_stage_by_the_hosts_clock_has_done_nothing() -> None:
    device = FakeDevice()
    assert sum(stage_times(HostClock(lambda: device.host_s), device).values()) < 1e-3


def test_an_engines_work_is_charged_to_what_started_it() -> None:
    steps: list[Step] = run_ranks(engine_steps, 1, False)[0]
    for launched, stats, record, _ in steps:
        computing = launched["forward"] + launched["backward"]
        assert computing > 100 * EACH_S
        assert stats.compute_s == pytest.approx(computing, rel=0.01)
        assert stats.run_s == pytest.approx(computing, rel=0.05)
        assert stats.exposed_pull_s < 1.01 * launched["pull"]
        assert record.pipeline_ms == (1e3 * stats.run_s,)
    # The norm of a step, and the update of the step before: of the first step there is the norm only.
    first, second = steps
    assert 0 < first.record.optimizer_ms < second.record.optimizer_ms
    assert second.record.optimizer_ms == pytest.approx(1e3 * first.launched["optimizer"], rel=0.01)


def test_laps_of_a_step_can_be_kept() -> None:
    for step in run_ranks(engine_steps, 1, False)[0]:
        kinds = [kind for kind, _, _ in step.laps]
        batches = step.record.num_micro_batches[0]
        assert kinds.count("forward") == kinds.count("backward") == batches
        assert kinds.index("pull") < kinds.index("run") < kinds.index("forward")
        (run,) = ((begin, end) for kind, begin, end in step.laps if kind == "run")
        computing = [lap for lap in step.laps if lap[0] in ("forward", "backward")]
        assert all(run[0] <= begin < end <= run[1] for _, begin, end in computing)
        assert all(one[2] <= other[1] for one, other in pairwise(computing))


def test_an_engine_by_the_hosts_clock_has_done_nothing() -> None:
    for launched, stats, *_ in run_ranks(engine_steps, 1, True)[0]:
        assert stats.compute_s < 0.01 * (launched["forward"] + launched["backward"])


class FakePeak:
    """A peak that somebody else sets."""

    def __init__(self) -> None:
        self.bytes = 0

    def restart(self) -> None:
        self.bytes = 0

    def read(self) -> int:
        return self.bytes


def peaks(rank: int) -> list[int]:
    """What the records of three steps say, of which the second needs most."""
    engine = small_engine(rank, strategies=["tp1"])
    peak = engine.crew.stepper._peak = FakePeak()
    found: list[int] = []
    for needed in (300, 500, 200):

        def need(*_: Any, needed: int = needed) -> None:
            peak.bytes = max(peak.bytes, needed)

        engine.crew.update.compare = need  # called in each step
        engine.train_batch()
        found.append(engine.last_step.peak_memory_bytes)
    engine.destroy()
    return found


def test_peak_memory_is_of_one_step() -> None:
    assert run_ranks(peaks, 1)[0] == [300, 500, 200]


def test_the_peak_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cuda", 1), list[torch.device]()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda of: 7 if of == device else 0)
    peak = PeakMemory(device)
    peak.restart()
    assert (asked, peak.read()) == ([device], 7)
    assert PeakMemory(torch.device("cpu")).read() == 0
