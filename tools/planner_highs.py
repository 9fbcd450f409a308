"""What HiGHS is worth in every step: steps with its composed strategies against those of the candidates alone.

Strategies are always proposed quickly, whatever a job's default is: the better they are, the less is left to compose.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import numpy as np

from ds_hydra.planner import Planner
from ds_hydra.planner.chunked import ChunkedSearch
from ds_hydra.planner.composing import budget_of
from ds_hydra.planner.kernels.problem import PipelineKinds
from tools import aims
from tools.planner_workloads import Figures, Workload

# Model, GPUs, what strategies were proposed for, what lengths come then, and the share of a step that is to be saved.
SHIFT = "CommonCrawl-like"
WHOLE = (
    ("7b", 16, "pretraining", "pretraining", aims.COMPOSED_GAIN),
    ("7b", 64, "pretraining", "pretraining", aims.COMPOSED_GAIN),
    ("32b", 64, SHIFT, "pretraining", aims.COMPOSED_SHIFT_GAIN),
)
CHUNKED = (("32b", 64, SHIFT, SHIFT), ("7b", 16, "pretraining", "pretraining"), ("32b", 64, SHIFT, "pretraining"))
_STEPS = 10  # in which a few have a use for composed strategies: of three, one decides
_PLANS = "from tools.planner_highs import digest_of_plans; print(digest_of_plans())"


def bench_highs(figures: Figures, quick: bool) -> None:
    """Steps, HiGHS's CPU time, and equal plans on a busy machine."""
    for model, gpus, proposed, come, aim in WHOLE[::2] if quick else WHOLE:
        _whole(figures, Workload.of(model, proposed, gpus), Workload.of(model, come, gpus), aim)
    for model, gpus, proposed, come in CHUNKED[1:2] if quick else CHUNKED:
        _chunked(figures, Workload.of(model, proposed, gpus), Workload.of(model, come, gpus))
    _busy(figures, (1 if quick else 2) * (os.cpu_count() or 1))


def _whole(figures: Figures, proposed: Workload, come: Workload, aim: float) -> None:
    """Candidates of whole sequences: 60 batches, since few of them gain much and most nothing."""
    strategies, batches = proposed.propose(False)[0], come.batches(60)
    alone, composing = come.planner(strategies), come.planner(strategies, highs="composes")
    before = [alone.plan(step, range(len(b)), b.tolist()).predicted_ms for step, b in enumerate(batches)]
    made = [composing.made(step, range(len(b)), b.tolist()) for step, b in enumerate(batches)]
    after = [one.plan.predicted_ms for one in made]
    shares = [one.highs for one in made if one.highs is not None]
    what = str(come) if proposed.data == come.data else f"{come}, proposed for {proposed.data}"
    gain, worst = 1.0 - fmean(after) / fmean(before), max(a / b for a, b in zip(after, before, strict=True))
    print(f"{what}: step {fmean(before):.0f} -> {fmean(after):.0f} ms, {sum(s.new_strategy for s in shares)} of "
          f"{len(batches)} steps under a new strategy")  # fmt: skip
    figures.note(f"step below the same pool's, {what}", f"{gain:.2%}", f">= {aim:.1%}", gain >= aim)
    figures.note(f"step over the same pool's, worst, {what}", f"{worst:.3f}", "<= 1", worst <= 1.0)
    least = min(share.programs for share in shares) if len(shares) == len(batches) else 0
    figures.note(f"programs in a step, least, {what}", str(least), ">= 1", least >= 1)
    cpu = np.array([share.cpu_ms for share in shares])
    p90, of_step = float(np.percentile(cpu, 90)), float(cpu.mean()) / fmean(after)
    name = f"HiGHS, CPU ms in a step, p90 (worst {cpu.max():.0f}), {what}"
    figures.limited(name, p90, aims.HIGHS_MS)
    figures.limited(f"HiGHS, CPU over the step's predicted time, {what}", of_step, aims.HIGHS_SHARE)


def _chunked(figures: Figures, proposed: Workload, come: Workload) -> None:
    """Default candidates. Where composed strategies were searched, the candidates alone get as many tries."""
    strategies, batches = proposed.propose(False, wider=True)[0], come.batches(_STEPS)
    composing, alone = come.planner(strategies, highs="composes"), come.planner(strategies)
    budget = budget_of(come.table, strategies, composing.options.effort)
    more = Planner(come.table, strategies, alone.options, budget=budget._replace(tries=budget.tries * 3 // 2))
    before, after, searched = [], [], 0
    promising = ChunkedSearch.promising
    for step, batch in enumerate(batches):
        found: list[PipelineKinds] = []

        def noted(search: ChunkedSearch, *arguments: Any, into: list[PipelineKinds] = found) -> list[PipelineKinds]:
            into += promising(search, *arguments)
            return into

        with mock.patch.object(ChunkedSearch, "promising", noted):
            after.append(composing.plan(step, range(len(batch)), batch.tolist()).predicted_ms)
        searched += bool(found)
        control = more if found else alone
        before.append(control.plan(step, range(len(batch)), batch.tolist()).predicted_ms)
    what = str(come) if proposed.data == come.data else f"{come}, proposed for {proposed.data}"
    ratio = fmean(after) / fmean(before)
    print(f"{what}: step {fmean(before):.0f} -> {fmean(after):.0f} ms, composed ones searched in {searched} steps")
    figures.note(
        f"step over default pool's, same tries, {what}",
        f"{ratio:.4f}",
        f"<= {aims.COMPOSED_CHUNKED:.3f}",
        ratio < aims.COMPOSED_CHUNKED + 5e-5,
    )


def digest_of_plans() -> str:
    """Of eight plans with composed strategies."""
    come = Workload.of("7b", "pretraining", 64)
    planner = come.planner(come.propose(False)[0], highs="composes")
    made = [planner.made(step, range(len(b)), b.tolist()) for step, b in enumerate(come.batches(8))]
    assert any(one.highs is not None and one.highs.new_strategy for one in made), "no step had a use for one"
    return hashlib.sha256(b"".join(one.plan.digest() for one in made)).hexdigest()


def _busy(figures: Figures, others: int) -> None:
    """Plans of another process, beside so many busy ones, with other hashes."""
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    try:
        command = [sys.executable, "-c", _PLANS]
        env, root = {**os.environ, "PYTHONHASHSEED": "7"}, Path(__file__).resolve().parents[1]
        loaded = subprocess.run(command, env=env, cwd=root, check=True, capture_output=True, text=True).stdout.strip()
    finally:
        for process in load:
            process.kill()
            process.wait()
    same = loaded == digest_of_plans()
    figures.note("composed plans are the same beside busy processes", str(same), "True", same)
