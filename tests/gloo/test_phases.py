"""Steps of several phases in real training: replayed from a file, recorded, stopped and gone on with, looked through.

That they train as one process does is shown by the rows of the training table, and that these rows would see it if
phases did not add up, by mutants.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.planner import PhasedPlanner, load_plans, parse_phases, save_plans
from ds_hydra.step.stepper import Stepper
from ds_hydra.step.strategy_runtime import StrategyRuntime
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.cases import CASES
from tests.support.equivalence import compare
from tests.support.small_job import same, small_config, small_engine, small_model, whole_state

PHASES = "4*tp1 then tp2 + pp2 then tp4"
LONGEST = (30, 60, 400)
CANDIDATES = ["4*tp1", "tp4", "tp2 + pp2"]
STEPS = 4
TABLE = CostTable(
    tuple(SchemeCost(ParallelScheme(tp, pp), 0.0, 1.0, 2.0, 400, 10) for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 2)))
)


def trained(rank: int, folder: Path, steps: int = STEPS, **hydra: Any) -> tuple[list[float], dict[str, Tensor]]:
    config = small_config(4, cost_table=str(folder / "table.json"), **hydra)
    config["hydra"]["strategies"] = CANDIDATES
    engine = small_engine(rank, config=config)
    # Gradients that add up over phases are counted, beside the memory that they share within one.
    assert engine.crew.prepared.memory.phases is ("replay" in hydra)
    losses = [float(engine.train_batch()) for _ in range(steps - engine.global_steps)]
    state = whole_state(engine)
    engine.destroy()
    return losses, state


def run(folder: Path, steps: int = STEPS, **hydra: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of rank 0 of four."""
    return run_ranks(lambda rank: trained(rank, folder, steps, **hydra), 4, timeout=200)[0]


