"""Layouts, transfer plans, their sums and their twins: every element once, within the bounds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.pipe.model_plan import twins_of
from ds_hydra.pipe.placement import Strategy
from ds_hydra.zero_hetero.contributions import order_contributions
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import Layout, Piece, even_layout, layout_of_intervals
from ds_hydra.zero_hetero.nodes import node_of
from ds_hydra.zero_hetero.transfer_plan import Message, Slice, TransferPlan, plan_transfer
from ds_hydra.zero_hetero.twin_plan import SUMMED_INSIDE, Twins, plan_twin_pull, plan_twin_push
from tests.pure.test_strategy import large_strategies


# --- Layouts: even cuts for any number of ranks, and contradictions that are refused with their numbers.
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


# --- Transfer plans by properties: every element once, push is the transposed pull, volumes within the bounds.
# One parameter: (elements, whether TP splits it). A replica: (TP degree, its stages' parameter indices).
Params = list[tuple[int, bool]]


def strategy_layout(params: Params, replicas: list[list[tuple[int, set[int]]]], num_ranks: int) -> Layout:
    """Replicas of stages: each stage is a TP group that holds some of the parameters, split or whole."""
    pieces: list[tuple[Piece, ...]] = []
    starts = [sum(numel for numel, _ in params[:index]) for index in range(len(params))]
    for stage in (stage for replica in replicas for stage in replica):
        tp, holds = stage
        for tp_rank in range(tp):
            own: list[Piece] = []
            for index in sorted(holds):
                numel, split = params[index]
                low, high = (numel * tp_rank // tp, numel * (tp_rank + 1) // tp) if split else (0, numel)
                if low < high:
                    offset = own[-1].offset + own[-1].stop - own[-1].start if own else 0
                    own.append(Piece(starts[index] + low, starts[index] + high, offset))
            pieces.append(tuple(own))
    assert len(pieces) <= num_ranks
    pieces += [()] * (num_ranks - len(pieces))
    sizes = tuple(sum(piece.stop - piece.start for piece in own) for own in pieces)
    return Layout(sum(numel for numel, _ in params), tuple(pieces), sizes)


@st.composite
def strategies(draw: st.DrawFn) -> tuple[Params, Layout, int]:
    """Random parameters, split by random heterogeneous replicas over 1 to 13 ranks."""
    num_ranks = draw(st.integers(1, 13))
    params = draw(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=5))
    replicas: list[list[tuple[int, set[int]]]] = []
    left = num_ranks
    while left and (not replicas or draw(st.booleans())):
        num_stages = draw(st.integers(1, min(3, left, len(params))))
        cuts = sorted(draw(st.lists(st.integers(0, len(params)), min_size=num_stages - 1, max_size=num_stages - 1)))
        stages = []
        for stage, (low, high) in enumerate(zip([0, *cuts], [*cuts, len(params)], strict=True)):
            tp = draw(st.integers(1, left - (num_stages - 1 - stage)))
            left -= tp
            stages.append((tp, set(range(low, high))))
        replicas.append(stages)
    return params, strategy_layout(params, replicas, num_ranks), num_ranks


def run_plan(plan: TransferPlan, buffers: list[list[int]], sizes: tuple[int, ...]) -> list[list[list[int]]]:
    """What arrives at each place of each rank's destination buffer, in a pure simulation of LNK."""
    arrived: list[list[list[int]]] = [[[] for _ in range(size)] for size in sizes]
    for message in plan.messages:
        for src_offset, dst_offset, length in message.slices:
            for index in range(length):
                arrived[message.dst][dst_offset + index].append(buffers[message.src][src_offset + index])
    return arrived


def fill(layout: Layout) -> list[list[int]]:
    """Local buffers in which every element is its own index in the flat tensor."""
    buffers = [[-1] * size for size in layout.sizes]
    for buffer, pieces in zip(buffers, layout.pieces, strict=True):
        for start, stop, offset in pieces:
            buffer[offset : offset + stop - start] = range(start, stop)
    return buffers


def assert_delivers(plan: TransferPlan, src: Layout, dst: Layout) -> None:
    expected = [[[] if element < 0 else [element] for element in buffer] for buffer in fill(dst)]
    assert run_plan(plan, fill(src), dst.sizes) == expected


