"""Part "launches": kernels that a layer launches in a forward and backward, ours and the plain model's.

Counted in models of two sizes: what the larger one launches more belongs to its further layers, the rest to
embeddings, head and loss. On a CPU torch's operators are counted in place of kernels.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.profiling.stage_timer import StageTimer, hollow_source
from tools import aims
from tools.gpu.bench import Bench, Findings, Table
from tools.gpu.job import llama, new_model, save_config
from tools.gpu.plain_loop import PlainLoop, PlainPack

FEW, MORE = 2, 6  # layers
_COPIES = ("Memcpy", "Memset")
OURS, OFF, PLAIN = "engine's stage", 'engine\'s stage, functions "off"', "plain model"


class Count(NamedTuple):
    """One forward and backward."""

    kernels: Counter[str]  # launches by the kernel's name
    copies: int  # of memory, and fills
    device_us: Counter[str]  # of each kernel
    host_ms: float  # until all was launched
    whole_ms: float  # until all was done


def measure_launches(bench: Bench) -> Findings:
    """Launches per layer and their times."""
    lengths = bench.pick((2048, 1024, 700, 324), (24, 10, 6))
    found = {
        name: [_count(bench, make(bench, layers, lengths)) for layers in (FEW, MORE)]
        for name, make in ((OURS, partial(_our_run, "auto")), (OFF, partial(_our_run, "off")), (PLAIN, _plain_run))
    }
    layers = MORE - FEW
    rows, figures = [], {}
    for name, (few, more) in found.items():
        totals = [sum(count.kernels.values()) for count in (few, more)]
        per_layer = (totals[1] - totals[0]) / layers
        row = {
            "per_layer": per_layer,
            "besides_layers": totals[0] - FEW * per_layer,
            "copies_per_layer": (more.copies - few.copies) / layers,
            "host_ms_per_layer": (more.host_ms - few.host_ms) / layers,
            "whole_ms_per_layer": (more.whole_ms - few.whole_ms) / layers,
        }
        figures[name] = row
        rows.append((name, *(f"{value:.2f}" if "ms" in key else f"{value:.1f}" for key, value in row.items())))
    unit = "kernels" if bench.device.type == "cuda" else "operators"
    headers = ("who", f"{unit} a layer", "besides layers", "copies a layer", "host ms a layer", "whole ms a layer")
    ours, off, plain = (figures[name]["per_layer"] for name in (OURS, OFF, PLAIN))
    missed = [
        f"the engine's stage launches {ours / other:.2f} of the {unit} of the {name} in a layer (aim {aims.LAUNCHES})"
        for name, other in ((OFF, off), (PLAIN, plain))
        if bench.full and ours > aims.LAUNCHES * other
    ]
    return Findings(
        f"{ours:.0f} {unit} a layer, forward and backward; {plain:.0f} in the plain model",
        (
            Table(f"Launches for {sum(lengths):,} tokens in {len(lengths)} sequences", headers, tuple(rows)),
            _longest(found[OURS], layers, unit),
        ),
        {"unit": unit, "counts": figures},
        tuple(missed),
    )


def _longest(counts: list[Count], layers: int, unit: str) -> Table:
    """The kernels of one layer of ours that take the most time."""
    few, more = counts
    spent = {name: (us - few.device_us[name]) / layers for name, us in more.device_us.items()}
    whole = sum(us for us in spent.values() if us > 0) or 1.0
    rows = tuple(
        (name[:72], f"{(more.kernels[name] - few.kernels[name]) / layers:.1f}", f"{us:.1f}", f"{us / whole:.0%}")
        for name, us in sorted(spent.items(), key=lambda item: -item[1])[:12]
    )
    return Table(f"Longest {unit} of one layer of the engine's", ("name", "a layer", "microseconds", "share"), rows)


def _our_run(functions: str, bench: Bench, layers: int, lengths: tuple[int, ...]) -> Callable[[], object]:
    """A stage as training builds it, "auto" being the default, with its gradients summed in FP32."""
    source = hollow_source(save_config(llama(bench, layers), bench.folder), StageOptions(functions=functions))
    timer = StageTimer(source, ParallelScheme(1, 1, 1), 0, bench.device, torch.bfloat16)
    batch = timer.batch(lengths)
    return lambda: timer.run(batch)


def _plain_run(bench: Bench, layers: int, lengths: tuple[int, ...]) -> Callable[[], object]:
    config = llama(bench, layers)
    loop = PlainLoop(new_model(config, bench), bench.device)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(config.vocab_size, (length,), generator=generator) for length in lengths]
    pack = PlainPack.of(rows, bench.device)
    return lambda: loop.forward_and_backward(pack, pack.num_targets)


def _count(bench: Bench, run: Callable[[], object]) -> Count:
    for _ in range(3):
        run()
    times = [_times(bench, run) for _ in range(bench.pick(10, 2))]
    on_gpu = bench.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        run()
        bench.synchronize()
    events = [event for event in profiler.events() or () if _counts(event, on_gpu)]
    kernels = [event for event in events if not event.name.startswith(_COPIES)]
    spent: Counter[str] = Counter()
    for event in kernels:
        spent[event.name] += event.time_range.elapsed_us()
    host_ms, whole_ms = (statistics.median(column) for column in zip(*times, strict=True))
    return Count(Counter(event.name for event in kernels), len(events) - len(kernels), spent, host_ms, whole_ms)


def _counts(event: Any, on_gpu: bool) -> bool:
    """What ran on the device; on a CPU operators that call no others."""
    if on_gpu:
        return event.device_type == DeviceType.CUDA and not event.is_user_annotation
    return event.name.startswith("aten::") and not event.cpu_children


def _times(bench: Bench, run: Callable[[], object]) -> tuple[float, float]:
    bench.synchronize()
    began = time.perf_counter()
    run()
    launched = time.perf_counter()
    bench.synchronize()
    return 1e3 * (launched - began), 1e3 * (time.perf_counter() - began)
