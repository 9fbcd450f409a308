"""Parts "budget" and "lengths": where one step's time goes, by class of kernel; how memory grows with a sequence.

budget   one step of the engine under the profiler. Each moment of the step belongs to the kernel that began first, so
         that classes and idle time add up to the whole. On a CPU operators stand in for kernels
lengths  steps of one sequence each, ever longer: peak memory beside what the memory model says, tokens per second
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tools.gpu.bench import Bench, Findings, Table, engine_alone, gib, llama, new_model, sequences
from tools.gpu.training import alone_memory

# In this order: what matches one of them belongs to it. Names of kernels, and of torch's operators.
CLASSES: Mapping[str, str] = {
    "messages": r"nccl|gloo|c10d",
    "attention": r"flash|fmha|attention|softmax_(warp|lse)",
    "loss": r"row_statistics|row_gradient|log_softmax|nll_loss|logsumexp|amax",
    "SwiGLU": r"silu|swiglu",
    "rotary": r"_turn\b|rotary|rotate",
    "norms": r"norm",
    "products": r"gemm|nvjet|cutlass|xmma|splitk|cublas|::(add)?mm\b|::bmm|matmul|::linear",
    "update": r"adam|multi_tensor|_foreach",
    "cat": r"catarray|::cat\b",
    "embedding": r"embedding|index",
    "copies": r"memcpy|memset|copy|fill|zero|::to\b|::clone|contiguous",
    "sums": r"reduce|::sum\b",
    "element-wise": r"elementwise|vectorized|triton|::(add|mul|sub|div|pow|neg|exp|where)",
}
IDLE, OTHER = "idle", "other"
_WHOLE = ("attention", "products", "norms", "update", "embedding")  # operators on a CPU whose parts are theirs


class Interval(NamedTuple):
    """A kernel of a step, in microseconds."""

    start: float
    stop: float
    name: str


def class_of(name: str) -> str:
    """The class of a kernel or operator."""
    return next((one for one, words in CLASSES.items() if re.search(words, name, re.IGNORECASE)), OTHER)


def shares(found: Iterable[Interval], start: float, stop: float) -> dict[str, float]:
    """Microseconds of each class between two moments, and of none, IDLE; they add up to all.

    What runs beside a kernel that began earlier has only what is left behind its end.
    """
    sums, now = dict[str, float](), start
    for one in sorted(found):
        begin, end = max(one.start, now), min(one.stop, stop)
        if end > begin:
            sums[IDLE] = sums.get(IDLE, 0.0) + begin - now
            sums[class_of(one.name)] = sums.get(class_of(one.name), 0.0) + end - begin
            now = end
    sums[IDLE] = sums.get(IDLE, 0.0) + stop - now
    return sums


def kernels_of(events: Iterable[Any], on_gpu: bool) -> list[Interval]:
    """Kernels of a profile's events; on a CPU operators that call no other, or are of a kind as a whole."""
    return [
        Interval(event.time_range.start, event.time_range.end, event.name)
        for event in events
        if (
            event.device_type == DeviceType.CUDA if on_gpu else not event.cpu_children or class_of(event.name) in _WHOLE
        )
        and not event.name.startswith(("ProfilerStep", "hydra"))
    ]


def measure_budget(bench: Bench) -> Findings:
    """Classes of one step, after some that warm up."""
    on_gpu, longest = bench.device.type == "cuda", bench.pick(8192, 96)
    kinds = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    model, data = new_model(llama(bench), bench), sequences(bench, longest)
    with engine_alone(bench, model, data, bench.pick(65536, 400), context_length=longest) as engine:
        for _ in range(bench.pick(4, 1)):
            engine.train_batch()
        bench.synchronize()
        began = time.perf_counter()
        with profile(activities=kinds) as found:
            engine.train_batch()
            bench.synchronize()
        wall_ms, tokens = 1e3 * (time.perf_counter() - began), engine.last_step.num_tokens
        if on_gpu:
            found.export_chrome_trace(str(bench.folder / "budget_trace.json"))
    kernels = kernels_of(found.events() or (), on_gpu)
    start, stop = min(one.start for one in kernels), max(one.stop for one in kernels)
    parts, whole = shares(kernels, start, stop), stop - start
    counts = Counter(class_of(one.name) for one in kernels)
    rows = tuple((name, f"{us / 1e3:.2f}", f"{us / whole:.1%}", counts[name] or "-")
                 for name, us in sorted(parts.items(), key=lambda part: -part[1]))  # fmt: skip
    unknown: dict[str, float] = {}
    for one in kernels:
        if class_of(one.name) == OTHER:
            unknown[one.name[:60]] = unknown.get(one.name[:60], 0.0) + one.stop - one.start
    most = tuple((name, f"{us:.1f}") for name, us in sorted(unknown.items(), key=lambda part: -part[1])[:8])
    idle = parts.get(IDLE, 0.0) / whole
    return Findings(
        f"a step of {tokens:,} tokens takes {whole / 1e3:.1f} ms, {idle:.1%} of it without a kernel",
        (Table(f"Where a step's time goes, {len(kernels)} kernels", ("class", "ms", "share", "kernels"), rows),
         Table("Of no class", ("kernel", "us"), most)),
        {"us": parts, "whole_us": whole, "wall_ms": wall_ms, "tokens": tokens, "kernels": dict(counts)},
    )  # fmt: skip


@dataclass(frozen=True)
class OfLength:
    """What steps of one sequence have shown."""

    length: int
    ms: float | None
    peak_bytes: int | None
    predicted_bytes: float | None
    refused: str = ""


LENGTHS = (8192, 32768, 131072, 524288)
_STEPS = 3


def measure_lengths(bench: Bench) -> Findings:
    """Each length by itself, up to the first that the job does not hold."""
    found: list[OfLength] = []
    for length in bench.pick(LENGTHS, (64, 128)):
        if bench.left <= 0 or (found and found[-1].refused):
            break
        found.append(_of_length(bench, length))
        bench.release()
    rows = tuple(
        (f"{one.length:,}", "-" if one.ms is None else f"{one.ms:.0f}",
         "-" if one.ms is None else f"{one.length / one.ms * 1e3:,.0f}", gib(one.peak_bytes), gib(one.predicted_bytes),
         one.refused[:100]) for one in found
    )  # fmt: skip
    held = [one.length for one in found if not one.refused]
    return Findings(
        f"sequences of up to {max(held, default=0):,} tokens of {len(found)} lengths tried",
        (Table("One sequence a step", ("tokens", "ms", "tokens/s", "peak GiB", "by the model", "refused"), rows),),
        {"lengths": [asdict(one) for one in found]},
    )


def _of_length(bench: Bench, length: int) -> OfLength:
    config = llama(bench)
    config.max_position_embeddings = max(config.max_position_embeddings, length)
    generator = torch.Generator().manual_seed(length)
    data = [torch.randint(config.vocab_size, (length,), generator=generator) for _ in range(_STEPS + 1)]
    ms, peak, hydra = 0.0, 0, {"context_length": length, "chunks": "auto"}
    try:
        with engine_alone(bench, new_model(config, bench), data, length, **hydra) as engine:
            predicted = alone_memory(engine, length)
            for step in range(_STEPS):
                engine.train_batch()
                ms = min(ms, engine.last_step.step_ms) if step else engine.last_step.step_ms
                peak = max(peak, engine.last_step.peak_memory_bytes)
    except (ConfigError, PlanError, torch.OutOfMemoryError) as error:
        return OfLength(length, None, None, None, str(error).splitlines()[0])
    return OfLength(length, ms, peak or None, predicted)
