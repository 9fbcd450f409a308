"""Part "several": ranks on several devices, a strategy that changes every step, and what pull and push cost then.

The ranks are started by torchrun, as a user would. On a CPU two ranks stand in.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ds_hydra.report.plots import read_steps
from ds_hydra.testing import free_port
from tools.gpu.bench import LAUNCHER, Bench, Findings, Table, gib

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = {
    2: ("2*tp1", "tp2", "pp2", "sp2"),
    4: ("4*tp1", "2*tp2", "tp2 + 2*tp1", "tp2pp2", "sp4", "tp4"),
    8: ("8*tp1", "4*tp2", "tp4 + 4*tp1", "2*tp2pp2", "tp2pp2 + 2*sp2", "sp8", "tp8"),
}
ROUNDS = 3  # that count; one before them builds every strategy


def measure_several(bench: Bench) -> Findings:
    """Steps under every strategy in turn."""
    devices = torch.cuda.device_count() if bench.device.type == "cuda" else 2
    if devices < 2:
        return Findings("one device: strategies, pulls and pushes need two", (), {"devices": devices})
    ranks = max(number for number in STRATEGIES if number <= devices)
    strategies = STRATEGIES[ranks] if bench.full else STRATEGIES[ranks][:2]
    rounds = 1 + bench.pick(ROUNDS, 1)
    records = launch(bench, ranks, strategies, rounds)[len(strategies) :]
    rows, figures = [], {}
    for strategy in strategies:
        mine = [record for record in records if record["strategy"] == strategy]
        keys = ("step_ms", "pull_ms", "push_ms", "optimizer_ms", "balance")
        median = {key: statistics.median(record[key] for record in mine) for key in keys}
        peak = max(record["peak_memory_bytes"] for record in mine) or None  # 0: a CPU, where it is not known
        figures[strategy] = median | {"peak_memory_bytes": peak, "steps": len(mine)}
        rows.append((strategy, *(f"{median[key]:.1f}" for key in keys[:-1]), f"{median['balance']:.2f}", gib(peak)))
    exposed = sum(r["pull_ms"] + r["push_ms"] for r in records) / sum(r["step_ms"] for r in records)
    headers = ("strategy", "step ms", "exposed pull", "exposed push", "optimizer", "balance", "peak GiB")
    return Findings(
        f"{ranks} ranks, {len(strategies)} strategies in turn: pulls and pushes are exposed for {exposed:.1%} of the "
        "steps' time",
        (Table(f"{ranks} ranks, the strategy changes every step", headers, tuple(rows)),),
        {"ranks": ranks, "devices": devices, "exposed": exposed, "strategies": figures},
    )


def launch(bench: Bench, ranks: int, strategies: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Records of the steps of a job under torchrun; RuntimeError, with what it printed, if it fails or takes long."""
    steps_file = bench.folder / "several.jsonl"
    # An address, not `--standalone`: that takes the machine's name, which need not lead anywhere.
    meeting = ["--nnodes", "1", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    launcher = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc_per_node", str(ranks)]
    job_of_rank = ["-m", "tools.gpu.several_rank", str(steps_file), str(rounds), str(int(bench.full)), *strategies]
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment.setdefault("OMP_NUM_THREADS", "1")
    if bench.device.type != "cuda":
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    job = subprocess.Popen(
        launcher + job_of_rank, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        printed = job.communicate(timeout=max(1.0, bench.left))[0]
    except subprocess.TimeoutExpired:
        job.terminate()  # the launcher ends its ranks
        try:
            printed = job.communicate(timeout=15)[0]
        except subprocess.TimeoutExpired:
            job.kill()
            printed = ""
        raise RuntimeError(f"{ranks} ranks did not end in time; the last they printed:\n{printed[-4000:]}") from None
    if job.returncode:
        raise RuntimeError(f"{ranks} ranks ended with {job.returncode}; the last they printed:\n{printed[-4000:]}")
    return read_steps(str(steps_file))[0]
