"""Part "several": ranks on several devices, a strategy that changes every step, and what pull and push cost then; and
how ranks of a job are started, here and for rows of the first hour. On a CPU two ranks stand in.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

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
    steps = (1 + bench.pick(ROUNDS, 1)) * len(strategies)
    codes, _ = launch(ranks, str(bench.folder), strategies, limit_s=bench.left, steps=steps, full=bench.full)
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}; what they printed stands above")
    records = read_steps(str(bench.folder / "steps.jsonl"))[0][len(strategies) :]
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


def launch(
    ranks: int, folder: str, strategies: Sequence[str], *, limit_s: float = float("inf"), **job: object
) -> tuple[list[int], float]:
    """Exit codes of the ranks of a job of `tools.gpu.rank`, and seconds between the end of the first and the last one;
    ranks that still run after `limit_s` are killed. No launcher would itself end the others when one is dead."""
    command = [sys.executable, "-m", "tools.gpu.rank", folder, repr(job), *strategies]
    running = [subprocess.Popen(command, cwd=ROOT, env=one) for one in environments(ranks)]
    ended, began = dict[int, float](), time.monotonic()
    while len(ended) < ranks:
        ended |= {rank: time.monotonic() for rank, one in enumerate(running) if rank not in ended
                  and one.poll() is not None}  # fmt: skip
        if time.monotonic() - began > limit_s:
            for one in running:
                one.kill()
        time.sleep(0.05)
    return [one.returncode for one in running], max(ended.values()) - min(ended.values())


def environments(ranks: int) -> list[dict[str, str]]:
    """What a launcher tells each rank of a job."""
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER} | {"OMP_NUM_THREADS": "1"}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    if not torch.cuda.is_available():
        kept |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
             "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    return [{**kept, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
