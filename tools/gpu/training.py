"""Parts "training", "costs" and "prediction": one rank of the real engine, what its costs are, and what they predict.

training    against each of `BASELINES`, of the same model on the same packs, in BF16, in turns, with FlashAttention 2
            and, where it is installed, 3
costs       a cost table of one device by local shapes, as `ds-hydra profile` makes it, and its held-out error
prediction  step time and peak memory as predicted by table and memory model, against what steps take
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hydra.commands import profile
from ds_hydra.config.hydra_block import FLASH_3, HydraConfig
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile, peak_tflops
from ds_hydra.engine.costs import job_memory, rank_memory
from ds_hydra.pipe.attention.backends import give_flash_3_back, use_flash_3
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.profiling.links import LinkFigure, Links
from tools import aims
from tools.gpu.baselines import BASELINES, Baseline, PlainPack
from tools.gpu.bench import (
    Bench,
    Findings,
    Table,
    device_name,
    engine_alone,
    engine_config,
    gib,
    llama,
    median_and_p90,
    new_model,
    num_matmul_parameters,
    save_config,
    sequences,
    training_flops,
)

_WARM_UP = 3
_LEAST = _WARM_UP + 5  # steps, whatever time is left
_ROUGH_FLOPS = 4e14  # the planner must only know that work grows with the tokens

Packs = tuple[tuple[int, ...], ...]  # sequence ids of each micro-batch


ENGINE = "engine"


class Side(NamedTuple):
    """One contestant's turn: milliseconds and losses of the same steps, the first `_WARM_UP` among them."""

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
    """Tokens per second, MFU and peak memory of the engine and of each baseline, in turns, with each attention."""
    config, longest = llama(bench), bench.pick(8192, 96)
    data = sequences(bench, longest)
    matmul = num_matmul_parameters(new_model(config, bench))
    table = _table_of_one(bench.folder / "one_scheme.json", training_flops(config, matmul, [1]), config, longest)
    steps = bench.pick(_WARM_UP + 7, _WARM_UP + 2)
    found: dict[tuple[str, str], list[Side]] = {}
    packs: tuple[Packs, ...] = ()
    left_over = 0
    attentions = ("FlashAttention 2", "FlashAttention 3") if has_flash_3(bench.device) else ("",)
    for _ in range(bench.pick(3, 1)):
        for attention in attentions:
            if found and bench.left < bench.seconds / 4:
                break
            paths = [one for one in HydraConfig(1).fast_paths if one != FLASH_3 or attention != "FlashAttention 2"]
            model = new_model(config, bench)
            ours, packs = _ours(bench, model, data, steps, str(table), paths, packs)
            found.setdefault((ENGINE, attention), []).append(ours)
            left_over = max(left_over, _left_over(bench))  # it would count as a baseline's
            for name, baseline in BASELINES.items():
                if not baseline.why_not(bench.device):
                    with flash_3(bench.device, attention == "FlashAttention 3"):
                        side = _plain(bench, baseline, new_model(config, bench), data, packs)
                    found.setdefault((name, attention), []).append(side._replace(name=name))
                    _left_over(bench)
    counted = [[len(data[i]) for pack in step for i in pack] for step in packs[_WARM_UP:]]
    work = Work(
        tokens=sum(map(sum, counted)),
        flops=sum(training_flops(config, matmul, lengths) for lengths in counted),
        title=f"{matmul / 1e9:.2f}e9 parameters that multiply, BF16, {len(counted)} steps, packs of up to {longest:,}",
    )
    return _compare(bench, found, work, left_over)


def has_flash_3(device: torch.device) -> bool:
    """Whether FlashAttention 3 can be used here."""
    try:
        return device.type == "cuda" and use_flash_3(device)
    finally:
        give_flash_3_back()


@contextmanager
def flash_3(device: torch.device, wanted: bool) -> Iterator[None]:
    """torch's attention by FlashAttention 3, if it is wanted."""
    if wanted:
        use_flash_3(device)
    try:
        yield
    finally:
        give_flash_3_back()


