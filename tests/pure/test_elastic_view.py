"""Views of an elastic job, through the form in which they travel."""

from __future__ import annotations

import json
import math

import pytest

from ds_hydra.elastic.view import Member, NormTable, Report, View


def member(number: int) -> Member:
    return Member(number, f"host{number % 2}/boot", ("10.0.0.1", 4000 + number), pid=100 + number, started="7")


def view_of(*tables: NormTable) -> View:
    reports = {number: Report(4, tables[0], tables[-1], 2) for number in (0, 2)} | {5: Report()}
    return View(3, (member(0), member(2), member(5)), tuple(map(member, range(3))), ("10.0.0.1", 29501), reports)


def test_a_view_is_the_same_after_its_travel() -> None:
    table, last = (
        NormTable(step, ((0.1 + 0.2, 0.0, 1.5), (5e-324, 3.0, 0.0), (math.inf, 0.0, 0.0))) for step in (4, 3)
    )
    view = view_of(table, last)
    wire = json.loads(json.dumps(view.to_wire()))
    assert View.from_wire(wire) == view
    assert len(wire["tables"]) == 2, "six places name them"
    assert [view.rank_of(number) for number in (0, 2, 5)] == [0, 1, 2]


def test_tables_that_only_compare_equal_stay_apart() -> None:
    view = view_of(NormTable(4, ((0.0, math.nan, 0.0),)), NormTable(4, ((-0.0, math.nan, 0.0),)))
    assert repr(View.from_wire(json.loads(json.dumps(view.to_wire())))) == repr(view)


@pytest.mark.parametrize(
    "change", [{"members": [{"id": "x"}]}, {"store": ["a"]}, {"reports": {"0": [1, 7, None, 0]}}, {"epoch": None}]
)
def test_what_is_no_view_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, LookupError, TypeError)):
        View.from_wire(view_of(NormTable(4, ())).to_wire() | change)
