"""That no tool is forgotten: `tools.check` finds each, runs it, and fails where it fails."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import aims, check, machine

# Modules of the folder that print no figures.
OTHERS = {"aims", "check", "count_pages", "deepspeed_baselines", "image_classes", "machine"}
ROOT = Path(__file__).resolve().parents[2]


def test_every_tool_is_run() -> None:
    assert set(check.tool_names()) == {path.stem for path in (ROOT / "tools").glob("*.py")} - OTHERS


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("print('bench_it: 3 rows; all aims met')", 0, "bench_it: 3 rows; all aims met"),
        ("print('bench_it: 3 rows; 1 aims missed'); raise SystemExit(1)", 1, "bench_it: 3 rows; 1 aims missed"),
        ("raise RuntimeError('rotten')", 1, "bench_it: no summary line"),
        ("import time; time.sleep(60)", -9, "bench_it: stopped after 1 s"),
    ],
)
def test_how_a_tool_ends_is_told(
    body: str, code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "bench_it.py").write_text(f"# figures_parser()\n{body}\n")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert check.tool_names(tmp_path) == ["bench_it"]
    ran = check.run("bench_it", quick=False, limit_s=1.0 if code == -9 else 60.0)
    assert (ran.code, ran.summary) == (code, told)
    assert ran.cpu_s > 0


def test_each_aim_is_told_as_those_have_ended_who_judge_by_it() -> None:
    output = "PASSED tests/gloo/test_resume.py::test_a\nFAILED tests/gloo/test_own_losses.py::test_b - assert\n"
    ran = [check.Ran(check.TESTS, 1, "", 1.0, 1.0, output), check.Ran("bench_systems", 0, "", 1.0, 1.0, "")]
    told = {name: held for name, _, _, held in check.aims_of(ran)}
    assert told.keys() == {name for name in vars(aims) if name.isupper()}
    assert (told["POST_TRAINING"], told["SYSTEM_GAP"], told["SAVE"]) == ("NO", "yes", "-")


def test_bounds_stand_in_the_table_of_aims_and_every_one_is_used() -> None:
    """A name that says aim or most, given a number at the top of a tool's file, is a bound of its own."""
    texts = {
        path: path.read_text(encoding="utf-8")
        for folder in ("tools", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "aims.py"
    }
    own = [
        f"{path}: {name}"
        for path, text in texts.items()
        if path.is_relative_to(ROOT / "tools")
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        for name in ast.unparse(target).strip("()").split(", ")
        if {"AIM", "AIMS", "MOST", "AGREEMENT", "TOLERANCE"} & set(name.split("_")[: 1 + (not name.startswith("_"))])
    ]
    assert not own, own
    used = {name for text in texts.values() for name in re.findall(r"\baims\.([A-Z_0-9]+)", text)}
    assert used == {name for name in vars(aims) if name.isupper()}


def test_aims_in_seconds_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that takes twice as long has twice as long; a faster one is asked for more, but not where it waits."""
    rounds: list[float] = []
    clock = [100.0]
    monkeypatch.setattr(machine, "_round_s", lambda: rounds.pop())
    monkeypatch.setattr(machine.time, "monotonic", lambda: clock[0])

    def measures(times: float) -> None:
        rounds[:] = [times * aims.LOOP_S * late for late in (3.0, 1.0, 7.0)]  # a loaded machine's

    for times, here, waiting in ((2.0, 8.0, 8.0), (0.5, 2.0, 4.0)):
        monkeypatch.setattr(machine, "_measured", [])
        measures(times)
        assert machine.limit(4.0).here == pytest.approx(here)
        assert machine.limit(4.0, waits=True).here == pytest.approx(waiting)
        assert not rounds, "measured several times, and once while it is fresh"
    assert str(machine.limit(4.0)) == "2, as 4 on the reference machine"
    for seconds, times, here in ((60.0, 1.0, 4.0), (60.0, 0.5, 4.0), (60.0, 0.5, 2.0), (1.0, 9.0, 2.0)):
        clock[0] += seconds
        measures(times)
        assert machine.limit(4.0).here == pytest.approx(here), "the slower of before and after counts"


def test_the_loop_is_measured_as_cpu_time() -> None:
    assert 0.01 < machine.loop_s() < 100.0
    assert machine.limit(4.0).here == pytest.approx(4.0 * machine.loop_s() / aims.LOOP_S)


def test_every_aim_in_seconds_is_read_through_the_machine() -> None:
    """Names end in their unit; what is compared with a simulated time, or with a constant, is not of this machine."""
    absolute = {"SIMULATED_MS", "CHUNKED_MS", "GROWTH_STEP_MS", "SILENT_S"}
    timed = {name for name in vars(aims) if name.endswith(("_S", "_MS")) and name not in absolute | {"LOOP_S"}}
    texts = [path.read_text("utf-8") for folder in ("tools", "tests") for path in (ROOT / folder).rglob("*.py")]
    for name in timed:
        reading = [text for text in texts if f"aims.{name}" in text]
        assert all("machine.limit(" in text or "figures.limited(" in text for text in reading), name


def test_marked_tests_run_where_they_are_asked_for_and_a_failing_one_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests" / "support").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\npythonpath = ['.']\naddopts = '-m \"not long\"'\nmarkers = ['long', 'drawn']\n"
    )
    for name in ("__init__.py", "drawn_tests.py"):
        (tmp_path / "tests" / "support" / name).write_text((ROOT / "tests" / "support" / name).read_text("utf-8"))
    (tmp_path / "tests" / "conftest.py").write_text(
        "import pytest\nfrom tests.support.drawn_tests import add_option as pytest_addoption, draw\n"
        "pytest_collection_modifyitems = pytest.hookimpl(trylast=True)(draw)\n"
    )
    rows = "import pytest\n" + "".join(
        f"@pytest.mark.{mark}\n@pytest.mark.parametrize('n', range(8))\ndef test_{mark}(n):\n    assert n != 3\n"
        for mark in ("long", "drawn")
    )
    (tmp_path / "tests" / "test_rows.py").write_text(rows + "def test_other():\n    pass\n")
    (tmp_path / "tests" / "test_none.py").write_text("def test_other():\n    raise KeyError\n")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert check.marked_files(tmp_path) == ["tests/test_rows.py"]
    ran = check.run(check.TESTS, quick=False, limit_s=600.0)
    assert (ran.code, ran.summary) == (1, "tests: 14 passed, 2 failed")
    monkeypatch.setattr(check, "QUICK_SHARE", 0.25)
    assert sum(map(int, re.findall(r"\d+", check.run(check.TESTS, quick=True, limit_s=600.0).summary))) == 4

    def counts(*arguments: str) -> int:
        command = [sys.executable, "-m", "pytest", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return sum(map(int, re.findall(r"\b(\d+) (?:passed|failed)", done.stdout)))

    assert counts("tests/test_rows.py") == 1 + 1, "a sixth of those marked drawn, and those that have no mark"
    assert counts("tests/test_rows.py::test_drawn") == 8, "who names a test means all of it"
    assert counts("tests/test_rows.py", "-k", "test_drawn") == 8
