"""The order of a sum: every contribution once, in rank order, written first and added after."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.zero_hetero.contributions import order_contributions

NUMEL = 30


@st.composite
def parts_of_senders(draw: st.DrawFn) -> dict[int, list[tuple[int, int, int]]]:
    """Random disjoint intervals of the sum for each of some senders, as (src_offset, dst_offset, length)."""
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for sender in draw(st.permutations(range(5)))[: draw(st.integers(0, 5))]:
        cuts = sorted(draw(st.sets(st.integers(0, NUMEL), max_size=6)))
        packed = 0
        parts[sender] = []
        for start, stop in zip(cuts[::2], cuts[1::2], strict=False):
            parts[sender].append((packed, start, stop - start))
            packed += stop - start
    return parts


@given(parts=parts_of_senders(), block=st.one_of(st.none(), st.integers(1, 12)), accumulate=st.booleans())
def test_terms_sum_everything_once_in_rank_order(
    parts: dict[int, list[tuple[int, int, int]]], block: int | None, accumulate: bool
) -> None:
    before = (-1, -1)  # what the sum holds: stale, or the first contribution where it accumulates
    expected: list[list[tuple[int, int]]] = [[before] if accumulate else [] for _ in range(NUMEL)]
    for sender in sorted(parts):
        for src_offset, dst_offset, length in parts[sender]:
            for index in range(length):
                expected[dst_offset + index].append((sender, src_offset + index))
    result: list[list[tuple[int, int]]] = [[before] for _ in range(NUMEL)]
    last_block = 0
    for term in order_contributions(parts.items(), NUMEL, block, accumulate=accumulate):
        for index in range(term.length):
            place = result[term.dst_offset + index]
            if term.first:
                place.clear()
            if term.sender is not None:
                place.append((term.sender, term.src_offset + index))
        if block is not None:
            assert term.dst_offset // block == (term.dst_offset + term.length - 1) // block >= last_block
            last_block = term.dst_offset // block
    assert result == expected
