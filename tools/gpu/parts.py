"""The table of parts, and how one is run: guarded, with what it found or what broke it as a plain record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tools.gpu.bench import Bench, Findings

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 25.0  # a process of its own needs to import everything and to begin on the device
_GRACE_SECONDS = 5.0  # for a launcher to end its ranks
_TAIL = 4000  # characters of a process's last words


@dataclass(frozen=True)
class Part:
    """A row of the table."""

    what: str  # it measures, for a reader
    module: str
    function: str
    seconds: float  # on a device; all together leave room for the starts of their processes

    def run(self, bench: Bench) -> Findings:
        """Measure."""
        # Imported here, so that a part that cannot even be imported does not take the others with it.
        measure: Callable[[Bench], Findings] = getattr(import_module(f"tools.gpu.{self.module}"), self.function)
        return measure(bench)


# In this order: `prediction` uses the table that `costs` leaves.
PARTS = {
    "attention": Part("attention backends against SDPA in FP32: errors and times on several mixes of lengths",
                      "kernels", "measure_attention", 45),
    "training": Part("a 1B Llama on one rank in BF16 against four baselines in turns: tokens/s, MFU, peak memory",
                     "training", "measure_training", 300),
    "costs": Part("a cost table by local shapes, and its error on held-out lengths",
                  "training", "measure_costs", 110),
    "prediction": Part("step time and peak memory as predicted, against what steps take",
                       "training", "measure_prediction", 45),
    "launches": Part("kernels that a layer launches", "kernels", "measure_launches", 25),
    "syncs": Part("hidden synchronisations of a step, each with its place", "kernels", "measure_syncs", 25),
    "budget": Part("where a step's time goes, by class of kernel, summed to 100 %", "budget", "measure_budget", 40),
    "lengths": Part("peak memory and tokens/s of sequences up to the longest that one device holds",
                    "budget", "measure_lengths", 120),
    "several": Part("ranks on several devices, the strategy changing every step: exposed pull and push",
                    "several", "measure_several", 75),
}  # fmt: skip


def run_here(name: str, bench: Bench) -> dict[str, Any]:
    """One part in this process. Its record has `status` "measured" or "failed", then with the trace in `error`."""
    try:
        found = PARTS[name].run(bench)
    except Exception:
        error = traceback.format_exc()
        return {"status": "failed", "seconds": bench.seconds - bench.left, "error": error}
    return {
        "status": "measured",
        "seconds": bench.seconds - bench.left,
        "summary": found.summary,
        "missed": list(found.missed),
        "tables": [table._asdict() for table in found.tables],
        "figures": found.figures,
    }


def run_apart(name: str, bench: Bench, limit: float) -> dict[str, Any]:
    """One part in a process of its own, which is ended after `limit` seconds.

    An error on a GPU may leave the process unable to use it again, and a part that hangs would keep the others
    from running; memory that one part leaves behind would count as the next one's.
    """
    answer = bench.folder / f"{name}.json"
    command = [sys.executable, "-m", "tools.bench_gpu", name, "--answer", str(answer), "--seconds", str(bench.seconds)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    command += [] if bench.full else ["--quick"]
    began = time.monotonic()
    job = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        last_words = job.communicate(timeout=limit)[1]
        how = f"its process ended with {job.returncode}"
    except subprocess.TimeoutExpired:
        _end_group(job)
        last_words, how = job.communicate()[1], "its process took too long and was ended"
    if answer.exists():
        return json.loads(answer.read_text())
    error = f"{how}; its last words:\n{last_words[-_TAIL:]}"
    return {"status": "failed", "seconds": time.monotonic() - began, "error": error}


def _end_group(job: subprocess.Popen[str]) -> None:
    """End a process with all that it has started."""
    # A launcher that is asked to end ends its ranks, which are no part of this group; one that is killed leaves them.
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        os.killpg(job.pid, signal.SIGKILL)


def device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
