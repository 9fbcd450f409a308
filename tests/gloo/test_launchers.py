"""Real launchers: two of them, as on two machines, hosts of one name, and one that restarts what has died."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser

import ds_hydra
from ds_hydra.testing import free_port, rank_environment, run_ranks
from tests.support import launched_job
from tests.support.case import Case
from tests.support.equivalence import make_engine, model_dtype, samples_of
from tests.support.families import build_model
from tests.support.fault_job import digest
from tests.support.small_job import sequences, shared_source, small_config, small_model
from tools import aims
from tools.bench_hosts import measured
from tools.hosts.namespaces import why_not

# --- Real launchers: two of them, as on two machines, and one that restarts what has died. torchrun's agents
# fork their ranks, and what their jobs are compared with runs on forked ranks too: ranks that begin as programs
# take seconds to import what they need, as those of `tools.bench_gpu` do under torchrun.
ROOT = Path(__file__).parents[2]


def launch(
    job: Callable[..., None], *args: object, ranks: int, num_nodes: int = 1, node: int = 0, port: int, restarts: int = 0
) -> BaseProcess:
    address = ["--master_addr", "127.0.0.1", "--master_port", str(port), "--max_restarts", str(restarts)]
    shape = ["--nnodes", str(num_nodes), "--node_rank", str(node), "--nproc_per_node", str(ranks)]
    process = get_context("fork").Process(target=_agent, args=([*shape, *address], job, args))
    process.start()
    return process


def _agent(options: list[str], job: Callable[..., None], args: tuple[object, ...]) -> None:
    """What `torchrun OPTIONS` does on a node, but for the ranks, which are forks."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    config = config_from_args(get_args_parser().parse_args([*options, "script"]))[0]
    elastic_launch(replace(config, start_method="fork"), job)(*args)


def finish(launchers: list[BaseProcess]) -> None:
    try:
        for launcher in launchers:
            launcher.join(300)
        assert [launcher.exitcode for launcher in launchers] == [0] * len(launchers)
    finally:
        for launcher in launchers:
            launcher.kill()


LAUNCHED = Case(
    "launched",
    "llama_tied",
    ("2*tp2", "tp2pp2", "sp2 + 2*tp1"),
    steps=3,
    lengths=(9, 30, 5, 17, 44) * 4,
    tokens_per_step=90,
)


def launched_model() -> Any:
    return build_model(LAUNCHED.family, model_dtype(LAUNCHED))


def launched(rank: int) -> dict[str, Any]:
    """Losses and parameters of a run, on a rank that a launcher or a test has started."""
    if not dist.is_torchelastic_launched():
        rank_environment(rank)
    engine = make_engine(LAUNCHED, samples_of(LAUNCHED))
    losses = [float(engine.train_batch()) for _ in range(LAUNCHED.steps)]
    parameters = engine.fp32_state_dict()
    engine.destroy()
    return {"losses": losses, "parameters": parameters}


def save_launched(file: Path) -> None:
    """What a rank that a launcher has started does."""
    found = launched(rank := int(os.environ["RANK"]))
    if rank == 0:
        torch.save(found, file)
    dist.destroy_process_group()


@pytest.mark.drawn
def test_ranks_of_two_launchers_equal_those_of_one_machine(tmp_path: Path) -> None:
    file, port = tmp_path / "two.pt", free_port()
    finish([launch(save_launched, file, num_nodes=2, node=node, ranks=2, port=port) for node in range(2)])
    found: dict[str, Any] = torch.load(file)
    with shared_source(launched_model()):
        forked = run_ranks(launched, 4, timeout=120)[0]
    assert found["losses"] == forked["losses"]
    assert found["parameters"].keys() == forked["parameters"].keys()
    for name, value in forked["parameters"].items():
        assert torch.equal(value, found["parameters"][name]), name


