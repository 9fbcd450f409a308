"""What a newcomer sees first: the demo's first figure at once, lines that move, and one figure wherever it is shown."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from ds_hydra.commands import moving
from ds_hydra.commands.demo_preview import CLUSTERS, MIXES, OURS, ROWS, options, shipped_gains, span
from ds_hydra.rivals.preview import BALANCED, FIXED, INFINIPIPE, ONE, SCHEDULED, ZERO_3
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
    assert f"{shipped_gains()[0].mean_ms[OURS] / 1e3:.2f} s  ds-hydra" in told


README_ROWS = {
    FIXED: "best fixed layout of TP, PP, CP (ring or Ulysses), packed and dealt out in turn",
    BALANCED: "such a layout, sequences balanced by our costs",
    SCHEDULED: "Megatron-Core's dynamic context parallelism, as it schedules",
    ZERO_3: "DeepSpeed ZeRO-3 with Ulysses, packed and dealt out in turn",
    INFINIPIPE: "InfiniPipe, as published",
    ONE: "ds-hydra with one layout in every step",
}


def test_readme_and_its_pages_show_the_shipped_figures() -> None:
    readme, comparison = (ROOT / "README.md").read_text(), (ROOT / "docs" / "comparison.md").read_text()
    gains = shipped_gains()
    assert [(gain.model, gain.lengths) for gain in gains] == list(ROWS)
    of_models = [[gain for gain in gains if gain.model == model] for model in CLUSTERS]
    for name, words in README_ROWS.items():
        cells = " | ".join(span(gain.times(name) for gain in some) for some in of_models)
        assert f"| {words} | {cells} |" in readme
    fixed, scheduled = (span(row[at] for row in gains[0].over_links.values()) for at in (0, 1))
    assert (
        f"With 12 to 100 GB/s between nodes 32B takes {fixed} times as long under the best balanced layout, and "
        in readme
    )
    assert f"{scheduled} by Megatron-Core's schedule" in readme
    for gain in gains:
        seconds = " | ".join(f"{gain.mean_ms[name] / 1e3:.2f}" for name in (*README_ROWS, OURS))
        assert all(f"`{gain.layouts[name]}`" in comparison for name in (FIXED, BALANCED, ONE))
        assert f", {gain.lengths.partition(',')[0]} | {seconds} |" in comparison
        for at, rival in enumerate(("best fixed, balanced", "Megatron-Core's schedule") if gain.over_links else ()):
            cells = " | ".join(f"{row[at]:.2f}" for row in gain.over_links.values())
            assert f"{rival} | {cells} |" in comparison
    assert all(word in readme for word in options(*ROWS[0]) if word != MIXES[ROWS[0][1]]), (
        "the command gives the figures"
    )


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
