"""Reports: laps of a step, its line and record, plots of a run and its pages."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ds_hydra.commands import report
from ds_hydra.commands.__main__ import main
from ds_hydra.commands.figures import shipped
from ds_hydra.commands.report import waits_of
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.engine.record import pushing_s, waiting_s
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import save_plans
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.fixed_layout import layouts_by_length, layouts_that_hold
from ds_hydra.ranks.rank_stats import RankStats
from ds_hydra.report.plots import changes_of_ranks, draw_report, read_steps, relative_errors, summarise
from ds_hydra.report.record import (
    Event,
    HighsFigures,
    StepLog,
    StepRecord,
    format_line,
    monitor_events,
)
from ds_hydra.rivals.preview import BALANCED
from ds_hydra.zero_hetero.clock import Clock, HostClock, Stopwatch
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.device_steps import FakeDevice, FakeDeviceClock


# --- Laps: seconds by kind, waits within work counted once, and what a device does charged to who has started
# it.
def two_laps(clock: Clock, device: FakeDevice) -> Stopwatch:
    """A forward of 40 s and a backward of 80 s that waits in its middle until a message comes at 100 s."""
    watch = Stopwatch(clock)
    with watch.lap("run"):
        with watch.lap("forward", stage=1, microbatch=7):
            device.launch(40.0)
        with watch.lap("backward", stage=1, microbatch=7):
            device.launch(30.0)
            with watch.lap("pull"):
                device.stand_still_until(100.0)
            device.launch(50.0)
    return watch


def test_work_is_charged_to_the_lap_that_started_it() -> None:
    device = FakeDevice()
    laps = two_laps(FakeDeviceClock(device), device).take()
    device.wait()
    spent = laps.spent()
    assert spent["forward"] == pytest.approx((40.0, 40.0), abs=1e-3)
    assert spent["pull"] == pytest.approx((30.0, 30.0), abs=1e-3)
    assert spent["backward"] == pytest.approx((110.0, 80.0), abs=1e-3)
    assert spent["run"] == pytest.approx((150.0, 0.0), abs=1e-3)


def test_laps_are_named_and_in_the_order_of_their_begins() -> None:
    device = FakeDevice()
    watch = two_laps(HostClock(lambda: device.host_s), device)
    laps = watch.take().laps
    assert not watch.take().laps, "taken once"
    assert [(lap.kind, lap.stage, lap.microbatch) for lap in laps] == [
        ("run", None, None), ("forward", 1, 7), ("backward", 1, 7), ("pull", None, None)
    ]  # fmt: skip
    assert [lap.inside and lap.inside.kind for lap in laps] == [None, "run", "run", "backward"]


def test_nothing_is_read_before_the_device_has_passed_it() -> None:
    device = FakeDevice()
    laps = two_laps(FakeDeviceClock(device), device).take()
    with pytest.raises(RuntimeError, match="the device comes to"):
        laps.spent()


def test_an_error_ends_its_laps() -> None:
    watch = Stopwatch(HostClock())
    with pytest.raises(ZeroDivisionError), watch.lap("run"), watch.lap("forward"):
        _ = 1 / 0
    assert [lap.end is None for lap in watch.take().laps] == [False, False]


def test_without_a_clock_nothing_is_kept() -> None:
    device = FakeDevice()
    watch = Stopwatch(None)
    with watch.lap("run"):
        device.launch(1.0)
    assert not watch.take().laps


# --- Reports: the step line, the JSON record, monitor scalars and the summary say what a step did.
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


# --- Reports of a run from its step records.
pytest.importorskip("matplotlib")


def record(step: int, **changes: Any) -> dict[str, Any]:
    strategy = ("2*tp1", "tp2", "tp1 + pp2")[step % 3]
    pipelines = 1 if strategy == "tp2" else 2
    return {
        "step": step, "strategy": strategy, "step_ms": 100.0 + step, "predicted_ms": 90.0, "num_tokens": 4000 + step,
        "predicted_step_ms": 99.0, "expected_ms": 100.5 + step, "num_sequences": 10, "planning_ms": 2.0,
        "planning_hidden": True, "loss": 9.0 - 0.1 * step, "learning_rate": 1e-3, "slowest_wait_ms": 5.0,
        "balance": 1.1, "changed": True, "pipeline_ms": [95.0] * pipelines,
        "predicted_pipeline_ms": [93.0] * pipelines, **changes,
    }  # fmt: skip


def write(path: Path, records: list[dict[str, Any]], *more: str) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records) + "".join(more))
    return path


class Images(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.found.append(dict(attrs))


def test_every_figure_is_drawn_and_told_in_words(tmp_path: Path) -> None:
    figures = draw_report([record(i) for i in range(1, 13)], tmp_path, [5, 50, 500] * 9)
    parser = Images()
    parser.feed((tmp_path / "index.html").read_text())
    assert [image["src"] for image in parser.found] == [figure.path.name for figure in figures]
    assert all(image["alt"] for image in parser.found)
    assert all(figure.path.stat().st_size > 5000 for figure in figures)
    assert len(figures) == 10
    assert "The loss went from 8.900 to 7.800 in 12 steps" in figures[0].words
    assert "37,621 tokens a second in the median" in figures[1].words
    assert figures[2].title.startswith("Step 12:")
    with pytest.raises(ConfigError, match="no record of step 99: there are 1 to 1"):
        draw_report([record(1)], tmp_path, step=99)


def test_records_without_predictions_and_single_pipelines_still_draw(tmp_path: Path) -> None:
    plain = [
        record(i, strategy="tp2", predicted_step_ms=None, predicted_pipeline_ms=[], pipeline_ms=[90.0]) for i in (1, 2)
    ]
    words = [figure.words for figure in draw_report(plain, tmp_path)]
    assert sum(text.startswith("Nothing to draw") for text in words) == 2


def test_where_other_ranks_train_from_a_step_on_is_marked(tmp_path: Path) -> None:
    names = ["4*tp1", "2*tp2", "3*tp1", "3*tp1", "tp2 + 2*tp1"]
    records = [record(step, strategy=name, pipeline_ms=[]) for step, name in enumerate(names, start=1)]
    assert changes_of_ranks(records) == [(1, 4), (3, 3), (5, 4)]
    figures = draw_report(records, tmp_path)
    assert all("4 ranks trained at first, 3 from step 3, 4 from step 5." in figure.words for figure in figures[:2])
    assert changes_of_ranks(records[:2]) == [(1, 4)]


def test_a_resumed_run_counts_each_step_once_and_broken_lines_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [record(1), record(2), record(2, step_ms=7.0)], '{"step": 3, "st')
    records, broken = read_steps(path)
    assert [r["step"] for r in records] == [1, 2]
    assert records[1]["step_ms"] == 7.0
    assert broken == 1
    with pytest.raises(ConfigError, match="no step records"):
        read_steps(write(tmp_path / "none.jsonl", []))


def test_errors_are_relative_to_the_measured_time() -> None:
    records = [record(1, step_ms=100.0, expected_ms=110.0), record(2, step_ms=100.0, expected_ms=80.0)]
    assert relative_errors(records) == pytest.approx([0.1, -0.2])
    assert summarise([0.1, -0.2, 0.05]) == pytest.approx((0.1, 0.2))


def test_a_short_run_without_predictions_is_not_judged_and_has_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [record(i, expected_ms=None, planning_hidden=False, slowest_wait_ms=90.0) for i in range(1, 5)]
    assert report.main([str(write(tmp_path / "steps.jsonl", bad))]) == 0
    said = capsys.readouterr().out
    assert "too short to be judged: 4 steps, of at least 20" in said
    assert "- (median / p90), with corrections -" in said
    told = (tmp_path / "report" / "index.html").read_text()
    assert "nothing was predicted" in told
    assert not [line for line in (*said.splitlines(), told) if "error" in line and "%" in line.split("error")[1][:12]]


def test_the_tool_prints_a_summary_and_refuses_what_is_no_steps_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "steps.jsonl", [record(i) for i in range(1, 9)])
    assert report.main([str(path), "--json", str(tmp_path / "figures.json")]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("ds-hydra report: 8 steps, 3 kinds of replicas")
    assert (tmp_path / "report" / "index.html").is_file()
    assert json.loads((tmp_path / "figures.json").read_text())["steps"] == 8
    assert report.main([str(tmp_path / "missing.jsonl")]) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expected_ms": 150.0}, "prediction error after 10 steps"),
        ({"slowest_wait_ms": 60.0}, "waiting for the slowest pipeline"),
        ({"planning_hidden": False}, "steps whose planning was hidden: 0%"),
        ({"loss": 5.0}, "mean loss of the last quarter, after the first: 5.000 after 5.000"),
        ({"skipped": True}, "steps skipped: 100.0%"),
    ],
)
def test_a_run_is_judged_by_aims_that_are_printed(
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "draw_report", lambda *_: [])  # takes seconds, and has tests of its own
    good = write(tmp_path / "good.jsonl", [record(i) for i in range(1, 21)])
    assert report.main([str(good)]) == 0
    assert "judged by" in capsys.readouterr().out
    bad = write(tmp_path / "bad.jsonl", [record(i, **changes) for i in range(1, 21)])
    assert report.main([str(bad)]) == 1
    assert f"not as it should be: {words}" in capsys.readouterr().out


# --- Pages that show a run and a preview: whole in one file, with a drawing or a reason for everything they
# promise.
TABLE = CostTable.load(shipped("a800-7b"))
LENGTHS = [30_000, *[700 + 13 * n for n in range(50)]]


def whole(page: str) -> list[str]:
    """The titles of a page that needs nothing from elsewhere, whose drawings can be read and names stand once."""
    assert not re.findall(r"<(?:script|link|img|iframe)\b|url\(http|@import", page)
    assert "prefers-color-scheme:dark" in page
    assert "#010203" not in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    for drawing in drawings:
        assert ElementTree.fromstring(drawing).get("aria-label")
        assert "currentColor" in drawing
    names = Counter(name for drawing in drawings for name in set(re.findall(r' id="([^"]+)"', drawing)))
    shared = {name for name, count in names.items() if count > 1}
    texts: dict[str, set[str]] = {}
    for drawing in drawings:
        for element in ElementTree.fromstring(drawing).iter():
            if element.get("id") in shared:
                texts.setdefault(str(element.get("id")), set()).add(ElementTree.tostring(element).decode())
    assert {name for name, of in texts.items() if len(of) > 1} == set(), "one name, two meanings"
    return re.findall(r"<h2>(.*?)</h2>", page)


def page_record(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step, "strategy": "tp8 + 4*tp2", "step_ms": 2000.0 + step, "predicted_ms": 1900.0, "num_tokens": 90_000,
        "expected_ms": 1990.0, "num_sequences": 51, "planning_ms": 2.0, "planning_hidden": True, "loss": 9.0 - step,
        "learning_rate": 1e-3, "slowest_wait_ms": 5.0, "balance": 1.1, "changed": False,
        "pipeline_ms": [1900.0, 1000.0, 950.0, 950.0, 950.0], "predicted_pipeline_ms": [1900.0] + [950.0] * 4,
        **changes,
    }  # fmt: skip


@pytest.mark.drawn
def test_a_run_is_one_page_with_what_the_fixed_layout_would_have_taken(tmp_path: Path) -> None:
    planner = Planner(TABLE, [StrategyShape.parse("tp8 + 4*tp2")], PlannerOptions())
    plans = [planner.plan(step, range(51), LENGTHS) for step in range(3)]
    save_plans(plans, tmp_path / "plans.jsonl")
    steps = tmp_path / "steps.jsonl"
    steps.write_text("".join(json.dumps(page_record(step)) + "\n" for step in (1, 2, 3)))
    page = tmp_path / "run.html"
    command = ["report", str(steps), "--html", str(page)]
    assert main(command) == 0
    assert "Give --plans" in page.read_text()
    assert main([*command, "--plans", str(tmp_path / "plans.jsonl"), "--cost-table", "a800-7b"]) == 0
    titles = whole(page.read_text())
    assert titles[:4] == [
        "With a fixed layout these steps would have taken", "Beside other systems, on these lengths", "Lengths",
        "Who waited",
    ]  # fmt: skip
    assert "Predicted against measured step time" in titles
    told = page.read_text()
    assert "51 sequences" not in told
    assert "153 sequences" in told
    of_table = min(
        Planner(TABLE, [shape], PlannerOptions()).plan(0, range(51), LENGTHS).predicted_ms
        for shape in layouts_that_hold(TABLE, 16, 30_000)
    )
    over = 2002.0 / plans[0].predicted_ms  # the median of what was measured over its estimate
    ((layout, shown),) = re.findall(rf"{BALANCED}: ([^<]+)</td><td>([\d,]+) ms", told)
    assert 0.5 * over * of_table < float(shown.replace(",", "")) < over * of_table, "a ring suits these lengths"
    assert "ring" in layout


def test_who_waited_is_told_phase_by_phase() -> None:
    waits = waits_of([page_record(1)])
    assert waits == {"tp8": [0.0], "tp2": pytest.approx([900 / 2001, 950 / 2001, 950 / 2001, 950 / 2001])}
    phased = page_record(1, strategy="2*tp8 then 8*tp2", num_pipelines=[2, 8], pipeline_ms=[500.0, 400.0] + [600.0] * 8)
    assert waits_of([phased]) == {"tp8": pytest.approx([0.0, 100 / 2001]), "tp2": [0.0] * 8}
    assert waits_of([page_record(1, strategy="tp16", pipeline_ms=[5.0])]) == {}


def test_layouts_by_length_end_with_one_that_holds_the_longest() -> None:
    assert list(map(str, layouts_by_length(TABLE, 16, 65_536))) == ["8*tp2", "4*tp4", "2*tp8"]
    assert layouts_by_length(TABLE, 16, 2_000) == []
    assert layouts_by_length(TABLE, 16, 200_000) == []


def test_a_preview_is_one_page(tmp_path: Path) -> None:
    page = tmp_path / "preview.html"
    command = ["preview", "--cost-table", "a800-7b", "--lengths", "lognormal:6.22,1.233", "--gpus", "16", "--tokens",
               "60000", "--context", "65536", "--steps", "2", "--strategies", "8*tp2", "tp8 + 4*tp2"]  # fmt: skip
    assert main([*command, "--html", str(page)]) == 0
    told = page.read_text()
    assert whole(told) == [
        "Lengths", "Beside other systems, on these lengths", "With a fixed layout these steps would take",
        "The plan of one step", "Who waits", "Strategies that were chosen",
    ]  # fmt: skip
    assert "8*tp2 then 4*tp4 then 2*tp8" in told
    assert "ds-hydra" in told
