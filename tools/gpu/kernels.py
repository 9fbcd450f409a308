"""Parts "attention", "launches" and "syncs": kernels, and waits for them.

attention  every backend against SDPA in FP32 on several mixes of lengths: outputs, gradients and times
launches   kernels that a layer launches in a forward and backward, ours and the plain model's, counted in models of two
           sizes: what the larger one launches more belongs to its further layers, the rest to embeddings, head and
           loss. On a CPU torch's operators are counted in place of kernels
syncs      where a step of the engine makes the host wait for the device without being told to. torch warns at each such
           operation; the stack at that moment says which line of this project asked for it. A wait between the first
           forward and the last backward leaves the device without work, so it is an aim that there is none. On a CPU
           nothing waits: there the operations stand in that would
"""

from __future__ import annotations

import importlib.util
import statistics
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hydra.pipe.attention.backends import BACKENDS, Segments, choose_backend
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.profiling.stage_timer import StageTimer, hollow_source
from tools import aims
from tools.gpu.baselines import PlainLoop, PlainPack
from tools.gpu.bench import Bench, Findings, Table, engine_alone, llama, new_model, save_config, sequences

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


class Mix(NamedTuple):
    """Lengths of one packed row; `window` counts the token itself."""

    name: str
    lengths: tuple[int, ...]
    window: int | None = None


class Measured(NamedTuple):
    """One backend on one mix; errors are relative to the largest entry of the reference."""

    backend: str
    mix: str
    tokens: int
    output_error: float
    gradient_error: float  # largest of queries, keys and values
    forward_ms: float
    both_ms: float  # forward and backward
    tflops: float  # of forward and backward, masked scores not counted
    chosen: bool  # training would take this one