def _compare(bench: Bench, found: Mapping[tuple[str, str], list[Side]], work: Work, left_over: int) -> Findings:
    """The table, and what misses its aim."""
    peak, rows, missed, ratios = peak_tflops(device_name(bench.device)), [], [], {}
    seconds = {who: statistics.median(side.seconds for side in sides) for who, sides in found.items()}
    for (name, attention), sides in found.items():
        ours = found[ENGINE, attention][0]
        ratio = seconds[name, attention] / seconds[ENGINE, attention]
        ratios[f"{name}, {attention}".rstrip(", ")] = ratio
        difference = abs(ours.losses[0] - sides[0].losses[0]) / abs(sides[0].losses[0])
        aim = BASELINES[name].aim if name in BASELINES else 0.0
        if bench.full and ratio < aim:
            missed.append(f"training: {ratio:.3f} of the tokens per second of {name}, less than {aim}")
        if not difference <= aims.GPU_LOSS_AGREEMENT:
            missed.append(f"training: losses of the first step of {name} differ by {difference:.1e}, more than "
                          f"{aims.GPU_LOSS_AGREEMENT:.0e}")  # fmt: skip
        ms = sorted(one for side in sides for one in side.ms[_WARM_UP:])
        tflops = work.flops / seconds[name, attention] / 1e12
        spread = f"{ms[len(ms) // 4]:.1f} to {ms[3 * len(ms) // 4]:.1f}"
        mfu = f"{tflops / peak:.1%}" if peak and bench.full else "-"
        rows.append((f"{name} {attention}".rstrip(), f"{statistics.median(ms):.1f}", spread,
                     f"{work.tokens / seconds[name, attention]:,.0f}", f"{ratio:.3f}", mfu, gib(sides[0].peak_bytes),
                     f"{sides[0].losses[0]:.4f}", f"{sides[0].losses[-1]:.4f}"))  # fmt: skip
    absent = {name: why for name, one in BASELINES.items() if (why := one.why_not(bench.device))}
    if bench.device.type != "cuda" or not has_flash_3(bench.device):
        absent["all with FlashAttention 3"] = "it is not installed for this device"
    if left_over > aims.GPU_LEFT_OVER:
        missed.append(f"training: {gib(left_over)} GiB are still taken after the engine was destroyed")
    headers = ("who", "median ms", "half lie in", "tokens/s", "engine is faster by", "MFU", "peak GiB", "first loss",
               "last loss")  # fmt: skip
    figures = {"ratios": ratios, "left_over_bytes": left_over, "tokens": work.tokens, "flops": work.flops,
               "peak_tflops": peak, "absent": absent, "turns": len(found[next(iter(found))]),
               "sides": [side._asdict() for sides in found.values() for side in sides]}  # fmt: skip
    told = "; ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items() if not name.startswith(ENGINE))
    tables = (Table(work.title, headers, tuple(rows)), Table("Did not run", ("who", "why"), tuple(absent.items())))
    return Findings(f"the engine's tokens per second over those of: {told}", tables, figures, tuple(missed))


def _table_of_one(path: Path, flops_per_token: float, config: Any, longest: int) -> Path:
    """A cost table by FLOPs whose MaxLen bounds the packs, so that both sides hold the same activations."""
    per_ms = _ROUGH_FLOPS / 1e3
    a = 6.0 * config.num_hidden_layers * config.hidden_size / per_ms
    cost = SchemeCost(ParallelScheme(1, 1, 1), a, flops_per_token / per_ms, 1.0, longest, min(longest, 1024))
    TableFile(CostTable((cost,), "by FLOPs, for packs of one size")).save(path)
    return path


def _ours(
    bench: Bench, model: Any, data: Sequence[Tensor], steps: int, table: str, paths: Sequence[str],
    before: tuple[Packs, ...],
) -> tuple[Side, tuple[Packs, ...]]:  # fmt: skip
    """Steps of the engine, and the packs of each, which are those of the turn `before`."""
    packs: list[Packs] = []
    losses: list[float] = []
    peaks: list[int] = []  # the engine begins to look for its peak anew in every step
    with engine_alone(bench, model, data, bench.pick(65536, 400), cost_table=table, fast_paths=paths) as engine:

        def step() -> None:
            losses.append(float(engine.train_batch()))

        def after() -> None:
            packs.append(packs_of(engine.last_step.plan))
            peaks.append(engine.last_step.peak_memory_bytes)

        ms = _timed(step, len(before) or steps, bench, float("inf"), after)
    assert before in ((), tuple(packs)), "each turn has the same packs"
    return Side(ENGINE, ms, tuple(losses), max(peaks) or None), tuple(packs)  # 0: a CPU, where it is not known


