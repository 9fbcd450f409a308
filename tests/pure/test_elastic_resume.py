"""What survivors hold and complete, who keeps whose copy; what members say to each other, as it travels."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_hydra.elastic import messages as m
from ds_hydra.elastic.messages import Member, Report, lacking, newest_layout, to_apply, usable
from ds_hydra.zero_hetero.buddies import check_nothing_lost, held_layout, may_leave, shift_of, wards_first
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import even_layout
from ds_hydra.zero_hetero.norm_table import NormTable
from ds_hydra.zero_hetero.transfer_plan import plan_transfer
from tools import aims


@pytest.mark.parametrize(
    ("hosts", "shift"),
    [
        ("a", 0),
        ("aa", 1),
        ("aaaa", 1),
        ("aabb", 2),
        ("aaabbb", 3),
        ("aaabb", 3),
        ("aabbccd", 2),
        ("aaaaaaabbbbbbbb", 8),
    ],
)
def test_a_copy_is_kept_in_another_node_where_there_is_room(hosts: str, shift: int) -> None:
    assert shift_of(hosts) == shift
    largest = max(hosts.count(host) for host in hosts)
    if len(hosts) >= 2 * largest and len(set(hosts)) > 1:
        assert all(hosts[rank] != hosts[(rank + shift) % len(hosts)] for rank in range(len(hosts)))


@pytest.mark.parametrize(("num_ranks", "shift"), [(2, 1), (3, 1), (4, 1), (4, 2), (5, 2), (6, 3), (7, 2)])
@pytest.mark.parametrize("numel", [0, 3, 10, 101])
def test_survivors_hold_every_element_unless_neighbours_are_lost(num_ranks: int, shift: int, numel: int) -> None:
    """All losses of one and two members, with ids that have gaps; values arrive in their places."""
    former = tuple(range(10, 10 + 2 * num_ranks, 2))
    values = list(range(numel))
    for lost in (*itertools.combinations(former, 1), *itertools.combinations(former, 2)):
        members = [member for member in former if member not in lost]
        ranks = [former.index(member) for member in lost]
        neighbours = any((a + shift) % num_ranks == b for a, b in itertools.permutations(ranks, 2))
        if neighbours or not members:
            with pytest.raises(PlanError, match=r"members .* are gone"):
                check_nothing_lost(former, members, shift)
            continue
        check_nothing_lost(former, members, shift)
        source, target = held_layout(numel, former, members, shift), even_layout(numel, len(members))
        plan, shares = plan_transfer(source, target), even_layout(numel, num_ranks)
        found = [[-1] * size for size in target.sizes]
        held = []
        for member in members:
            pieces = [shares.pieces[rank] for rank in wards_first(member, former, members, shift)]
            held.append(
                [value for of_rank in pieces for piece in of_rank for value in values[piece.start : piece.stop]]
            )
        for message in plan.messages:
            for piece in message.slices:
                moved = held[message.src][piece.src_offset : piece.src_offset + piece.length]
                found[message.dst][piece.dst_offset : piece.dst_offset + piece.length] = moved
        assert [value for part in found for value in part] == values


@pytest.mark.parametrize(("num_ranks", "shift"), [(2, 1), (4, 1), (4, 2), (5, 2), (6, 3)])
def test_of_ranks_that_leave_together_none_keeps_the_copy_of_another(num_ranks: int, shift: int) -> None:
    """And who has to wait leaves later: of all that want to some do."""
    for count in range(1, num_ranks):
        for ranks in itertools.combinations(range(num_ranks), count):
            found = may_leave(ranks, num_ranks, shift)
            assert found
            check_nothing_lost(range(num_ranks), [one for one in range(num_ranks) if one not in found], shift)
    assert not may_leave((0,), num_ranks, 0), "without copies"


@pytest.mark.parametrize("ranks", [64, 1024])
@pytest.mark.parametrize("lost", [1, 8], ids=["one", "a node"])
def test_of_a_large_model_few_shares_move_when_ranks_are_lost(ranks: int, lost: int) -> None:
    """32B parameters with two moments each, in 60 buckets, on nodes of 8; in shares of a rank."""
    numel, former = 32 * 10**9 // 60, range(ranks)
    members = [rank for rank in former if not ranks // 2 <= rank < ranks // 2 + lost]
    moved = plan_transfer(held_layout(numel, former, members, 8), even_layout(numel, len(members))).slices
    far = moved.src != moved.dst
    most = max(np.bincount(ends[far], moved.length[far], len(members)).max() for ends in (moved.dst, moved.src))
    share = numel / len(members)
    assert most + share <= aims.CUT_ANEW_SHARES * share, "what a rank sends or gets, and then its copy"


def table(step: int, *words: float) -> NormTable:
    return NormTable(step, tuple((1.0, word, 0.5) for word in words or (0.0, 0.0)))


def test_all_survivors_complete_the_open_step_or_none() -> None:
    """One in any state: it has no table of step 4, has one, or has applied it; who lacks it is given it."""
    newest, before = table(4).name, table(3).name
    behind, voted = Report(4, None, before), Report(4, newest, before)
    applied, joins = Report(5, None, newest), Report()
    for reports in itertools.product((behind, voted, applied, joins), repeat=3):
        complete = voted in reports or applied in reports
        found = {to_apply(report, reports) for report in reports if report.committed == 4}
        assert found <= {newest if complete else None}
        assert all(to_apply(report, reports) is None for report in reports if report in (applied, joins))
        lack = {number: newest for number, report in enumerate(reports) if report is behind and complete}
        assert lacking(dict(enumerate(reports))) == lack


def test_who_has_taken_a_cut_proves_it_for_all() -> None:
    assert newest_layout([Report(4, None, None, 2), Report(4, None, None, 3), Report()]) == 3


def test_a_step_that_all_refuse_is_not_applied() -> None:
    assert usable(None) is None
    assert usable(table(4, -1.0, -1.0)) is None
    assert usable(table(4, 0.0, 7.0)) is None
    assert usable(table(4, 7.0, 7.0)) == table(4, 7.0, 7.0)


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
