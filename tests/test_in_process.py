"""Ranks of one process: the same results as gloo's ranks, and errors that say which rank waits for what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.pipe import collectives
from ds_hydra.pipe.in_process import InProcessRanks
from ds_hydra.pipe.ulysses import AllToAll, start, wait
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.transport import TorchTransport

RANKS = 3
MEMBERS = tuple(range(RANKS))


def in_memory(program: Callable[[int, Any], Any], num_ranks: int = RANKS) -> list[Any]:
    ranks = InProcessRanks(num_ranks)
    return ranks.run(lambda rank: program(rank, ranks.group(tuple(range(num_ranks)), rank)))


def values(rank: int, *shape: int) -> Tensor:
    """Small whole numbers, so that sums are exact in any order."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank)).double()


def exchanged(x: Tensor, message: AllToAll) -> Tensor:
    started, token = start([message], [x])
    return wait([message], started, token)[0]


def collective_calls(rank: int, group: Any) -> list[Tensor]:
    """Every collective that stages use, forward and backward, on small whole numbers."""
    widths = (3, 1, 2)
    results: list[Tensor] = []
    for call in (
        lambda x: collectives.copy_to_ranks(x, group) * (rank + 1),
        lambda x: collectives.sum_over_ranks(x * (rank + 1), group),
        lambda x: collectives.gather_last_dim(x[..., : widths[rank]], widths, rank, group),
        lambda x: collectives.split_last_dim(x, widths, rank, group) * (rank + 1),
        lambda x: exchanged(x.reshape(-1), AllToAll((4, 6, 2), ((4, 4, 4), (6, 6, 6), (2, 2, 2))[rank], group)),
    ):
        x = values(rank, 2, 6).requires_grad_()
        out = call(x)
        (out * values(7, *out.shape)).sum().backward()
        assert x.grad is not None
        results += [out.detach(), x.grad]
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        results.append(values(rank, 5))
        dist.all_reduce(results[-1], op=op, group=group)
    return results


def test_collectives_and_their_backwards_equal_gloos() -> None:
    expected = run_ranks(lambda rank: collective_calls(rank, dist.group.WORLD), RANKS)
    for mine, gloos in zip(in_memory(collective_calls), expected, strict=True):
        for one, other in zip(mine, gloos, strict=True):
            assert torch.equal(one, other)


def ring(rank: int, transport: Any) -> list[Tensor]:
    """Two messages of one tag to each neighbour, and one of another tag, waited for in another order than sent."""
    after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
    first, second, other = torch.empty(3), torch.empty(3), torch.empty(2)
    apart = transport.exchange([(before, torch.full((2,), float(rank)))], [(after, other)], tag=5)
    work = transport.exchange(
        [(after, torch.full((3,), float(rank))), (after, torch.full((3,), rank + 0.5))],
        [(before, first), (before, second)],
    )
    work.wait_receives()
    work.wait()
    apart.wait()
    return [first, second, other]


def test_messages_arrive_as_over_gloo() -> None:
    expected = run_ranks(lambda rank: ring(rank, TorchTransport()), RANKS)
    ranks = InProcessRanks(RANKS)
    for mine, gloos in zip(ranks.run(lambda rank: ring(rank, ranks.transport(rank))), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, gloos, strict=True))


def test_ranks_take_turns_in_the_same_order_each_time() -> None:
    def order() -> list[int]:
        seen: list[int] = []

        def program(rank: int, group: Any) -> None:
            for _ in range(3):
                seen.append(rank)
                dist.all_reduce(torch.zeros(1), group=group)

        in_memory(program)
        return seen

    assert order() == order()
    assert sorted(order()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("failing", MEMBERS)
def test_the_first_error_ends_all_ranks(failing: int) -> None:
    def program(rank: int, group: Any) -> None:
        dist.all_reduce(torch.zeros(1), group=group)
        if rank == failing:
            raise ValueError(f"no such layer on rank {rank}")
        try:
            dist.all_reduce(torch.zeros(1), group=group)
        except Exception:
            raise AssertionError("a model's own handler must not see the end of another rank") from None

    before = threading.active_count()
    with pytest.raises(ValueError, match=f"no such layer on rank {failing}"):
        in_memory(program)
    assert threading.active_count() == before


def hold_back(rank: int, group: Any) -> None:
    if rank != 1:
        dist.all_reduce(torch.zeros(1), group=group)


def differ_in_kind(rank: int, group: Any) -> None:
    if rank == 1:
        dist.all_gather([torch.zeros(1)] * RANKS, torch.zeros(1), group=group)
    else:
        dist.all_reduce(torch.zeros(1), group=group)


def differ_in_shape(rank: int, group: Any) -> None:
    dist.all_reduce(torch.zeros(1 + rank), group=group)


def differ_in_size(rank: int, group: Any) -> None:
    send = [2 if rank == 0 and peer == 2 else 1 for peer in MEMBERS]
    dist.all_to_all_single(torch.empty(RANKS), torch.zeros(sum(send)), [1] * RANKS, send, group=group)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (hold_back, r"rank 0 waits for all_reduce of ranks \(0, 1, 2\); rank 2 waits .*the other ranks have ended"),
        (differ_in_kind, r"different collectives: .*rank 1: \('all_gather'"),
        (differ_in_shape, r"different collectives: .*\(1,\).*\(2,\)"),
        (differ_in_size, "rank 0 sends 2 to rank 2, which expects 1"),
    ],
)
def test_ranks_at_odds_are_told_at_once(program: Callable[[int, Any], None], told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        in_memory(program)


def test_a_message_that_nobody_sends_is_told_at_once() -> None:
    def program(rank: int) -> Sequence[Tensor] | None:
        if rank == 0:
            ranks.transport(0).exchange([], [(2, torch.empty(1))], tag=9).wait()
        return None

    ranks = InProcessRanks(RANKS)
    with pytest.raises(RuntimeError, match=r"rank 0 waits for messages of ranks \(2,\) with tag 9"):
        ranks.run(program)


def test_grad_mode_is_the_callers() -> None:
    with torch.no_grad():
        assert InProcessRanks(2).run(lambda rank: torch.is_grad_enabled()) == [False, False]
    assert InProcessRanks(2).run(lambda rank: torch.is_grad_enabled()) == [True, True]
