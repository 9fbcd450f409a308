"""Faults of running jobs: dead and frozen ranks, restarts, false alarms, long runs."""

from __future__ import annotations

import itertools
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools import aims, machine
from tools.faults.tally import Tally

NUM_RANKS, STEPS = 4, 5


def check_faults(quick: bool, sample: int | None = None) -> Tally:
    """Fault × phase × rank: every rank ends in time, nothing lives on, and the restarted job ends the same."""
    from tests.support.fault_job import FAULTS, PHASES, Fault, run_job

    tally = Tally("faults")
    cases = list(itertools.product(FAULTS, PHASES, (0, 1, NUM_RANKS - 1)))
    if sample is not None:
        cases = random.Random(0).sample(cases, min(sample, len(cases)))
    elif quick:
        cases = [("SIGKILL", "forward", 1), ("SIGSTOP", "push", 0), ("exception", "saving", 3)]
    with tempfile.TemporaryDirectory() as scratch:
        expected = run_job(Path(scratch), NUM_RANKS, STEPS).digests
    ends: dict[str, list[float]] = {"dead": [], "frozen": []}
    for kind, phase, rank in cases:
        what = f"{kind} in {phase} of rank {rank}"
        with tempfile.TemporaryDirectory() as scratch:
            fault = Fault(kind, phase, rank, step=2)
            first = run_job(Path(scratch), NUM_RANKS, STEPS, fault=fault)
            frozen = kind == "SIGSTOP"
            limit = machine.limit(aims.FROZEN_S if frozen else aims.DEAD_S, waits=True)
            if kind != "SIGTERM":
                ends["frozen" if frozen else "dead"].append(first.end_s)
            wrong = []
            if not first.fired:
                wrong.append("the fault was not reached")
            if kind != "SIGTERM" and first.end_s > limit.here:
                wrong.append(f"the last rank ended after {first.end_s:.1f} s (aim {limit})")
            if first.orphans:
                wrong.append(f"{len(first.orphans)} processes lived on")
            if kind == "SIGTERM" and first.codes != [0] * NUM_RANKS:
                wrong.append(f"exit codes {first.codes}")
            if kind != "SIGTERM" and not (f"rank {rank}" in first.errors and "step 3" in first.errors):
                wrong.append("no error names the rank and the step")
            second = run_job(Path(scratch), NUM_RANKS, STEPS)
            if second.digests != expected:
                wrong.append(f"after a restart the parameters differ: exit codes {second.codes}")
            tally.count(not wrong, f"{what}: {'; '.join(wrong)}")
        if tally.tried % 21 == 0:
            print(f"  {tally.passed} of {tally.tried} held, of {len(cases)} to try", flush=True)
    tally.figures = {f"{name}_s_worst": max(times, default=0.0) for name, times in ends.items()}
    return tally


def check_resume(quick: bool) -> Tally:
    """Stop at every step of 12, twice, with another strategy on both sides: difference 0."""
    from tests.support.fault_job import run_job

    tally = Tally("exact resume")
    steps = 4 if quick else 12
    with tempfile.TemporaryDirectory() as scratch:
        expected = run_job(Path(scratch), NUM_RANKS, steps, limit_s=120).digests
    for stop in range(1, 2 if quick else steps - 1):
        with tempfile.TemporaryDirectory() as scratch:
            for end in (stop, stop + 1, steps):
                last = run_job(Path(scratch), NUM_RANKS, end, limit_s=120)
            tally.count(last.digests == expected, f"stopped after steps {stop} and {stop + 1}: parameters differ")
    return tally


def check_resharding(quick: bool) -> Tally:
    """8 -> 4 -> 6 -> 8 ranks: masters and moments after each load, and the order of the data."""
    from ds_hydra.testing import run_ranks
    from tests.gloo.test_resume import leg
    from tests.support.small_job import same, small_engine

    tally = Tally("resharding")
    with tempfile.TemporaryDirectory() as scratch:
        saved: dict[str, Any] = {}
        order: list[tuple[int, ...]] = []
        worlds = (4, 2, 1) if quick else (8, 4, 6, 8)
        for num_ranks in worlds:
            loaded, after, drawn = run_ranks(leg, num_ranks, Path(scratch), 2, timeout=300)[0]
            tally.count(not saved or same(loaded, saved), f"loaded by {num_ranks} ranks: masters or moments differ")
            saved, order = after, order + drawn
        steps = 2 * len(worlds)
        straight = run_ranks(lambda rank: [small_engine(rank).sampler.batch(step) for step in range(steps)], 1)[0]
        tally.count(order == straight, "the order of the sequences differs")
    return tally


def check_false_alarms(quick: bool) -> Tally:
    """Ranks slowed five times, by pulses of SIGSTOP in turn: none counts as dead or frozen, and training ends."""
    from tests.support.fault_job import run_job

    tally = Tally("false alarms")
    seconds = 8.0 if quick else 180.0
    stop = threading.Event()

    def slow(pids: Sequence[int]) -> None:
        def pulse() -> None:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not stop.is_set():
                for on, pause in ((signal.SIGSTOP, 0.8), (signal.SIGCONT, 0.2)):
                    for pid in pids:
                        try:
                            os.kill(pid, on)
                        except ProcessLookupError:
                            stop.set()
                    time.sleep(pause)

        threading.Thread(target=pulse, daemon=True).start()

    with tempfile.TemporaryDirectory() as scratch:
        steps = 40 if quick else 600
        outcome = run_job(Path(scratch), NUM_RANKS, steps, every=50, during=slow, limit_s=seconds * 4 + 120)
        stop.set()
    alarms = outcome.errors.count("is frozen") + outcome.errors.count(" died")
    tally.figures = {"alarms": alarms, "seconds": outcome.end_s}
    tally.count(alarms == 0 and outcome.codes == [0] * NUM_RANKS, f"{alarms} alarms, exit codes {outcome.codes}")
    return tally


def check_soak(quick: bool) -> Tally:
    """Many steps, another strategy in each, saved in the background: memory, descriptors and threads stay flat."""
    from ds_hydra.testing import run_ranks
    from tests.support.small_job import small_engine

    tally = Tally("soak")
    steps = 60 if quick else 2000

    def run(rank: int) -> tuple[dict[str, int], dict[str, int]]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = scratch if rank == 0 else ""
            from ds_hydra.ranks.channel import Channel

            folder = Channel(None, rank, NUM_RANKS).tell(folder)
            block = {"dir": folder, "every": 10, "keep_last": 2, "asynchronous": True}
            engine = small_engine(rank, checkpoint=block, faults={"frozen_seconds": 9.0})
            while engine.global_steps < steps // 2:
                engine.train_batch()
            before = _resources()
            while engine.global_steps < steps:
                engine.train_batch()
            engine.wait_for_checkpoint()
            after = _resources()
            engine.destroy()
        return before, after

    for rank, (before, after) in enumerate(run_ranks(run, NUM_RANKS, timeout=3600)):
        tally.figures[f"rank{rank}"] = {"before": before, "after": after}
        for key, room in (("descriptors", 0), ("threads", 1), ("memory_mb", max(10, before["memory_mb"] // 20))):
            grown = after[key] - before[key]
            tally.count(grown <= room, f"rank {rank}: {key} grew from {before[key]} to {after[key]}")
    return tally


def _resources() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_mb": pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
