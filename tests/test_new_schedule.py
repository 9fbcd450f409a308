"""A schedule that weighs times and cuts sequences: what this file says of it is all that is written for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import ds_hydra.planner.kernels as kernels
from ds_hydra.commands.__main__ import main
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.schedules.batches import Batches, Work
from ds_hydra.pipe.schedules.list_walk import (
    BACKWARD,
    FORWARD,
    NEVER,
    WEIGHT,
    Jobs,
    Walk,
    begin,
    first_gradient,
    next_forward,
)
from ds_hydra.pipe.schedules.registry import SCHEDULES, Schedule, orders, register
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.validate import check_runnable
from ds_hydra.planner import Planner, PlannerOptions, StepPlan, validate_plan
from ds_hydra.planner.kernels import load
from ds_hydra.planner.propose import wider_shapes
from ds_hydra.planner.recipe import PlanRecipe
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.case import Case
from tests.support.equivalence import compare


def weights_first(jobs: Jobs, walk: Walk) -> int:
    """As the list order, but a stage computes the weights' gradients that it owes before it begins a forward."""
    left, stop, now = 0, 0, 0
    for m in range(len(jobs.forward)):
        left += jobs.num_stages * jobs.parts * (3 if jobs.weight[m] > 0 else 2)
    while left > 0:
        for stage in range(jobs.num_stages):
            if walk.free[stage] <= now and begin_weights_first(jobs, walk, stage, now):
                stop = max(stop, walk.free[stage])
                left -= 1
        later = NEVER
        for stage in range(jobs.num_stages):
            if now < walk.free[stage] < later:
                later = walk.free[stage]
        if left > 0 and later == NEVER:
            return -1
        now = later
    return stop


def begin_weights_first(jobs: Jobs, walk: Walk, stage: int, now: int) -> bool:
    kind, at = BACKWARD, first_gradient(jobs, walk, stage, now)
    if at < 0 and walk.num_paid[stage] < walk.num_owing[stage]:
        kind, at = WEIGHT, walk.owing[stage * jobs.parts * len(jobs.forward) + walk.num_paid[stage]]
    if at < 0:
        kind, at = FORWARD, next_forward(jobs, walk, stage, now)
    if at < 0:
        return False
    begin(jobs, walk, stage, now, kind, at)
    return True


WEIGHTS_FIRST = Schedule("weights-first", walk=weights_first, ranges=2, proposed=True)
SCHEMES = {ParallelScheme(tp=4): 400, ParallelScheme(tp=2): 180, ParallelScheme(pp=2): 120, ParallelScheme(2, 2): 300}
TABLE = CostTable(
    tuple(
        SchemeCost(scheme, 2e-4 / scheme.num_ranks, 0.9 / scheme.num_ranks, 4.0, limit, 20, Shares.usual())
        for scheme, limit in SCHEMES.items()
    )
)
LENGTHS = [150, 140, 60, 50, 40, 30, 20, 20, 10, 10]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Here alone."""
    register(WEIGHTS_FIRST)
    yield
    del SCHEDULES[WEIGHTS_FIRST.name]


@pytest.fixture
def in_plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of this schedule are not compiled, for which each process would take half a minute."""
    timing = load._timing
    monkeypatch.setattr(load, "_timing", lambda walk, is_compiled: timing(walk, is_compiled=False))


def planned(which: str, schedule: str = "weights-first") -> StepPlan:
    options = PlannerOptions(kernels=which)
    planner = Planner(TABLE, [StrategyShape.parse(f"2*pp2/{schedule}")], options)
    plan = planner.plan(0, range(len(LENGTHS)), LENGTHS)
    validate_plan(plan, TABLE, 4)
    check_runnable(plan)
    return plan


