"""The GPU benchmark without a GPU: parts run in tiny shapes, what only a device does stands on fakes."""

from __future__ import annotations

import json
import stat
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

from tools import bench_gpu
from tools.gpu import launches, parts, syncs
from tools.gpu.bench import Bench, Findings, Table
from tools.gpu.job import llama, new_model, num_matmul_parameters, training_flops
from tools.gpu.page import page
from tools.gpu.plain_loop import PlainLoop, PlainPack

CPU = torch.device("cpu")


@pytest.fixture
def small(tmp_path: Path) -> Bench:
    return Bench(CPU, full=False, seconds=60.0, folder=tmp_path)


@pytest.mark.long
def test_parts_run_on_a_cpu_and_say_that_no_gpu_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bench_gpu.DEFAULT.exists() and bench_gpu.DEFAULT.read_text()
    assert bench_gpu.main(["training", "launches", "--json", str(tmp_path / "figures.json")]) == 0
    out = capsys.readouterr().out
    assert "NO GPU IS MEASURED HERE" in out
    assert "nothing measured; all parts ran" in out
    record = json.loads((tmp_path / "figures.json").read_text())
    assert not record["gpu"]
    assert [part["status"] for part in record["parts"].values()] == ["measured"] * 2
    ours, plain = record["parts"]["training"]["figures"]["sides"]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=5e-3)  # of all steps, updates between them
    counts = record["parts"]["launches"]["figures"]["counts"]
    assert all(row["per_layer"] > 20 for row in counts.values())
    assert counts[launches.OURS]["per_layer"] < counts[launches.OFF]["per_layer"], "as training computes it"
    assert (tmp_path / "figures.md").read_text().startswith("# No GPU was measured")
    assert (bench_gpu.DEFAULT.exists() and bench_gpu.DEFAULT.read_text()) == before, "written by --json alone"


def test_a_part_that_fails_is_told_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str) -> Callable[[parts.Part, Bench], Findings]:
        def run(self: parts.Part, given: Bench) -> Findings:
            if self is parts.PARTS["costs"]:
                raise RuntimeError("an illegal memory access")
            return Findings("ran", (Table("t", ("a",), ((1,),)),), {})

        return run

    monkeypatch.setattr(parts.Part, "run", measure("costs"))
    assert bench_gpu.main(["attention", "costs", "several"]) == 1
    out = capsys.readouterr().out
    assert "RuntimeError: an illegal memory access" in out
    assert "missed: part costs: failed" in out
    assert out.count(": ran (") == 2


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo CUDA error: device-side assert >&2; exit 3", ["ended with 3", "device-side assert"]),
        ("echo waiting for rank 1 >&2; sleep 60 & wait", ["took too long", "waiting for rank 1"]),
    ],
)
def test_a_process_that_dies_or_hangs_is_told(
    small: Bench, monkeypatch: pytest.MonkeyPatch, script: str, told: list[str]
) -> None:
    program = small.folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(parts.sys, "executable", str(program))
    monkeypatch.setattr(parts, "_GRACE_SECONDS", 0.1)
    record = parts.run_apart("launches", small, limit=1.0)
    assert record["status"] == "failed"
    assert all(words in record["error"] for words in told)
    assert record["seconds"] < 20