def _plain(bench: Bench, baseline: Baseline, model: Any, data: Sequence[Tensor], packs: Sequence[Packs]) -> Side:
    """The same steps by a baseline."""
    losses: list[float] = []
    loop = baseline.loop(model, bench.device)
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


TABLE = "cost_table.json"  # in the run's folder, for other parts
SCHEMES = ("tp1", "tp8", "pp2", "sp2")
_SPREAD = 1.8  # a measurement takes so much longer than its repeats
_BATCHES = 33  # measured of a stage, in parts and slices too

# One device cannot measure links. These stand for a node with NVLink: what they add to a time is the same straight line
# in the tokens for every rung, so they have no part in the error; a job of several devices measures its own.
ASSUMED = Links(
    tuple(LinkFigure(operation, 2, 25.0, 2e11) for operation in ("all_reduce", "all_gather", "all_to_all", "p2p")),
    "assumed: 200 GB/s and 25 microseconds",
)


def measure_costs(bench: Bench) -> Findings:
    """Measure the table, leave it in the run's folder, and compare it with lengths that it was not fitted to."""
    schemes = bench.pick(SCHEMES, ("tp1", "tp2"))
    figures = make_table(bench, schemes, bench.left)
    measured = figures["record"]["measured"]
    costs = {row["scheme"]: row for row in figures["record"]["schemes"]}
    rows = tuple(
        (name, f"{costs[name]['a']:.2e}", f"{costs[name]['b']:.2e}", f"{costs[name]['c']:.2f}",
         f"{costs[name].get('floor', 0.0):.2f}",
         costs[name]["max_length"], *(_share(entry[key]) for key in ("held_out_median", "held_out_p90")))
        for name, entry in measured.items()
    )  # fmt: skip
    headers = ("scheme", "a ms/tok^2", "b ms/tok", "c ms", "floor ms", "MaxLen of 8 ranks", "held-out median", "p90")
    median, p90 = figures["held_out_median"], figures["held_out_p90"]
    return Findings(
        f"{len(rows)} schemes in {figures['seconds']:.0f} s, held-out error median {median:.1%}, p90 {p90:.1%}",
        (Table(f"Cost table by local shapes; links {ASSUMED.source}", headers, rows),),
        figures | {"links": ASSUMED.to_record()},
        tuple(figures["missed"]) if bench.full else (),
    )


