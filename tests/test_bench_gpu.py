"""What measures on GPUs, without one: the benchmark, the first hour, operations and bytes that are counted."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from threading import Thread
from time import sleep
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from ds_hydra.costs.analytic import flops_of
from ds_hydra.pipe.collectives import start_sum
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.profiling.stage_memory import Allocations
from ds_hydra.testing import run_ranks
from tools import bench_gpu, first_hour
from tools.first_hour import LISTS, Hour, Row
from tools.gpu import kernels
from tools.gpu.baselines import LlamaLoop, PlainLoop, PlainPack
from tools.gpu.bench import Bench, Findings, Table, llama, new_model, num_matmul_parameters, page, training_flops
from tools.gpu.budget import Interval, class_of, shares
from tools.gpu.plain_llama import PlainLlama
from tools.gpu.training import Side, Work, _compare

# --- The GPU benchmark without a GPU: parts run in tiny shapes, what only a device does stands on fakes.
CPU = torch.device("cpu")


@pytest.fixture
def small(tmp_path: Path) -> Bench:
    return Bench(CPU, full=False, seconds=60.0, folder=tmp_path)


@pytest.mark.long
def test_parts_run_on_a_cpu_and_say_that_no_gpu_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_gpu.main(["training", "launches", "--json", str(tmp_path / "figures.json")]) == 0
    out = capsys.readouterr().out
    assert "NO GPU IS MEASURED HERE" in out
    assert "nothing measured; all parts ran" in out
    record = json.loads((tmp_path / "figures.json").read_text())
    assert not record["gpu"]
    assert [part["status"] for part in record["parts"].values()] == ["measured"] * 2
    figures = record["parts"]["training"]["figures"]
    ours, *others = figures["sides"]
    assert [one["name"] for one in others] == ["plain loop", "compiled layers", "plain Llama, compiled"]
    assert all(ours["losses"] == pytest.approx(one["losses"], rel=5e-3) for one in others)  # updates between them
    assert set(figures["absent"]) == {"Liger", "all with FlashAttention 3"}
    counts = record["parts"]["launches"]["figures"]["counts"]
    assert all(row["per_layer"] > 20 for row in counts.values())
    assert counts[kernels.OURS]["per_layer"] < counts[kernels.OFF]["per_layer"], "as training computes it"
    assert (tmp_path / "figures.md").read_text().startswith("# No GPU was measured")


def test_a_part_that_fails_is_told_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imported(name: str) -> Any:
        if name == "tools.gpu.training":
            raise RuntimeError("an illegal memory access")
        found = Findings("ran", (Table("t", ("a",), ((1,),)),), {})
        return SimpleNamespace(measure_attention=lambda bench: found, measure_several=lambda bench: found)

    monkeypatch.setattr(bench_gpu, "import_module", imported)
    assert bench_gpu.main(["attention", "costs", "several"]) == 1
    out = capsys.readouterr().out
    assert "RuntimeError: an illegal memory access" in out
    assert "missed: part costs: failed" in out
    assert out.count(": ran (") == 2


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


def test_a_plain_llama_computes_what_hugging_faces_does(small: Bench) -> None:
    """In FP64, with gradients: what the engine is compared with is the same model."""
    pack = PlainPack.of([torch.arange(40), torch.arange(3, 27)], CPU)
    found: dict[str, Any] = {}
    for kind in (PlainLoop, LlamaLoop):
        with mock.patch.object(PlainLlama, "compile_blocks"):
            loop = kind(new_model(llama(small), small), CPU)
        loop.model.double()
        loss = loop.sum_of_losses(pack)
        shared = loop.model.get_parameter({PlainLoop: "model.embed_tokens.weight"}.get(kind, "embed_tokens.weight"))
        found[kind.__name__] = loss.detach(), *torch.autograd.grad(loss, shared)
    # Both compute the loss in FP32.
    torch.testing.assert_close(found["LlamaLoop"], found["PlainLoop"], rtol=1e-4, atol=1e-5)


def test_who_is_beaten_by_less_than_its_aim_is_told(small: Bench) -> None:
    full = Bench(CPU, full=True, seconds=1.0, folder=small.folder)
    sides = {(name, ""): [Side(name, (9.0, 9.0, 9.0, ms, ms), (2.0, 1.0), None)]
             for name, ms in (("engine", 100.0), ("plain loop", 105.0), ("plain Llama, compiled", 90.0))}  # fmt: skip
    found = _compare(full, sides, Work(1000, 1e12, "t"), 0)
    assert found.missed == ("training: 1.050 of the tokens per second of plain loop, less than 1.1",)
    assert found.figures["ratios"]["plain Llama, compiled"] == pytest.approx(0.9), "told, and no aim"
    assert found.figures["absent"]["Liger"] == "liger_kernel is not installed"


def test_waits_are_counted_by_the_line_that_asks_for_them() -> None:
    with kernels.caught(CPU) as found:
        for _ in range(3):
            float(torch.ones(1).sum())
        torch.ones(2) * 2
    assert [(place.where.split(":")[0], count) for place, count in found.items()] == [("tests/test_bench_gpu.py", 3)]


def test_waits_on_a_gpu_are_torchs_own_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with kernels.caught(torch.device("cuda")) as found:
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
    assert [kernels._counts(one, True) for one in everything] == [True, True, False, False]
    assert [kernels._counts(one, False) for one in everything] == [False, False, False, True]


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


# --- The first hour on GPUs without one: rows come in order, end at the first that fails, and say what did not
# run.
GOOD, BAD = ("-c", "print('as it should be')"), ("-c", "print('a kernel is wrong'); raise SystemExit(3)")


@pytest.mark.parametrize(("gpus", "ran"), [(0, ["a", "aim", "c"]), (2, ["a", "b", "aim", "c"])])
def test_the_first_row_that_must_hold_and_fails_is_the_last(
    gpus: int, ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An aim that is missed is noted, and the run goes on."""
    monkeypatch.setattr(first_hour, "num_gpus", lambda: gpus)
    rows = [
        Row("a", 0, GOOD, "all", "nothing", on_cpu=GOOD, must=True),
        Row("b", 1, GOOD, "all", "nothing"),
        Row("aim", 1, BAD, "speed", "a wait", on_cpu=BAD),
        Row("c", 2, BAD, "no error", "the kernel", gpus=2, on_cpu=BAD, must=True),
        Row("d", 3, GOOD, "all", "nothing"),
    ]
    assert first_hour.run(rows, Hour(tmp_path), False, tmp_path / "hour.json") == 1
    printed = capsys.readouterr().out
    assert ("NO GPU IS MEASURED HERE" in printed) is (gpus == 0)
    assert ("b: left out, it needs 1 GPU" in printed) is (gpus == 0)
    for words in ("FAILED with 3", "a kernel is wrong", "If not: the kernel", "missed: aim failed\n",
                  "missed: c failed; what comes after it was not tried (--from 'c' begins there)"):  # fmt: skip
        assert words in printed
    found = json.loads((tmp_path / "hour.json").read_text())
    assert [row["row"] for row in found["rows"] if row["ran"]] == ran