def mixes(bench: Bench) -> tuple[Mix, ...]:
    """One long sequence, equal ones, a long tail, many tiny ones, and a window."""
    one = bench.pick(8192, 96)
    tail = [max(1, int(one / (rank + 1) ** 1.2)) for rank in range(bench.pick(64, 6))]
    return (
        Mix("one long", (one,)),
        Mix("16 equal", (one // 16,) * 16),
        Mix("long tail", tuple(tail)),
        Mix("256 tiny", (bench.pick(48, 2),) * bench.pick(256, 16)),
        Mix("one long, window", (one,), bench.pick(1024, 16)),
    )


def measure_attention(bench: Bench) -> Findings:
    """Errors and times of all backends that this machine has."""
    heads, kv_heads, head_dim = bench.pick((HEADS, KV_HEADS, HEAD_DIM), (4, 2, 16))
    names = [name for name in BACKENDS if name in _usable(bench)]
    found: list[Measured] = []
    for mix in mixes(bench):
        generator = torch.Generator().manual_seed(0)
        tokens = sum(mix.lengths)
        wide = [torch.randn(tokens, h, head_dim, generator=generator) for h in (heads, kv_heads, kv_heads)]
        inputs = [x.to(bench.device, torch.bfloat16) for x in wide]
        expected = _reference(inputs, mix)
        found += [_measure(bench, name, mix, inputs, expected) for name in names if bench.left > 0]
    missed = [
        f"{m.backend} on {m.mix}: differs from FP32 by {max(m.output_error, m.gradient_error):.1e}, "
        f"more than {aims.GPU_ATTENTION:.0e}"
        for m in found
        if not max(m.output_error, m.gradient_error) <= aims.GPU_ATTENTION
    ]
    if len(found) < len(names) * len(mixes(bench)):
        missed.append(f"{len(names) * len(mixes(bench)) - len(found)} cases were left out: no time was left")
    worst = max(max(m.output_error, m.gradient_error) for m in found)
    headers = ("backend", "lengths", "tokens", "output", "gradients", "forward ms", "with backward", "TFLOP/s", "taken")
    rows = tuple(
        (m.backend, m.mix, m.tokens, f"{m.output_error:.1e}", f"{m.gradient_error:.1e}", m.forward_ms, m.both_ms,
         m.tflops, "yes" if m.chosen else "") for m in found
    )  # fmt: skip
    return Findings(
        f"{len(names)} backends ({', '.join(names)}) on {len(mixes(bench))} mixes, at worst {worst:.1e} from FP32",
        (Table("Attention, BF16, errors against SDPA in FP32", headers, rows),),
        {"heads": [heads, kv_heads, head_dim], "rows": [m._asdict() for m in found]},
        tuple(missed),
    )


def _usable(bench: Bench) -> Iterator[str]:
    yield "sdpa"
    if bench.device.type == "cuda":
        yield "torch"
        if importlib.util.find_spec("flash_attn") is not None:
            yield "flash"


def _measure(bench: Bench, name: str, mix: Mix, inputs: list[Tensor], expected: list[Tensor]) -> Measured:
    segments, scale = Segments.whole(mix.lengths), inputs[0].shape[-1] ** -0.5
    q, k, v = (x.detach().requires_grad_() for x in inputs)

    def forward() -> Tensor:
        return BACKENDS[name](q, k, v, segments, scale, mix.window, None)

    def both() -> list[Tensor]:
        out = forward()
        return [out, *torch.autograd.grad(out, (q, k, v), out.detach())]

    got = [x.detach().float() for x in both()]
    output, *gradients = (_error(one, other) for one, other in zip(got, expected, strict=True))
    repeats = bench.pick(10, 2)
    both_ms = bench.median_ms(both, repeats)
    # Two products in the forward and five in the backward, of 2 * length^2 * head_dim, of which half is masked.
    seen = sum(_pairs(length, mix.window) for length in mix.lengths)
    flops = 7 * 2.0 * inputs[0].shape[1] * inputs[0].shape[2] * seen
    with torch.no_grad():
        forward_ms = bench.median_ms(forward, repeats)
        chosen = choose_backend(q, v, None) is BACKENDS[name]
    return Measured(name, mix.name, sum(mix.lengths), output, max(gradients), forward_ms, both_ms,
                    flops / both_ms / 1e9, chosen)  # fmt: skip


def _pairs(length: int, window: int | None) -> int:
    """Pairs of a token and one that it sees: of 4 tokens 10, with a window of 2 seven."""
    seen = min(length, window or length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def _reference(inputs: list[Tensor], mix: Mix) -> list[Tensor]:
    """Output and gradients by torch's plain SDPA in FP32, from the same BF16 numbers."""
    # One key head of one sequence at a time: the plain kernel holds all scores, 256 MiB for a head of 8,192 tokens.
    q, k, v = (x.detach().float().requires_grad_() for x in inputs)
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    start = 0
    for length in mix.lengths:
        rows = slice(start, start + length)
        for head in range(k.shape[1]):
            queries = slice(head * group, (head + 1) * group)
            _one_head(out, (q, k, v), rows, queries, head, mix.window)
        start += length
    return [out, *(x.grad for x in (q, k, v) if x.grad is not None)]


def _one_head(
    out: Tensor, inputs: tuple[Tensor, ...], rows: slice, queries: slice, head: int, window: int | None
) -> None:
    """Fill in the output of a key head's queries in one sequence, and add to the gradients of the inputs."""
    q = inputs[0][rows, queries].transpose(0, 1)[None]
    k, v = (x[rows, head : head + 1].transpose(0, 1)[None].expand(-1, q.shape[1], -1, -1) for x in inputs[1:])
    seen: Any = None
    if window is not None:
        age = torch.arange(q.shape[2], device=q.device)
        seen = (age[:, None] >= age) & (age[:, None] - age < window)
    with sdpa_kernel(SDPBackend.MATH):
        part = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
    # The gradient that `_measure` gives is the backend's own output in BF16, so both differ by rounding alone.
    part.backward(part.detach())
    out.data[rows, queries] = part.detach()[0].transpose(0, 1)


FEW_LAYERS, MORE_LAYERS = 2, 6  # layers
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
        name: [_count(bench, make(bench, layers, lengths)) for layers in (FEW_LAYERS, MORE_LAYERS)]
        for name, make in ((OURS, partial(_our_run, "auto")), (OFF, partial(_our_run, "off")), (PLAIN, _plain_run))
    }
    layers = MORE_LAYERS - FEW_LAYERS
    rows, figures = [], {}
    for name, (few, more) in found.items():
        totals = [sum(count.kernels.values()) for count in (few, more)]
        per_layer = (totals[1] - totals[0]) / layers
        row = {
            "per_layer": per_layer,
            "besides_layers": totals[0] - FEW_LAYERS * per_layer,
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


ROOT = Path(__file__).resolve().parents[2]
WARNING = "called a synchronizing CUDA operation"  # torch's words
_WARM_UP, STEPS = 3, 2
_COMPUTES = ("pipe/runtime.py", "run")  # the file and the function between whose calls a stage computes
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero")


class Place(NamedTuple):
    """A line that made the host wait; `computing`: while a stage ran its micro-batches."""

    where: str  # file:line in function
    computing: bool


def measure_syncs(bench: Bench) -> Findings:
    """Waits of a step by place."""
    config, longest = llama(bench, 4), bench.pick(4096, 96)
    data = sequences(bench, longest, seed=4)
    with engine_alone(bench, new_model(config, bench), data, bench.pick(16384, 400)) as engine:
        for _ in range(_WARM_UP):
            engine.train_batch()
        batches = 0
        with caught(bench.device) as found:
            for _ in range(STEPS):
                engine.train_batch()
                batches += sum(engine.last_step.num_micro_batches)
    rows = tuple(
        (place.where, "yes" if place.computing else "", f"{count / STEPS:g}") for place, count in found.most_common()
    )
    hidden = sum(count for place, count in found.items() if place.computing)
    missed = []
    if hidden and bench.device.type == "cuda":
        missed.append(f"{hidden / STEPS:g} waits for the device while a stage computes, the aim is none")
    what = "waits" if bench.device.type == "cuda" else "reads of a number, which would wait on a GPU,"
    return Findings(
        f"{found.total() / STEPS:g} {what} a step of {batches / STEPS:g} micro-batches, {hidden / STEPS:g} of them "
        "while a stage computes",
        (Table("Hidden synchronisations", ("place", "while computing", "a step"), rows),),
        {
            "steps": STEPS,
            "micro_batches": batches,
            "places": [{**place._asdict(), "count": count} for place, count in found.most_common()],
        },
        tuple(missed),
    )


@contextmanager
def caught(device: torch.device) -> Iterator[Counter[Place]]:
    """Within it, every operation that waits for the device is counted by its place."""
    found: Counter[Place] = Counter()
    others = warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if WARNING in str(message):
            found[_place(f"{filename}:{lineno}")] += 1
        else:
            others(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=WARNING)
        warnings.showwarning = show
        with _warnings_of(device):
            yield found


@contextmanager
def _warnings_of(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        stand_in: AbstractContextManager[Any] = _Reads()
        with stand_in:
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Reads(TorchDispatchMode):
    """Warns, in torch's words, at operations whose result the host must read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in _READS:
            warnings.warn(WARNING, stacklevel=2)
        return func(*args, **(kwargs or {}))


def _place(otherwise: str) -> Place:
    """The innermost line of this project on the stack, the benchmark's own left out; `otherwise` if there is none."""
    # On a GPU a backward runs in a thread of autograd, whose stack holds no more than hooks and what is recomputed.
    where, computing = "", threading.current_thread() is not threading.main_thread()
    for frame, line in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename).resolve()
        if not path.is_relative_to(ROOT) or {"tools", ".venv"} & set(path.relative_to(ROOT).parts):
            continue
        inside = str(path.relative_to(ROOT))
        where = where or f"{inside}:{line} in {frame.f_code.co_name}"
        computing |= (inside, frame.f_code.co_name) == _COMPUTES
    return Place(where or otherwise, computing)
