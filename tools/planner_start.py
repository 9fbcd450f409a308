"""The planner's first plan in a new process, with kernels that are cached and that are not."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import aims
from tools.planner_workloads import TABLES, Figures

_FIRST_PLAN = """
import time; began = time.process_time()
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
import sys, hashlib, random
table = CostTable.load(sys.argv[1])
texts = ("4*tp16", "tp16 + 2*tp8 + 8*tp4", "8*tp4pp2", "2*tp8 + 12*tp4")
planner = Planner(table, [StrategyShape.parse(text) for text in texts],
                  PlannerOptions(kernels="compiled"))
draw, digest = random.Random(7), hashlib.sha256()
for step in range(8):
    lengths = [min(32768, int(draw.lognormvariate(6.22, 1.233)) + 1) for _ in range(190)]
    plan = planner.plan(step, range(190), lengths)
    if step == 0:
        first = time.process_time() - began
    digest.update(plan.to_json().encode())
print(first, digest.hexdigest())
"""


def first_plan(cache: str | None = None, hash_seed: int = 0) -> tuple[float, str]:
    """CPU seconds from a fresh interpreter to the first plan, and a digest of eight plans."""
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), **({"NUMBA_CACHE_DIR": cache} if cache else {})}
    command = [sys.executable, "-c", _FIRST_PLAN, str(TABLES / "llama_32b_a800.json")]
    root = Path(__file__).resolve().parents[1]
    out = subprocess.run(command, env=env, cwd=root, check=True, capture_output=True, text=True).stdout.split()
    return float(out[0]), out[1]


def bench_start(figures: Figures, quick: bool) -> None:
    """Start-up with a warm cache, cold compilation, and the same plans in several runs, some of them under load."""
    warm = [first_plan(hash_seed=run) for run in range(3)]
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        loaded = [first_plan(hash_seed=run) for run in range(3, 4 if quick else 5)]
    finally:
        for process in load:
            process.kill()
            process.wait()
    seconds = statistics.median(s for s, _ in warm)
    figures.limited("import and first plan, warm cache, CPU s", seconds, aims.FIRST_PLAN_S)
    same = len({digest for _, digest in warm + loaded}) == 1
    figures.note(f"same plans in {len(warm + loaded)} runs, {len(loaded)} under load", str(same), "True", same)
    if not quick:
        with tempfile.TemporaryDirectory() as cache:
            print(f"  cold compile: {first_plan(cache)[0]:.0f} s of CPU time")
