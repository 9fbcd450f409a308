"""Correction factors in a real training run: reported by default, and applied to the plans if the config says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_hydra.report import calibration
from ds_hydra.testing import run_ranks
from tests.support.small_job import small_engine


def job(rank: int, mode: str, ahead: int) -> tuple[list[float], list[dict[str, Any]], list[str], float]:
    """Losses, corrections and recipes of each step, and the largest factor by which the costs of plans have grown."""
    calibration.APPLY_EVERY = 8
    engine: Any = small_engine(rank, cost_correction=mode, planner={"ahead": ahead}, strategies=["2*tp1", "tp2"])
    losses, corrections, recipes = [], [], []
    before = engine.crew.plans.table
    for _ in range(20):
        losses.append(float(engine.train_batch()))
        corrections.append(dict(engine.last_step.corrections))
        assert engine.last_step.planning_by == ("producer" if ahead else "here")  # new costs need no new process
        recipes.append(engine.last_step.planning_recipe)
    scale = max(engine.crew.plans.table[cost.scheme].b / cost.b for cost in before.costs)
    engine.destroy()
    return losses, corrections, recipes, scale


@pytest.fixture(scope="module")
def reported() -> list[float]:
    """Losses of a run that leaves the costs of its plans as they were."""
    losses, _, _, scale = run_ranks(job, 2, "report", 0, timeout=120)[0]
    assert scale == 1.0
    return losses


@pytest.mark.drawn
@pytest.mark.parametrize("ahead", [0, 2])
def test_applied_corrections_change_the_plans_costs_and_not_the_training(ahead: int, reported: list[float]) -> None:
    applied = run_ranks(job, 2, "apply", ahead, timeout=120)
    for losses, corrections, recipes, scale in applied:
        assert losses == pytest.approx(reported, rel=1e-5)
        assert set(corrections[-1]) == {"tp1", "tp2"}  # both kinds of pipelines were seen often enough
        assert scale > 1.03  # the estimated table takes CPU ranks for faster than they are
        # A correction holds from the step after the next on, whether that was planned ahead or not.
        assert [len(set(part)) for part in (recipes[:9], recipes[9:17], recipes[17:])] == [1, 1, 1]
        assert recipes[8] != recipes[9]
    assert applied[0][3] == applied[1][3]


def corrected(
    rank: int, folder: Path, loaded: int | None, stops: tuple[int, ...], steps: int, ahead: int
) -> tuple[list[str], list[str]]:
    """Plans and their recipes, of all steps or of those from a checkpoint of the folder on."""
    calibration.APPLY_EVERY, calibration.APPLY_CHANGE = 4, 0.0
    engine: Any = small_engine(
        rank, cost_correction="apply", planner={"ahead": ahead}, strategies=["2*tp1", "tp2", "pp2"],
        checkpoint={"dir": str(folder), "keep_last": None, "resume": False},
    )  # fmt: skip
    if loaded is not None:
        engine.load_checkpoint(folder, tag=f"step{loaded}")
    plans, recipes = [], []
    while engine.global_steps < steps:
        engine.train_batch()
        plans.append(engine.last_step.plan_digest)
        recipes.append(engine.last_step.planning_recipe)
        if engine.global_steps in stops:
            engine.save_checkpoint(folder, tag=f"step{engine.global_steps}")
    engine.destroy()
    return plans, recipes


@pytest.mark.drawn
def test_a_restart_plans_by_the_corrections_that_the_job_had(tmp_path: Path) -> None:
    """After the step that a correction is found in, the one that it holds from, and the next."""
    stops = (4, 5, 6)
    plans, recipes = run_ranks(corrected, 2, tmp_path, None, stops, 9, 2, timeout=120)[0]
    assert recipes == [recipes[0]] * 5 + [recipes[5]] * 4
    assert recipes[4] != recipes[5]
    again = run_ranks(lambda rank: [corrected(rank, tmp_path, stop, (), 9, 0) for stop in stops], 2, timeout=120)[0]
    assert again == [(plans[stop:], recipes[stop:]) for stop in stops]
