"""The service with real producer processes: killed, frozen, talking nonsense; the plans stay the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_hydra.costs.cost_table import CostTable, TableFile
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner import PlannedStep, Planner, PlannerOptions, PlannerService, PlanRecipe, validate_plan
from ds_hydra.planner import service as planner_service
from ds_hydra.planner.producer import answer
from ds_hydra.planner.selection import MadePlan
from ds_hydra.planner.service import producer_command
from ds_hydra.simulate.job import job_record, read_job, shipped_cluster
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.producer import step_ms_of
from ds_hydra.simulate.step import Simulator
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.planner_cases import a800_batch, a800_planner

# --- The service with real producer processes: killed, frozen, talking nonsense; the plans stay the same.
# A producer that is ready, answers the first request that it gets with what its arguments say, and then sleeps. Each
# argument is a line; READY stands for the usual one.
LIAR = """
import json, sys, time
from ds_hydra.planner import PlanRecipe
recipe = PlanRecipe.of_text(json.loads(sys.stdin.readline())["recipe"])
step = json.loads(sys.stdin.readline())["step"]
ready = json.dumps({"generation": 0, "ready": recipe.digest, "kernels": recipe.options.kernels})
for line in sys.argv[1:]:
    print(line.replace("STEP", str(step)).replace("READY", ready), flush=True)
time.sleep(600)
"""


def recipe_of(planner: Planner, **changes: Any) -> PlanRecipe:
    return PlanRecipe(planner.cost_table, planner.strategies, replace(planner.options, **changes))


def service(**options: object) -> PlannerService:
    return PlannerService(recipe_of(a800_planner(kernels="pure")), **options)  # type: ignore[arg-type]


def lying(*lines: str) -> tuple[str, ...]:
    return (sys.executable, "-c", LIAR, *lines)


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
        assert not planner.restarts
        time.sleep(0.5)
        assert planner.get(4).hidden
    here = a800_planner(kernels="pure")
    for step, one in enumerate(planned):
        assert one.made_by == "producer"
        assert one.plan == here.plan(step, range(40), a800_batch(step, 40))


@pytest.mark.drawn
@pytest.mark.parametrize("kernels", ["auto", "compiled", "pure"])
def test_a_plan_is_the_same_whoever_makes_it(kernels: str) -> None:
    """Also where pipelines may cut sequences, of which a search with less effort or other kernels finds others."""
    texts, options = ("4*tp16", "4*tp8pp2/v", "2*tp8pp2/list + 4*tp8"), PlannerOptions(kernels=kernels, effort=1)
    recipe = PlanRecipe(a800_planner().cost_table, tuple(map(StrategyShape.parse, texts)), options)
    found = []
    for ahead in (0, 2):
        with PlannerService(recipe, ahead) as planner:
            found.append([(one.plan, one.recipe) for one in steps(planner, 0, 2)])
    assert found[0] == found[1]
    assert all(digest for _, digest in found[0])


@pytest.mark.drawn
def test_the_producer_simulates_steps_of_the_job_that_it_is_told() -> None:
    table, strategies = a800_planner().cost_table, [StrategyShape.parse(text) for text in ("8*tp8", "4*tp8pp2/v")]
    found = TableFile(table, step={"fixed_ms": 3.0, "update_ms_per_element": 1e-6})
    job = shipped_cluster("a800-32b", found, LinkModel(8, between=Speed(2e-5, 2e9)), 64)
    assert read_job(json.loads(json.dumps(job_record(job)))) == job
    # In the order of Python's hashes, which differs from process to process, they would change the plans' digest.
    for names in (layers := job_record(job)["plan"]["layers"]):
        assert names == sorted(names)
    assert len(layers[0]) > 4, "fewer may be in order by chance"
    options = PlannerOptions(kernels="compiled")
    here = Planner(table, strategies, options, step_ms=Simulator(job).step_ms)
    recipe = PlanRecipe(table, tuple(strategies), options, job=job_record(job))
    with PlannerService(recipe, command=producer_command("ds_hydra.simulate.producer")) as service:
        planned = steps(service, 0, 4)
    with PlannerService(recipe, 0, simulation=step_ms_of) as service:
        assert [one.plan for one in steps(service, 0, 4)] == [one.plan for one in planned]
    batches = [a800_batch(step, 40) for step in range(4)]
    assert [one.plan for one in planned] == [here.plan(step, range(40), batch) for step, batch in enumerate(batches)]
    alone = Planner(table, strategies, options)
    without = [alone.plan(step, range(40), batch).strategy for step, batch in enumerate(batches)]
    assert [one.plan.strategy for one in planned] != without, "the simulation changed nothing, so this shows nothing"


@pytest.mark.drawn
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_other_costs_hold_from_the_step_that_is_named_on(ahead: int) -> None:
    """Also for steps that the producer has planned, or is planning, by the costs before, and for one started anew."""
    here = a800_planner(kernels="pure")
    slower = CostTable(tuple(replace(cost, b=2 * cost.b) for cost in here.cost_table.costs), "slower")
    changed = Planner(slower, here.strategies, PlannerOptions(kernels="pure"))
    with service(ahead=ahead) as planner:
        for step in range(4):
            planner.submit(step, range(40), a800_batch(step, 40))
        planned = [planner.get(0)]
        planner.use_table(slower, 2)
        if ahead == 3:
            assert planner.producer_pid is not None
            os.kill(planner.producer_pid, signal.SIGKILL)
        planned += [planner.get(step) for step in (1, 2, 3)]
    for step, one in enumerate(planned):
        by = here if step < 2 else changed
        assert one.plan == by.plan(step, range(40), a800_batch(step, 40))
    assert len({one.recipe for one in planned}) == 2


def killed(planner: PlannerService) -> None:
    assert planner.producer_pid is not None
    os.kill(planner.producer_pid, signal.SIGKILL)


def stopped(planner: PlannerService) -> None:
    assert planner.producer_pid is not None
    os.kill(planner.producer_pid, signal.SIGSTOP)


def rotten(planner: PlannerService) -> None:
    assert planner._producer is not None
    planner._producer._take = lambda line: json.loads("rot")  # type: ignore[method-assign]


@pytest.mark.drawn
@pytest.mark.parametrize(("hurt", "reason"), [(killed, "died"), (stopped, "frozen"), (rotten, "garbage")])
def test_a_producer_that_fails_is_replaced_and_asked_the_same(hurt: Callable[..., None], reason: str) -> None:
    with service(frozen_s=2.0) as planner:
        planned = steps(planner, 0, 2)
        before = planner.producer_pid
        hurt(planner)
        planned += steps(planner, 10, 3)
        assert planner.restarts == {reason: 1}
        assert [one.made_by for one in planned] == ["producer", "producer", "restarted", "producer", "producer"]
        assert before is not None
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)
    here = a800_planner(kernels="pure")
    assert [one.plan for one in planned] == [
        here.plan(step, range(40), a800_batch(step, 40)) for step in (0, 1, 10, 11, 12)
    ]


def test_a_producer_that_is_late_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """It is stopped for longer than a step may be late before the log says so, but not for so long that it is frozen:
    who waits is told, and so are the others."""
    turns: list[float] = []
    with service(frozen_s=30.0) as planner, caplog.at_level("INFO", logger="ds_hydra"):
        steps(planner, 0, 1)
        pid = planner.producer_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(6.0, os.kill, (pid, signal.SIGCONT)).start()
        planner.submit(20, range(40), a800_batch(20, 40))
        one = planner.get(20, turns.append)
        assert (one.made_by, one.hidden, planner.producer_pid) == ("producer", False, pid)
    assert one.waited_ms > 5500
    assert one.planning_ms < one.waited_ms
    assert len(turns) >= 4
    assert turns == sorted(turns)
    assert sum("waiting for the plan of step 21" in message for message in caplog.messages) == 1


def test_what_is_slow_to_start_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes, for longer than one may stand still."""
    monkeypatch.setattr(planner_service, "_START_S", 1.0)
    slow = ("-c", "import sys, time\nwhile time.process_time() < 3: pass\nimport runpy; sys.argv = sys.argv[1:]; "
            "runpy.run_path(sys.argv[0], run_name='__main__')")  # fmt: skip
    python, *start = producer_command(beat_s=0.1)
    with service(frozen_s=1.0, command=(python, *slow, *start)) as planner:
        assert steps(planner, 0, 1)[0].made_by == "producer"
        assert not planner.restarts


