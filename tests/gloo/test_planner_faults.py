"""A training run whose planning process is killed, frozen or talks nonsense goes on with the same plans."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any
from unittest import mock

import pytest

from ds_hydra.ranks.telling import Telling
from ds_hydra.testing import run_ranks
from tests.support.small_job import small_engine

NONSENSE = (sys.executable, "-c", "import sys; print('nonsense', flush=True); sys.stdin.read()")
Found = tuple[list[float], list[str], list[str]]


def job(rank: int, fault: str) -> Found:
    """Losses, plans and who made them, of eight steps; rank 0's planning process is hurt after the third."""
    ahead = 0 if fault == "in process" else 2
    engine: Any = small_engine(rank, planner={"ahead": ahead}, faults={"frozen_seconds": 2.0})
    losses: list[float] = []
    plans: list[str] = []
    makers: list[str] = []
    for step in range(8):
        losses.append(float(engine.train_batch()))
        plans.append(engine.last_step.plan_digest)
        makers.append(engine.last_step.planning_by)
        service = getattr(engine.pre_step_callback, "service", None)
        if step == 2 and service is not None and service.producer_pid is not None and fault != "none":
            if fault == "garbage":
                service._command = NONSENSE
            os.kill(service.producer_pid, signal.SIGSTOP if fault == "frozen" else signal.SIGKILL)
    engine.destroy()
    return losses, plans, makers


@pytest.fixture(scope="module")
def calm() -> Found:
    """The same steps without a fault."""
    found: Found = run_ranks(job, 2, "none", timeout=120)[0]
    assert set(found[2]) == {"producer"}
    return found


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("fault", "maker"),
    [("died", "restarted"), ("frozen", "restarted"), ("garbage", "here"), ("in process", "here")],
)
def test_training_is_the_same_to_the_bit(fault: str, maker: str, calm: Found) -> None:
    results = run_ranks(job, 2, fault, timeout=120)
    for losses, plans, makers in results:
        assert (losses, plans) == calm[:2]
        assert maker in makers
    assert results[0] == results[1]


def slow(rank: int) -> tuple[list[str], list[str], int]:
    """Who made the plans of four steps; what a rank was doing while the third one's was late, and how often it was told
    that there is no plan yet: four times in what a collective may wait."""
    faults = {"frozen_seconds": 60.0}
    engine: Any = small_engine(rank, planner={"ahead": 1}, faults=faults, timeout_seconds=4.0)
    makers, doing = [], []
    heard: list[str] = []
    tell = Telling.tell

    def listened(telling: Telling, text: str | None) -> str:
        heard.append(tell(telling, text))
        return heard[-1]

    with mock.patch.object(Telling, "tell", listened):
        for step in range(4):
            service = getattr(engine.pre_step_callback, "service", None)
            if step == 2:
                if service is not None:
                    os.kill(service.producer_pid, signal.SIGSTOP)
                    threading.Timer(5.0, os.kill, (service.producer_pid, signal.SIGCONT)).start()
                threading.Timer(4.0, lambda: doing.append(engine.crew.activity.now)).start()
            engine.train_batch()
            makers.append(engine.last_step.planning_by)
    engine.destroy()
    return makers, doing, heard.count("waiting\n")


def test_ranks_wait_for_a_plan_for_longer_than_for_a_message() -> None:
    first, second = run_ranks(slow, 2, timeout=120)
    assert first == second
    makers, doing, waits = first
    assert makers == ["producer"] * 4
    assert doing[0].startswith("waiting for plan")
    assert waits >= 3
