"""Which tokens' queries each of the ranks computes that have the same heads, and which keys it needs. Pure but for
torch's types."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.pipe.head_sharing import most_of_room, row_parts
from ds_hydra.pipe.reach import Reach
from ds_hydra.pipe.rows import position_ids
from ds_hydra.planner.pipelines import row_order

REACHES = st.sampled_from([Reach(), Reach(window=5), Reach(chunk=4)])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(2, 6), REACHES)
def test_parts_are_a_row_and_have_the_keys_that_their_queries_see(lengths: list[int], count: int, reach: Reach) -> None:
    tokens = sum(lengths)
    if tokens < count:
        return
    parts = row_parts(tuple(lengths), 0, reach, count)
    assert [parts[0].start, *(part.stop for part in parts)] == [*(part.start for part in parts), tokens]
    positions = position_ids(lengths, 0, tokens)
    for part in parts:
        assert part.start < part.stop
        seen = [
            token - at + reach.first(at) for token in range(part.start, part.stop) for at in (int(positions[token]),)
        ]
        assert part.first == seen[0] <= min(seen)


def test_parts_cost_about_the_same() -> None:
    """Of a sequence of 12 tokens the first eight see 36 keys and the others 42, where halves of six see 21 and 57."""
    (first, last) = row_parts((12,), 0, Reach(), 2)
    assert (first.stop, last.first) == (8, 0)
    work = np.arange(1, 1001)
    shares = [work[part.start : part.stop].sum() / work.sum() for part in row_parts((1000,), 0, Reach(), 4)]
    assert max(shares) < 0.252
    windowed = row_parts((1000,), 0, Reach(window=10), 4)
    assert max(part.stop - part.start for part in windowed) < 256
    assert [part.first for part in windowed[1:]] == [part.start - 9 for part in windowed[1:]]


def test_a_slice_costs_what_it_sees() -> None:
    """Of tokens 900..1000 of a sequence all see about as many keys, so they are shared by their number."""
    (first, _) = row_parts((100,), 900, Reach(), 2)
    assert first.stop in (51, 50)


@pytest.mark.parametrize("lengths", [[9660, *range(100, 900, 30)], [2912, *range(100, 1000, 32)]])
def test_in_the_order_of_a_plan_two_ranks_compute_nearly_what_they_hold(lengths: list[int]) -> None:
    """Sorted, the longer half of the tokens is most of the work; a single long sequence is cut off its middle."""
    half = sum(lengths) // 2

    def off(row: list[int]) -> int:
        return abs(row_parts(tuple(row), 0, Reach(), 2)[0].stop - half)

    assert off([lengths[i] for i in row_order(range(len(lengths)), lengths)]) < 0.3 * off(sorted(lengths))


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_a_row_within_its_share_has_memory_for_what_the_first_node_keeps_more(nodes: int) -> None:
    """In queries of a token that a node holds: at least 13.4 a layer, and queries, outputs, keys and values of those
    that the first node computes, in place of those that it holds."""
    first = row_parts((4096,), 0, Reach(), nodes)[0]
    assert (first.stop - first.start) * nodes / 4096 == pytest.approx(nodes**0.5, rel=1e-3)
    more = 4.0 * ((first.stop - first.start) * nodes / 4096 - 1.0)
    assert most_of_room(nodes) * (13.4 + more) <= 13.4
    assert most_of_room(nodes) * (13.4 + more) > 0.94 * 13.4, "no more is left free than is needed"
