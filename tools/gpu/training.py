"""Part "training": one rank of the real engine against a plain loop of the same model on the same packs, in BF16."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile, peak_tflops
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.plan.step_plan import StepPlan
from tools import aims
from tools.gpu.bench import Bench, Findings, Table, device_name, gib
from tools.gpu.job import engine_alone, llama, new_model, num_matmul_parameters, sequences, training_flops
from tools.gpu.plain_loop import PlainLoop, PlainPack

_WARM_UP = 3
_LEAST = _WARM_UP + 5  # steps, whatever time is left
_ROUGH_FLOPS = 4e14  # the planner must only know that work grows with the tokens

Packs = tuple[tuple[int, ...], ...]  # sequence ids of each micro-batch


@dataclass(frozen=True)
class Side:
    """One contestant: milliseconds and losses of the same steps, the first `_WARM_UP` among them."""

    name: str
    ms: tuple[float, ...]
    losses: tuple[float, ...]
    peak_bytes: int | None

    @property
    def seconds(self) -> float:
        """Of the steps that count."""
        return sum(self.ms[_WARM_UP:]) / 1e3


class Work(NamedTuple):
    """What both sides did in the steps that count."""

    tokens: int
    flops: float
    title: str


def measure_training(bench: Bench) -> Findings:
    """Tokens per second, MFU and peak memory of both."""
    config, longest = llama(bench), bench.pick(8192, 96)
    data = sequences(bench, longest)
    model = new_model(config, bench)
    matmul = num_matmul_parameters(model)
    table = _table_of_one(bench.folder / "one_scheme.json", training_flops(config, matmul, [1]), config, longest)
    steps = bench.pick(_WARM_UP + 20, _WARM_UP + 2)
    ours, packs = _ours(bench, new_model(config, bench), data, steps, str(table))
    left_over = _left_over(bench)  # it would count as the plain loop's
    plain = _plain(bench, model, data, packs)
    counted = [[len(data[i]) for pack in step for i in pack] for step in packs[_WARM_UP:]]
    work = Work(
        tokens=sum(map(sum, counted)),
        flops=sum(training_flops(config, matmul, lengths) for lengths in counted),
        title=f"{matmul / 1e9:.2f}e9 parameters that multiply, BF16, {len(counted)} steps, packs of up to {longest:,}",
    )
    return _compare(bench, ours, plain, work, left_over)


def _compare(bench: Bench, ours: Side, plain: Side, work: Work, left_over: int) -> Findings:
    """The table, and what misses its aim."""
    ratio = plain.seconds / ours.seconds
    difference = abs(ours.losses[0] - plain.losses[0]) / abs(plain.losses[0])
    missed = []
    if bench.full and ratio < aims.GPU_TRAINING:
        missed.append(f"training: {ratio:.3f} of the plain loop's tokens per second, less than {aims.GPU_TRAINING}")
    if not difference <= aims.GPU_LOSS_AGREEMENT:
        missed.append(
            f"training: losses of the first step differ by {difference:.1e}, more than {aims.GPU_LOSS_AGREEMENT:.0e}"
        )
    if left_over > aims.GPU_LEFT_OVER:
        missed.append(f"training: {gib(left_over)} GiB are still taken after the engine was destroyed")
    peak = peak_tflops(device_name(bench.device))
    rows = []
    for side in (ours, plain):
        tflops = work.flops / side.seconds / 1e12
        median, rate = statistics.median(side.ms[_WARM_UP:]), work.tokens / side.seconds
        mfu = f"{tflops / peak:.1%}" if peak and bench.full else "-"
        losses = (f"{side.losses[0]:.4f}", f"{side.losses[-1]:.4f}")
        rows.append((side.name, f"{median:.1f}", f"{rate:,.0f}", f"{tflops:.2f}", mfu, gib(side.peak_bytes), *losses))
    headers = ("who", "median ms", "tokens/s", "TFLOP/s", "MFU", "peak GiB", "first loss", "last loss")
    figures = {
        "ratio": ratio,
        "loss_difference": difference,
        "left_over_bytes": left_over,
        "tokens": work.tokens,
        "flops": work.flops,
        "peak_tflops": peak,
        "sides": [asdict(side) for side in (ours, plain)],
    }
    summary = f"{ratio:.3f} of the plain loop's tokens per second, losses {difference:.1e} apart"
    return Findings(summary, (Table(work.title, headers, tuple(rows)),), figures, tuple(missed))


def _table_of_one(path: Path, flops_per_token: float, config: Any, longest: int) -> Path:
    """A cost table by FLOPs whose MaxLen bounds the packs, so that both sides hold the same activations."""
    per_ms = _ROUGH_FLOPS / 1e3
    a = 6.0 * config.num_hidden_layers * config.hidden_size / per_ms
    cost = SchemeCost(ParallelScheme(1, 1, 1), a, flops_per_token / per_ms, 1.0, longest, min(longest, 1024))
    TableFile(CostTable((cost,), "by FLOPs, for packs of one size")).save(path)
    return path


def _ours(bench: Bench, model: Any, data: Sequence[Tensor], steps: int, table: str) -> tuple[Side, tuple[Packs, ...]]:
    """Steps of the engine, within a half of the part's time, and the packs of each."""
    packs: list[Packs] = []
    losses: list[float] = []
    peaks: list[int] = []  # the engine begins to look for its peak anew in every step
    with engine_alone(bench, model, data, bench.pick(65536, 400), cost_table=table) as engine:

        def step() -> None:
            losses.append(float(engine.train_batch()))

        def after() -> None:
            packs.append(packs_of(engine.last_step.plan))
            peaks.append(engine.last_step.peak_memory_bytes)

        ms = _timed(step, steps, bench, bench.seconds / 2, after)
    return Side("engine", ms, tuple(losses), max(peaks) or None), tuple(packs)  # 0: a CPU, where it is not known


