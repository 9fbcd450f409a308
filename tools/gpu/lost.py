"""Row "lost ranks" of the first hour: ranks die, others go on; masters equal those of jobs stopped and restarted.

  python -m tools.gpu.lost [COURSE ...]

On CPUs without a GPU. On devices four ranks, which may share one (see `tools.gpu.bench`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ds_hydra.host.environment import JOINS, MEMBERS_FOLDER
from tests.support.elastic_job import Loss, Result, result_of
from tools.gpu.bench import ranks_at_hand
from tools.gpu.several import ROOT, environments

RANKS, STEPS, FAULT_STEP = 4, 5, 2
AT_ONCE = 3  # jobs, which share the devices
LIMIT_S = 100.0
COURSES = {
    phase: (Loss(phase, member, FAULT_STEP),)
    for phase, member in (("pull", 0), ("forward", 1), ("backward", 3), ("push", 1), ("buddy", 2), ("vote", 0),
                          ("update", 1))
} | {
    f"a second one while {phase}": (Loss("forward", 1, FAULT_STEP), Loss(phase, 3, FAULT_STEP))
    for phase in ("connecting", "rebuilding", "re-sharding", "copying")
} | {
    "a joiner": (Loss("push", 1, FAULT_STEP),),
    "a frozen one": (Loss("forward", 2, FAULT_STEP, "SIGSTOP"),),
}  # fmt: skip


def main(names: Sequence[str]) -> int:
    """Run the courses; 0 when all others have gone on, to the right bits."""
    if torch.cuda.is_available() and ranks_at_hand() < RANKS:
        print(f"left out: it needs {RANKS} ranks that NCCL can connect, and there are {ranks_at_hand()}")
        return 0
    chosen = names or tuple(COURSES)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda name: wrong(name, Path(folder)), chosen))
    for name, problems in zip(chosen, found, strict=True):
        for problem in problems:
            print(f"wrong: {name}: {problem}")
    bad = sum(map(bool, found))
    print(f"lost: {len(chosen)} courses, {f'{bad} wrong' if bad else 'all others went on, with the same bits'}")
    return 1 if bad else 0


def wrong(name: str, folder: Path) -> list[str]:
    """What is wrong with a course."""
    losses, joins = COURSES[name], name == "a joiner"
    place = folder / name.replace(" ", "_")
    began = time.monotonic()
    result = run(place, RANKS, steps=STEPS, losses=[tuple(vars(loss).values()) for loss in losses], joins=joins)
    dead = {loss.member for loss in losses}
    codes = [-9 if member in dead else 0 for member in range(RANKS + joins)]
    if result.codes != codes:
        return [f"exit codes {result.codes}, not {codes}", *(text[-3000:] for text in result.told)]
    legs = result.legs(RANKS, STEPS)
    took = [line.split("go on with step")[1][:60] for text in result.told for line in text.splitlines()
            if "go on with step" in line]  # fmt: skip
    print(f"{name}: {legs} in {time.monotonic() - began:.0f} s; step{';'.join(took)}", flush=True)
    if len(legs) < 2:
        return [f"nothing was lost: {legs}"]
    right = stopped(tuple(legs), folder)
    return [] if result.digests == right else [f"masters of {legs} are not those of a stop and a restart"]


@cache
def stopped(legs: tuple[tuple[int, int], ...], folder: Path) -> list[str]:
    """Digests of jobs that are stopped and restarted with so many ranks, until these steps."""
    place, digests, tag = folder / "_".join(f"{ranks}-{until}" for ranks, until in legs), list[str](), ""
    for ranks, until in legs:
        result = run(place, ranks, steps=until, tag=tag)
        assert not any(result.codes), f"a stopped job ended with {result.codes}: {result.told}"
        digests, tag = result.digests, f"until{until}"
    return digests


def run(place: Path, ranks: int, *, joins: bool = False, **job: Any) -> Result:
    """A job of so many ranks in this folder, and a process that joins it."""
    place.mkdir(exist_ok=True)
    members = {MEMBERS_FOLDER: str(place)}
    given = [one | members for one in environments(ranks)]
    given += [one | members | {JOINS: "1"} for one in environments(int(joins))]
    processes = []
    for number, environment in enumerate(given):
        command = [sys.executable, "-m", "tools.gpu.lost_rank", str(place), str(number), repr({**job, "joins": joins})]
        with (place / f"told{number}").open("w") as told:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=told, stderr=told))
    deadline = time.monotonic() + LIMIT_S
    while any(one.poll() is None for one in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    for one in processes:
        one.kill()
    codes: list[int | None] = [one.wait() for one in processes]
    return result_of(place, codes, [(place / f"told{number}").read_text() for number in range(len(given))])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