def test_a_part_in_a_process_of_its_own_answers_by_a_file(small: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class InThisProcess:
        """Runs what a process would be started for."""

        def __init__(self, command: list[str], **_: Any) -> None:
            assert command[1:3] == ["-m", "tools.bench_gpu"]
            self.returncode = bench_gpu.main(command[3:])

        def communicate(self, timeout: float) -> tuple[None, str]:
            return None, ""

    monkeypatch.setattr(
        parts.Part, "run", lambda self, given: Findings(f"{given.seconds:g} s", (), {"full": given.full})
    )
    monkeypatch.setattr(subprocess, "Popen", InThisProcess)
    record = parts.run_apart("syncs", small, limit=60.0)
    assert (record["status"], record["summary"], record["figures"]) == ("measured", "60 s", {"full": False})


def test_flops_are_those_that_torch_counts(small: Bench) -> None:
    config = llama(small)
    loop = PlainLoop(new_model(config, small), CPU)
    matmul = num_matmul_parameters(loop.model)
    pack = PlainPack.of([torch.arange(40), torch.arange(24)], CPU)
    with FlopCounterMode(display=False) as counter:
        loop.forward_and_backward(pack, pack.num_targets)
    products = counter.get_flop_counts()["Global"]
    counted = sum(flops for operator, flops in products.items() if "mm" in str(operator))
    assert counted == 6 * matmul * 64
    attention = training_flops(config, matmul, pack.lengths) - counted
    # 4 layers, 4 heads of 16: a forward's two products of 2 * length^2 * 16 each, half masked; the backward as two.
    assert attention == 4 * 4 * 3 * sum(2 * (2 * length * length * 16) / 2 for length in pack.lengths)


def test_waits_are_counted_by_the_line_that_asks_for_them() -> None:
    with syncs.caught(CPU) as found:
        for _ in range(3):
            float(torch.ones(1).sum())
        torch.ones(2) * 2
    assert [(place.where.split(":")[0], count) for place, count in found.items()] == [("tests/test_bench_gpu.py", 3)]


def test_waits_on_a_gpu_are_torchs_own_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with syncs.caught(torch.device("cuda")) as found:
        assert modes == ["warn"]
        warnings.warn("called a synchronizing CUDA operation (function warn_or_error_on_sync)", stacklevel=1)
    assert modes == ["warn", 0]
    assert found.total() == 1


def test_a_call_on_a_gpu_is_timed_between_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, waits = [0.0], list[float]()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            assert not (waits[1:]), "all is read only after the device has done it"
            self.at = clock[0]

        def elapsed_time(self, other: Event) -> float:
            assert len(waits) == 2
            return other.at - self.at

    def call() -> None:
        clock[0] += 7.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    on_gpu = Bench(torch.device("cuda", 0), full=True, seconds=1.0, folder=tmp_path)
    assert on_gpu.median_ms(call, repeats=5, warm_up=2) == 7.0
    assert clock[0] == 7 * 7.0


def test_on_a_gpu_kernels_are_what_ran_there() -> None:
    def event(name: str, kind: DeviceType, annotation: bool = False) -> Any:
        return SimpleNamespace(name=name, device_type=kind, is_user_annotation=annotation, cpu_children=[])

    kernel, copy = event("gemm", DeviceType.CUDA), event("Memcpy HtoD", DeviceType.CUDA)
    range_of_user, operator = event("step", DeviceType.CUDA, True), event("aten::mm", DeviceType.CPU)
    everything = (kernel, copy, range_of_user, operator)
    assert [launches._counts(one, True) for one in everything] == [True, True, False, False]
    assert [launches._counts(one, False) for one in everything] == [False, False, False, True]


def test_the_page_says_what_was_not_measured() -> None:
    part = {"what": "kernels", "status": "measured", "summary": "12 a layer", "seconds": 1.0,
            "tables": [{"title": "Longest", "headers": ["name", "ms"], "rows": [["a|b*c", 1.5]]}]}  # fmt: skip
    failed = {"what": "ranks", "status": "failed", "seconds": 2.0, "error": "Traceback\nNCCL error"}
    record = {"gpu": True, "full": True, "device": "H100", "versions": {"torch": "2.13"}, "seconds": 9.0,
              "missed": ["part several: failed"], "parts": {"launches": part, "several": failed}}  # fmt: skip
    text = page(record)
    assert text.startswith("# Measured on a GPU\n")
    assert "| a\\|b\\*c | 1.5 |" in text
    assert "Not measured: failed." in text
    assert "NCCL error" in text
    assert "missed: part several: failed." in text
    assert page({**record, "gpu": False}).startswith("# No GPU was measured\n")
