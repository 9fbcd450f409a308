"""Ranks that hold the same share the work of a pull and a push: the same values, and the same sums as one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.ranks.channel import Channel
from ds_hydra.ranks.rank_stats import unequal_pairs
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero import scratch_plan
from ds_hydra.zero_hetero.collectives import GroupCollectives, MessageCollectives
from ds_hydra.zero_hetero.layout import Layout, Piece, even_layout, layout_of_intervals
from ds_hydra.zero_hetero.link import TwinPullLink, TwinPushLink, checksums_of
from ds_hydra.zero_hetero.transport import HostLane, TorchTransport
from ds_hydra.zero_hetero.twin_plan import Twins, plan_twin_pull, plan_twin_push
from tests.support.layouts import NUMELS, contribution, expected_sum, full_tensor, local_values


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
