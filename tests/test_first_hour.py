"""The first hour on GPUs without one: rows come in order, end at the first that fails, and say what did not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import first_hour
from tools.first_hour import ROWS, Row

GOOD, BAD = ("-c", "print('as it should be')"), ("-c", "print('a kernel is wrong'); raise SystemExit(3)")


@pytest.mark.parametrize(("gpus", "ran"), [(0, ["a", "c"]), (2, ["a", "b", "c"])])
def test_the_first_row_that_fails_is_the_last(
    gpus: int, ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_hour, "num_gpus", lambda: gpus)
    rows = [
        Row("a", 0, GOOD, "all", "nothing", on_cpu=GOOD),
        Row("b", 1, GOOD, "all", "nothing"),
        Row("c", 2, BAD, "no error", "the kernel", gpus=2, on_cpu=BAD),
        Row("d", 3, GOOD, "all", "nothing"),
    ]
    assert first_hour.run(rows, "a", False, tmp_path / "hour.json") == 1
    printed = capsys.readouterr().out
    assert ("NO GPU IS MEASURED HERE" in printed) is (gpus == 0)
    assert ("b: left out, it needs 1 GPU" in printed) is (gpus == 0)
    for words in ("FAILED with 3", "a kernel is wrong", "If not: the kernel",
                  "missed: c failed; what comes after it was not tried (--from 'c' begins there)"):  # fmt: skip
        assert words in printed
    found = json.loads((tmp_path / "hour.json").read_text())
    assert [row["row"] for row in found["rows"] if row["ran"]] == ran


def test_rows_begin_where_they_are_told_to(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(first_hour, "num_gpus", lambda: 2)
    rows = [Row("a", 0, BAD, "-", "-"), Row("b", 1, GOOD, "-", "-", gpus=4), Row("c", 2, GOOD, "-", "-")]
    assert first_hour.run(rows, "b", False, None) == 0
    printed = capsys.readouterr().out
    assert "b: left out, it needs 4 GPUs" in printed
    assert "1 of 3 rows ran on 2 GPUs" in printed


def test_a_row_that_stands_still_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    waits = ("-c", "import time; print('step 3', flush=True); time.sleep(60)")
    row = Row("turns", 0, waits, "no hang", "-", on_cpu=waits, limit_s=3.0)
    assert first_hour.run([row], "turns", False, None) == 1
    assert "it stood still, or took longer than 3 s" in capsys.readouterr().out


def test_rows_are_in_the_order_of_their_minutes() -> None:
    assert [row.minute for row in ROWS] == sorted(row.minute for row in ROWS)
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert any(row.short and row.on_cpu for row in ROWS), "--quick runs something"
