"""Transfer plans by properties: every element once, push is the transposed pull, volumes within the bounds."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import Layout, Piece, even_layout, layout_of_intervals
from ds_hydra.zero_hetero.transfer_plan import Message, Slice, TransferPlan, plan_transfer

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


def test_the_sender_is_local_then_near_then_idle() -> None:
    """Hetu v2, section 4.3, heuristics I to III."""
    everywhere = layout_of_intervals(8, [(0, 8)] * 3 + [(0, 0)] * 3)
    plan = plan_transfer(everywhere, layout_of_intervals(8, [(0, 8), *[(0, 0)] * 2, *[(0, 8)] * 3]))
    assert [(m.src, m.dst) for m in plan.messages] == [(0, 0), (0, 5), (1, 3), (2, 4)]
    near = plan_transfer(
        everywhere, layout_of_intervals(8, [(0, 0)] * 3 + [(0, 8)] * 3), link_cost=lambda a, b: abs(a - b)
    )
    assert [(m.src, m.dst) for m in near.messages] == [(2, 3), (2, 4), (2, 5)]


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


@pytest.mark.parametrize(("num_ranks", "tp"), [(1, 1), (4, 2), (6, 3), (6, 2), (7, 7), (8, 4), (5, 1)])
def test_deepspeeds_planner_agrees(num_ranks: int, tp: int) -> None:
    """DeepSpeed's affine planner, an independent implementation, pulls the same elements to the same places."""
    affine = pytest.importorskip("deepspeed.checkpoint.affine")
    affine_transfer = pytest.importorskip("deepspeed.checkpoint.affine_transfer")
    params = [(29, True), (31, True), (53, True)]
    dst = strategy_layout(params, [[(tp, {0, 1, 2})]] * (num_ranks // tp), num_ranks)
    src = even_layout(dst.numel, num_ranks)

    def affine_map(layout: Layout) -> object:
        holders: dict[tuple[int, int], set[int]] = {}
        for rank, own in enumerate(layout.pieces):
            for start, stop, _ in own:
                holders.setdefault((start, stop), set()).add(rank)
        pieces = {
            rank: [affine.AffinePiece((b - a,), a, (1,), offset, (1,), holders[a, b]) for a, b, offset in own]
            for rank, own in enumerate(layout.pieces)
        }
        return affine.ParamAffineMap((layout.numel,), {r: (size,) for r, size in enumerate(layout.sizes)}, pieces)

    theirs = {
        (s.source_rank, s.source_offset + index, s.target_rank, s.target_offset + index)
        for s in affine_transfer.plan_transfer(affine_map(dst), affine_map(src)).segments
        for index in range(s.numel)
    }
    ours = {
        (m.src, s.src_offset + index, m.dst, s.dst_offset + index)
        for m in plan_transfer(src, dst).messages
        for s in m.slices
        for index in range(s.length)
    }
    assert ours == theirs


@pytest.mark.parametrize("tp", [1, 8, 16])
def test_1024_ranks_are_planned_within_a_step(tp: int) -> None:
    """The layer of a 32B model: one bucket, and what one rank needs of it. Aim 100 ms; the bound allows for noise."""
    params = [(5120 * 5120, True)] * 4 + [(5120 * 27648, True)] * 3 + [(5120, False)] * 2
    layout = strategy_layout(params, [[(tp, set(range(9)))]] * (1024 // tp), 1024)
    start = time.perf_counter()
    plan = plan_transfer(even_layout(layout.numel, 1024), layout)
    pull, push = plan.recvs(5), plan.transposed().sends(5)
    assert time.perf_counter() - start < 2
    assert sum(m.numel for m in pull) == sum(m.numel for m in push) == plan.received_numels()[5]