def _plain(bench: Bench, model: Any, data: Sequence[Tensor], packs: Sequence[Packs]) -> Side:
    """The same steps by the plain loop."""
    losses: list[float] = []
    loop = PlainLoop(model, bench.device)
    batches = [[PlainPack.of([data[i] for i in ids], bench.device) for ids in step] for step in packs]
    waiting = iter(batches)
    bench.forget_peak()
    ms = _timed(lambda: losses.append(loop.step(next(waiting))), len(batches), bench, float("inf"), lambda: None)
    return Side("plain loop", ms, tuple(losses), bench.peak_bytes())


def _timed(
    step: Callable[[], None], steps: int, bench: Bench, seconds: float, after: Callable[[], None]
) -> tuple[float, ...]:
    """Wall milliseconds of up to `steps` steps, `_LEAST` of them in any case; `after` runs between them, untimed.

    Every step ends when the device has ended it, so neither side gains by what it would do ahead of the next one.
    """
    ms: list[float] = []
    while len(ms) < steps and (len(ms) < _LEAST or bench.seconds - bench.left < seconds):
        bench.synchronize()
        began = time.perf_counter()
        step()
        bench.synchronize()
        ms.append(1e3 * (time.perf_counter() - began))
        after()
    return tuple(ms)


def _left_over(bench: Bench) -> int:
    """Bytes of tensors that are still there after an engine was destroyed."""
    gc.collect()
    bench.release()
    return torch.cuda.memory_allocated(bench.device) if bench.device.type == "cuda" else 0


def packs_of(plan: str) -> Packs:
    """Sequence ids of each micro-batch of the only pipeline, from a plan's JSON."""
    read = StepPlan.from_json(plan, "the step's plan")
    batches = read.pipelines[0].microbatches
    return tuple(tuple(read.sequence_ids[span.sequence] for span in batch.spans) for batch in batches)
