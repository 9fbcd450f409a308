"""Jobs on a Ray cluster of two made-up nodes on this machine: equal to those of a launcher, and they go on.

Runs where Ray is installed: `make check-ray` makes such an environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ds_hydra.ray import train
from ds_hydra.testing import free_port
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support import ray_job

ray = pytest.importorskip("ray", reason="Ray is not installed: make check-ray")

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0",
}  # fmt: skip
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
PATIENT_S = 480.0
STEPS = 8
LOCK = threading.Lock()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each, which notice soon that one is gone."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        soon = {
            "health_check_initial_delay_ms": 1000,
            "health_check_period_ms": 1000,
            "health_check_failure_threshold": 3,
        }
        found = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": soon})
        found.add_node(**NODE)
        ray.init(address=found.address)
        try:
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


def records(folder: Path) -> list[dict[str, Any]]:
    file = folder / "steps.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [record for line in lines if line.endswith("\n") and "loss" in (record := json.loads(line))]


def rank_processes(folder: Path) -> dict[str, int]:
    """Process numbers of the job's ranks: by their RANK, of one that has joined "joins"."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            told = dict(one.split(b"=", 1) for one in (place / "environ").read_bytes().split(b"\0") if b"=" in one)
        except OSError:
            continue
        if os.fsencode(folder) in words and words[2:3] == [os.fsencode(ray_job.__file__)]:
            name = "joins" if b"DS_HYDRA_JOINS" in told else told[b"RANK"].decode()
            found[name] = int(place.name)
    return found


def told_of(pid: int) -> list[str]:
    """The state of a process, its parent, and so on; empty if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def parent(pid: int) -> int:
    return int(told_of(pid)[1])


def lives(pid: int) -> bool:
    return told_of(pid)[:1] not in ([], ["Z"])


def run(folder: Path, befalls: Callable[[], None], **more: Any) -> None:
    """The job, whom something befalls when it has made two steps."""
    words = [str(folder), str(STEPS), str(more.pop("least"))]
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(train, ray_job.__file__, words, ranks=2, strategy="STRICT_SPREAD", **more)
        try:
            deadline = time.monotonic() + PATIENT_S
            while len(records(folder)) < 2 and not job.done():
                assert time.monotonic() < deadline, "no steps"
                time.sleep(0.05)
            befalls()
            assert job.result(timeout=PATIENT_S) == []
        except BaseException:
            for pid in rank_processes(folder).values():
                os.kill(pid, signal.SIGKILL)  # which ends the job
            raise


def ended(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("end*"))]


def test_losses_are_those_of_the_launcher(cluster: Any, tmp_path: Path) -> None:
    """To the bit, of a script and of a function, with ranks on two nodes."""
    launched, script = tmp_path / "launched", tmp_path / "script"
    for folder in (launched, script, tmp_path / "function"):
        folder.mkdir()
    command = ["launch", "--num_gpus", "2", "--master_port", str(free_port()), "--no_local_rank", ray_job.__file__]
    done = subprocess.run(
        [sys.executable, "-m", "ds_hydra.commands", *command, str(launched), str(STEPS)],
        env=os.environ, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert train(ray_job.__file__, [str(script), str(STEPS)], ranks=2, strategy="STRICT_SPREAD") == []
    returned = train(ray_job.trained, [tmp_path / "function", STEPS], ranks=2, strategy="STRICT_SPREAD")
    expected = ended(launched)
    assert len(expected) == 2
    assert ended(script) == expected
    assert returned == [one["losses"] for one in expected]
    assert len(expected[0]["losses"]) == STEPS


@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_lost_actor_is_replaced(cluster: Any, tmp_path: Path, victim: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The one that has the number 0, which writes the records, and the other one."""

    def kill() -> None:
        pid = rank_processes(tmp_path)[victim]
        os.kill(parent(pid), signal.SIGKILL)
        time.sleep(1.0)
        assert not lives(pid), "the rank's process ends with its actor"

    run(tmp_path, kill, least=2)
    assert [record["step"] for record in records(tmp_path)] == list(range(1, STEPS + 1))
    assert [(one["ranks"], one["joined"]) for one in ended(tmp_path)] == [(2, False), (2, True)]
    told = capfd.readouterr().err
    assert "is lost to Ray" in told
    assert "another one comes, 7 more may" in told


def test_a_node_that_comes_takes_the_place_of_one_that_is_gone(cluster: Any, tmp_path: Path) -> None:
    """The ranks of a node end as soon as its daemon is gone; the job goes on without them until another node comes."""
    gone: list[float] = []

    def exchange() -> None:
        node = next(iter(cluster.worker_nodes))
        daemon = node.all_processes["raylet"][0].process.pid
        pid = next(pid for pid in rank_processes(tmp_path).values() if parent(parent(pid)) == daemon)
        began = time.monotonic()
        cluster.remove_node(node, allow_graceful=False)  # kills it
        while lives(pid):
            assert time.monotonic() < began + 10
            time.sleep(0.05)
        gone.append(time.monotonic() - began)
        cluster.add_node(**NODE)

    run(tmp_path, exchange, least=2)
    assert [record["step"] for record in records(tmp_path)] == list(range(1, STEPS + 1))
    assert sorted((one["ranks"], one["joined"]) for one in ended(tmp_path)) == [(2, False), (2, True)]
    print(f"its rank was gone after {gone[0]:.2f} s")


def test_a_job_grows_with_the_cluster(cluster: Any, tmp_path: Path) -> None:
    run(tmp_path, lambda: cluster.add_node(**NODE), least=3, most=3)
    assert [(one["ranks"], one["joined"]) for one in ended(tmp_path)] == [(3, False), (3, False), (3, True)]


def refuses() -> None:
    raise ConfigError("this one refuses")


def fails() -> None:
    raise ZeroDivisionError("by nothing")


def returns_a_lock() -> Any:
    return LOCK


@pytest.mark.parametrize(
    ("work", "more", "error", "words"),
    [
        (fails, {"ranks": 7, "wait_seconds": 1}, ConfigError, r"7 ranks need {'CPU': 1.0} each.*room for \d"),
        (fails, {"ranks": 1, "resources": {"TPU": 2}, "wait_seconds": 1}, ConfigError, "TPU.*room for 0"),
        (fails, {"ranks": 2, "strategy": "STRICT_PACK", "wait_seconds": 2}, ConfigError, "strategy cannot be met"),
        (LOCK.acquire, {"ranks": 1}, ConfigError, "acquire.*cannot be sent"),
        (returns_a_lock, {"ranks": 1}, ConfigError, "a lock, cannot be sent"),
        ("no_such_script.py", {"ranks": 1}, ConfigError, "no_such_script.py is not on node"),
        (refuses, {"ranks": 1}, ConfigError, "this one refuses"),
        (fails, {"ranks": 1, "respawn": 0}, RuntimeError, "exit code 1.*by nothing"),
    ],
)  # fmt: skip
def test_what_cannot_run_says_so(
    cluster: Any, work: Any, more: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"(?s){words}"):
        train(work, **more)
    assert [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"] == []
