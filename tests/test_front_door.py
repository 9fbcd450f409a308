"""What a newcomer sees first: the demo's first figure at once, lines that move, and one figure wherever it is shown."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

from ds_hydra.commands import moving
from ds_hydra.commands.demo_preview import OPTIONS, shipped_gains
from tools import aims, machine

ROOT = Path(__file__).resolve().parents[1]


def test_the_first_figure_needs_neither_torch_nor_a_planner() -> None:
    code = (
        "import sys; from ds_hydra.commands.demo import _first_part; _first_part(False); "
        "assert not {'torch', 'numba', 'highspy'} & set(sys.modules), 'heavy import'"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert spent_s < machine.limit(aims.FIRST_FIGURE_CPU_S).here
    assert "shipped figures (--recompute computes them)" in told
    assert f"{shipped_gains()[0].ours_ms / 1e3:.2f} s  ds-hydra" in told


def test_readme_and_its_pages_show_the_shipped_figures() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) \|$", readme, re.M)
    assert [(words, *map(float, numbers)) for words, *numbers in rows] == [
        (one.lengths, *(round(ms / 1e3, 2) for ms in (one.full_ms, one.balanced_ms, one.ours_ms)), round(one.gain, 2))
        for one in shipped_gains()
    ]
    (layout,) = re.findall(r"fixed layout is `([^`]+)`", readme)
    assert {one.fixed for one in shipped_gains()} == {layout}
    comparison = (ROOT / "docs" / "comparison.md").read_text()
    assert all(f"{float(seconds):.2f} s" in comparison for seconds in rows[0][1:4])
    assert all(word in readme for word in OPTIONS), "the command gives the figures"


def test_readme_shows_the_rivals_of_the_comparison() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"\| (1\.\d\d) \| (1\.\d\d) \| (2\.\d\d) \|$", readme, re.M)
    same = {"model": "32b", "gpus": 64, "context": 32768, "tokens": 200000, "keys": 1.0, "between": 25.0}
    rivals = ("its layout, our assignment", "packing-aware CP", "DeepSpeed")
    found = []
    for cell in json.loads((ROOT / "benchmarks" / "systems.json").read_text())["cells"]:
        if same.items() <= cell["cell"].items():
            steps = {name: sum(one["step_ms"]) for name, one in cell["systems"].items()}
            found.append([round(steps[name] / steps["ds-hydra"], 2) for name in rivals])
    assert [[float(one) for one in row] for row in rows] == found


def test_silence_ends_within_ten_seconds() -> None:
    assert max(moving.EVERY_S, moving.EVERY_LINE_S) <= aims.SILENT_S


def test_a_line_moves_while_the_lock_is_held_and_ranks_are_forked() -> None:
    """The writer is told that it may end, as forked ranks hold its pipe open too."""
    code = (
        "import os, time; from ds_hydra.commands.moving import moving\n"
        "with moving('computing', 9.0):\n"
        "    child = os.fork()\n"
        "    time.sleep(0.6 if child else 30)\n"
        "    if not child: os._exit(0)\n"
        "print('ended', flush=True); os.kill(child, 9)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["   computing: 0 s of about 9", "ended"]
    assert time.monotonic() - began < 20


def test_the_demo_is_installed_without_what_developers_need() -> None:
    shown = subprocess.run(
        ["make", "-n", "demo", "VENV=/nowhere/venv"], cwd=ROOT, check=True, capture_output=True, text=True,
        env={**os.environ, "MAKEFLAGS": ""},
    ).stdout  # fmt: skip
    assert "ds-hydra demo" in shown
    assert "--editable ." in shown
    assert "[dev]" not in shown
    loud = [line for line in shown.splitlines() if "pip" in line and "setuptools" not in line]
    assert loud
    assert not [line for line in loud if "--quiet" in line], "minutes without a line"
