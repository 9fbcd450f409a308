"""What stages over several nodes wait for in the comparison of systems, and how many tokens they hold."""

from __future__ import annotations

import pytest

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.rivals.waits import crossing, two_hops_ms
from tools.systems.cells import LONG_CELLS, WIDE_CELLS
from tools.systems.ours import all_schemes


def test_of_a_row_over_two_nodes_crosses_what_one_holds_and_the_other_needs() -> None:
    assert crossing((4096,) * 4, 2, 1.0) == (0.0, 0.0), "each node computes the two sequences that it holds"
    first = round(16384 * 0.5**0.5) - 8192  # tokens of the second node that the first one computes
    assert crossing((16384,), 2, 1.0) == (pytest.approx(2 * 8192), pytest.approx(first, abs=1))
    assert crossing((16384,), 2, 1 / 8)[0] == pytest.approx(max(first * 1.25, 2048), abs=2)
    assert crossing((100, 16384), 2, 1.0).coming > crossing((16384,), 2, 1.0).coming / 2


def test_two_hops_wait_for_what_comes_first_and_goes_last() -> None:
    """With four equal groups and long attention: two groups of the first hop, one of the second, and so back."""
    groups, inside, coming, going = (2, 2, 2, 2), 4.0, 12.0, 2.0
    waits = two_hops_ms(groups, 1000.0, inside, coming, going)
    assert waits == pytest.approx((2 * 0.75 * inside + coming + going + 2 * 0.25 * inside) / 4)
    assert two_hops_ms(groups, 0.0, inside, coming, going) == pytest.approx(inside + coming + going)
    assert two_hops_ms((8,), 5.0, inside, coming, going) == pytest.approx(inside + coming + going)


def test_ours_has_ulysses_on_stages_of_up_to_two_nodes_with_its_waits_in_b() -> None:
    table = all_schemes(LONG_CELLS[0])
    pipelines = [cost for cost in table.costs if cost.uniform.sp > 1 and cost.scheme.pp > 1]
    assert {cost.uniform.tp * cost.uniform.sp for cost in pipelines} >= {8, 16}
    assert all(cost.uniform.tp * cost.uniform.sp <= 16 and type(cost) is SchemeCost for cost in pipelines)
    base = table[ParallelScheme(4, 2)]
    inside, across = (table[ParallelScheme(4, 2, degree)].b * degree / base.b - 1.0 for degree in (2, 4))
    assert 0.0 <= inside < across, "messages between nodes are dearer"
    assert "waits for messages in b" in table[ParallelScheme(4, 2, 4)].derived


def test_three_nodes_share_queries_with_memory_for_the_keys_of_all() -> None:
    table = all_schemes(next(cell for cell in WIDE_CELLS if cell.context == 524_288))
    two, three = table[ParallelScheme(4, 1, 4)], table[ParallelScheme(4, 1, 6)]
    assert two.max_length < three.max_length < 0.8 * 1.5 * two.max_length
    assert {cost.uniform.tp * cost.uniform.sp for cost in table.costs if cost.uniform.sp % 3 == 0} == {24}
    assert {cost.scheme.pp for cost in table.costs if cost.uniform.sp % 3 == 0} == {1}


def test_a_sequence_takes_as_long_beside_others() -> None:
    """Also a long one, whose waits are its own."""
    lengths = [100, 16_384, 17_000, 20_481, 30_000, 32_768]
    for cost in all_schemes(WIDE_CELLS[-1]).costs:
        alone = [float(cost.sequence_ms([length])[0]) for length in lengths]
        assert cost.sequence_ms(lengths) == pytest.approx(alone, rel=1e-12), cost.scheme
