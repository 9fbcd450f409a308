"""Reports: the step line, the JSON record, monitor scalars and the summary say what a step did."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ds_hydra.engine.record import pushing_s, waiting_s
from ds_hydra.ranks.rank_stats import RankStats
from ds_hydra.report.log import StepLog
from ds_hydra.report.record import Event, HighsFigures, StepRecord, format_line, is_heterogeneous, monitor_events
from ds_hydra.zero_hetero.errors import ConfigError

RECORD = StepRecord(
    step=1,
    loss=2.34561,
    grad_norm=1.25,
    learning_rate=1e-4,
    num_tokens=9000,
    num_targets=8990,
    num_sequences=10,
    strategy="tp4 + 2*pp2",
    changed=True,
    step_ms=800.0,
    predicted_ms=700.0,
    expected_ms=760.0,
    num_padding=1000,
    pipeline_ms=(600.0, 700.0, 800.0),
    searched_ms=770.0,
    lower_bound_ms=700.0,
    planning_ms=12.0,
    plan='{"step":0}',
)


def test_line() -> None:
    assert format_line(RECORD) == (
        "step 1 | loss 2.3456 | norm 1.25 | lr 1.0e-04 | tp4 + 2*pp2 | 800 ms (pred -5%) | wait 0% | "
        "11.2k tok/s | pad 10%"
    )
    known = replace(RECORD, total_steps=44, slowest_wait_ms=96.0, peak_memory_bytes=3 << 29, predicted_step_ms=500.0,
                    expected_ms=808.0, num_padding=0, changed=False)  # fmt: skip
    assert format_line(known, 3909.4) == (
        "step 1/44 | loss 2.3456 | norm 1.25 | lr 1.0e-04 | tp4 + 2*pp2 | 800 ms (pred +1%) | wait 12% | "
        "11.2k tok/s | 1.5 GiB | 1:05:09 left"
    )
    assert "| 800 ms | wait" in format_line(replace(RECORD, expected_ms=None)), "nothing is known of the costs yet"
    assert "| norm - |" in format_line(replace(RECORD, grad_norm=None))
    assert "| 11.2k tok/s | 312 TFLOP/s |" in format_line(replace(RECORD, tflops=312.4))
    assert "| experts 1.8x | wait 0%" in format_line(replace(RECORD, expert_imbalance=1.83))
    unusual = replace(RECORD, planning_hidden=False, skipped=True, recomputed=0.125)
    for words in ("| again 12% |", "| plan late 12 ms |", "| SKIPPED: not finite"):
        assert words in format_line(unusual)


@pytest.mark.parametrize("steps", [44, 1_000_000])
@pytest.mark.parametrize(
    "strategy", ["8*tp1", " + ".join(["tp16", "2*tp8pp3/v", "4*tp4pp2/list", "8*tp2pp2", "16*tp1"])]
)
def test_lines_fit_a_terminal(steps: int, strategy: str) -> None:
    record = replace(RECORD, step=steps, total_steps=steps, strategy=strategy, step_ms=123456.0, num_tokens=10**8,
                     peak_memory_bytes=79 << 30, slowest_wait_ms=12345.0)  # fmt: skip
    for one in (
        record,
        replace(record, tflops=612.3, expert_imbalance=12.3),
        replace(record, skipped=True, planning_hidden=False, recomputed=0.5),
    ):
        line = format_line(one, 360000.0)
        assert len(line) <= 140
        assert strategy[:9] in line
        assert line.endswith("| 100:00:00 left")


def test_the_time_left_follows_from_the_latest_steps(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(0)
    with caplog.at_level(logging.INFO, logger="ds_hydra"):
        for step, ms in enumerate((90_000.0, 1000.0, 1000.0), start=1):
            log.add(replace(RECORD, step=step, step_ms=ms, total_steps=63))
    assert caplog.messages[-1].endswith("| 1:00 left")


def test_waiting_for_the_slowest_pipeline_is_told_from_pushing() -> None:
    def rank(run_s: float, exposed_push_s: float) -> RankStats:
        return RankStats(0.0, 0.0, run_s, run_s, 0.0, exposed_push_s, 0.0, 0.0, 0.0, 0.0)

    # Rank 0 is done 2 s before the slowest one, and its pushes end half a second after that one; rank 2's pushes end
    # before the slowest is done, as it owns nothing of that pipeline's.
    phase = [rank(3.0, 2.5), rank(5.0, 0.5), rank(4.0, 0.25)]
    assert waiting_s(phase) == [2.0, 0.0, 0.25]
    assert pushing_s(phase) == [0.5, 0.5, 0.0]


def test_derived_figures() -> None:
    assert RECORD.balance == pytest.approx(800 / 700)
    assert RECORD.padding_share == pytest.approx(0.1)
    assert RECORD.tokens_per_second == pytest.approx(11250)
    assert RECORD.gap == pytest.approx(770 / 700 - 1)
    assert replace(RECORD, lower_bound_ms=0.0).gap is None
    assert replace(RECORD, pipeline_ms=()).balance == 1.0


def test_json_record_is_valid_json_even_when_numbers_are_not() -> None:
    record = json.loads(json.dumps(replace(RECORD, loss=math.nan, grad_norm=math.inf).to_dict(), allow_nan=False))
    assert record["loss"] is None
    assert record["grad_norm"] is None
    assert record["balance"] == pytest.approx(800 / 700)
    assert set(StepRecord.__dataclass_fields__) - {"plan", "highs"} <= set(record)
    assert record["planner"] == {"highs": None}
    figures = HighsFigures(3, 5, 8.0, 0.02, new_strategy=True, strategy="tp4 + 2*pp2")
    assert replace(RECORD, highs=figures).to_dict()["planner"] == {"highs": asdict(figures)}


def test_log_writes_line_json_plans_and_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events: list[Event] = []

    def write(new: Sequence[Event]) -> None:
        events.extend(new)

    steps, plans = tmp_path / "runs" / "steps.jsonl", tmp_path / "plans.jsonl"
    plans.write_text("left by an earlier run\n")
    log = StepLog(0, steps_file=str(steps), plans_file=str(plans), write_events=write)
    with caplog.at_level(logging.INFO, logger="ds_hydra"):
        log.add(RECORD)
        log.add(replace(RECORD, step=2, strategy="8*tp1", plan='{"step":1}', loss=2.0))
        log.add(replace(RECORD, step=3, skipped=True, skipped_steps=1, loss=1.5))
        log.close()
        log.close()
    assert [json.loads(line)["step"] for line in steps.read_text().splitlines()] == [1, 2, 3]
    assert plans.read_text().splitlines() == ['{"step":0}', '{"step":1}', '{"step":0}']
    assert ("Train/Samples/train_loss", 2.34561, 10) in events
    assert ("Train/Samples/lr", 1e-4, 30) in events
    assert len(caplog.messages) == 4, "three lines and one summary"
    summary = caplog.messages[-1]
    for words in ("3 steps", "2.3456 -> 1.5000", "1 skipped", "2 strategies, 1 heterogeneous", "2 x  tp4 + 2*pp2"):
        assert words in summary, summary


def test_other_ranks_write_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "steps.jsonl"
    log = StepLog(1, steps_file=str(file))
    with caplog.at_level(logging.INFO, logger="ds_hydra"):
        log.add(RECORD)
        log.close()
    assert not file.exists()
    assert not caplog.messages


def test_steps_per_print(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(0, steps_per_print=2)
    with caplog.at_level(logging.INFO, logger="ds_hydra"):
        for step in range(1, 6):
            log.add(replace(RECORD, step=step, skipped=step == 3))
    assert [message.split(" ")[1] for message in caplog.messages] == ["2", "3", "4"]


def test_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"folder.*cannot be written.*hydra\.steps_file"):
        StepLog(0, steps_file=str(tmp_path / "folder"))


def test_events_leave_out_what_is_not_known() -> None:
    names = {name for name, _, _ in monitor_events(replace(RECORD, grad_norm=None, lower_bound_ms=0.0), 10)}
    assert "Train/Samples/grad_norm" not in names
    assert "Train/Hydra/gap" not in names


def test_heterogeneous() -> None:
    assert is_heterogeneous("tp4 + 2*pp2")
    assert not is_heterogeneous("8*tp1")
    assert not is_heterogeneous("tp2 + tp2")


def test_a_full_disk_costs_lines_of_the_log_and_not_the_job(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def write(events: Sequence[Event]) -> None:
        raise OSError(28, "No space left on device")

    log = StepLog(0, steps_file="/dev/full", plans_file="/dev/full", write_events=write)
    for step in (1, 2, 3):
        log.add(replace(RECORD, step=step, plan="{}"))
    assert caplog.text.count("/dev/full: a line cannot be written (No space left on device)") == 2, "once for each file"
    assert "step 3: the monitors cannot write" in caplog.text


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"

    def in_child() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(line) + 50, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        log.add(replace(RECORD, step=2))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.add(replace(RECORD, step=3))

    log = StepLog(0, steps_file=str(file))
    log.add(replace(RECORD, step=1))
    line = file.read_bytes()
    pid = os.fork()
    if pid == 0:
        try:
            in_child()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert [json.loads(text)["step"] for text in file.read_text().splitlines()] == [1, 3]
