"""Megatron-Core's schedulers of dynamic context parallelism: every sequence once, on units that hold it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.rivals.as_made import AS_MADE, Units, as_made
from ds_hydra.rivals.costs import Recomputed
from ds_hydra.rivals.dynamic_cp import Group, Turn, balanced_turns, packed_turns
from ds_hydra.zero_hetero.errors import PlanError
from tools.systems.cells import Cell

CELL = Cell("7b", 8, 16384, 40_000, "CommonCrawl")
Scheduler = Callable[[list[int], int, int], list[Turn]]
SCHEDULERS: list[Scheduler] = [balanced_turns, packed_turns]


def test_a_turn_is_filled_longest_first_where_the_busiest_unit_gets_least() -> None:
    # 8 tokens need two units with 4 on each, the others one; two more tokens fit nowhere, and have all units later.
    first, second = packed_turns([8, 4, 4, 2], 4, 4)
    assert first == (Group(2, (0,)), Group(1, (1,)), Group(1, (2,)))
    assert second == (Group(4, (3,)),)


def test_a_group_packs_what_it_holds_and_no_unit_gets_more_than_a_full_one_of_the_longest_kind() -> None:
    # Rank by rank at most 1.05 * 6 * 8: so three of 6 tokens do not share a unit, but 6 and 2 do.
    (turn,) = packed_turns([6, 6, 2, 2], 2, 8)
    assert turn == (Group(1, (0, 2)), Group(1, (1, 3)))


@pytest.mark.parametrize("schedule", SCHEDULERS)
@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=40), units=st.sampled_from([1, 2, 4, 8, 16]))
def test_every_sequence_is_computed_once_on_units_that_hold_it(
    schedule: Scheduler, lengths: list[int], units: int
) -> None:
    most = -(-max(lengths) // units) + 20
    turns = schedule(lengths, units, most)
    assert sorted(at for turn in turns for group in turn for at in group.positions) == list(range(len(lengths)))
    for turn in turns:
        assert sum(group.units for group in turn) == units
        assert all(group.positions for group in turn), "no unit is without work"
        longest = [(group.units, lengths[at]) for group in turn for at in group.positions]
        assert all(length <= most * units for units, length in longest)


def test_units_of_any_number_are_filled_by_the_successor() -> None:
    for count, lengths in itertools.product((3, 5, 7), ([100, 50, 20, 10], [90] * 6, [100])):
        turns = packed_turns(lengths, count, 40)
        assert sorted(at for turn in turns for group in turn for at in group.positions) == list(range(len(lengths)))
        assert all(sum(group.units for group in turn) == count for turn in turns)


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_what_no_group_holds_is_refused(schedule: Scheduler) -> None:
    with pytest.raises(PlanError, match="a sequence of 500 tokens does not fit 4 units with 100 tokens on each"):
        schedule([500, 10], 4, 100)


def _units(count: int) -> Units:
    """Of one rank, for which a token takes 1 ms divided by the units of a group, and a micro-batch 10 ms."""
    table = CostTable(
        tuple(SchemeCost(ParallelScheme(sp=n), a=0.0, b=1.0 / n, c=10.0, max_length=1000 * n) for n in (1, 2, 4))
    )
    return Units(ParallelScheme(), count, 100, Recomputed.NOTHING, table)


def test_all_units_wait_after_a_turn_of_the_first_and_only_groups_for_their_members_under_the_second() -> None:
    units, lengths = _units(2), [100, 60, 40, 30]
    ran = units.balanced(lengths)
    turns = balanced_turns(lengths, 2, 100)
    assert ran.ms == sum(max(sum(10.0 + lengths[at] / g.units for at in g.positions) for g in turn) for turn in turns)
    # One turn of 100 and of 60 + 40 tokens, and one of 30 shared by two.
    assert packed_turns(lengths, 2, 100) == [(Group(1, (0,)), Group(1, (1, 2))), (Group(2, (3,)),)]
    ran = units.packed(lengths)
    assert ran.ms == 110.0 + 25.0
    assert ran.busy == (135.0, 135.0)


@pytest.mark.parametrize("name", AS_MADE)
def test_a_cell_is_run_by_either_scheduler(name: str) -> None:
    batches = CELL.batches(2)
    made = as_made(CELL, batches, name)
    assert len(made.ran) == 2
    assert all(max(one.busy) <= one.ms for one in made.ran)
    assert 0.0 <= made.idle < 1.0
    assert 0.0 <= made.gap < 1.0
    assert made.exposed_ms >= 0.0
    with pytest.raises(PlanError, match="no units of"):
        as_made(CELL, [[10_000_000]], name)
