"""What members say to each other, through the form in which it travels."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from ds_hydra.elastic import messages as m
from ds_hydra.elastic.messages import Member, Report
from ds_hydra.zero_hetero.norm_table import NormTable


def member(number: int) -> Member:
    return Member(number, f"host{number % 2}/boot", ("10.0.0.1", 4000 + number), pid=100 + number, started="7")


BEFORE = m.Roster(2, tuple(map(member, range(1024))), 1024)
AFTER = m.Roster(5, (*BEFORE.members[:7], *BEFORE.members[8:], member(1024)), 1025)
KNOWN = {2: BEFORE}
TABLE, LAST = (
    NormTable(step, ((0.1 + 0.2, 0.0, 1.5), (5e-324, 3.0, math.nan), (math.inf, -0.0, 0.0))) for step in (4, 3)
)
BALLOT = m.Ballot(5, 0)
REPORTS = (Report(4, None, LAST.name, 2),) * 600 + (Report(4, TABLE.name, LAST.name, 2),) * 423 + (Report(),)
INSTALL = m.Install(BALLOT, 2, AFTER, BEFORE.members, ("10.0.0.1", 29501), REPORTS, (TABLE,))


def travelled(message: m.Message, known: Any = KNOWN) -> m.Message | None:
    return m.from_wire(json.loads(json.dumps(m.to_wire(message, KNOWN))), known)


@pytest.mark.parametrize(
    "message",
    [
        m.Word("kill", 2, 7),
        m.Stop(BALLOT, 2, planned=True, tables=(TABLE.name,)),
        m.Vote(BALLOT, 2, (BALLOT, AFTER), REPORTS[0], AFTER.members, (TABLE, LAST)),
        m.Vote(BALLOT, 2, None, Report(), None),
        m.Propose(BALLOT, 2, AFTER),
        INSTALL,
        replace(INSTALL, epoch=-1),
        m.Newer(AFTER, BALLOT),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_message_is_the_same_after_its_travel(message: m.Message) -> None:
    assert repr(travelled(message)) == repr(message), "NaN too"


def test_a_change_of_a_thousand_members_is_told_in_hundreds_of_bytes() -> None:
    told = len(json.dumps(m.to_wire(replace(INSTALL, tables=()), KNOWN)))
    assert told < 1500
    assert len(json.dumps(m.to_wire(replace(INSTALL, epoch=-1, tables=()), KNOWN))) > 100 * told


def test_what_needs_a_roster_that_is_not_known_is_no_message() -> None:
    assert travelled(INSTALL, {}) is None
    assert travelled(m.Newer(AFTER), {}) == m.Newer(AFTER)


def test_tables_that_only_compare_equal_have_names_of_their_own() -> None:
    one, other = (NormTable(4, ((zero, math.nan, 0.0),)) for zero in (0.0, -0.0))
    assert one.name != other.name == NormTable.of_text(other.text).name


def test_a_view_has_all_reports_by_id() -> None:
    view = INSTALL.view
    assert (view.reports[8], view.reports[1024], view.joined) == (REPORTS[0], Report(), {1024})
    assert view.tables == {TABLE.name: TABLE}


@pytest.mark.parametrize(
    "change",
    [
        {"former": [{"id": "x"}]}, {"former": [[1020, 5]]}, {"former": [[-1, 2]]}, {"store": ["a"]},
        {"reports": [[1 << 40, {}]]}, {"reports": [[1, {"committed": "x"}]]}, {"roster": None}, {"tables": ["e30="]},
        {"ballot": None},
    ],
)  # fmt: skip
def test_what_is_no_install_is_refused(change: dict[str, object]) -> None:
    wire = m.to_wire(INSTALL, KNOWN)["Install"]
    with pytest.raises((ValueError, LookupError, TypeError)):
        m.from_wire({"Install": wire | change}, KNOWN)
