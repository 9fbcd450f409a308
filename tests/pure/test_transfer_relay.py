"""Relay plans: the same result as without, each element into a node once, nobody receives more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import Layout, Piece, even_layout, layout_of_intervals
from ds_hydra.zero_hetero.relay_plan import plan_relay
from ds_hydra.zero_hetero.transfer_plan import TransferPlan, plan_transfer


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Random pieces for 1 to 9 ranks, placed one after the other with gaps."""
    numel = draw(st.integers(1, 40))
    pieces: list[tuple[Piece, ...]] = []
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 9))):
        cuts = sorted(draw(st.sets(st.integers(0, numel), max_size=6)))
        own: list[Piece] = []
        end = draw(st.integers(0, 2))
        for start, stop in zip(cuts[::2], cuts[1::2], strict=False):
            own.append(Piece(start, stop, end))
            end += stop - start + draw(st.integers(0, 1))
        pieces.append(tuple(own))
        sizes.append(end)
    return Layout(numel, tuple(pieces), tuple(sizes))


def moved(plan: TransferPlan, buffers: list[list[int]], sizes: tuple[int, ...]) -> list[dict[int, int]]:
    """For each rank what arrives at which place of its destination buffer; nothing may arrive twice."""
    arrived: list[dict[int, int]] = [{} for _ in sizes]
    for message in plan.messages:
        for src_offset, dst_offset, length in message.slices:
            for index in range(length):
                assert dst_offset + index not in arrived[message.dst]
                arrived[message.dst][dst_offset + index] = buffers[message.src][src_offset + index]
    return arrived


def filled(layout: Layout) -> list[list[int]]:
    buffers = [[-1] * size for size in layout.sizes]
    for buffer, pieces in zip(buffers, layout.pieces, strict=True):
        for start, stop, offset in pieces:
            buffer[offset : offset + stop - start] = range(start, stop)
    return buffers


@given(dst=layouts(), node_size=st.integers(1, 4))
def test_two_hops_deliver_everything_once(dst: Layout, node_size: int) -> None:
    src = even_layout(dst.numel, dst.num_ranks)
    plan = plan_relay(src, dst, node_size)
    entered = moved(plan.enter, filled(src), dst.sizes)
    between = [
        [values.get(index, -2) for index in range(size)] for values, size in zip(entered, dst.sizes, strict=True)
    ]
    spread = moved(plan.spread, between, dst.sizes)
    assert [[values.get(index, -1) for index in range(len(b))] for values, b in zip(spread, between, strict=True)] == (
        filled(dst)
    )
    direct = plan_transfer(src, dst)
    into_node: dict[tuple[int, int], int] = {}
    for message in plan.enter.messages:
        if message.src // node_size != message.dst // node_size:
            for piece in message.slices:
                for index in range(piece.length):
                    key = (message.dst // node_size, filled(src)[message.src][piece.src_offset + index])
                    into_node[key] = into_node.get(key, 0) + 1
    assert all(count == 1 for count in into_node.values())
    assert all(message.src // node_size == message.dst // node_size for message in plan.spread.messages)
    both = zip(plan.enter.received_numels(), plan.spread.received_numels(), strict=True)
    assert tuple(a + b for a, b in both) == direct.received_numels()
    for message in plan.spread.messages:  # what stays, stays in its place
        assert message.src != message.dst or all(piece.src_offset == piece.dst_offset for piece in message.slices)
    assert tuple(hop.transposed() for hop in reversed(plan.transposed())) == plan


def test_replicas_of_a_node_bring_in_equal_parts() -> None:
    plan = plan_relay(even_layout(64, 8), layout_of_intervals(64, [(0, 64)] * 8), 4)
    across = [
        sum(message.numel for message in plan.enter.recvs(rank) if message.src // 4 != rank // 4) for rank in range(8)
    ]
    assert across == [8] * 8  # without the relay 32 each


def test_the_example_of_the_docstring() -> None:
    plan = plan_relay(even_layout(8, 4), layout_of_intervals(8, [(0, 8)] * 4), 2)
    moves = [
        [(m.src, m.dst, piece.dst_offset, piece.length) for m in hop.messages for piece in m.slices if m.src != m.dst]
        for hop in plan
    ]
    assert [move for move in moves[0] if move[1] < 2] == [(0, 1, 0, 2), (1, 0, 2, 2), (2, 0, 4, 2), (3, 1, 6, 2)]
    assert [move for move in moves[1] if move[1] < 2] == [(0, 1, 4, 2), (1, 0, 6, 2)]


def test_nodes_need_ranks() -> None:
    with pytest.raises(PlanError, match="node of 0 ranks"):
        plan_relay(even_layout(4, 2), even_layout(4, 2), 0)


def test_a_rank_passes_on_one_interval_unless_its_node_s_own_part_lies_in_it() -> None:
    """Seven nodes of four: of 144 elements that others own, each rank brings in 36 that follow each other."""
    plan = plan_relay(even_layout(168, 28), layout_of_intervals(168, [(0, 168)] * 28), 4)
    parts = {message.src: len(message.slices) for message in plan.spread.messages if message.src != message.dst}
    assert [rank for rank in range(28) if parts[rank] > 1] == [4, 9, 18, 23]
    assert max(parts.values()) == 2
