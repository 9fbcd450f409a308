"""A training run whose planning process is killed, frozen or talks nonsense goes on, and says so."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.small_job import small_engine

NONSENSE = (sys.executable, "-c", "import sys; print('nonsense', flush=True); sys.stdin.read()")


def job(rank: int, fault: str) -> tuple[list[float], list[str | None]]:
    """Losses and fallback reasons of eight steps; rank 0's planning process is hurt after the third."""
    engine: Any = small_engine(rank, planner={"ahead": 2})
    losses: list[float] = []
    reasons: list[str | None] = []
    for step in range(8):
        losses.append(float(engine.train_batch()))
        reasons.append(engine.last_step.planning_fallback)
        service = engine.crew.plans._service
        if step == 2 and service is not None:
            service._patience = 1.0
            if fault == "garbage":
                service._command = NONSENSE
            os.kill(service.producer_pid, signal.SIGSTOP if fault == "frozen" else signal.SIGKILL)
    engine.destroy()
    return losses, reasons


@pytest.fixture(scope="module")
def calm() -> list[float]:
    """Losses of the same steps, planned in the training process."""
    losses: list[float] = run_ranks(job_without_fault, 2, timeout=120)[0]
    return losses


@pytest.mark.parametrize("fault", ["died", "frozen", "garbage"])
def test_training_goes_on(fault: str, calm: list[float]) -> None:
    results = run_ranks(job, 2, fault, timeout=120)
    for losses, reasons in results:
        assert losses == pytest.approx(calm, rel=1e-5)  # whatever plans them, the steps are the same
        assert fault in reasons
    assert results[0] == results[1]


def job_without_fault(rank: int) -> list[float]:
    engine: Any = small_engine(rank, planner={"ahead": 0})
    losses = [float(engine.train_batch()) for _ in range(8)]
    engine.destroy()
    return losses
