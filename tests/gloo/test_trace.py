"""A traced step of a real run: what every rank did, in the order that was predicted, by the rules of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds_hydra.engine.record import measured_spans
from ds_hydra.report.trace import trace_faults
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.clock import HostClock, Stopwatch
from tests.support.small_job import small_engine


def job(rank: int, folder: str) -> list[float]:
    """Three steps, of which the second is traced."""
    engine: Any = small_engine(
        rank,
        strategies=["2*tp1", "pp2/v", "tp2"],
        steps_file=f"{folder}/steps.jsonl",
        trace={"steps": [2], "profiler": True},
    )
    losses = [float(engine.train_batch()) for _ in range(3)]
    engine.destroy()
    return losses


def computing(record: dict[str, Any], process: str) -> list[str]:
    """Forwards and backwards of a process, in order of time; weights' gradients may run together."""
    (pid,) = {e["pid"] for e in record["traceEvents"] if e["name"] == "process_name" and e["args"]["name"] == process}
    events = [e for e in record["traceEvents"] if e["pid"] == pid and e.get("cat") in ("forward", "backward")]
    names = [event["name"] for event in sorted(events, key=lambda event: event["ts"])]
    return [name for name in names if not name.startswith("W")]


def test_a_traced_step_is_written_with_what_was_predicted(tmp_path: Path) -> None:
    run_ranks(job, 2, str(tmp_path), timeout=240)
    assert sorted(path.name for path in tmp_path.glob("trace_*")) == ["trace_step2.json"]
    record = json.loads((tmp_path / "trace_step2.json").read_text())
    assert not trace_faults(record)
    for rank in range(2):
        measured = computing(record, f"rank {rank} measured")
        assert measured == computing(record, f"rank {rank} predicted")
        assert measured[0] == "F0"
        assert "F0'" in measured
        assert json.loads((tmp_path / f"profile_step2_rank{rank}.json").read_text())["traceEvents"]
    kinds = {(event["cat"], event["name"]) for event in record["traceEvents"] if event["ph"] == "X"}
    assert {("pull", "pull"), ("push", "push"), ("control", "schedule"), ("norm", "norm")} <= kinds


def test_a_trace_begins_with_the_step_s_first_pull() -> None:
    """The update of the step before comes first among the laps, and is left out."""
    now = iter(range(100))
    watch = Stopwatch(HostClock(lambda: float(next(now))))
    with watch.lap("optimizer"):
        pass
    with watch.lap("pull"):
        pass
    with watch.lap("run"), watch.lap("forward", microbatch=3):
        pass
    spans = measured_spans(watch.take(), 7)
    assert [(span.rank, span.name, span.start_s, span.stop_s) for span in spans] == [
        (7, "pull", 0.0, 1.0), (7, "schedule", 2.0, 5.0), (7, "F3", 3.0, 4.0)
    ]  # fmt: skip
