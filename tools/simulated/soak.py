"""Does an emulated cluster run for ever? Many steps with another strategy each, and what every rank holds meanwhile."""

from __future__ import annotations

import gc
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ds_hydra.emulate.cluster import EmulatedJob, emulate
from ds_hydra.emulate.engine import EmulatedEngine
from tests.support.planner_cases import random_job, random_lengths, random_plan
from tools import aims
from tools.simulated.part import Part

RANKS, STRATEGIES = 16, 12
QUICK_RANKS, QUICK_STRATEGIES = 8, 8  # all have run before memory is first looked at
# Allocators settle and caches fill, by some hundred KiB; to keep one activation of each step would be ten times more.


class Holding(NamedTuple):
    """What one rank holds after a step."""

    memory: int  # bytes that are not files; what is still shared with the parent counts, so that it does not grow
    files: int
    threads: int


def holding(engine: EmulatedEngine) -> Holding | None:
    """Of this process, after every tenth step."""
    if engine.global_steps % 10:
        return None
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = int(status["RssAnon"].split()[0]) << 10
    return Holding(memory, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


def soak(steps: int, *, quick: bool, timeout_s: float) -> Part:
    """Run `steps` steps, with another strategy in each, and compare what ranks hold early and late."""
    rng = random.Random(16)
    ranks, count = (QUICK_RANKS, QUICK_STRATEGIES) if quick else (RANKS, STRATEGIES)
    cluster, lengths = random_job(rng, ranks), random_lengths(rng, 4000)
    strategies: dict[str, None] = {}
    while len(strategies) < count:
        strategies[str(random_plan(rng, cluster.table, ranks).phases[0].shape)] = None
    job = EmulatedJob(cluster, tuple(strategies), lengths, 400 * ranks, choose="cycle")
    runs = emulate(job, steps, look=holding, timeout_s=timeout_s)
    faults = [f"step {step.plan.step}: {step.fault}" for step in runs[0] if step.fault]
    ran = [step.plan.strategy for step in runs[0]]
    same = sum(one == other for one, other in pairwise(ran))
    rows: list[tuple[object, ...]] = []
    missed = faults[:3] + ([f"{same} steps kept the strategy of the step before"] if same else [])
    for index, what in enumerate(Holding._fields):
        seen = [[step.seen[index] for step in run if step.seen is not None] for run in runs]
        early = len(seen[0]) // 3
        growth = max(of_rank[-1] - of_rank[early] for of_rank in seen)
        rows.append((what, max(of_rank[early] for of_rank in seen), max(of_rank[-1] for of_rank in seen), growth))
        if growth > (aims.GROWTH_BYTES if what == "memory" else 0):
            missed.append(f"{what} of a rank grew by {growth:,} from step {10 * (early + 1)} to step {steps}")
    summary = f"{len(ran)} steps on {ranks} ranks without a deadlock, {len(set(ran))} strategies in turn"
    return Part("Many steps", ("held by a rank", "early", "late", "largest growth"), rows, summary,
                {"soak": rows, "steps": len(ran)}, missed)  # fmt: skip
