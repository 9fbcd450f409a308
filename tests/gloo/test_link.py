"""Links over gloo and in one process: what a plan says arrives, sums in rank order; masters on any number of ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.ranks.channel import Channel
from ds_hydra.ranks.rank_stats import unequal_pairs
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero import scratch_plan
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import ALIGNMENT, BucketSpec, Layout, Piece, even_layout, layout_of_intervals
from ds_hydra.zero_hetero.link import Handle, Link, TwinPullLink, TwinPushLink, checksums_of
from ds_hydra.zero_hetero.masters import MasterShards, clip_, global_grad_norm
from ds_hydra.zero_hetero.transfer_plan import TransferPlan, plan_transfer
from ds_hydra.zero_hetero.transport import (
    GroupCollectives,
    HostLane,
    InProcessTransport,
    MessageCollectives,
    Post,
    TorchTransport,
    Transport,
)
from ds_hydra.zero_hetero.twin_plan import Twins, plan_twin_pull, plan_twin_push
from tests.support.layouts import NUMELS, contribution, expected_sum, full_tensor, heterogeneous, local_values


# --- LNK over gloo and in one process: what a plan says arrives, sums in rank order, the same bits each time.
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


# --- Ranks that hold the same share the work of a pull and a push: the same values, and the same sums as one by
# one.
def replicas(num_ranks: int) -> tuple[Layout, tuple[tuple[int, ...], ...]]:
    """Two pipelines of TP 2 on ranks 0 to 3, whose shards overlap; the other ranks hold everything. And the twins."""
    numel = sum(NUMELS)
    # A TP rank has 60 of the first 101 elements and 60 of the other 101; both ranks have the 19 in the middle.
    shards = [tuple(Piece(lo + skip, lo + skip + 60, 60 * (lo > 0)) for lo in (0, 101)) for skip in (0, 41)]
    pieces = tuple(shards[rank % 2] if rank < 4 else (Piece(0, numel, 3),) for rank in range(num_ranks))
    sizes = tuple(121 if rank < 4 else numel + 5 for rank in range(num_ranks))
    return Layout(numel, pieces, sizes), ((0, 2), (1, 3), tuple(range(4, num_ranks)))


@pytest.mark.drawn
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("num_ranks", "node_size"), [(5, 8), (8, 2), (8, 3)])
def test_twins_pull_the_same_and_push_the_same_sum(
    num_ranks: int, node_size: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they trade in pieces: the sums are the same to the bit."""
    layout, groups = replicas(num_ranks)
    masters = even_layout(layout.numel, num_ranks)
    twins = [Twins.of(ranks, node_size) for ranks in groups]
    pull_plan, push_plan = plan_twin_pull(masters, layout, twins), plan_twin_push(masters, layout, twins)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        transport, mine = TorchTransport(), next(one for one in twins if rank in one.ranks)
        how: dict[str, Any] = {"collectives": MessageCollectives(transport, rank), "lane": HostLane(early=early)}
        size = mine.padded(layout.sizes[rank], layout.alignment)
        pulled = torch.full((size,), -7.0, dtype=torch.float64)
        link = TwinPullLink(pull_plan, rank, transport, **how)
        shard = local_values(masters, rank, full_tensor(1, torch.float64), 0)
        pull = link.pull(shard, pulled, tag=1)
        source = torch.full((size,), 3.0, dtype=torch.float64)  # gaps are traded, but never leave
        source[: layout.sizes[rank]] = local_values(layout, rank, contribution(layout, rank, torch.float64), 3.0)
        push_link = TwinPushLink(push_plan, rank, transport, **how)
        summed = torch.full((masters.sizes[rank],), 99.0, dtype=torch.float64)
        space = torch.empty(push_link.push_bytes(torch.float64, torch.float64, torch.float64), dtype=torch.uint8)
        push = push_link.push(source, summed, tag=2, scratch=space)
        for handle in (pull, push):
            while early and handle.advance():
                pass
        for handle in (push, pull, push):
            handle.wait()
        held = local_values(layout, rank, torch.ones(layout.numel), 0) > 0
        expected = local_values(layout, rank, full_tensor(1, torch.float64), -7.0)
        assert torch.equal(pulled[: layout.sizes[rank]][held], expected[held])
        start, stop = masters.pieces[rank][0][:2]
        expected = expected_sum(layout, torch.float64, torch.float64)[start:stop]
        torch.testing.assert_close(summed, expected, rtol=1e-14, atol=1e-14)
        twice = summed.clone()
        push_link.push(source, twice, accumulate=True, tag=3).wait()
        torch.testing.assert_close(twice, 2 * expected, rtol=1e-14, atol=1e-14)
        sums = checksums_of(link.hops(shard, pulled), num_ranks)
        assert unequal_pairs(sums, Channel(dist.group.WORLD, rank, num_ranks)) == []
        return pulled, summed

    first = run_ranks(body, num_ranks)
    monkeypatch.setattr(scratch_plan, "AT_ONCE", 1)  # pieces of 64 elements of a part, and a shorter one
    second = run_ranks(body, num_ranks)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))


