"""Layouts: even cuts for any number of ranks, and contradictions that are refused with their numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import Layout, Piece, even_layout, layout_of_intervals


@given(numel=st.integers(0, 500), num_ranks=st.integers(1, 40))
def test_even_layout_tiles_the_tensor_in_near_equal_parts(numel: int, num_ranks: int) -> None:
    layout = even_layout(numel, num_ranks)
    layout.validate()
    held = [element for pieces in layout.pieces for piece in pieces for element in range(piece.start, piece.stop)]
    assert held == list(range(numel))
    assert max(layout.sizes) - min(layout.sizes) <= 1
    assert [layout.held(rank) for rank in range(num_ranks)] == list(layout.sizes)


def layout_of(*pieces: tuple[int, int, int], numel: int = 10, size: int = 10) -> Layout:
    return Layout(numel, (tuple(Piece(*piece) for piece in pieces), ()), (size, 0))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (layout_of((0, 11, 0), size=20), r"rank 0.*stop=11.*\[0, 10\)"),
        (layout_of((-1, 4, 0)), r"rank 0.*start=-1"),
        (layout_of((4, 4, 0)), r"empty"),
        (layout_of((0, 8, 3)), r"buffer of 10 elements.*end at 11"),
        (layout_of((0, 4, -1)), r"offset=-1"),
        (layout_of((0, 4, 0), (3, 6, 4)), r"rank 0.*same elements.*stop=4.*start=3"),
        (layout_of((0, 4, 0), (4, 6, 3)), r"rank 0.*same places"),
        (Layout(4, ((Piece(0, 4, 0),),), (4, 4)), r"1 ranks.*2"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(layout: Layout, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        layout.validate()


def test_no_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="12 elements among 0 ranks"):
        even_layout(12, 0)


def test_empty_intervals_are_left_out() -> None:
    assert layout_of_intervals(5, [(2, 2), (0, 5)]).pieces == ((), (Piece(0, 5, 0),))
