"""Plans of real training: phases, composed strategies, slices, corrected and simulated times, planners that fail."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.shares import Shares
from ds_hydra.engine import plans, prepare
from ds_hydra.engine.prepare import exposed_of, simulated_job
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.step_plan import StepPlan, load_plans
from ds_hydra.planner import PhasedPlanner, Planner, PlannerOptions, parse_phases, save_plans
from ds_hydra.planner.composing import COMPOSED
from ds_hydra.profiling.links import LinkFigure, Links
from ds_hydra.ranks.channel import Telling
from ds_hydra.report import calibration
from ds_hydra.simulate.job import read_job
from ds_hydra.simulate.step import Simulator
from ds_hydra.step.stepper import Stepper
from ds_hydra.step.strategy_runtime import StrategyRuntime
from ds_hydra.testing import float64_throughout, run_ranks
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.cases import CASES
from tests.support.equivalence import compare
from tests.support.planner_cases import in_slices, num_slices
from tests.support.small_job import same, shared_source, small_config, small_engine, small_model, whole_state

# --- Steps of several phases in real training: replayed from a file, recorded, stopped and gone on with, looked
# through. That they train as one process does is shown by the rows of the training table, and that these rows
# would see it if phases did not add up, by mutants.
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


# --- A strategy that HiGHS composes for a step: connected at its first use, a candidate later on, kept by
# checkpoints.
POOL = tuple(map(StrategyShape.parse, ("2*tp2", "4*tp1")))
MIX = "tp2 + 2*tp1"  # where one sequence is too long for tp1, and all others are best off there
COMPOSED_STEPS, STOP, JOINS_AFTER = 8, 3, 4


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


def composed(engine: Any, steps: int) -> list[tuple[str, str, bool]]:
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
        whole = composed(engine, COMPOSED_STEPS)
        state = whole_state(engine)
        engine = engine_of(rank, cost_table)
        parts = composed(engine, STOP)
        engine.save_checkpoint(folder)
        candidates = engine.crew.plans.joined
        engine = engine_of(rank, cost_table)
        engine.load_checkpoint(folder)
        differing = [] if engine.crew.plans.joined == candidates else ["candidates"]
        parts += composed(engine, COMPOSED_STEPS - STOP)
        differing += [] if same(whole_state(engine), state) else ["masters"]
    differing += [f"step {step}" for step in range(COMPOSED_STEPS) if parts[step] != whole[step]]
    first = next((step for step, (strategy, _, new) in enumerate(whole) if strategy == MIX and new), COMPOSED_STEPS)
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


# --- A run with its long sequences in slices, replayed or planned, as a user would: the same training, or a
# refusal.
CUT_STEPS = 3


def config(plans: Path, **hydra: Any) -> dict[str, Any]:
    return small_config(2, seed=4, **({"planner": {"ahead": 0}, "replay": str(plans)} | hydra))


def train(rank: int, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], CostTable]:
    engine = small_engine(rank, small_model().double(), settings)
    for _ in range(CUT_STEPS):
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


# --- Correction factors in a real training run: reported by default, and applied to the plans if the config
# says so.
def job(rank: int, mode: str, ahead: int) -> tuple[list[float], list[dict[str, Any]], list[str], float]:
    """Losses, corrections and recipes of each step, and the largest factor by which the costs of plans have grown."""
    calibration.APPLY_EVERY, calibration.EARLY, calibration.TRIED_AFTER = 8, (), ()
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
    calibration.APPLY_EVERY, calibration.APPLY_CHANGE, calibration.EARLY, calibration.TRIED_AFTER = 4, 0.0, (), ()
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


def corrected_as(rank: int, folder: Path, correction: str, ahead: int) -> tuple[list[str], dict[str, Tensor]]:
    """Recipes and digests of plans of nine steps, and what they trained; costs by measured times, or by a file."""
    calibration.EARLY, calibration.TRIED_AFTER = (3, 6), (3,)
    engine: Any = small_engine(
        rank, cost_correction=correction, planner={"ahead": ahead}, strategies=["2*tp1", "tp2", "pp2/list"],
        steps_file=str(folder / f"{ahead}.jsonl"),
    )  # fmt: skip
    found: list[str] = []
    for _ in range(9):
        engine.train_batch()
        found += [engine.last_step.planning_recipe, engine.last_step.plan_digest]
    state = whole_state(engine)
    engine.destroy()
    return found, state


@pytest.mark.drawn
def test_a_run_that_corrected_its_costs_is_replayed_to_the_bit(tmp_path: Path) -> None:
    whole = run_ranks(corrected_as, 2, tmp_path, "apply", 2, timeout=120)
    recipes = whole[0][0][::2]
    assert recipes[0] == recipes[3] != recipes[4] == recipes[5] != recipes[6], "shapes were tried for two steps"
    again = run_ranks(corrected_as, 2, tmp_path, str(tmp_path / "2.jsonl"), 0, timeout=120)
    assert [found for found, _ in again] == [found for found, _ in whole]
    assert all(same(one[1], other[1]) for one, other in zip(again, whole, strict=True))


# --- Where links were measured, the planner's process knows the job, and simulates its best plans with their
# messages.
LINKS = Links(tuple(LinkFigure(op, 2, 100.0, 1e7) for op in ("all_reduce", "all_gather", "all_to_all", "p2p")))
MEASURED = CostTable(
    (
        SchemeCost(ParallelScheme(1, 1), 0.0, 1.0, 2.0, 400, 10),
        SchemeCost(ParallelScheme(2, 1), 0.0, 0.51, 2.0, 400, 10),
        SchemeCost(ParallelScheme(1, 2), 0.0, 0.5, 1.0, 400, 10),
    )
)
SIMULATED_STEPS = 3


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
    for _ in range(SIMULATED_STEPS):
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
    TableFile(MEASURED, links=LINKS.to_record()).save(tmp_path / "table.json")
    assert run_ranks(planned, 2, tmp_path, ahead, timeout=200)[0] == (
        ("producer" if ahead else "here"),
        True,
        [True] * SIMULATED_STEPS,
    )


# --- A training run whose planning process is killed, frozen or talks nonsense goes on with the same plans.
NONSENSE = (sys.executable, "-c", "import sys; print('nonsense', flush=True); sys.stdin.read()")
Found = tuple[list[float], list[str], list[str]]


def faulty_job(rank: int, fault: str) -> Found:
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
    found: Found = run_ranks(faulty_job, 2, "none", timeout=120)[0]
    assert set(found[2]) == {"producer"}
    return found


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("fault", "maker"), [("died", "restarted"), ("frozen", "restarted"), ("garbage", "here"), ("in process", "here")]
)
def test_training_is_the_same_to_the_bit(fault: str, maker: str, calm: Found) -> None:
    results = run_ranks(faulty_job, 2, fault, timeout=120)
    for losses, made, makers in results:
        assert (losses, made) == calm[:2]
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
