"""A strategy that HiGHS composes for a step: connected at its first use, a candidate later on, kept by checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.engine import plans, prepare
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.planner import Planner, PlannerOptions, StepPlan
from ds_hydra.planner.composing import COMPOSED
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.small_job import same, small_engine, whole_state

POOL = tuple(map(StrategyShape.parse, ("2*tp2", "4*tp1")))
MIX = "tp2 + 2*tp1"  # where one sequence is too long for tp1, and all others are best off there
STEPS, STOP, JOINS_AFTER = 8, 3, 4


@pytest.fixture
def cost_table(tmp_path: Path) -> str:
    costs = (
        SchemeCost(ParallelScheme(1), 0.0, 1.0, 0.0, max_length=95, util_length=1),
        SchemeCost(ParallelScheme(2), 0.0, 0.7, 0.0, max_length=250, util_length=1),
    )
    TableFile(CostTable(costs)).save(tmp_path / "costs.json")
    return str(tmp_path / "costs.json")


def engine_of(rank: int, cost_table: str, **hydra: Any) -> Any:
    with mock.patch.object(prepare, "propose_strategies", return_value=POOL):
        return small_engine(rank, strategies="auto", choose="best", tokens_per_step=400, cost_table=cost_table, **hydra)


def trained(engine: Any, steps: int) -> list[tuple[str, str, bool]]:
    """Of each step its strategy, its plan, and whether the strategy was no candidate."""
    found = []
    for _ in range(steps):
        engine.train_batch()
        record = engine.last_step
        assert record.highs is not None
        assert record.highs.programs >= 1
        assert record.highs.new_strategy == (json.loads(record.plan)["source"] == COMPOSED)
        found.append((record.strategy, record.plan, record.highs.new_strategy))
    return found


def survives(rank: int, cost_table: str, folder: Path) -> list[str]:
    """Train without a stop, then with one: what differs."""
    with mock.patch.object(plans, "JOINS_AFTER", JOINS_AFTER):
        engine = engine_of(rank, cost_table)
        whole = trained(engine, STEPS)
        state = whole_state(engine)
        engine = engine_of(rank, cost_table)
        parts = trained(engine, STOP)
        engine.save_checkpoint(folder)
        candidates = engine.crew.plans.joined
        engine = engine_of(rank, cost_table)
        engine.load_checkpoint(folder)
        differing = [] if engine.crew.plans.joined == candidates else ["candidates"]
        parts += trained(engine, STEPS - STOP)
        differing += [] if same(whole_state(engine), state) else ["masters"]
    differing += [f"step {step}" for step in range(STEPS) if parts[step] != whole[step]]
    first = next((step for step, (strategy, _, new) in enumerate(whole) if strategy == MIX and new), STEPS)
    if first >= STOP or candidates != ((first + JOINS_AFTER, StrategyShape.parse(MIX)),):
        differing.append(f"composed at {first}: {candidates}")
    later = [new for strategy, _, new in whole[first + JOINS_AFTER :] if strategy == MIX]
    if not later or any(later):
        differing.append("it did not join")
    return differing


@pytest.mark.drawn
def test_a_composed_strategy_survives_a_restart(cost_table: str, tmp_path: Path) -> None:
    assert run_ranks(survives, 4, cost_table, tmp_path / "saved", timeout=300) == [[]] * 4


Batch = tuple[int, tuple[int, ...], tuple[int, ...]]


def own_callback(rank: int, cost_table: str, ahead: int) -> tuple[list[str], list[Batch], list[Batch], list[str]]:
    """Who planned, what the callback was called with and what it should have been, and what is refused."""
    planner = Planner(CostTable.load(cost_table), POOL, PlannerOptions(kernels="pure"))
    called: list[Batch] = []

    def plan(step: int, ids: tuple[int, ...], lengths: tuple[int, ...]) -> StepPlan:
        called.append((step, ids, lengths))
        if step == 3:
            return planner.plan(step + 1, ids, lengths)
        return planner.plan(step, ids, lengths)

    engine = small_engine(
        rank, strategies=list(map(str, POOL)), choose="best", tokens_per_step=400, cost_table=cost_table,
        planner={"ahead": ahead}, pre_step_callback=plan,
    )  # fmt: skip
    assert engine.pre_step_callback is (plan if rank == 0 else None)
    makers, given = [], []
    for step in range(3):
        engine.train_batch()
        makers.append(engine.last_step.planning_by)
        plan_of_step = json.loads(engine.last_step.plan)
        given.append((step, tuple(plan_of_step["sequence_ids"]), tuple(plan_of_step["lengths"])))
    refused: list[str] = []
    try:
        engine.train_batch()
    except PlanError as error:
        refused.append(str(error))
    return makers, called[:3], given, refused


@pytest.mark.drawn
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_users_own_callback_is_called_before_each_step_and_checked(cost_table: str, ahead: int) -> None:
    for rank, (makers, called, given, refused) in enumerate(run_ranks(own_callback, 4, cost_table, ahead)):
        assert makers == ["callback"] * 3
        assert called == (given if rank == 0 else [])
        assert "was asked for step 3" in refused[0]


def listed(rank: int, cost_table: str) -> list[tuple[str, bool, float]]:
    engine = small_engine(
        rank, strategies=list(map(str, POOL)), choose="best", tokens_per_step=400, cost_table=cost_table
    )
    found = []
    for _ in range(2):
        engine.train_batch()
        highs = engine.last_step.highs
        found.append((engine.last_step.strategy, highs.new_strategy, highs.gain))
        assert highs.strategy == MIX
    return found


def test_listed_strategies_alone_are_run_and_a_better_one_is_told(cost_table: str) -> None:
    for steps in run_ranks(listed, 4, cost_table):
        for strategy, new, gain in steps:
            assert (strategy, new) == ("2*tp2", False)
            assert gain > 0.05
