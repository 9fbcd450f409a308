"""LNK over gloo and in one process: what a plan says arrives, sums in rank order, the same bits each time."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero import scratch_plan
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import ALIGNMENT, Layout, Piece, even_layout, layout_of_intervals
from ds_hydra.zero_hetero.link import Handle, Link
from ds_hydra.zero_hetero.transfer_plan import TransferPlan, plan_transfer
from ds_hydra.zero_hetero.transport import InProcessTransport, Post, TorchTransport, Transport
from tests.support.layouts import NUMELS, contribution, expected_sum, full_tensor, heterogeneous, local_values


def pull_and_push(
    rank: int, transport: Transport, plan: TransferPlan, layout: Layout, dtype: torch.dtype, sum_dtype: torch.dtype
) -> tuple[tuple[Tensor, Handle], tuple[Tensor, Handle]]:
    masters = even_layout(layout.numel, layout.num_ranks)
    pulled = torch.full((layout.sizes[rank],), -7.0, dtype=dtype)
    pull = Link(plan, rank, transport).pull(local_values(masters, rank, full_tensor(1, dtype), 0), pulled, tag=3)
    summed = torch.full((masters.sizes[rank],), 99.0, dtype=sum_dtype)
    source = local_values(layout, rank, contribution(layout, rank, dtype), float("nan"))  # gaps must not travel
    push = Link(plan.transposed(), rank, transport).push(source, summed, tag=5)
    return (pulled, pull), (summed, push)


def check(rank: int, layout: Layout, pulled: Tensor, summed: Tensor) -> None:
    torch.testing.assert_close(pulled, local_values(layout, rank, full_tensor(1, pulled.dtype), -7.0), rtol=0, atol=0)
    masters = even_layout(layout.numel, layout.num_ranks)
    for start, stop, _ in masters.pieces[rank]:
        assert torch.equal(summed, expected_sum(layout, pulled.dtype, summed.dtype)[start:stop])


DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)]


@pytest.mark.parametrize("num_ranks", [4, 5, 6, 7])
@pytest.mark.parametrize(("dtype", "sum_dtype"), DTYPES)
def test_in_process(num_ranks: int, dtype: torch.dtype, sum_dtype: torch.dtype) -> None:
    layout = heterogeneous(num_ranks)
    plan = plan_transfer(even_layout(layout.numel, num_ranks), layout)
    post = Post()
    started = [
        pull_and_push(rank, InProcessTransport(post, rank), plan, layout, dtype, sum_dtype) for rank in range(num_ranks)
    ]
    for rank, ((pulled, pull), (summed, push)) in enumerate(started):
        pull.wait()
        push.wait()
        check(rank, layout, pulled, summed)
    assert not any(post.boxes.values())


@pytest.mark.parametrize(("num_ranks", "max_open_receives"), [(4, None), (7, None), (5, 1)])
def test_gloo(num_ranks: int, max_open_receives: int | None) -> None:
    layout = heterogeneous(num_ranks)
    plan = plan_transfer(even_layout(layout.numel, num_ranks), layout)

    def body(rank: int) -> None:
        transport = TorchTransport(max_open_receives=max_open_receives)
        for dtype, sum_dtype in DTYPES:
            (pulled, pull), (summed, push) = pull_and_push(rank, transport, plan, layout, dtype, sum_dtype)
            push.wait()  # not in the order of the start
            pull.wait()
            pull.wait()  # a second time does nothing
            check(rank, layout, pulled, summed)

    run_ranks(body, num_ranks)


def test_many_in_flight_share_scratch_and_give_the_same_bits() -> None:
    num_ranks = 4
    layout = heterogeneous(num_ranks)
    plan = plan_transfer(even_layout(layout.numel, num_ranks), layout)

    def body(rank: int) -> list[Tensor]:
        push = Link(plan.transposed(), rank, TorchTransport())
        source = local_values(layout, rank, contribution(layout, rank, torch.bfloat16), 0)
        results = []
        for _ in range(2):
            sums = [torch.empty(even_layout(layout.numel, num_ranks).sizes[rank]) for _ in range(4)]
            handles = [push.push(source, total, tag=index) for index, total in enumerate(sums)]
            for handle in handles:
                handle.wait()
            results += sums
        return results

    for results in run_ranks(body, num_ranks):
        assert all(torch.equal(results[0], other) for other in results)


def test_receives_open_in_the_order_of_their_start() -> None:
    """Also where a later one is waited for first, all have one tag, and a peer is far behind."""

    def body(rank: int) -> list[list[float]]:
        transport = TorchTransport(max_open_receives=2)
        peer = 1 - rank
        buffers = [torch.zeros(1000) for _ in range(6)]
        works = [
            transport.exchange([(peer, torch.full((1000,), 10.0 * rank + index))], [(peer, buffer)])
            for index, buffer in enumerate(buffers)
        ]
        if rank == 0:
            works[4].wait_receives()  # rank 1 need not open anything for this
            dist.barrier()
        else:
            dist.barrier()
        for work in works:
            work.wait_receives()
        for work in works:
            work.wait()
        assert not transport._opened
        assert not transport._waiting
        return [buffer.unique().tolist() for buffer in buffers]

    assert run_ranks(body, 2, timeout=20) == [[[10.0 + i] for i in range(6)], [[float(i)] for i in range(6)]]


def test_push_casts_for_the_wire_and_sums_own_part_exactly() -> None:
    layout = layout_of_intervals(6, [(0, 6), (0, 6)])
    plan = plan_transfer(even_layout(6, 2), layout).transposed()
    post = Post()
    values = [torch.tensor([1.0 + 2**-20] * 6), torch.tensor([3.0 + 2**-20] * 6)]
    sums = [torch.empty(3), torch.empty(3)]
    handles = [
        Link(plan, rank, InProcessTransport(post, rank)).push(values[rank], sums[rank], wire_dtype=torch.bfloat16)
        for rank in range(2)
    ]
    for handle in handles:
        handle.wait()
    assert sums[0].tolist() == [4.0 + 2**-20] * 3
    assert sums[1].tolist() == [4.0 + 2**-20] * 3


def rounding(rank: int, phase: int, layout: Layout) -> Tensor:
    """A contribution of one phase as a full tensor, zero where `rank` holds nothing: sums depend on their order."""
    held = contribution(layout, rank, torch.float32) != 0
    return held * full_tensor(1000 * phase + rank, torch.float32) * 10.0 ** ((rank * 5 + phase) % 7)


@pytest.mark.parametrize("num_ranks", [4, 7])
@pytest.mark.parametrize("gloo", [False, True])
def test_pushes_of_two_phases_add_up_in_the_order_of_phases_and_ranks(num_ranks: int, gloo: bool) -> None:
    """The second phase has another layout, and a rank adds each of its contributions to what the first one left."""
    layouts = [heterogeneous(num_ranks), layout_of_intervals(sum(NUMELS), [(9, 150)] + [(20, 202)] * (num_ranks - 1))]
    masters = even_layout(sum(NUMELS), num_ranks)
    plans = [plan_transfer(masters, layout).transposed() for layout in layouts]

    def push(rank: int, phase: int, transport: Transport, total: Tensor) -> Handle:
        source = local_values(layouts[phase], rank, rounding(rank, phase, layouts[phase]), float("nan"))
        return Link(plans[phase], rank, transport).push(source, total, accumulate=phase > 0, tag=4)

    totals = [torch.full((masters.sizes[rank],), 99.0) for rank in range(num_ranks)]
    if gloo:

        def body(rank: int) -> Tensor:
            started = [push(rank, phase, TorchTransport(), totals[rank]) for phase in range(2)]
            for handle in started:
                handle.wait()
            return totals[rank]

        totals = run_ranks(body, num_ranks)
    else:
        post = Post()
        for phase in range(2):
            started = [push(rank, phase, InProcessTransport(post, rank), totals[rank]) for rank in range(num_ranks)]
            for handle in started:
                handle.wait()
    expected = torch.zeros(sum(NUMELS))
    for phase in range(2):
        for rank in range(num_ranks):
            expected += rounding(rank, phase, layouts[phase])
    assert torch.equal(torch.cat(totals), expected)
    first, second = (
        functools.reduce(torch.add, (rounding(rank, phase, layouts[phase]) for rank in range(num_ranks)))
        for phase in range(2)
    )
    assert not torch.equal(first + second, expected)  # the sum of the phases' sums is rounded in another order


def test_accumulating_adds_what_travels_in_16_bits_and_keeps_what_nobody_adds_to() -> None:
    layout = layout_of_intervals(6, [(1, 6), (0, 6)])
    plan = plan_transfer(even_layout(6, 2), layout).transposed()
    post = Post()
    sums = [torch.tensor([1.0 + 2**-20] * 3), torch.tensor([100.0, 200.0, 300.0])]
    values = [torch.tensor([2.0, 2.0 + 2**-10, 2.0, 2.0, 2.0]), torch.zeros(6)]
    handles = [
        Link(plan, rank, InProcessTransport(post, rank)).push(
            values[rank], sums[rank], wire_dtype=torch.bfloat16, accumulate=True
        )
        for rank in range(2)
    ]
    for handle in handles:
        handle.wait()
    # Rank 0's own contribution is exact, what it sends loses its last bits.
    assert sums[0].tolist() == [1.0 + 2**-20, 3.0 + 2**-20, 3.0 + 2**-10 + 2**-20]
    assert sums[1].tolist() == [102.0, 202.0, 302.0]


def test_nobody_contributes_gives_zeros() -> None:
    layout = layout_of_intervals(10, [(2, 5), (0, 0)])
    plan = plan_transfer(even_layout(10, 2), layout).transposed()
    post = Post()
    sums = [torch.full((5,), 9.0), torch.full((5,), 9.0)]
    sources = [torch.ones(3), torch.empty(0)]
    handles = [Link(plan, r, InProcessTransport(post, r)).push(sources[r], sums[r]) for r in range(2)]
    for handle in handles:
        handle.wait()
    assert sums[0].tolist() == [0, 0, 1, 1, 1]
    assert sums[1].tolist() == [0] * 5


def test_contiguous_messages_are_not_copied() -> None:
    """A TP shard's part of an owner's interval is many slices for the owner, one interval for the receiver."""
    params = (40, 40)
    pieces = tuple((Piece(20 * t, 20 * t + 20, 0), Piece(40 + 20 * t, 60 + 20 * t, 20)) for t in range(2))
    plan = plan_transfer(even_layout(sum(params), 2), Layout(80, pieces, (40, 40)))
    link = Link(plan, 0, InProcessTransport(Post(), 0))
    assert all(len(envelope.parts) == 1 for envelope in link.sends + link.recvs)
    assert link.pull_scratch == 0


def test_wrong_buffers_are_refused() -> None:
    link = Link(plan_transfer(even_layout(10, 2), layout_of_intervals(10, [(0, 10)] * 2)), 1, TorchTransport())
    with pytest.raises(PlanError, match=r"rank 1.*destination.*\(9,\).*10"):
        link.pull(torch.zeros(5), torch.zeros(9))
    with pytest.raises(PlanError, match=r"rank 1.*source.*strides \(2,\)"):
        link.pull(torch.zeros(10)[::2], torch.zeros(10))
    with pytest.raises(PlanError, match=r"float32 into torch.bfloat16; give memory"):
        link.pull(torch.zeros(5), torch.zeros(10, dtype=torch.bfloat16))
    with pytest.raises(PlanError, match=r"rank 2.*2 ranks"):
        Link(plan_transfer(even_layout(10, 2), even_layout(10, 2)), 2, TorchTransport())


def test_waiting_before_sending_is_explained() -> None:
    plan = plan_transfer(even_layout(4, 2), layout_of_intervals(4, [(0, 4)] * 2))
    handle = Link(plan, 0, InProcessTransport(Post(), 0)).pull(torch.zeros(2), torch.zeros(4), tag=8)
    with pytest.raises(RuntimeError, match=r"rank 0 waits .*tag 8.*rank 1"):
        handle.wait()


@pytest.mark.parametrize("large", [1, 3, 1000])
def test_runs_of_large_slices_give_the_same(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slice by itself, some of them, or whole messages; scratch memory is what was planned, used to the end."""
    monkeypatch.setattr(scratch_plan, "LARGE", large)
    num_ranks = 4
    layout = heterogeneous(num_ranks)
    masters = even_layout(layout.numel, num_ranks)
    plan = plan_transfer(masters, layout)
    post = Post()
    pulls, pushes = ([Link(p, r, InProcessTransport(post, r)) for r in range(4)] for p in (plan, plan.transposed()))
    assert [link.pull_scratch for link in pulls] == scratch_plan.pull_scratch(plan).tolist()
    for cast in (False, True):
        planned = scratch_plan.push_scratch(plan.transposed(), cast=cast).tolist()
        assert [link.push_scratch(cast=cast) for link in pushes] == planned
    handles = []
    for rank in range(num_ranks):
        for dtype, sum_dtype in DTYPES:
            pulled = torch.full((layout.sizes[rank],), -7.0, dtype=dtype)
            shard = local_values(masters, rank, full_tensor(1, dtype), 0)
            pull = pulls[rank].pull(shard, pulled, tag=3, scratch=torch.empty(pulls[rank].pull_scratch, dtype=dtype))
            summed = torch.full((masters.sizes[rank],), 99.0, dtype=sum_dtype)
            source = local_values(layout, rank, contribution(layout, rank, dtype), float("nan"))
            push = pushes[rank].push(source, summed, tag=5)
            handles.append((rank, pulled, pull, summed, push))
    for rank, pulled, pull, summed, push in handles:
        pull.wait()
        push.wait()
        check(rank, layout, pulled, summed)
    assert not any(post.boxes.values())


def test_what_several_ranks_get_is_gathered_once() -> None:
    """Rank 0 owns what ranks 1 and 2 want in two parts each."""
    pieces = ((), *[(Piece(0, 2, 0), Piece(5, 8, 2))] * 2)
    plan = plan_transfer(layout_of_intervals(8, [(0, 8), (0, 0), (0, 0)]), Layout(8, pieces, (0, 5, 5)))
    assert scratch_plan.pull_scratch(plan).tolist() == [ALIGNMENT, 0, 0]
    post = Post()
    links = [Link(plan, rank, InProcessTransport(post, rank)) for rank in range(3)]
    local = [torch.zeros(size) for size in (0, 5, 5)]
    sources = [torch.arange(8.0), torch.empty(0), torch.empty(0)]
    handles = [link.pull(*buffers) for link, *buffers in zip(links, sources, local, strict=True)]
    for handle in handles:
        handle.wait()
    assert [buffer.tolist() for buffer in local[1:]] == [[0.0, 1.0, 5.0, 6.0, 7.0]] * 2
    assert [link.pull_scratch for link in links] == [ALIGNMENT, 0, 0]
