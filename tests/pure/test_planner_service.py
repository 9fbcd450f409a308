"""The service with real producer processes: killed, frozen, talking nonsense; training's plans go on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.table_file import TableFile
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner import Planner, PlannerOptions, PlannerService, validate_plan
from ds_hydra.planner.producer import answer
from ds_hydra.planner.service import PlannedStep
from ds_hydra.simulate.job_record import job_record, read_job
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.llama import shipped_cluster
from ds_hydra.simulate.step import Simulator
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.planner_cases import a800_batch, a800_planner

PATIENT = 60.0  # seconds; machines may be busy
# A producer that answers the first request it gets with what its argument says, and then sleeps.
LIAR = """
import json, sys, time
sys.stdin.readline()
step = json.loads(sys.stdin.readline())["step"]
print(sys.argv[1].replace("STEP", str(step)), flush=True)
time.sleep(600)
"""


def service(patience: float = PATIENT, **options: object) -> PlannerService:
    planner = a800_planner()
    options = {"kernels": "pure", **options}
    return PlannerService(planner.cost_table, planner.strategies, PlannerOptions(**options), patience=patience)  # type: ignore[arg-type]


def steps(planner: PlannerService, first: int, count: int) -> list[PlannedStep]:
    """Submit and get `count` steps, two ahead, as training does; every plan is checked."""
    for step in range(first, first + 2):
        planner.submit(step, range(40), a800_batch(step, 40))
    planned = []
    for step in range(first, first + count):
        planner.submit(step + 2, range(40), a800_batch(step + 2, 40))
        planned.append(planner.get(step))
        assert planned[-1].plan.step == step
        assert planned[-1].plan.lengths == tuple(a800_batch(step, 40))
        validate_plan(planned[-1].plan, a800_planner().cost_table, 64)
    return planned


def test_plans_come_from_the_producer_and_equal_those_made_here() -> None:
    with service() as planner:
        planned = steps(planner, 0, 4)
        assert not planner.fallbacks
        time.sleep(0.5)
        assert planner.get(4).hidden
    here = a800_planner(kernels="pure")
    for step, one in enumerate(planned):
        assert one.fallback is None
        assert one.plan == here.plan(step, range(40), a800_batch(step, 40))


def test_the_producer_simulates_steps_of_the_job_that_it_is_told() -> None:
    table, strategies = a800_planner().cost_table, [StrategyShape.parse(text) for text in ("8*tp8", "4*tp8pp2/v")]
    found = TableFile(table, step={"fixed_ms": 3.0, "update_ms_per_element": 1e-6})
    job = shipped_cluster("a800-32b", found, LinkModel(8, between=Speed(2e-5, 2e9)), 64)
    assert read_job(json.loads(json.dumps(job_record(job)))) == job
    options = PlannerOptions(kernels="compiled")
    here = Planner(table, strategies, options, step_ms=Simulator(job).step_ms)
    with PlannerService(
        table, strategies, options, patience=PATIENT, job=job_record(job),
        command=(sys.executable, "-m", "ds_hydra.simulate.producer"),
    ) as service:  # fmt: skip
        planned = steps(service, 0, 4)
    batches = [a800_batch(step, 40) for step in range(4)]
    assert [one.plan for one in planned] == [here.plan(step, range(40), batch) for step, batch in enumerate(batches)]
    alone = Planner(table, strategies, options)
    without = [alone.plan(step, range(40), batch).strategy for step, batch in enumerate(batches)]
    assert [one.plan.strategy for one in planned] != without, "the simulation changed nothing, so this shows nothing"


def test_other_costs_hold_from_the_next_step_on() -> None:
    """Also for steps that the producer has planned, or is planning, by the costs before; nothing falls back."""
    here = a800_planner(kernels="pure")
    slower = CostTable(tuple(replace(cost, b=2 * cost.b) for cost in here.cost_table.costs), "slower")
    with service() as planner:
        for step in range(3):
            planner.submit(step, range(40), a800_batch(step, 40))
        assert planner.get(0).plan.predicted_ms == here.plan(0, range(40), a800_batch(0, 40)).predicted_ms
        planner.use_table(slower)
        changed = Planner(slower, here.strategies, PlannerOptions(kernels="pure"))
        for step in (1, 2):
            assert planner.get(step).plan == changed.plan(step, range(40), a800_batch(step, 40))
        assert not planner.fallbacks


def test_a_killed_producer_is_counted_and_replaced() -> None:
    with service() as planner:
        steps(planner, 0, 2)
        assert planner.producer_pid is not None
        os.kill(planner.producer_pid, signal.SIGKILL)
        planned = steps(planner, 10, 4)
        assert planner.fallbacks["died"] >= 1
        assert planner.restarts["died"] >= 1
        assert planned[-1].fallback is None
        assert any(one.plan.source == "fast" and one.fallback == "died" for one in planned)


def test_a_frozen_producer_is_counted_and_replaced() -> None:
    with service() as planner:
        steps(planner, 0, 1)
        planner._patience = 1.0
        frozen = planner.producer_pid
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        planner.submit(20, range(5), a800_batch(20, 5))
        began = time.monotonic()
        one = planner.get(20)
        assert one.fallback == "frozen"
        assert time.monotonic() - began < 30
        assert planner.restarts["frozen"] == 1
        with pytest.raises(ProcessLookupError):
            os.kill(frozen, 0)
        planner._patience = PATIENT
        assert steps(planner, 30, 1)[0].fallback is None


def test_the_producer_validates_what_it_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = a800_planner(kernels="pure")
    request = {"generation": 0, "step": 0, "ids": range(40), "lengths": a800_batch(0, 40)}
    assert "plan" in answer(planner, request)
    plan = planner.plan(0, range(40), a800_batch(0, 40))
    phase = plan.phases[0]
    slower = replace(phase.pipelines[0], predicted_ms=2 * phase.pipelines[0].predicted_ms)
    wrong = replace(plan, phases=(replace(phase, pipelines=(slower, *phase.pipelines[1:])),))
    monkeypatch.setattr(planner, "plan", lambda *_: wrong)
    assert "cost table gives" in str(answer(planner, request)["invalid"])


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("not json at all", "garbage"),
        ('{"plan": 3}', "garbage"),
        ('{"generation": 0, "step": STEP, "plan": "nonsense", "planning_ms": 1}', "invalid"),
        ('{"generation": 0, "step": STEP, "planning_ms": 1}', "invalid"),
        ("STALE", "invalid"),
        ("TOO_FULL", "invalid"),
        ('{"generation": 0, "step": STEP, "invalid": "a pipeline states 3 ms"}', "invalid"),
        ("", "garbage"),
    ],
)
def test_nonsense_is_counted_and_answered_here(reply: str, reason: str) -> None:
    here = a800_planner(kernels="pure")
    text = here.plan(0, range(40), a800_batch(0, 40)).to_json()
    if reply == "STALE":  # a good plan, of another batch
        reply = json.dumps(
            {"generation": 0, "step": 0, "plan": here.plan(0, range(40), a800_batch(1, 40)).to_json(), "planning_ms": 1}
        )
    if reply == "TOO_FULL":
        record = json.loads(text)
        (pipelines,) = record["phases"]
        for pipeline in pipelines:
            pipeline["microbatches"], pipeline["predicted_ms"] = [], 0
        pipelines[-1] |= {"microbatches": [list(range(40))], "predicted_ms": 1}  # tp4 holds fewer tokens
        reply = json.dumps({"generation": 0, "step": 0, "plan": json.dumps(record), "planning_ms": 1})
    planner = PlannerService(
        here.cost_table, here.strategies, PlannerOptions(kernels="pure"), patience=PATIENT,
        command=(sys.executable, "-c", LIAR, reply),
    )  # fmt: skip
    with planner:
        planner.submit(0, range(40), a800_batch(0, 40))
        one = planner.get(0)
        assert one.fallback == reason
        assert planner.fallbacks == {reason: 1}
        assert planner.restarts == {reason: 1}
        assert one.plan.lengths == tuple(a800_batch(0, 40))


def test_a_producer_that_never_starts_is_given_up() -> None:
    here = a800_planner(kernels="pure")
    with PlannerService(
        here.cost_table, here.strategies, PlannerOptions(kernels="pure"), command=("false",)
    ) as planner:
        for step in range(8):
            planner.submit(step, range(5), a800_batch(step, 5))
            assert planner.get(step).fallback in ("died", "stopped")
        assert sum(planner.restarts.values()) == 5
        assert planner.producer_pid is None


def test_bad_sequences_raise_here_what_the_planner_says() -> None:
    with service() as planner:
        planner.submit(0, [7], [10**6])
        with pytest.raises(PlanError, match="no strategy can hold sequence 7 of 1000000 tokens"):
            planner.get(0)
        assert not planner.restarts


def test_misuse_is_refused() -> None:
    with service() as planner:
        planner.submit(0, [1], [5])
        with pytest.raises(PlanError, match="submitted to the planner twice"):
            planner.submit(0, [1], [5])
        with pytest.raises(PlanError, match="never submitted"):
            planner.get(3)
    with pytest.raises(ConfigError, match="ahead >= 1"):
        PlannerService(a800_planner().cost_table, a800_planner().strategies, ahead=0)


def test_steps_are_told_apart_by_their_number_not_by_their_order() -> None:
    """A reference planner picks plans by how many it has made; here any order of submission will do."""
    with service() as planner:
        for step in (9, 2, 5):
            planner.submit(step, range(20), a800_batch(step, 20))
        for step in (2, 5, 9):
            assert planner.get(step).plan.lengths == tuple(a800_batch(step, 20))
        assert not planner.fallbacks


def test_a_cold_compile_delays_no_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # read by the producer; this process's kernels are loaded
    with service(kernels="auto") as planner:
        planned = steps(planner, 0, 2)
        assert {(one.plan.source, one.fallback) for one in planned} == {("fast", None)}
        assert all(one.planning_ms < 10_000 for one in planned)
    assert not list(tmp_path.glob("*.warm"))  # the compilation had not ended


def test_the_producer_dies_with_its_parent() -> None:
    script = (
        "import os, sys, time; from tests.pure.test_planner_service import service\n"
        "s = service(); s.submit(0, range(5), [5, 6, 7, 8, 9]); s.get(0); print(s.producer_pid, flush=True)\n"
        "time.sleep(600)"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(child, 0)
            time.sleep(0.05)
        pytest.fail(f"producer {child} outlived its parent by 20 s")