@pytest.mark.parametrize("when", ["it starts", "it plans"])
def test_one_that_lives_and_does_nothing_is_replaced(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its planning thread takes a lock twice, while another thread of it goes on."""
    monkeypatch.setattr(planner_service, "_START_S", 2.0)
    (tmp_path / "stuck.py").write_text(
        "import json, threading, time\n"
        "from ds_hydra.planner import producer\n"
        "def main(requests, tell):\n"
        "    lock = threading.Lock()\n"
        "    lock.acquire()\n"
        "    threading.Thread(target=lambda: [time.sleep(0.01) for _ in iter(int, 1)], daemon=True).start()\n"
        f"    producer.answer = lambda *_: lock.acquire()\n"
        f"    {'lock.acquire()' if when == 'it starts' else 'producer.main(requests, tell)'}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with service(frozen_s=2.0, command=producer_command("stuck")) as planner:
        monkeypatch.setattr(planner, "_command", producer_command())
        assert steps(planner, 0, 1)[0].made_by == "restarted"
        assert planner.restarts == {"frozen": 1}


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "numpy", "threading", "dataclasses", "ds_hydra"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the {name} of the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep + os.environ.get("PYTHONPATH", "") + os.pathsep + ".")
    with service() as planner:
        assert steps(planner, 0, 1)[0].made_by == "producer"
        assert not planner.restarts


def test_the_producer_validates_what_it_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = a800_planner(kernels="pure")
    request = {"generation": 0, "step": 0, "ids": range(40), "lengths": a800_batch(0, 40)}
    assert "plan" in answer(planner, request)
    plan = planner.plan(0, range(40), a800_batch(0, 40))
    phase = plan.phases[0]
    slower = replace(phase.pipelines[0], predicted_ms=2 * phase.pipelines[0].predicted_ms)
    wrong = replace(plan, phases=(replace(phase, pipelines=(slower, *phase.pipelines[1:])),))
    monkeypatch.setattr(planner, "made", lambda *_: MadePlan(wrong, None))
    assert "cost table gives" in str(answer(planner, request)["invalid"])


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["not json at all"], "garbage"),
        (['{"plan": 3}'], "garbage"),
        (["[1, 2]"], "garbage"),
        ([""], "garbage"),
        (["READY", '{"generation": 0, "step": STEP, "plan": "nonsense", "planning_ms": 1}'], "invalid"),
        (["READY", '{"generation": 0, "step": STEP, "planning_ms": 1}'], "invalid"),
        (["READY", "STALE"], "invalid"),
        (["READY", "TOO_FULL"], "invalid"),
        (["READY", '{"generation": 0, "step": STEP, "invalid": "a pipeline states 3 ms"}'], "invalid"),
        (["GOOD"], "invalid"),  # but it never said that it plans by this recipe
        (['{"generation": 0, "ready": "0123456789abcdef", "kernels": "pure"}', "GOOD"], "invalid"),
    ],
)
def test_nonsense_is_counted_and_asked_again(lines: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = a800_planner(kernels="pure")
    right = here.plan(0, range(40), a800_batch(0, 40))
    record = json.loads(right.to_json())
    (pipelines,) = record["phases"]
    for pipeline in pipelines:
        pipeline["microbatches"], pipeline["predicted_ms"] = [], 0
    pipelines[-1] |= {"microbatches": [list(range(40))], "predicted_ms": 1}  # tp4 holds fewer tokens
    answers = {
        "GOOD": right.to_json(),
        "STALE": here.plan(0, range(40), a800_batch(1, 40)).to_json(),  # a good plan, of another batch
        "TOO_FULL": json.dumps(record),
    }
    for name, text in answers.items():
        said = json.dumps({"generation": 0, "step": 0, "plan": text, "planning_ms": 1})
        lines = [said if line == name else line for line in lines]
    with service(command=lying(*lines)) as planner:
        planner.submit(0, range(40), a800_batch(0, 40))
        monkeypatch.setattr(planner, "_command", producer_command())
        one = planner.get(0)
        assert planner.restarts == {reason: 1}
    assert (one.made_by, one.plan) == ("restarted", right)


@pytest.mark.parametrize("command", [("false",), ("echo", "rot")])
def test_where_no_producer_lives_this_process_makes_the_same_plans(command: tuple[str, ...]) -> None:
    here = a800_planner(kernels="pure")
    with service(command=command) as planner:
        for step in range(3):
            planner.submit(step, range(40), a800_batch(step, 40))
            one = planner.get(step)
            assert (one.made_by, one.plan) == ("here", here.plan(step, range(40), a800_batch(step, 40)))
        assert sum(planner.restarts.values()) == 5
        assert planner.producer_pid is None


def test_where_no_process_can_be_started_this_one_makes_the_same_plans() -> None:
    here = a800_planner(kernels="pure")
    with service(command=("/no/such/program",)) as planner:
        planner.submit(0, range(40), a800_batch(0, 40))
        one = planner.get(0)
    assert (one.made_by, one.plan) == ("here", here.plan(0, range(40), a800_batch(0, 40)))
    assert not planner.restarts


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
    with pytest.raises(ConfigError, match="ahead >= 0"):
        service(ahead=-1)


def test_steps_are_told_apart_by_their_number_not_by_their_order() -> None:
    """A reference planner picks plans by how many it has made; here any order of submission will do."""
    with service() as planner:
        for step in (9, 2, 5):
            planner.submit(step, range(20), a800_batch(step, 20))
        for step in (2, 5, 9):
            assert planner.get(step).plan.lengths == tuple(a800_batch(step, 20))
        assert not planner.restarts


# --- The producer's process dies with its parent.
ROOT = Path(__file__).parents[2]


def test_the_producer_dies_with_its_parent_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(600)")
    script = (
        "import time; from ds_hydra.planner.service import ProducerProcess, producer_command\n"
        "p = ProducerProcess(producer_command('slow_module', 0.1)); time.sleep(1)\n"
        "print(p.process.pid, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    assert_gone_with_its_parent(script, environment)


def assert_gone_with_its_parent(script: str, environment: dict[str, str]) -> None:
    """A script that tells the producer's process is killed: that is gone within some seconds; whoever inherits it may
    not have waited for it yet."""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
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


def test_the_producer_dies_with_its_parent() -> None:
    script = (
        "import os, sys, time; from tests.pure.test_planner_service import service\n"
        "s = service(); s.submit(0, range(5), [5, 6, 7, 8, 9]); s.get(0); print(s.producer_pid, flush=True)\n"
        "time.sleep(600)"
    )
    assert_gone_with_its_parent(script, {**os.environ, "PYTHONPATH": str(ROOT)})
