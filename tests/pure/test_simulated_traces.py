"""What a simulated step's trace must hold, and the picture of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_hydra.report.gantt import draw_gantt
from ds_hydra.report.trace import Span, trace_faults, trace_record
from ds_hydra.zero_hetero.errors import ConfigError

SPANS = [Span(0, "compute", "forward", "F0", 0.0, 3.0), Span(0, "compute", "pull", "wait", 1.0, 2.0)]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda events: events[4].update(dur=0), "lasts 0 microseconds"),
        (lambda events: events[5].update(dur=3e6), "'wait' .* overlaps 'F0'"),
        (lambda events: events[4].update(ts="0"), "begins at '0'"),
        (lambda events: events[4].update(ts=float("nan")), "begins at nan"),
        (lambda events: events[4].update(ph="B"), "phase 'B'"),
        (lambda events: events[0].update(name="process"), "is no metadata of process_name, "),
        (lambda events: events[1].update(args={"sort_index": "0"}), "is no metadata"),
        (lambda events: events[4].pop("name"), "lacks a name"),
        (lambda events: events[4].update(pid="0"), "pid or tid"),
        (lambda events: events.pop(0), "no name"),
    ],
)
def test_what_breaks_the_rules_of_a_trace_is_found(spoil: object, words: str) -> None:
    record = trace_record({"predicted": SPANS})
    assert not trace_faults(record)
    assert [(e["ts"], e["dur"]) for e in record["traceEvents"] if e["ph"] == "X"] == [(0.0, 3e6), (1e6, 1e6)]
    spoil(record["traceEvents"])  # type: ignore[operator]
    assert re.search(words, trace_faults(record)[0]), trace_faults(record)
    assert trace_faults({**record, "displayTimeUnit": "s"}), "viewers know ms and ns"
    assert trace_faults({"events": record["traceEvents"]}), "events have a name of their own"


def test_a_picture_shows_every_rank_and_refuses_too_many(tmp_path: Path) -> None:
    again = [span._replace(rank=1) for span in SPANS]
    words = draw_gantt(tmp_path / "a.png", {"predicted": SPANS + again, "measured": SPANS}, "two ranks")
    assert words == "3 rows over 3000.0 ms"
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match="97 rows"):
        draw_gantt(tmp_path / "b.png", {"": [SPANS[0]._replace(rank=rank) for rank in range(97)]}, "many")