def test_the_example_of_the_docstring() -> None:
    src, dst = even_layout(12, 3), layout_of_intervals(12, [(0, 6), (6, 12), (0, 12)])
    pull = plan_transfer(src, dst)
    assert [(m.src, m.dst, *piece) for m in pull.messages for piece in m.slices] == [
        (0, 0, 0, 0, 4),
        (0, 2, 0, 0, 4),
        (1, 0, 0, 4, 2),
        (1, 1, 2, 0, 2),
        (1, 2, 0, 4, 4),
        (2, 1, 0, 2, 4),
        (2, 2, 0, 8, 4),
    ]
    assert [(m.src, m.numel) for m in pull.transposed().recvs(1)] == [(0, 2), (2, 4)]


@given(strategies())
def test_pull_delivers_every_element_once(case: tuple[Params, Layout, int]) -> None:
    _, layout, num_ranks = case
    masters = even_layout(layout.numel, num_ranks)
    assert_delivers(plan_transfer(masters, layout), masters, layout)


@given(strategies())
def test_push_is_the_transposed_pull(case: tuple[Params, Layout, int]) -> None:
    _, layout, num_ranks = case
    pull = plan_transfer(even_layout(layout.numel, num_ranks), layout)
    push = pull.transposed()
    turned = sorted((m.dst, m.src, tuple(Slice(b, a, n) for a, b, n in m.slices)) for m in pull.messages)
    assert [(m.src, m.dst, m.slices) for m in push.messages] == turned
    assert push.transposed() == pull
    # Every owner receives each of its elements once from each rank that holds it.
    arrived = run_plan(push, fill(layout), even_layout(layout.numel, num_ranks).sizes)
    holders = Counter(element for buffer in fill(layout) for element in buffer if element >= 0)
    assert Counter(element for rank in arrived for place in rank for element in place) == holders
    assert all(len(set(place)) <= 1 for rank in arrived for place in rank)


@given(strategies())
def test_volumes_stay_within_the_bounds(case: tuple[Params, Layout, int]) -> None:
    """Hydraulis, appendix B.1: a receiver gets its partition at most, an owner sends its shard to each requester."""
    _, layout, num_ranks = case
    masters = even_layout(layout.numel, num_ranks)
    plan = plan_transfer(masters, layout)
    for rank in range(num_ranks):
        own = [set(range(p.start, p.stop)) for p in masters.pieces[rank]]
        owned = set().union(*own)
        wanted = [{e for e in buffer if e >= 0} for buffer in fill(layout)]
        # Not one element more than needed: what is wanted and not owned, what others want of the owned.
        assert plan.received_numels()[rank] == len(wanted[rank] - owned)
        assert plan.sent_numels()[rank] == sum(len(w & owned) for r, w in enumerate(wanted) if r != rank)
        requesters = sum(bool(w & owned) for w in wanted)
        assert plan.received_numels()[rank] <= layout.held(rank)
        assert plan.sent_numels()[rank] <= masters.sizes[rank] * requesters
        for messages, peers in ((plan.sends(rank), "dst"), (plan.recvs(rank), "src")):
            assert len({getattr(message, peers) for message in messages}) == len(messages)  # one per peer
        assert sum(m.numel for m in plan.sends(rank)) == plan.sent_numels()[rank]
        assert sum(m.numel for m in plan.recvs(rank)) == plan.received_numels()[rank]


@pytest.mark.parametrize("num_ranks", [5, 6, 7, 8])
def test_a_homogeneous_strategy_moves_the_bytes_of_zero_1(num_ranks: int) -> None:
    numel = 1003
    masters = even_layout(numel, num_ranks)
    plan = plan_transfer(masters, layout_of_intervals(numel, [(0, numel)] * num_ranks))
    assert plan.received_numels() == tuple(numel - size for size in masters.sizes)
    assert plan.sent_numels() == tuple(size * (num_ranks - 1) for size in masters.sizes)
    assert all(len(message.slices) == 1 for message in plan.messages)
    assert len(plan.messages) == num_ranks**2


