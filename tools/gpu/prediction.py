"""Part "prediction": step time and peak memory as predicted by table and memory model, against what steps take."""

from __future__ import annotations

from typing import Any

from ds_hydra.engine.costs import job_memory, rank_memory
from ds_hydra.pipe.shape import ParallelScheme
from tools import aims
from tools.gpu.bench import Bench, Findings, Table, gib, median_and_p90
from tools.gpu.cost_table import table_of
from tools.gpu.job import engine_alone, llama, new_model, sequences
from tools.gpu.training import packs_of

_WARM_UP = 3


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
        while len(rows) < bench.pick(40, _WARM_UP + 3) and (len(rows) <= _WARM_UP or bench.left > 0):
            engine.train_batch()
            record = engine.last_step
            most = max(sum(len(data[i]) for i in pack) for pack in packs_of(record.plan))
            rows.append({
                "tokens": record.num_tokens, "micro_batches": sum(record.num_micro_batches), "largest": most,
                "measured_ms": record.step_ms, "predicted_ms": record.predicted_step_ms,
                "measured_bytes": record.peak_memory_bytes or None,
                "predicted_bytes": memory.fullest(_ALONE, most).total(most),
            })  # fmt: skip
    counted = rows[_WARM_UP:]
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
