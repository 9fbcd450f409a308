"""Groups that deal out what they do not share: never sooner done than what is shared without a remainder."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.rivals.waits import WaitingCost
from tools.systems.cells import Cell
from tools.systems.dealt import busiest_ms, dealt
from tools.systems.measure import DEALT, measure


def _group(units: int, *, message: float = 0.0, a: float = 0.0) -> SchemeCost:
    """A token takes a unit 1 ms, and a * l more; a micro-batch 5 ms. Ideal where it stands, dealt out by `dealt`."""
    return WaitingCost(
        ParallelScheme(sp=units), a / units, 1.0 / units, 5.0, 1000 * units, 1, message=message, alone=10**6
    )


def _dealt(cost: SchemeCost) -> SchemeCost:
    return dealt(CostTable((cost,))).costs[0]


def test_what_is_not_shared_is_computed_whole_by_one_unit() -> None:
    cost = _group(2)
    assert cost.load_ms([40, 30, 20]) == 5 + 45
    assert _dealt(cost).load_ms([40, 30, 20]) == 5 + 45, "all are shared, as messages take nothing"
    # A ring of 3/4 ms a token adds 22.5 ms where all are shared; with none of them one unit has 40, the other 30 + 20.
    dear = _dealt(_group(2, message=0.75))
    assert dear.load_ms([40, 30, 20]) == 5 + 50
    assert dear.load_ms([40, 40]) == 5 + 40
    # Attention of a long sequence hides what goes round for a short one beside it: 0.1 * 100 * 100 / 2 ms.
    hidden = _dealt(_group(2, message=0.5, a=0.1))
    assert hidden.load_ms([100, 9]) == pytest.approx(5 + 109 / 2 + 0.1 * (100**2 + 9**2) / 2)


def test_works_go_to_the_unit_with_the_least_so_far() -> None:
    assert busiest_ms([5, 4, 3, 3], 2) == 8
    assert busiest_ms([], 3) == 0
    assert busiest_ms([7, 1], 4) == 7


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=9), st.sampled_from([2, 3, 4, 8]), st.floats(0, 2),
    st.floats(0, 0.1),
)  # fmt: skip
def test_it_is_the_best_number_of_shared_sequences_and_never_less_than_the_ideal(
    lengths: list[int], units: int, message: float, a: float
) -> None:
    cost = _group(units, message=message, a=a)
    found, order = _dealt(cost).load_ms(lengths), sorted(lengths, reverse=True)
    tried = []
    for shared in range(len(lengths) + 1):
        ring, square = message * sum(order[:shared]), a / units * sum(x * x for x in order[:shared])
        rest = busiest_ms([x + a * x * x for x in order[shared:]], units)
        tried.append(5 + sum(order[:shared]) / units + max(square, ring) + rest)
    assert found == pytest.approx(min(tried))
    assert found >= cost.load_ms(lengths) - 1e-6
    assert found <= _dealt(_group(units, message=1e9, a=a)).load_ms(lengths) + 1e-6, "sharing is a choice"


def test_a_group_of_one_and_costs_of_other_systems_stay_as_they_are() -> None:
    alone = SchemeCost(ParallelScheme(), 0.1, 1.0, 5.0, 1000, 1)
    assert _dealt(alone) is alone


def test_a_comparison_has_both_and_the_gap_that_dealing_out_leaves() -> None:
    cell = Cell("7b", 8, 16384, 40_000, "CommonCrawl")
    for name, other in DEALT.items():
        assert measure(cell, 2, other) == {}, "it comes with the ideal one"
        found = measure(cell, 2, name)
        ideal, made = found[name], found[other]
        assert made.strategies == ideal.strategies
        assert made.gap >= 0.0
        # Both have the same transfers; nothing waits for a ring there, so the remainder alone differs.
        for one, more in itertools.zip_longest(ideal.step_ms, made.step_ms):
            assert more >= one - 1e-6