@given(strategies(), strategies())
def test_any_layout_to_any_layout(one: tuple[Params, Layout, int], two: tuple[Params, Layout, int]) -> None:
    """Also from replicated sources: each element once, and from the receiver itself where it holds it."""
    numel = min(one[1].numel, two[1].numel)
    num_ranks = max(one[2], two[2])
    src, dst = (resized(case[1], numel, num_ranks) for case in (one, two))
    plan = plan_transfer(src, dst)
    assert_delivers(plan, src, dst)
    have, want = fill(src), fill(dst)
    for rank in range(num_ranks):
        assert plan.received_numels()[rank] == len(set(want[rank]) - set(have[rank]) - {-1})
    assert plan == plan_transfer(src, dst)


def resized(layout: Layout, numel: int, num_ranks: int) -> Layout:
    """The layout cut to the first `numel` elements, with empty ranks added."""
    pieces = tuple(
        tuple(Piece(p.start, min(p.stop, numel), p.offset) for p in own if p.start < numel) for own in layout.pieces
    )
    pieces += ((),) * (num_ranks - len(pieces))
    return Layout(numel, pieces, layout.sizes + (0,) * (num_ranks - len(layout.sizes)))


def test_replicas_of_equal_shape_talk_in_pairs() -> None:
    halves = [(0, 6), (6, 12)]
    none = [(0, 0)] * 4
    src = layout_of_intervals(12, halves * 2 + none)
    dst = layout_of_intervals(12, none + halves * 2)
    assert [(m.src, m.dst) for m in plan_transfer(src, dst).messages] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_the_sender_is_local_then_idle() -> None:
    """Hetu v2, section 4.3, heuristics I and III."""
    everywhere = layout_of_intervals(8, [(0, 8)] * 3 + [(0, 0)] * 3)
    plan = plan_transfer(everywhere, layout_of_intervals(8, [(0, 8), *[(0, 0)] * 2, *[(0, 8)] * 3]))
    assert [(m.src, m.dst) for m in plan.messages] == [(0, 0), (0, 5), (1, 3), (2, 4)]


def test_the_holder_that_has_sent_least_is_next() -> None:
    src = layout_of_intervals(8, [(0, 8), (0, 4), (4, 8), (0, 0)])
    plan = plan_transfer(src, layout_of_intervals(8, [(0, 0)] * 3 + [(0, 8)]))
    assert plan.messages == (Message(0, 3, (Slice(0, 0, 4),)), Message(2, 3, (Slice(0, 4, 4),)))


def test_an_element_that_nobody_holds_is_named() -> None:
    src = layout_of_intervals(10, [(0, 4), (6, 10)])
    with pytest.raises(PlanError, match=r"rank 1 needs elements \[2, 8\).*holds element 4"):
        plan_transfer(src, layout_of_intervals(10, [(0, 0), (2, 8)]))
    replicated = layout_of_intervals(10, [(0, 4), (0, 4)])
    with pytest.raises(PlanError, match=r"rank 0 needs elements \[0, 10\).*holds element 4"):
        plan_transfer(replicated, layout_of_intervals(10, [(0, 10), (0, 0)]))


def test_layouts_of_different_tensors_or_jobs_are_refused() -> None:
    with pytest.raises(PlanError, match=r"10 elements.*11"):
        plan_transfer(even_layout(10, 2), even_layout(11, 2))
    with pytest.raises(PlanError, match=r"2 ranks.*3"):
        plan_transfer(even_layout(10, 2), even_layout(10, 3))


def test_contributions_may_be_less_than_what_was_pulled() -> None:
    """A norm weight that two TP ranks hold whole: each contributes its half, from its place in the same buffer."""
    masters = even_layout(8, 2)
    contributed = Layout(8, ((Piece(0, 4, 3),), (Piece(4, 8, 7),)), (11, 11))
    push = plan_transfer(masters, contributed).transposed()
    assert push.messages == (Message(0, 0, (Slice(3, 0, 4),)), Message(1, 1, (Slice(7, 0, 4),)))


def test_plans_are_equal_when_their_messages_are() -> None:
    plan = plan_transfer(even_layout(17, 3), layout_of_intervals(17, [(0, 9), (9, 17), (0, 17)]))
    back = plan.transposed().transposed()
    assert back == plan != plan.transposed()
    assert hash(back) == hash(plan)
    assert TransferPlan(4, plan.slices) != plan


# --- The order of a sum: every contribution once, in rank order, written first and added after.
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


# --- Plans of twins: what a plain transfer delivers, nothing twice, into a node once; sums of everything, once.
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


def test_the_example_of_the_docstring_of_twins() -> None:
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
