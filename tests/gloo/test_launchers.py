"""Real launchers: two of them, as on two machines, and one that restarts what has died."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
JOB, RESTARTED_JOB = ROOT / "tests/support/torchrun_job.py", ROOT / "tests/support/restarted_job.py"


Process = subprocess.Popen[str]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def launch(*job: object, ranks: int, num_nodes: int = 1, node: int = 0, port: int, restarts: int = 0) -> Process:
    address = ["--master_addr", "127.0.0.1", "--master_port", str(port), "--max_restarts", str(restarts)]
    shape = ["--nnodes", str(num_nodes), "--node_rank", str(node), "--nproc_per_node", str(ranks)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", *shape, *address, *map(str, job)]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(jobs: list[Process]) -> None:
    try:
        outputs = [job.communicate(timeout=600)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert all(job.returncode == 0 for job in jobs), "\n".join(outputs)


def test_two_launchers_equal_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    port, other = free_port(), free_port()
    jobs = [launch(JOB, one, ranks=4, port=port)]
    jobs += [launch(JOB, two, num_nodes=2, node=node, ranks=2, port=other) for node in range(2)]
    finish(jobs)
    results: list[dict[str, Any]] = [torch.load(path) for path in (one, two)]
    assert results[0]["losses"] == results[1]["losses"]
    assert results[0]["parameters"].keys() == results[1]["parameters"].keys()
    for name, value in results[0]["parameters"].items():
        assert torch.equal(value, results[1]["parameters"][name]), name


def test_a_launcher_restarts_what_has_died(tmp_path: Path) -> None:
    """The launcher starts all ranks anew; they resume by themselves and end as if nothing had happened."""
    for name in ("undisturbed", "restarted"):
        (tmp_path / name).mkdir()
    finish(
        [
            launch(RESTARTED_JOB, tmp_path / "undisturbed", -1, ranks=2, port=free_port()),
            launch(RESTARTED_JOB, tmp_path / "restarted", 3, ranks=2, port=free_port(), restarts=1),
        ]
    )
    assert (tmp_path / "restarted/died").exists()
    for rank in range(2):
        texts = [(tmp_path / name / f"digest{rank}").read_text() for name in ("undisturbed", "restarted")]
        assert texts[0] == texts[1]
