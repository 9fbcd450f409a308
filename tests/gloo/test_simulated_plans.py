"""Where links were measured, the planner's process knows the job, and simulates its best plans with their messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.engine.prepare import exposed_of, simulated_job
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.plan.step_plan import StepPlan, load_plans
from ds_hydra.planner import Planner
from ds_hydra.profiling.links import LinkFigure, Links
from ds_hydra.simulate.job import read_job
from ds_hydra.simulate.step import Simulator
from ds_hydra.testing import run_ranks
from tests.support.small_job import small_config, small_engine

LINKS = Links(tuple(LinkFigure(op, 2, 100.0, 1e7) for op in ("all_reduce", "all_gather", "all_to_all", "p2p")))
TABLE = CostTable(
    (
        SchemeCost(ParallelScheme(1, 1), 0.0, 1.0, 2.0, 400, 10),
        SchemeCost(ParallelScheme(2, 1), 0.0, 0.51, 2.0, 400, 10),
        SchemeCost(ParallelScheme(1, 2), 0.0, 0.5, 1.0, 400, 10),
    )
)
STEPS = 3


def planned(rank: int, folder: Path, ahead: int) -> Any:
    """On rank 0: who planned, and whether the plans are those of a planner here."""
    config = small_config(
        2,
        cost_table=str(folder / "table.json"),
        choose="best",
        planner={"ahead": ahead},
        plans_file=str(folder / "plans"),
    )
    engine = small_engine(rank, config=config)
    for _ in range(STEPS):
        engine.train_batch()
    crew = engine.crew
    found = None
    if rank == 0:
        recipe, cluster = crew.plans._recipe, simulated_job(crew.job, crew.world, crew.prepared.found)
        exposed = exposed_of(crew.job, crew.world, crew.prepared.found)
        assert exposed is not None
        here = Planner(
            crew.plans.table, crew.plans.strategies, recipe.options,
            exposed_ms=list(map(exposed, crew.plans.strategies)), step_ms=Simulator(cluster).step_ms,
        )  # fmt: skip
        told = read_job(json.loads(recipe.text)["job"])
        plans = load_plans(folder / "plans").values()
        same = [plan == here.plan(plan.step, plan.sequence_ids, plan.lengths) for plan in plans]
        last = engine.last_step
        assert last.predicted_step_ms == StepPlan.from_json(last.plan).step_ms != last.predicted_ms
        assert last.expected_ms == pytest.approx(last.predicted_step_ms), "no step has corrected it yet"
        found = last.planning_by, told == cluster, same
    engine.destroy()
    return found


@pytest.mark.drawn
@pytest.mark.parametrize("ahead", [0, 1])
def test_plans_of_training_are_those_of_the_shortest_simulated_step(ahead: int, tmp_path: Path) -> None:
    TableFile(TABLE, links=LINKS.to_record()).save(tmp_path / "table.json")
    assert run_ranks(planned, 2, tmp_path, ahead, timeout=200)[0] == (
        ("producer" if ahead else "here"),
        True,
        [True] * STEPS,
    )