def make_table(bench: Bench, schemes: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Figures of `ds-hydra profile` for these schemes in about so many seconds; TABLE is what it wrote."""
    folder = bench.folder
    config = folder / "ds.json"
    longest = bench.pick(8192, 128)
    config.write_text(json.dumps(engine_config(bench.pick(65536, 400), context_length=longest)))
    links, figures = folder / "links.json", folder / "profile.json"
    links.write_text(json.dumps(ASSUMED.to_record()))
    # A scheme with pipelines has two stages to measure, the others have one.
    stages = sum(1 + ("pp" in scheme) for scheme in schemes)
    repeats = bench.pick(max(0.05, seconds / _SPREAD / stages / _BATCHES), 0.005)
    options = ["--model", save_config(llama(bench), folder), "--deepspeed_config", config, "--out", folder / TABLE,
               "--gpus", 8, "--links", links, "--longest", longest, "--clock", "wall", "--ranks", 1, "--json", figures,
               "--seconds", repeats, "--schemes", *schemes]  # fmt: skip
    if not bench.full:
        options += ["--quick", "--rungs", 3]
    code = profile.main([str(option) for option in options], name="profile")
    if code > 1:
        raise RuntimeError(f"ds-hydra profile ended with {code}; its own message says why")
    return json.loads(figures.read_text())


def table_of(bench: Bench) -> Path:
    """The table that an earlier part has left, or one of tp1 alone, measured now."""
    path = bench.folder / TABLE
    if not path.exists():
        make_table(bench, ("tp1",), bench.left / 3)
    return path


def _share(error: float | None) -> str:
    """An error for a table; a dash where there was no room for held-out lengths."""
    return "-" if error is None else f"{error:.1%}"


_WARM = 3


def measure_prediction(bench: Bench) -> Findings:
    """Steps of the engine under a measured table; each predicted before it ran."""
    longest = bench.pick(8192, 128)
    data = sequences(bench, longest, seed=2)
    table = table_of(bench)
    model = new_model(llama(bench), bench)
    rows: list[dict[str, Any]] = []
    with engine_alone(
        bench, model, data, bench.pick(32768, 400), cost_table=str(table), context_length=longest
    ) as engine:
        memory = _memory_model(engine)
        while len(rows) < bench.pick(40, _WARM + 3) and (
            len(rows) < bench.pick(_WARM + 20, _WARM + 1) or bench.left > 0
        ):
            engine.train_batch()
            record = engine.last_step
            most = max(sum(len(data[i]) for i in pack) for pack in packs_of(record.plan))
            rows.append({
                "tokens": record.num_tokens, "micro_batches": sum(record.num_micro_batches), "largest": most,
                "measured_ms": record.step_ms, "predicted_ms": record.predicted_step_ms,
                "measured_bytes": record.peak_memory_bytes or None,
                "predicted_bytes": memory.fullest(_ALONE, most).total(most),
            })  # fmt: skip
    counted = rows[_WARM:]
    time_median, time_p90 = median_and_p90([abs(r["predicted_ms"] / r["measured_ms"] - 1.0) for r in counted])
    # The largest step counts: the model is there to say what fits.
    fullest = max(counted, key=lambda row: row["predicted_bytes"])
    excess = fullest["predicted_bytes"] / fullest["measured_bytes"] - 1.0 if fullest["measured_bytes"] else None
    missed = []
    if bench.full and time_median > aims.STEP_MEDIAN:
        missed.append(f"step time: median error {time_median:.1%} is above {aims.STEP_MEDIAN:.0%}")
    if bench.full and time_p90 > aims.STEP_P90:
        missed.append(f"step time: p90 error {time_p90:.1%} is above {aims.STEP_P90:.0%}")
    if bench.full and (excess is None or abs(excess) > aims.MEMORY):
        what = "is not known" if excess is None else f"{excess:+.1%} is more than {aims.MEMORY:.0%}"
        missed.append(f"peak memory: the error {what}")
    shown = [
        (r["tokens"], r["micro_batches"], r["largest"], f"{r['measured_ms']:.1f}", f"{r['predicted_ms']:.1f}",
         f"{r['predicted_ms'] / r['measured_ms'] - 1.0:+.1%}", gib(r["measured_bytes"]), gib(r["predicted_bytes"]))
        for r in counted[:12]
    ]  # fmt: skip
    headers = ("tokens", "micro-batches", "largest", "ms", "predicted", "error", "peak GiB", "predicted GiB")
    summary = (
        f"{len(counted)} steps: time off by {time_median:.1%} in the median, {time_p90:.1%} at p90; peak memory "
        + ("not measured on a CPU" if excess is None else f"off by {excess:+.1%}")
    )
    figures = {"time_median": time_median, "time_p90": time_p90, "memory_error": excess, "steps": counted}
    return Findings(
        summary, (Table("Steps, predicted before they ran", headers, tuple(shown)),), figures, tuple(missed)
    )


_ALONE = ParallelScheme(1, 1, 1)


def alone_memory(engine: Any, tokens: int) -> float:
    """Bytes of a step whose largest micro-batch has so many tokens, by the engine's memory model, on one rank."""
    return float(_memory_model(engine).fullest(_ALONE, tokens).total(tokens))


def _memory_model(engine: Any) -> Any:
    """The memory model that the engine limits its plans by."""
    job, world, found = engine.job, engine.crew.world, engine.crew.prepared.found
    return job_memory(
        job.source,
        [_ALONE],
        world.num_ranks,
        rank_memory(world.device, world.cluster.ranks_beside(world.rank)),
        job.types.compute,
        measured=found.activations,
    )
