"""The same job on a quiet and on a busy machine, and with its planner's process hurt: the same plans, the same bits.

python -m tools.check_load [--quick] [--busy N] [--json FILE]

A job of three ranks proposes strategies and runs sequences in slices. Its plans, masters and moments after eight steps
are compared, to the bit, with those of an undisturbed run:

busy       beside N processes that compute without end (4 by default), ten times
ahead      with 0, 1 and 8 steps planned ahead in place of 2
hurt       its planner's process killed, stopped for 1 s, 6 s and for ever, talking nonsense, unable to live; busy
restarted  stopped after three steps and started again with another `ahead`; busy
hash       with other seeds of Python's hashes, in processes of their own; not with --quick
cold       with an empty cache of compiled kernels, whose compilation the first step waits for; not with --quick

Exits non-zero if a run differs, nothing was cut, or a producer was replaced that was late only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_hydra.commands.figures import figures_parser, finish, print_table
from tools.load.job import HURTS, Settings, run, share_before_forking

ROOT = Path(__file__).parents[1]
Found = dict[str, Any]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Beside processes that compute without end."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Case:
    """A run: what differs from the undisturbed one in its settings, its environment, and in what runs beside it."""

    kind: str
    what: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    beside: int = 0
    environment: Mapping[str, str] | None = None  # of a process of its own; {folder} is the run's
    restarted: bool = False

    def run(self, folder: str) -> Found:
        """What was found, in a folder for the run."""
        settings = Settings(folder, **self.changes)
        if self.environment is not None:
            return apart(settings, {key: value.format(folder=folder) for key, value in self.environment.items()})
        with busy(self.beside), contextlib.redirect_stdout(io.StringIO()):
            if not self.restarted:
                return run(settings)
            first = run(replace(settings, steps=3, every=3))
            second = run(replace(settings, ahead=1))
        return second | {key: first[key] + second[key] for key in ("plans", "makers", "recipes", "slices")}

    @property
    def replaces(self) -> bool:
        """Whether plans have to come from elsewhere than from the first producer."""
        return self.changes.get("ahead") == 0 or self.changes.get("hurt", "stopped for 1 s") != "stopped for 1 s"


def apart(settings: Settings, environment: Mapping[str, str]) -> Found:
    """A run from a process of its own, with more in its environment."""
    text = subprocess.run(
        [sys.executable, "-m", "tools.load.job", json.dumps(asdict(settings))],
        cwd=ROOT, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    found: Found = json.loads(text.splitlines()[-1])
    return found


def cases(quick: bool, beside: int) -> list[Case]:
    """All that is compared with the undisturbed run, in order."""
    hurts = ("killed", "talks nonsense") if quick else tuple(HURTS)
    found = [Case("busy", f"{number + 1}", beside=beside) for number in range(1 if quick else 10)]
    found += [Case("ahead", f"{ahead}", {"ahead": ahead}) for ahead in ((8,) if quick else (0, 1, 8))]
    found += [Case("hurt", hurt, {"hurt": hurt}, 0 if quick else beside) for hurt in hurts]
    found.append(Case("restarted", "after 3 steps", beside=beside, restarted=True))
    if not quick:
        found += [Case("hash", f"{seed}", environment={"PYTHONHASHSEED": f"{seed}"}) for seed in range(3)]
        found.append(Case("cold", "kernels", environment={"NUMBA_CACHE_DIR": "{folder}/numba"}))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 when all runs were the same."""
    parser = figures_parser(__doc__)
    parser.add_argument("--busy", type=int, default=4, metavar="N", help="processes that compute beside the job (4)")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    share_before_forking()

    def timed(case: Case) -> dict[str, Any]:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = case.run(folder)
        return {"kind": case.kind, "what": case.what, "seconds": time.perf_counter() - began, **found}

    calm = timed(Case("calm", ""))
    missed = [] if calm["slices"] else ["no sequence was cut, so plans could hardly differ"]
    rows = []
    for case in cases(options.quick, options.busy):
        row = timed(case)
        row["same plans"] = sum(map(str.__eq__, row["plans"], calm["plans"]))
        row["same bits"] = row["bits"] == calm["bits"]
        if (row["plans"], row["bits"]) != (calm["plans"], calm["bits"]) or set(row["recipes"]) != set(calm["recipes"]):
            missed.append(
                f"{case.kind} {case.what}: {row['same plans']} of {len(calm['plans'])} plans are the same, masters and "
                f"moments {row['bits']} against {calm['bits']}"
            )
        if bool({"restarted", "here"} & set(row["makers"])) != case.replaces:
            missed.append(f"{case.kind} {case.what}: its plans were made by {', '.join(sorted(set(row['makers'])))}")
        rows.append(row)
    print_table(
        ("kind", "what", "same plans", "same bits", "made by", "longest wait, s", "seconds"),
        [
            (row["kind"], row["what"], row["same plans"], str(row["same bits"]), ", ".join(sorted(set(row["makers"]))),
             row["waited_ms"] / 1e3, row["seconds"])
            for row in rows
        ],
    )  # fmt: skip
    same = sum(row["same bits"] for row in rows)
    summary = f"{same} of {len(rows)} runs the same to the bit, {calm['slices']} slices in {len(calm['plans'])} steps"
    return finish("check_load", summary, {"calm": calm, "runs": rows}, missed, options.json)


if __name__ == "__main__":
    sys.exit(main())