def test_runs_add_to_one_folder_and_start_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_hour, "num_gpus", lambda: 2)
    table = ("-c", "import json, sys; json.dump(" + repr({
        "gpu": True, "full": True, "device": "H", "versions": {}, "seconds": 1.0, "missed": [],
        "parts": {"p": {"what": "w", "status": "measured", "summary": "s",
                        "tables": [{"title": "t", "headers": ["a"], "rows": [[7.5]]}]}},
    }) + ", open(sys.argv[1], 'w')); print('first'); print('second')", "{out}.json")  # fmt: skip
    rows = [Row("one row", 0, table, "-", "-"), Row("b", 1, GOOD, "-", "-", gpus=4), Row("long", 2, GOOD, "-", "-",
                                                                                       needs_s=500.0)]  # fmt: skip
    assert first_hour.run(rows, Hour(tmp_path, seconds=300.0), False, None) == 0
    printed = capsys.readouterr().out
    assert "b: left out, it needs 4 GPUs" in printed
    assert re.search(r"long: left out, it needs 500 s, \d+ are left", printed)
    assert (tmp_path / "one-row.txt").read_text() == "first\nsecond\n", "and not its last line alone"
    assert first_hour.run(rows, Hour(tmp_path, seconds=600.0), False, None) == 0
    assert "one row: left out, it has passed" in capsys.readouterr().out
    page = (tmp_path / "page.md").read_text()
    assert "| 7.5 |" in page
    assert "## Row: long" in page
    assert first_hour.run(rows, Hour(tmp_path, only=("one row",)), False, None) == 0
    assert "1 of 3 rows ran on 2 GPUs" in capsys.readouterr().out


def test_a_row_that_stands_still_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waits = ("-c", "import time; print('step 3', flush=True); time.sleep(60)")
    row = Row("turns", 0, waits, "no hang", "-", on_cpu=waits, limit_s=3.0)
    assert first_hour.run([row], Hour(tmp_path), False, None) == 1
    assert "it stood still, or took longer than 3 s" in capsys.readouterr().out
    assert "step 3" in (tmp_path / "turns.txt").read_text()