def replay(folder: Path) -> dict[str, Any]:
    return {"planner": {"ahead": 0}, "replay": str(folder / "phases.jsonl")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder with a cost table, the plans that a run of single phases recorded, and the same steps in phases."""
    folder = tmp_path_factory.mktemp("phases")
    TableFile(TABLE).save(folder / "table.json")
    losses, _ = run(folder, plans_file=str(folder / "plans.jsonl"))
    planner = PhasedPlanner(TABLE, parse_phases(PHASES), longest=LONGEST)
    plans = load_plans(folder / "plans.jsonl").values()
    save_plans([planner.plan(plan.step, plan.sequence_ids, plan.lengths) for plan in plans], folder / "phases.jsonl")
    return folder, losses


@pytest.fixture(scope="module")
def replayed(recorded: tuple[Path, list[float]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of the recorded steps in phases, with parameters compared; their files are in the folder."""
    folder, _ = recorded
    files: dict[str, Any] = {"steps_file": str(folder / "steps.jsonl"), "plans_file": str(folder / "again.jsonl")}
    return run(folder, **replay(folder), **files, faults={"frozen_seconds": 0, "compare_every": 1})


@pytest.mark.drawn
def test_recorded_steps_run_again_in_phases(
    recorded: tuple[Path, list[float]], replayed: tuple[list[float], dict[str, Tensor]]
) -> None:
    """The plans are written as they were read, and the records have a figure for each pipeline of each phase."""
    folder, losses = recorded
    assert replayed[0] == pytest.approx(losses, rel=1e-5)
    asked, done = load_plans(folder / "phases.jsonl"), load_plans(folder / "again.jsonl")
    records = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert len(records) == len(done) == STEPS
    assert max(len(plan.phases) for plan in done.values()) == 3
    for record, plan in zip(records, done.values(), strict=True):
        assert plan.phases == asked[plan.step].phases
        assert record["strategy"] == plan.strategy
        assert record["num_pipelines"] == [len(phase.pipelines) for phase in plan.phases]
        assert record["num_micro_batches"] == [len(pipeline.microbatches) for pipeline in plan.pipelines]
        assert len(record["pipeline_ms"]) == len(record["predicted_pipeline_ms"]) == len(plan.pipelines)
        assert sum(record["phase_ms"]) == pytest.approx(plan.total_ms(record["pipeline_ms"]))
        assert 0 < sum(record["phase_ms"]) <= record["step_ms"]
        assert record["predicted_ms"] == plan.predicted_ms
        assert plan.searched_ms == sum(phase.predicted_ms for phase in plan.phases)


@pytest.mark.drawn
def test_a_stopped_run_goes_on_as_the_undisturbed_one(
    recorded: tuple[Path, list[float]], replayed: tuple[list[float], dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, _ = recorded
    checkpoint: dict[str, Any] = {"checkpoint": {"dir": str(tmp_path), "every": 2}}
    run(folder, 2, **replay(folder), **checkpoint)
    losses, resumed = run(folder, **replay(folder), **checkpoint)
    assert len(losses) == 2
    assert same(replayed[1], resumed)


@pytest.mark.drawn
def test_what_is_not_finite_is_told_with_its_phase(recorded: tuple[Path, list[float]]) -> None:
    """A step of which one sequence has a loss that is not finite is skipped whole: no phase leaves a trace."""
    folder, _ = recorded
    plan = load_plans(folder / "phases.jsonl")[0]
    *others, last = ({batch.num_tokens for p in phase.pipelines for batch in p.microbatches} for phase in plan.phases)
    assert not last & set().union(*others), "rows of the last phase are known by their lengths"

    def skipping(rank: int) -> tuple[bool, bool, list[str]]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ds_hydra").addHandler(handler)
        model = small_model()
        model.model.layers[3].register_forward_hook(
            lambda _, args, out: out * float("inf") if args[0].shape[1] in last else out
        )
        config = small_config(4, cost_table=str(folder / "table.json"), **replay(folder))
        # The hook counts all tokens.
        config["hydra"] |= {"strategies": CANDIDATES, "fast_paths": ["sp_overlap", "functions"]}
        engine = small_engine(rank, model, config)
        before = whole_state(engine)
        engine.train_batch()
        return engine.last_step.skipped, same(before, whole_state(engine)), lines

    results = run_ranks(skipping, 4, timeout=200)
    assert [(skipped, unchanged) for skipped, unchanged, _ in results] == [(True, True)] * 4
    told = next(line for line in results[0][2] if "is skipped" in line)
    assert f"pipeline 0 of phase {len(plan.phases) - 1}, micro-batch 0: loss" in told


def test_a_file_with_an_empty_phase_is_refused_before_step_0(
    recorded: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder, _ = recorded
    rows = [json.loads(line) for line in (folder / "phases.jsonl").read_text().splitlines()]
    empty = [{**pipeline, "microbatches": [], "predicted_ms": 0.0} for pipeline in rows[-1]["phases"][0]]
    rows[-1]["phases"].insert(1, empty)
    (tmp_path / "phases.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def refused(rank: int) -> str:
        try:
            trained(rank, folder, steps=0, **replay(tmp_path))
        except PlanError as error:
            return str(error)
        return ""

    for text in run_ranks(refused, 4, timeout=100):
        assert f"plan of step {STEPS - 1}: phase 1 (4*tp1) of its" in text


def only_the_last_phase_counts() -> Any:
    """Pushes of each phase overwrite the gradients of those before."""
    train = StrategyRuntime.train
    return mock.patch.object(
        StrategyRuntime, "train", lambda self, *args, accumulate, alone: train(self, *args, alone=alone)
    )


def each_phase_makes_an_update() -> Any:
    """Later phases compute with the parameters that the earlier ones have changed."""
    train = Stepper._train

    def and_update(self: Any, *args: Any, **how: Any) -> Any:
        run = train(self, *args, **how)
        self._update.apply([run.loss], [run.router_loss])
        return run

    return mock.patch.object(Stepper, "_train", and_update)


def each_phase_has_its_own_mean() -> Any:
    """The loss of a phase is divided by the phase's targets, not by the step's."""
    train = Stepper._train

    def by_own(self: Any, runtime: Any, batches: Any, known: Any, weight: int, **how: Any) -> Any:
        own = int(self._world.channel.rows(torch.tensor([batches.weight])).sum())
        return train(self, runtime, batches, known, own, **how)

    return mock.patch.object(Stepper, "_train", by_own)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("mutant", "differs"),
    [
        (only_the_last_phase_counts, "gradient"),
        (each_phase_makes_an_update, "parameter"),
        (each_phase_has_its_own_mean, "loss"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_phases_that_do_not_add_up_are_seen(mutant: Callable[[], Any], differs: str) -> None:
    (case,) = (case for case in CASES if case.name == "phases 4*tp1, 2*tp2, tp4")
    with mutant():
        missed = compare(replace(case, steps=2)).missed(case.aims, case.name)
    assert any(f"{differs} differs" in line for line in missed), missed