def test_a_group_s_collectives_do_what_messages_do() -> None:
    """Two teams of 4 ranks, parts of 3 elements."""

    def body(rank: int) -> None:
        teams = [(0, 2), (1, 3)]
        made: dict[tuple[int, ...], Any] = {team: dist.new_group(list(team)) for team in teams}
        mine = teams[rank % 2]
        results = []
        for collectives in (GroupCollectives(made.__getitem__), MessageCollectives(TorchTransport(), rank)):
            gathered, own = torch.zeros(6), mine.index(rank)
            gathered[3 * own : 3 * own + 3] = rank + 1
            collectives.gather(gathered, mine).wait()
            traded = torch.zeros(6)
            collectives.trade(torch.arange(6.0) + 10 * rank, traded, mine).wait()
            results.append((gathered.tolist(), traded.tolist()))
        assert results[0] == results[1]
        first, second = mine
        assert results[0][0] == [first + 1.0] * 3 + [second + 1.0] * 3
        assert results[0][1] == [10.0 * r + 3 * own + i for r in mine for i in range(3)]

    run_ranks(body, 4)


@pytest.mark.drawn
@pytest.mark.parametrize("node_size", [1, 3, 6])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_twins_add_up_by_rank_what_has_travelled(wire: torch.dtype, node_size: int) -> None:
    """One layout for all: one contribution after the other, a rank's own rounded too; on nodes of 3 those of each node,
    then the nodes' sums."""
    numel, ranks = 1003, range(6)
    held = layout_of_intervals(numel, [(0, numel)] * 6)
    masters, twins = even_layout(numel, 6), [Twins.of(tuple(ranks), node_size)]
    plan = plan_twin_push(masters, held, twins)
    values = [torch.randn(twins[0].padded(numel, 1), generator=torch.Generator().manual_seed(rank)) for rank in ranks]

    def body(rank: int) -> None:
        transport = TorchTransport()
        link = TwinPushLink(plan, rank, transport, collectives=MessageCollectives(transport, rank), lane=HostLane())
        summed = torch.empty(masters.sizes[rank])
        link.push(values[rank], summed, wire_dtype=wire).wait()
        a, b, c, d, e, f = (value.to(wire).float() for value in values)
        total = (a + b + c) + (d + e + f) if node_size == 3 else a + b + c + d + e + f
        start, stop = masters.pieces[rank][0][:2]
        assert torch.equal(summed, total[start:stop])

    run_ranks(body, 6)


# --- Master shards: any number of ranks trains as torch.optim on the whole tensors does, to the bit.
BUCKETS = (
    BucketSpec("embed", (("embed.weight", 57),)),
    BucketSpec("layer.0", (("a.weight", 40), ("a.bias", 5), ("norm.weight", 3), ("b.weight", 33))),
    BucketSpec("head", (("tiny.bias", 2),)),
)
NAMES = [name for bucket in BUCKETS for name, _ in bucket.params]
GROUPS: list[dict[str, Any]] = [
    {"names": [name for name in NAMES if "bias" not in name and "norm" not in name], "weight_decay": 0.1, "lr": 0.02},
    {"names": [name for name in NAMES if "bias" in name or "norm" in name], "weight_decay": 0.0, "lr": 0.01},
]


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(n, generator=generator) for bucket in BUCKETS for name, n in bucket.params}


