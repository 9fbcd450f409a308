"""Who keeps whose copy, what survivors hold, and which of them complete the open step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ds_hydra.elastic.messages import Report, lacking, newest_layout, to_apply, usable
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
