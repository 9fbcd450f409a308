"""A run with its long sequences in slices, replayed or planned, as a user would: the same training, or a refusal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.planner import load_plans, save_plans
from ds_hydra.testing import float64_throughout, run_ranks
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.planner_cases import in_slices, num_slices
from tests.support.small_job import shared_source, small_config, small_engine, small_model, whole_state

STEPS = 3


def config(plans: Path, **hydra: Any) -> dict[str, Any]:
    return small_config(2, seed=4, **({"planner": {"ahead": 0}, "replay": str(plans)} | hydra))


def train(rank: int, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], CostTable]:
    engine = small_engine(rank, small_model().double(), settings)
    for _ in range(STEPS):
        engine.train_batch()
    found = whole_state(engine), engine.crew.plans.table
    engine.destroy()
    return found


@pytest.mark.drawn
def test_replayed_slices_train_as_the_recorded_run_and_off_refuses_them(tmp_path: Path) -> None:
    recorded, cut = tmp_path / "plans.jsonl", tmp_path / "cut.jsonl"
    settings = config(recorded, choose="cycle", replay=None, plans_file=str(recorded))
    with float64_throughout(small_model()), shared_source(small_model().double()):
        whole, table = run_ranks(train, 2, settings, timeout=120)[0]
        plans = [in_slices(plan, table) for plan in load_plans(recorded).values()]
        assert any(map(num_slices, plans))
        save_plans(plans, cut)
        sliced, _ = run_ranks(train, 2, config(cut, self_check="on"), timeout=120)[0]
    torch.testing.assert_close(sliced, whole, rtol=1e-9, atol=1e-12)

    def refused(rank: int) -> str:
        try:
            train(rank, config(cut, chunks="off"))
        except PlanError as error:
            return str(error)
        return ""

    told = 'but this job runs whole sequences only: hydra.chunks is "off". Plan without slices'
    assert all(told in text and "micro-batch" in text for text in run_ranks(refused, 2))


@pytest.mark.drawn
def test_sequences_that_the_planner_cuts_train_as_whole_ones(tmp_path: Path) -> None:
    """A table with shares, and costs that grow fast with length: slices under the list order and in a V."""
    costs = (SchemeCost(ParallelScheme(pp=pp), 2e-3 / pp, 0.2 / pp, 1.0 / pp, 200, 8, Shares.usual()) for pp in (1, 2))
    table, plans = tmp_path / "table.json", tmp_path / "plans.jsonl"
    TableFile(CostTable(tuple(costs), "made up")).save(table)
    one = {"cost_table": str(table), "choose": "best", "replay": None, "plans_file": str(plans)}
    with float64_throughout(small_model()), shared_source(small_model().double()):
        whole, _ = run_ranks(train, 2, config(plans, **one, strategies=["2*tp1"]), timeout=120)[0]
        for strategy in ("pp2/list", "pp2/v"):
            plans.unlink()
            cut, _ = run_ranks(train, 2, config(plans, **one, strategies=[strategy]), timeout=120)[0]
            assert any(map(num_slices, load_plans(plans).values())), strategy
            torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-12, msg=partial("{}: {}".format, strategy))
