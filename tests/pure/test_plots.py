"""Reports of a run from its step records."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ds_hydra.commands import report
from ds_hydra.report.curves import changes_of_ranks
from ds_hydra.report.plots import draw_report, read_steps, relative_errors, summarise
from ds_hydra.zero_hetero.errors import ConfigError

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
    assert "step prediction error - (median / p90), expected -" in said
    told = (tmp_path / "report" / "index.html").read_text()
    assert "nothing was predicted" in told
    assert not [line for line in (*said.splitlines(), told) if "error" in line and "%" in line.split("error")[1][:12]]


def test_the_tool_prints_a_summary_and_refuses_what_is_no_steps_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "steps.jsonl", [record(i) for i in range(1, 9)])
    assert report.main([str(path), "--json", str(tmp_path / "figures.json")]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("ds-hydra report: 8 steps, 3 schemes")
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
    assert f"missed: {words}" in capsys.readouterr().out