@pytest.mark.parametrize("name", LISTS)
def test_rows_are_in_the_order_of_their_minutes(name: str) -> None:
    rows = LISTS[name]
    assert [row.minute for row in rows] == sorted(row.minute for row in rows)
    assert len({row.name for row in rows}) == len(rows)
    assert any(row.short and row.on_cpu for row in rows), "--quick runs something"
    assert rows[-1].minute <= {"one": 45, "eight": 60}[name]
    assert all(row.needs_s <= 540 for row in rows), "runs of ten minutes run each of them"
    parts_named = {word for row in rows if "tools.bench_gpu" in row.command for word in row.command[2:]}
    assert parts_named - {"--json", "{out}.json"} <= set(bench_gpu.PARTS)


def test_every_moment_of_a_step_has_one_class() -> None:
    """Two products with a message beside them: it has what is left behind the first; then nothing runs."""
    found = [Interval(10.0, 20.0, "nvjet_tst_128x256"), Interval(12.0, 26.0, "ncclDevKernel_SendRecv"),
             Interval(30.0, 34.0, "flash_fwd_kernel"), Interval(14.0, 18.0, "CatArrayBatchedCopy")]  # fmt: skip
    parts = shares(found, 8.0, 36.0)
    assert parts == {"products": 10.0, "messages": 6.0, "attention": 4.0, "idle": 2.0 + 4.0 + 2.0}
    assert sum(parts.values()) == 28.0
    names = {"_silu_forward": "SwiGLU", "aten::cat": "cat", "_row_gradient": "loss", "multi_tensor_apply": "update",
             "at::native::vectorized_elementwise_kernel": "element-wise", "cudaSomething": "other"}  # fmt: skip
    assert {name: class_of(name) for name in names} == names


# --- A model's floating point operations, against those that torch counts in a forward and backward.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
LENGTHS = [200, 70]


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    eager: Any = {"attn_implementation": "eager"}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **eager, tie_word_embeddings=tied))
    with FlopCounterMode(display=False) as counted:
        for length in LENGTHS:
            ids = torch.zeros(1, length, dtype=torch.long)
            model(input_ids=ids, labels=ids).loss.backward()
    # Eager attention computes all pairs of tokens, of which a causal one needs half.
    halves = sum(6 * 64 * 3 * length**2 for length in LENGTHS)
    assert flops_of(CausalLM(model).plan, 64, LENGTHS) == counted.get_total_flops() - halves


def test_nothing_is_said_of_experts_and_frozen_parameters() -> None:
    experts = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
    assert flops_of(CausalLM(experts).plan, 64, LENGTHS) is None
    frozen = LlamaForCausalLM(LlamaConfig(**SIZES))
    frozen.model.embed_tokens.requires_grad_(False)
    assert flops_of(CausalLM(frozen).plan, 64, LENGTHS) is None


# --- Bytes that tensors hold at moments of some work, and at most.
SIZE = 1 << 18


def block() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8)


def test_what_is_held_and_at_most() -> None:
    with Allocations(torch.device("cpu")) as found:
        first, second = block(), block()
        found.mark()
        del first, second
        found.mark()
    assert found.held == [2 * SIZE, 0]
    assert found.peak == 2 * SIZE


def test_what_another_thread_frees_does_not_count_for_ever() -> None:
    # Threads of process groups let go of what was sent, and the profiler does not follow them.
    with Allocations(torch.device("cpu")) as found:
        for _ in range(100):
            held = [block()]
            thread = Thread(target=held.clear)
            thread.start()
            thread.join()
    assert SIZE <= found.peak <= 20 * SIZE


def test_what_was_sent_is_gone_with_the_last_thread_that_lets_go_of_it_and_gloos_copies_do_not_count() -> None:
    def run(rank: int) -> tuple[list[int], int]:
        with Allocations(torch.device("cpu"), sends=True) as found:
            held = [block()]
            dist.broadcast(held[0], src=0)
            there = StorageWeakRef(held[0].untyped_storage())
            thread = Thread(target=held.clear)
            thread.start()
            thread.join()
            while not there.expired():  # gloo's thread may still have the operation that is over
                sleep(0.001)
            torch.empty(0)  # any operation
            found.mark()
            sent = block()[:, None]
            came = start_sum(sent, dist.group.WORLD).wait()
            assert torch.equal(came, sent)
        return found.held, found.peak

    assert run_ranks(run, 1) == [([0], 2 * SIZE)]