def test_survivors_live_on_and_a_process_comes_back_in_place_of_one_that_died(tmp_path: Path) -> None:
    """Of two ranks one is killed: the other goes on by itself, until it has a new fellow."""
    told = _launched(tmp_path, "--num_gpus", "2")
    assert "of rank 1 was ended by SIGKILL" in told
    assert re.search(r"lost members: 1, new ones: none; 1 ranks go on with step 3 .*; not protected", told)
    assert re.search(r"lost members: none, new ones: 2; 2 ranks go on with step 6 .*; each rank's share", told)
    ended = [json.loads((tmp_path / f"end{rank}").read_text()) for rank in range(2)]
    assert [(one["first"], one["joined"]) for one in ended] == [(0, False), (5, True)]


@pytest.mark.long
def test_a_spare_waits_until_a_rank_is_lost_and_takes_its_place(tmp_path: Path) -> None:
    """Who is started again for the lost one is the next spare, and is ended with the job."""
    told = _launched(tmp_path, "--num_gpus", "3", "--spares", "1")
    assert "of rank 1 was ended by SIGKILL" in told
    assert re.findall(r"lost members: (\S+), new ones: (\S+); (\d) ranks", told) == [
        ("1", "none", "1"),
        ("none", "2", "2"),
    ]
    assert "spare place" not in told  # it did not end before the job
    ended = [json.loads((tmp_path / f"end{rank}").read_text()) for rank in range(2)]
    assert [(one["first"], one["joined"]) for one in ended] == [(0, False), (3, True)]


def _launched(folder: Path, *options: str) -> str:
    """What `ds-hydra launch` and all its processes have said, when it has ended with 0."""
    command = ["launch", "--respawn", "1", *options, "--master_port", str(free_port()), "--no_local_rank"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "ds_hydra.commands", *command, launched_job.__file__, str(folder), "6"],
        env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def restarted(rank: int, folder: Path, die_at: int) -> str:
    """The digest of this rank's masters and moments at the end; rank 1 kills itself once before step `die_at`."""
    if not dist.is_torchelastic_launched():
        rank_environment(rank)
    config = small_config(2, checkpoint={"dir": str(folder / "checkpoints"), "every": 1}, faults={})
    engine = ds_hydra.initialize(model=small_model(), training_data=sequences(), config=config)[0]
    while engine.global_steps < 5:
        if rank == 1 and engine.global_steps == die_at and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        engine.train_batch()
    found = digest(engine)
    engine.destroy()
    return found


def save_restarted(folder: Path, die_at: int) -> None:
    """What a rank that a launcher has started does."""
    found = restarted(rank := int(os.environ["RANK"]), folder, die_at)
    (folder / f"digest{rank}").write_text(found)
    dist.destroy_process_group()


@pytest.mark.drawn
def test_a_launcher_restarts_what_has_died(tmp_path: Path) -> None:
    """The launcher starts all ranks anew; they resume by themselves and end as if nothing had happened."""
    for name in ("undisturbed", "restarted"):
        (tmp_path / name).mkdir()
    finish([launch(save_restarted, tmp_path / "restarted", 3, ranks=2, port=free_port(), restarts=1)])
    assert (tmp_path / "restarted/died").exists()
    undisturbed = run_ranks(restarted, 2, tmp_path / "undisturbed", -1, timeout=120)
    for rank in range(2):
        assert (tmp_path / f"restarted/digest{rank}").read_text() == undisturbed[rank]


# --- A job on two hosts of one name, as containers on one machine may be: a share of the table `two_hosts`.
@pytest.mark.drawn
def test_hosts_of_one_name_are_told_apart_and_bytes_between_them_are_the_plans() -> None:
    if reason := why_not():
        pytest.skip(reason)
    found = measured(1, ("2*tp1",), 1, 1, megabits=1000.0, names=("same", "same"), deepspeed=False, limit_s=300.0)
    (step,), (expected,) = found["slow"], found["expected"]
    for host, into in enumerate(step["into"]):
        planned = sum(kind[host] for kind in expected.values())
        assert 1 <= planned / found["least"]["2*tp1"] < 1.001, "each element enters a host once, gaps between them too"
        assert abs(into / planned - 1) < aims.HOSTS_BYTES
