"""Plans of twins: what a plain transfer delivers, nothing twice, into a node once; sums of everything, once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.pipe.placement import Strategy
from ds_hydra.pipe.transfers import twins_of
from ds_hydra.zero_hetero.layout import Layout, Piece, even_layout, layout_of_intervals
from ds_hydra.zero_hetero.nodes import node_of
from ds_hydra.zero_hetero.transfer_plan import TransferPlan
from ds_hydra.zero_hetero.twin_plan import SUMMED_INSIDE, Twins, plan_twin_pull, plan_twin_push
from tests.pure.test_connections import large_strategies


@st.composite
def twin_layouts(draw: st.DrawFn) -> tuple[Layout, list[Twins]]:
    """Up to 12 ranks in groups that hold the same, each with random pieces, on nodes of 1 to 4 ranks."""
    numel, num_ranks = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    group_of = [draw(st.integers(0, 3)) for _ in range(num_ranks)]
    node_size = draw(st.integers(1, 4))
    pieces: list[tuple[Piece, ...]] = [()] * num_ranks
    sizes, twins = [0] * num_ranks, []
    for group in sorted(set(group_of)):
        cuts = sorted(draw(st.sets(st.integers(0, numel), max_size=6)))
        own: list[Piece] = []
        end = draw(st.integers(0, 2))
        for start, stop in zip(cuts[::2], cuts[1::2], strict=False):
            own.append(Piece(start, stop, end))
            end += stop - start + draw(st.integers(0, 2))
        ranks = [rank for rank in range(num_ranks) if group_of[rank] == group]
        twins.append(Twins.of(ranks, node_size))
        for rank in ranks:
            pieces[rank], sizes[rank] = tuple(own), end if own else 0
    return Layout(numel, tuple(pieces), tuple(sizes), draw(st.sampled_from([1, 2, 8]))), twins


def move(plan: TransferPlan, sources: list[list[int]], buffers: list[list[int]], *, remote_only: bool = False) -> int:
    """Copy what a plan says, all at once; how many elements one of the destinations got twice."""
    arrived: Counter[tuple[int, int]] = Counter()
    taken = [list(source) for source in sources]
    for message in plan.messages:
        assert not (remote_only and message.src == message.dst)
        for src_offset, dst_offset, length in message.slices:
            for index in range(length):
                buffers[message.dst][dst_offset + index] = taken[message.src][src_offset + index]
                arrived[message.dst, dst_offset + index] += 1
    return sum(count - 1 for count in arrived.values())


def padded(layout: Layout, twins: list[Twins]) -> list[int]:
    sizes = list(layout.sizes)
    for one in twins:
        for rank in one.ranks:
            sizes[rank] = one.padded(layout.sizes[rank], layout.alignment)
    return sizes


@settings(deadline=None)
@given(twin_layouts())
def test_a_pull_brings_everything_once(case: tuple[Layout, list[Twins]]) -> None:
    layout, twins = case
    masters = even_layout(layout.numel, layout.num_ranks)
    shards = [[value for piece in own for value in range(piece.start, piece.stop)] for own in masters.pieces]
    plan = plan_twin_pull(masters, layout, twins)
    buffers = [[-1] * size for size in padded(layout, twins)]
    enter, *gathers = plan.hops
    assert move(enter, shards, buffers) == 0
    for gather in gathers:
        assert move(gather, buffers, buffers, remote_only=True) == 0
    for rank, own in enumerate(layout.pieces):
        for start, stop, offset in own:
            assert buffers[rank][offset : offset + stop - start] == list(range(start, stop))
    for rank in range(layout.num_ranks):
        members, part = plan.part_of(rank)
        assert rank in members
        assert len(members) > 1 or part == 0


@settings(deadline=None)
@given(twin_layouts())
def test_a_push_adds_up_everything_once(case: tuple[Layout, list[Twins]]) -> None:
    layout, twins = case
    masters = even_layout(layout.numel, layout.num_ranks)
    plan = plan_twin_push(masters, layout, twins)
    trade, leave = plan.hops
    sizes = padded(layout, twins)
    # Each rank contributes a power of 13 to each of its elements, so that a sum tells who is in it, and how often.
    grads = [[0] * size for size in sizes]
    for rank, own in enumerate(layout.pieces):
        for start, stop, offset in own:
            grads[rank][offset : offset + stop - start] = [13**rank] * (stop - start)
    slabs = [list(grad) for grad in grads]
    assert move(trade, grads, slabs, remote_only=True) == 0
    sums = [list(grad) for grad in grads]  # of those who are alone
    for rank in range(layout.num_ranks):
        members, part = plan.part_of(rank)
        if part:
            at = members.index(rank) * part
            slabs[rank][at : at + part] = grads[rank][at : at + part]
            rows = [slabs[rank][index * part : (index + 1) * part] for index in range(len(members))]
            sums[rank] = [sum(column) for column in zip(*rows, strict=True)]
    totals = [[0] * size for size in masters.sizes]
    for message in leave.messages:
        for src_offset, dst_offset, length in message.slices:
            for index in range(length):
                totals[message.dst][dst_offset + index] += sums[message.src][src_offset + index]
    for rank, own in enumerate(masters.pieces):
        for start, stop, offset in own:
            for element in range(start, stop):
                holders = [
                    other
                    for other, held in enumerate(layout.pieces)
                    if any(piece.start <= element < piece.stop for piece in held)
                ]
                assert totals[rank][offset + element - start] == sum(13**other for other in holders)


def test_the_example_of_the_docstring() -> None:
    held = layout_of_intervals(8, [(0, 4), (4, 8)] * 2)
    plan = plan_twin_pull(even_layout(8, 4), held, [Twins.of((0, 2), 4), Twins.of((1, 3), 4)])
    enter, gather = plan.hops
    assert [(m.src, m.dst, *m.slices[0]) for m in enter.messages] == [
        (0, 0, 0, 0, 2), (1, 2, 0, 2, 2), (2, 1, 0, 0, 2), (3, 3, 0, 2, 2)
    ]  # fmt: skip
    assert [(m.src, m.dst, *m.slices[0]) for m in gather.messages] == [
        (0, 2, 0, 0, 2), (1, 3, 0, 0, 2), (2, 0, 2, 2, 2), (3, 1, 2, 2, 2)
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [(4, 3), (3, 4, 4), (1, 4), (2, 2, 1), (4, 4, 4)])
def test_twins_bring_each_element_into_a_node_once(sizes: tuple[int, ...]) -> None:
    ranks, numel = sum(sizes), 120
    twins = Twins.of(range(ranks), sizes)
    masters = even_layout(numel, ranks)
    enter, *gathers = plan_twin_pull(masters, layout_of_intervals(numel, [(0, numel)] * ranks), [twins]).hops
    entered: dict[int, int] = dict.fromkeys(range(len(sizes)), 0)
    for message in enter.messages:
        entered[node_of(message.dst, sizes)] += message.numel
    assert entered == dict.fromkeys(range(len(sizes)), numel)
    for message in [message for gather in gathers for message in gather.messages]:
        assert node_of(message.src, sizes) == node_of(message.dst, sizes)
    owned = [sum(masters.sizes[rank] for rank in ranks) for ranks in twins.apart]
    crossed: Counter[int] = Counter()
    for message in enter.messages:
        if node_of(message.src, sizes) != (node := node_of(message.dst, sizes)):
            crossed[node] += message.numel
    assert crossed == {node: numel - own for node, own in enumerate(owned)}


@pytest.mark.parametrize("sizes", [(4, 4, 4), (3, 4), (3, 3), (3, 5, 4)])
def test_one_sum_of_each_element_enters_its_owners_node_from_each_other_node(sizes: tuple[int, ...]) -> None:
    ranks, numel = sum(sizes), 120
    twins, masters = Twins.of(range(ranks), sizes), even_layout(numel, ranks)
    trade, leave = plan_twin_push(masters, layout_of_intervals(numel, [(0, numel)] * ranks), [twins]).hops
    assert all(node_of(message.src, sizes) == node_of(message.dst, sizes) for message in trade.messages)
    entered: Counter[int] = Counter()
    for message in leave.messages:
        if node_of(message.src, sizes) != (node := node_of(message.dst, sizes)):
            entered[node] += message.numel
    owned: Counter[int] = Counter()
    for rank, shard in enumerate(masters.sizes):
        owned[node_of(rank, sizes)] += shard
    assert entered == {node: (len(sizes) - 1) * held for node, held in owned.items()}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 3), (SUMMED_INSIDE, SUMMED_INSIDE - 1)])
def test_few_twins_on_a_node_trade_with_all(sizes: tuple[int, ...]) -> None:
    twins = Twins.of(range(sum(sizes)), sizes)
    assert twins.pushing == (Twins(tuple(range(sum(sizes)))),)


@settings(max_examples=25, deadline=None)
@given(large_strategies(), st.sampled_from([1, 4, 8]))
def test_every_rank_is_among_one_of_the_twins(strategy: Strategy, node_size: int) -> None:
    twins = twins_of(strategy, node_size)
    assert sorted(rank for one in twins for rank in one.ranks) == list(range(strategy.num_ranks))
    for one in twins:
        # A process group numbers its ranks in ascending order, and so must a team their parts.
        assert all(list(those.ranks) == sorted(those.ranks) for those in (*one.pulling, *one.pushing))
        stages = [strategy.stage_of(rank) for rank in one.ranks]
        assert len({(stage.ranges, stage.tp) for stage in stages}) == 1
        assert len({stage.coordinates(rank)[0] for stage, rank in zip(stages, one.ranks, strict=True)}) == 1
