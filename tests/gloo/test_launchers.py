"""Two launchers, as on two machines, end with the parameters of one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

JOB = Path(__file__).parents[1] / "torchrun_job.py"
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def launch(result: Path, *, num_nodes: int, node: int, ranks: int, port: int) -> subprocess.Popen[str]:
    address = ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    shape = ["--nnodes", str(num_nodes), "--node_rank", str(node), "--nproc_per_node", str(ranks)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", *shape, *address, str(JOB), str(result)]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(jobs: list[subprocess.Popen[str]]) -> None:
    try:
        outputs = [job.communicate(timeout=240)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert all(job.returncode == 0 for job in jobs), "\n".join(outputs)


def test_two_launchers_equal_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    port, other = free_port(), free_port()
    jobs = [launch(one, num_nodes=1, node=0, ranks=4, port=port)]
    jobs += [launch(two, num_nodes=2, node=node, ranks=2, port=other) for node in range(2)]
    finish(jobs)
    results: list[dict[str, Any]] = [torch.load(path) for path in (one, two)]
    assert results[0]["losses"] == results[1]["losses"]
    assert results[0]["parameters"].keys() == results[1]["parameters"].keys()
    for name, value in results[0]["parameters"].items():
        assert torch.equal(value, results[1]["parameters"][name]), name