def test_it_orders_micro_batches_by_their_times() -> None:
    batches = Batches((-1,) * 4, 1, (Work(2, 2, 2, kept=1, until_weight=1),) * 4, room=4)
    kinds = {name: [action.kind for action in orders(name, batches, 2)[0]] for name in ("list", "weights-first")}
    assert kinds["list"] != kinds["weights-first"]
    assert {name: sorted(each) for name, each in kinds.items()} == dict.fromkeys(kinds, sorted(kinds["list"]))


@pytest.mark.parametrize("which", ["pure", pytest.param("compiled", marks=pytest.mark.long)])
def test_it_plans_slices_by_its_own_times(which: str) -> None:
    """The plan's check runs the registered order, so what the search says that the plan takes is by that order."""
    plan = planned(which)
    assert any(pipeline.in_slices for pipeline in plan.pipelines)
    assert plan.searched_ms == pytest.approx(plan.predicted_ms, rel=1e-6)
    assert plan.predicted_ms != planned(which, "v").predicted_ms


def test_both_kinds_of_kernels_time_alike() -> None:
    own, usual = (kernels.timing(kernels.compiled(), name) for name in ("weights-first", "v"))
    assert usual is kernels.compiled()
    assert own is kernels.timing(kernels.compiled(), "weights-first")
    assert own is not usual
    assert kernels.timing(kernels.pure(), "list") is kernels.pure()


def test_it_is_proposed_beside_the_others() -> None:
    shapes = wider_shapes(TABLE, num_layers=8)
    assert {shape.schedule for shape in shapes} == {"v", "weights-first"}
    shape = PipelineShape.parse("pp2/weights-first")
    assert (shape.parts, shape.cost_key) == (2, ParallelScheme(pp=2)), "what is profiled is any schedule's"


def test_another_process_plans_the_same() -> None:
    recipe = PlanRecipe(TABLE, (StrategyShape.parse("2*pp2/weights-first"),), PlannerOptions(kernels="pure"))
    assert json.loads(recipe.text)["modules"] == {__name__: __file__}
    assert recipe.digest != PlanRecipe(TABLE, (StrategyShape.parse("2*pp2/v"),), recipe.options).digest
    text = recipe.text
    del SCHEDULES[WEIGHTS_FIRST.name]
    other = PlanRecipe.of_text(text)
    assert other.planner().plan(0, range(len(LENGTHS)), LENGTHS).digest() == planned("pure").digest()


@pytest.mark.drawn
@pytest.mark.usefixtures("in_plain_python")
def test_it_trains_as_one_process_does() -> None:
    case = Case("new", "llama", ("2*pp2/weights-first", "tp2pp2/weights-first", "4*tp1"), steps=3, slices=True)
    missed = compare(case.shortened()).missed(case.aims, case.name)
    assert not missed, missed


@pytest.mark.usefixtures("in_plain_python")
def test_it_is_previewed_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--cost-table", "a800-7b", "--lengths", "pretraining", "--tokens", "60000", "--context", "8192"]
    strategies = ["4*tp2pp2/weights-first", "4*tp4"]
    assert main(["preview", *job, "--gpus", "16", "--steps", "2", "--strategies", strategies[0]]) == 0
    assert "weights-first" in capsys.readouterr().out
    trace = tmp_path / "step.json"
    assert main(["simulate", strategies[0], *job, "--steps", "1", "--trace", str(trace)]) == 0
    assert trace.stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "Upper", "walk": weights_first}, "lower-case"),
        ({"name": "none"}, "either `make` or `walk`"),
        ({"name": "both", "walk": weights_first, "make": lambda batches, num_stages: ()}, "either"),
        ({"name": "three", "walk": weights_first, "ranges": 3}, "1 range of layers, or 2"),
    ],
)
def test_what_is_no_schedule_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Schedule(**arguments)  # type: ignore[arg-type]


def test_a_name_is_registered_once() -> None:
    register(WEIGHTS_FIRST)
    with pytest.raises(PlanError, match="another one of this name"):
        register(Schedule("list", walk=weights_first))