def train_sharded(rank: int, num_ranks: int, steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Clipped AdamW steps on random gradients; norms, parameters and first moments."""
    masters = MasterShards(BUCKETS, rank, num_ranks, "cpu")
    for name, value in tensors(0).items():
        masters.load(name, value)
    optimizer = torch.optim.AdamW(masters.param_groups(GROUPS), foreach=False)
    masters.put_grads(None)
    norms = []
    for step in range(steps):
        gradients = tensors(1 + step)
        for piece in masters.pieces():
            masters.grad_of(piece).copy_(gradients[piece.name][piece.start : piece.stop])
        norm = global_grad_norm(masters.grads, dist.group.WORLD)
        clip_(masters.grads, norm, 1.0)
        optimizer.step()
        norms.append(norm.item())
    moments = masters.gather_full(dist.group.WORLD, source=masters.optimizer_state(optimizer, "exp_avg"), ranks=[0])
    assert bool(moments) == (rank == 0)
    return norms, masters.gather_full(dist.group.WORLD), moments


@pytest.mark.drawn
@pytest.mark.parametrize("num_ranks", [1, 4, 5, 7])
def test_adamw_is_bit_equal_to_the_whole(num_ranks: int) -> None:
    params = {name: torch.nn.Parameter(value) for name, value in tensors(0).items()}
    groups = [
        {"params": [params[name] for name in group["names"]], "lr": group["lr"], "weight_decay": group["weight_decay"]}
        for group in GROUPS
    ]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    expected_norms = []
    for step in range(3):
        gradients = tensors(1 + step)
        for name, param in params.items():
            param.grad = gradients[name]
        norm = torch.cat([g.double() for g in gradients.values()]).norm()
        clip_(gradients.values(), norm, 1.0)
        optimizer.step()
        expected_norms.append(norm.item())

    def body(rank: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        return train_sharded(rank, num_ranks, 3)

    results = run_ranks(body, num_ranks)
    for norms, values, _ in results:
        assert norms == results[0][0]  # the same on every rank
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        assert list(values) == NAMES
        for name, value in values.items():
            assert torch.equal(value, params[name].detach()), name
    for name, value in results[0][2].items():
        assert torch.equal(value, optimizer.state[params[name]]["exp_avg"]), name


def test_clipping_is_torchs() -> None:
    grads = [torch.randn(100, generator=torch.Generator().manual_seed(3)), torch.empty(0)]
    param = torch.nn.Parameter(torch.zeros(100))
    param.grad = grads[0].clone()
    torch.nn.utils.clip_grad_norm_([param], 0.5)
    norm = global_grad_norm(grads, None)
    clip_(grads, norm, 0.5)
    torch.testing.assert_close(grads[0], param.grad)
    before = grads[0].clone()
    clip_(grads, global_grad_norm(grads, None), 5.0)
    assert torch.equal(grads[0], before)


def test_each_rank_owns_its_interval_once() -> None:
    num_ranks = 6
    seen = {name: torch.zeros(n, dtype=torch.int) for bucket in BUCKETS for name, n in bucket.params}
    for rank in range(num_ranks):
        masters = MasterShards(BUCKETS, rank, num_ranks, "cpu")
        groups = masters.param_groups(GROUPS)
        masters.put_grads(None)
        assert [group["lr"] for group in groups] == [0.02, 0.01]  # also where a rank owns nothing of a group
        assert sum(p.numel() for group in groups for p in group["params"]) == masters.flat.numel()
        for param, bucket, start, stop in masters.spans:
            assert param.data_ptr() == masters.shards[bucket][start:stop].data_ptr()
            assert param.grad is not None
            assert param.grad.data_ptr() == masters.grads[bucket][start:stop].data_ptr()
        for piece in masters.pieces():
            seen[piece.name][piece.start : piece.stop] += 1
    assert all(bool((count == 1).all()) for count in seen.values())


def test_adjacent_pieces_of_a_group_are_one_parameter() -> None:
    masters = MasterShards(BUCKETS, 0, 1, "cpu")
    assert [(bucket, start, stop) for _, bucket, start, stop in (masters.param_groups(GROUPS), masters.spans)[1]] == [
        (0, 0, 57),
        (1, 0, 40),
        (1, 40, 48),
        (1, 48, 81),
        (2, 0, 2),
    ]


def test_bad_groups_and_tensors_are_refused() -> None:
    masters = MasterShards(BUCKETS, 0, 2, "cpu")
    with pytest.raises(PlanError, match=r"'a\.bias' is in optimizer groups 1 and 2"):
        masters.param_groups([*GROUPS, {"names": ["a.bias"]}])
    with pytest.raises(PlanError, match=r"3 of 6 parameters.*'a\.bias'"):
        masters.param_groups(GROUPS[:1])
    with pytest.raises(PlanError, match=r"no bucket holds a parameter 'x'"):
        masters.load("x", torch.zeros(1))
    with pytest.raises(PlanError, match=r"'a\.bias' has 5 elements.*6"):
        masters.load("a.bias", torch.zeros(6))
    with pytest.raises(PlanError, match="two buckets"):
        MasterShards([BUCKETS[0], BucketSpec("again", BUCKETS[0].params)], 0, 2, "cpu")
    with pytest.raises(PlanError, match=r"\['w'\] twice"):
        BucketSpec("b", (("w", 1), ("w", 2)))
