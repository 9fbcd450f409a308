"""Ranks that die, stand still or fail before all have met: named by the others, which end soon with 75."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed.runtime.engine as deepspeed_engine
import pytest
from deepspeed.accelerator import get_accelerator

from ds_hydra.host import host_engine, launch
from ds_hydra.host.launch import Fellows, meeting_of
from ds_hydra.testing import free_port, run_ranks
from tests.support.ends import TRACEBACK, all_told, codes, ends, mark_fault
from tests.support.small_job import small_engine

ROOT = Path(__file__).parents[2]


@contextmanager
def _ranks(port: int, ranks: range) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Processes that this one has started as a launcher starts ranks."""
    environment = os.environ | {"MASTER_PORT": str(port)}
    started = {
        rank: subprocess.Popen(["sleep", "60"], env=environment | {"RANK": str(rank)}, start_new_session=True)
        for rank in ranks
    }
    try:
        yield started
    finally:
        for one in started.values():
            one.kill()
            one.wait()


def test_ranks_that_each_see_one_device_start() -> None:
    """As under Slurm's `--gpus-per-task=1`: each rank's device is its number 0, whatever LOCAL_RANK says."""

    class OneDevice:
        """An accelerator that shows a process one device, whose memory is the host's."""

        chosen: list[int]

        def __init__(self) -> None:
            self.chosen = []

        def device_name(self, number: int | None = None) -> str:
            return "one" if number is None else "cpu"

        def device_count(self) -> int:
            return 1

        def set_device(self, number: int) -> None:
            if number:
                raise RuntimeError("CUDA error: invalid device ordinal")
            self.chosen.append(number)

        def __getattr__(self, name: str) -> Any:
            return getattr(get_accelerator(), name)

    def start(rank: int) -> tuple[list[int], int, str]:
        one = OneDevice()
        with ExitStack() as stack:
            for module in (launch, host_engine, deepspeed_engine):
                stack.enter_context(mock.patch.object(module, "get_accelerator", return_value=one))
            engine = small_engine(rank)
            engine.train_batch()
        with mock.patch.object(launch, "get_accelerator", return_value=one), launch._own_device_in_environment():
            bound = os.environ["LOCAL_RANK"]  # what DeepSpeed binds the default group to
        return one.chosen, int(os.environ["LOCAL_RANK"]), bound

    found = run_ranks(start, 2)
    assert [(local, bound) for _, local, bound in found] == [(0, "0"), (1, "0")]
    assert all(set(chosen) == {0} for chosen, _, _ in found)


@pytest.mark.parametrize("how", ["alive", "died", "frozen", "stopped for a moment", "absent", "forked"])
def test_ranks_of_this_host_are_seen_before_they_come(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name in ("LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.setenv(name, str(3 * (name == "LOCAL_SIZE")))
    with _ranks(port, range(2 if how in ("absent", "forked") else 3)) as ranks, _ranks(free_port(), range(5, 6)):
        time.sleep(0.2)
        fellows = Fellows(0, str(port), os.getpid() if how == "forked" else ranks[0].pid)
        fellows.look()
        assert sorted(fellows.now) == ([] if how == "forked" else sorted(ranks))
        assert fellows.fault(0.3) is None
        if how == "died":
            ranks[1].kill()
            ranks[1].wait()
        elif how in ("frozen", "stopped for a moment"):
            ranks[1].send_signal(signal.SIGSTOP)
            time.sleep(0.1)
            fellows.look()
            assert fellows.is_stopped(1)
            if how == "stopped for a moment":
                ranks[1].send_signal(signal.SIGCONT)
            time.sleep(0.4)
        monkeypatch.setattr(launch, "_ABSENT_S", 0.0)
        fellows.look()
        found = fellows.fault(0.3)
        if how in ("alive", "stopped for a moment", "forked"):
            assert found is None
            return
        assert found is not None
        assert found[0] == (2 if how == "absent" else 1)
        assert ("is frozen" if how == "frozen" else "died before all ranks had met") in found[1]
        if how == "frozen":
            assert ranks[1].wait(5) == -signal.SIGKILL, "it cannot end by itself"


LOST = {
    "1 is killed": (1, "rank 1 is frozen or its host is lost: it had come, and is not heard any more"),
    "0 is killed": (0, "the ranks' store is lost, with rank 0 or whoever keeps it"),
    "2 is late": (2, "rank 2 did not come within 4 s (hydra.timeout_seconds)"),
}


@pytest.mark.parametrize("what", LOST)
def test_a_rank_that_is_lost_while_others_come_is_named_by_them(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks of other hosts, of which nothing is seen but what they say in the store."""
    lost, text = LOST[what]
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(free_port())), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)

    def program(rank: int, place: Path) -> None:
        os.environ["RANK"] = str(rank)
        met = meeting_of(timeout_s=4.0 if lost == 2 else 20.0, frozen_s=2.0)
        assert met is not None
        assert met.texts(f"of {rank}") == ["of 0", "of 1", "of 2"]
        if rank == 2:
            time.sleep(12)  # while the others wait
            os._exit(3)
        mark_fault(place)
        if rank == lost:
            threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGKILL)).start()
        met.texts("again")

    found = ends(program, 3)
    assert codes(found) == [-9 if rank == lost else 75 for rank in range(2)] + [3], all_told(found)
    assert max(end.seconds for end in found[:2]) < 11.0
    assert TRACEBACK not in all_told(found)
    assert all_told(found).count(text) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "moment", "kind"),
    [
        (1, "exec", "killed"),
        (0, "imported", "raises"),
        (0, "at the port", "stopped"),
        (1, "in the meeting", "killed"),
        (1, "before heartbeats", "killed"),
        (0, "before torch", "stopped"),
        (1, "after torch", "raises"),
        (0, "before connecting", "killed"),
    ],
)
def test_a_rank_that_is_lost_in_its_start_is_named(victim: int, moment: str, kind: str, tmp_path: Path) -> None:
    """Whole scripts, as a launcher starts them that ends nobody."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "FAULT": f"{victim}|{moment}|{kind}", "MARK": str(tmp_path / "mark"),
    }  # fmt: skip
    with ExitStack() as stack:
        outputs = [stack.enter_context((tmp_path / str(rank)).open("w+")) for rank in range(2)]
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.started_job"], cwd=ROOT, stdout=outputs[rank],
                    stderr=subprocess.STDOUT, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
            for rank in range(2)
        ]  # fmt: skip
        for one in ranks:
            stack.callback(one.kill)
        other = ranks[1 - victim].wait(200)
        took = time.time() - float((tmp_path / "mark").read_text())
        told = (tmp_path / str(1 - victim)).read_text()
        assert other == 75, told
        assert f"rank {victim} " in told or kind == "raises", told
        assert ranks[victim].wait(60) == (1 if kind == "raises" else -9)
        if moment not in ("exec", "imported", "at the port"):  # before it the other may still be importing
            assert took < 60, told  # a few on an idle machine, and hydra.timeout_seconds (120) where nobody looks
