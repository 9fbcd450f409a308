"""A rank that computes slowly is told by rank 0 in one line, within twenty steps of a real job, and plans follow."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch import Tensor

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.pipe.models.causal_stage import CausalStage
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.plan.step_plan import StepPlan, save_plans
from ds_hydra.report import calibration
from ds_hydra.testing import float64_throughout, run_ranks
from tests.support.small_job import same, small_engine, small_model, whole_state

SLOW, PACE, RECOVERS = 2, 6.0, 22  # the rank, how slow it is, and the step from which on it is not
STEPS, SAVED = 36, 18


class Trained(NamedTuple):
    """What a rank saw of its job."""

    lines: list[str]
    plans: list[str]
    recipes: list[str]
    state: dict[str, Tensor]  # of masters, after the last step


def train(rank: int, folder: Path, mode: str, *, steps: int = STEPS, exact: bool = True, **block: Any) -> Trained:
    """A stage takes 0.8 ms a token besides, on the slow rank six times as much. It goes on from a checkpoint of the
    folder, if there is one."""
    calibration.APPLY_EVERY = 1000  # a correction of all costs is no part of a plan
    forward, lines = CausalStage.forward, list[str]()
    engine: Any = None

    def sleeping(self: Any, hidden: Any, batch: Any) -> Any:
        slow = rank == SLOW and engine.global_steps < RECOVERS
        time.sleep(8e-4 * sum(batch.pack.lengths) * (PACE if slow else 1.0))
        return forward(self, hidden, batch)

    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hydra").addHandler(handler)
    model = small_model().double() if exact else None
    exactly: Any = nullcontext() if model is None else float64_throughout(model)
    with exactly, mock.patch.object(CausalStage, "forward", sleeping):
        engine = small_engine(rank, model, strategies=["4*tp1"], cost_table=str(folder / "costs.json"),
                              cost_correction=mode, tokens_per_step=300, **block)  # fmt: skip
        plans, recipes = [], []
        while engine.global_steps < steps:
            engine.train_batch()
            plans.append(engine.last_step.plan)
            recipes.append(engine.last_step.planning_recipe)
            if block.get("checkpoint") and engine.global_steps == SAVED:
                engine.save_checkpoint(block["checkpoint"]["dir"])
        state = whole_state(engine)
        engine.destroy()
    told = [line for line in lines if "times as long as others" in line or "as fast as others" in line]
    return Trained(told, plans, recipes, state)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With costs of what a stage takes: 0.8 ms a token, and some for a micro-batch of the small model."""
    TableFile(CostTable((SchemeCost(ParallelScheme(), 0.0, 0.8, 20.0, 1000),))).save(tmp_path / "costs.json")
    return tmp_path


def share(plan: str) -> float:
    """Of a step's tokens, those of the slow rank."""
    planned = StepPlan.from_json(plan)
    return sum(batch.num_tokens for batch in planned.pipelines[SLOW].microbatches) / planned.num_tokens


def trained(folder: Path, mode: str, **options: Any) -> list[Trained]:
    """By rank."""
    return run_ranks(partial(train, **options), 4, folder, mode, timeout=240)


@pytest.mark.drawn
def test_a_slow_rank_is_told_and_plans_give_it_less_until_it_recovers(folder: Path) -> None:
    applied, *others = trained(folder, "apply")
    (slow,) = [line for line in applied.lines if line.startswith(f"rank {SLOW} ") and "times as long" in line]
    assert slow.endswith("; the plans of the steps after the next one give it less")
    assert all(other.lines == [] and other.plans == applied.plans for other in others)
    paces = [max(StepPlan.from_json(plan).pipelines[SLOW].paces, default=1.0) for plan in applied.plans]
    known = next(step for step, pace in enumerate(paces) if pace > 1.0)
    assert known <= 20
    # Computing, which takes as long on all ranks, counts too, and the machine may be busy with other things.
    assert 1.5 < paces[known] < 1.25 * PACE
    assert paces[-1] < 0.5 * paces[known]

    def mean(plans: list[str]) -> float:
        return sum(map(share, plans)) / len(plans)

    before, after, again = (
        mean(applied.plans[part]) for part in (slice(known), slice(known, RECOVERS), slice(-6, None))
    )
    assert after < 0.75 * before
    assert again > 1.15 * after
    # Whatever plans are made by, the same is trained.
    told = trained(folder, "report")[0]
    assert not any(StepPlan.from_json(plan).pipelines[SLOW].paces for plan in told.plans)
    assert told.lines[0].endswith('; with hydra.cost_correction "apply" later plans give it less')
    masters = [name for name in applied.state if name.endswith("/master")]
    largest = max(float((told.state[name] - applied.state[name]).abs().max()) for name in masters)
    assert 0.0 < largest < 1e-9


@pytest.mark.long
def test_restarts_and_replays_are_equal_to_the_bit(folder: Path) -> None:
    job: Any = {"steps": SAVED + 2, "exact": False, "checkpoint": {"dir": str(folder / "saved"), "keep_last": None}}
    whole = trained(folder, "apply", **job)[0]
    assert StepPlan.from_json(whole.plans[-1]).pipelines[SLOW].paces
    # What it measures itself counts from the second step after it on.
    again = trained(folder, "apply", **job)[0]
    assert (again.plans, again.recipes) == (whole.plans[SAVED:], whole.recipes[SAVED:])
    assert same(again.state, whole.state)
    save_plans(map(StepPlan.from_json, whole.plans), plans := folder / "plans.jsonl")
    replayed = trained(folder, "off", steps=SAVED + 2, exact=False, replay=str(plans))[0]
    assert same(replayed.state, whole.state)
