"""The strict transport: it carries what is right, names each break of a rule, and each mutant of ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero import pushes
from ds_hydra.zero_hetero.layout import even_layout
from ds_hydra.zero_hetero.pushes import Pulls, Pushes
from ds_hydra.zero_hetero.scratch_plan import Window
from ds_hydra.zero_hetero.transfer_plan import plan_transfer
from ds_hydra.zero_hetero.transport import TorchTransport, Transport
from tests.gloo import test_link, test_push
from tests.support.strict import (
    Rules,
    StrictCollectives,
    StrictError,
    StrictMemory,
    StrictTransport,
    strict_collectives,
)
from tests.support.strict_line import Line, StrictLane

# --- The strict transport: it carries what is right, a whole engine's steps among it, and names each break of a
# rule.
SOON = 1.5  # seconds after which a wait counts as one for ever, where there is one


def communicator(name: str = "links", rules: Rules | None = None, line: Line | None = None) -> StrictTransport:
    return StrictTransport(dist.new_group(list(range(dist.get_world_size()))), name, rules, line)


@pytest.mark.parametrize("rules", [Rules(), Rules(connect=True, lazy=True)], ids=["strict", "connect and lazy"])
def test_links_give_the_same_bits(rules: Rules) -> None:
    layout = test_link.heterogeneous(5)
    plan = plan_transfer(even_layout(layout.numel, 5), layout)

    def body(rank: int) -> None:
        transport = communicator(rules=rules)
        with StrictMemory([transport]):
            for dtype, sum_dtype in test_link.DTYPES:
                moves = test_link.pull_and_push(rank, transport, plan, layout, dtype, sum_dtype)
                (pulled, pull), (summed, push) = moves
                push.wait()
                pull.wait()
                test_link.check(rank, layout, pulled, summed)
        transport.close()

    run_ranks(body, 5)


def swap(transport: Transport, rank: int, first: int = 0, numel: int = 3) -> Tensor:
    """Both of two ranks send and receive."""
    got = torch.zeros(numel)
    transport.exchange([(1 - rank, torch.ones(numel))], [(1 - rank, got)], tag=first).wait()
    return got


def test_destinations_hold_nothing_until_they_are_waited_for() -> None:
    def body(rank: int) -> tuple[list[float], list[float]]:
        transport = communicator()
        swap(transport, rank)
        got = torch.zeros(2)
        work = transport.exchange([(1 - rank, torch.full((2,), rank + 5.0))], [(1 - rank, got)])
        dist.barrier()
        before = got.tolist()
        work.wait()
        work.wait()  # a second time does nothing
        transport.close()
        return before, got.tolist()

    for rank, (before, after) in enumerate(run_ranks(body, 2)):
        assert all(value != value for value in before)
        assert after == [6.0 - rank] * 2


def other_order(rank: int) -> None:
    transport = communicator()
    works = []
    for tag in ((1, 2), (2, 1))[rank]:
        works.append(transport.exchange([(1 - rank, torch.ones(3))], [(1 - rank, torch.empty(3))], tag))
    for work in works:
        work.wait()


def nobody_receives(rank: int) -> None:
    """gloo would send a small message without its receiver."""
    transport = communicator(rules=Rules(stall_s=SOON))
    if rank == 0:
        transport.exchange([(1, torch.ones(3))], []).wait()
    else:
        dist.barrier()


def sent_is_changed(rank: int) -> None:
    message, got = torch.ones(3), torch.empty(3)
    work = communicator().exchange([(1 - rank, message)], [(1 - rank, got)])
    message.zero_()
    work.wait()


def destination_is_written(rank: int) -> None:
    message, got = torch.ones(3), torch.empty(3)
    work = communicator().exchange([(1 - rank, message)], [(1 - rank, got)])
    got.zero_()
    work.wait()


def destination_is_taken_twice(rank: int) -> None:
    transport, got = communicator(), torch.empty(3)
    transport.exchange([(1 - rank, torch.ones(3))], [(1 - rank, got)])
    transport.exchange([(1 - rank, torch.ones(2))], [(1 - rank, got[1:])])


def destination_is_read(rank: int) -> None:
    transport, got = communicator(), torch.empty(3)
    with StrictMemory([transport]):
        transport.exchange([(1 - rank, torch.ones(3))], [(1 - rank, got)])
        got[1:].sum()


def sent_is_written(rank: int) -> None:
    transport, message = communicator(), torch.ones(3)
    with StrictMemory([transport]):
        transport.exchange([(1 - rank, message)], [(1 - rank, torch.empty(3))])
        message[:1].sum()  # reading is allowed
        message[1:].add_(1)


def never_waited_for(rank: int) -> None:
    transport = communicator()
    transport.exchange([(1 - rank, torch.ones(3))], [(1 - rank, torch.empty(3))], tag=7)
    transport.close()


def two_communicators(rank: int, rules: Rules, line: Line | None = None) -> None:
    """Started in another order on each rank; waited for at the end."""
    pair = [communicator("one", rules, line), communicator("two", rules, line)]
    works = []
    for transport in pair if rank == 0 else pair[::-1]:
        works.append(transport.exchange([(1 - rank, torch.ones(3))], [(1 - rank, torch.empty(3))]))
    for work in works:
        work.wait()


def blocked_host(rank: int) -> None:
    two_communicators(rank, Rules(stall_s=SOON, blocking=True))


def connecting_host(rank: int) -> None:
    two_communicators(rank, Rules(stall_s=SOON, connect=True))


def some_of_its_ranks(rank: int) -> None:
    """Rank 2 takes no part in the first exchange of a communicator that is made by it."""
    transport = communicator(rules=Rules(stall_s=SOON, lazy=True))
    if rank < 2:
        swap(transport, rank)
    else:
        dist.barrier()


def some_of_them_after_a_collective(rank: int) -> None:
    """A collective of all ranks has made the communicator."""
    transport = communicator(rules=Rules(stall_s=SOON, lazy=True))
    transport.made = True
    if rank < 2:
        swap(transport, rank)


def queued_host(rank: int) -> None:
    """Nobody's host is blocked, but the rank's queue is."""
    two_communicators(rank, Rules(stall_s=SOON), Line())


def collectives_in_another_order(rank: int) -> None:
    """Started one after the other, waited for at the end."""
    with strict_collectives():
        works = [dist.all_reduce(torch.ones(3 + (number + rank) % 2), async_op=True) for number in range(2)]
        for work in works:
            work.wait()


def parts_of_other_sizes(rank: int) -> None:
    """Rank 0 sends 2 elements to rank 1, which expects 3."""
    send, receive = ([1, 2], [1, 4]) if rank == 0 else ([4, 1], [3, 1])
    with strict_collectives():
        dist.all_to_all_single(torch.empty(sum(receive)), torch.ones(sum(send)), receive, send)


def nobody_else_gathers(rank: int) -> None:
    with strict_collectives(StrictCollectives(Rules(stall_s=SOON))):
        if rank == 0:
            dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3))
        else:
            time.sleep(2 * SOON)


def gathered_is_read(rank: int) -> None:
    with strict_collectives() as collectives, StrictMemory([collectives]):
        got = torch.empty(4)
        work = dist.all_gather_single(got, torch.ones(2), async_op=True)
        dist.all_reduce(torch.ones(1))  # the other one has gathered, too
        assert got.sum() == 4, work


def gathered_in_place_is_written(rank: int) -> None:
    with strict_collectives():
        got = torch.ones(4)
        work = dist.all_gather_single(got, got.chunk(2)[rank], async_op=True)
        got.chunk(2)[rank].add_(1)
        work.wait()


def mark_is_not_waited_for(rank: int) -> None:
    """What has been summed in a lane is read beside it."""
    lane, total = StrictLane(), torch.zeros(4)
    with StrictMemory([], [lane]):
        with lane.aside():
            total[:2].add_(1)
            early = lane.mark()
            total[2:].add_(1)
        lane.wait(early)
        total[:2].sum()
        total[2:].sum()


def what_a_lane_reads_is_written(rank: int) -> None:
    lane, given = StrictLane(), torch.zeros(4)
    with StrictMemory([], [lane]):
        with lane.aside():
            given.sum()
            lane.wait(lane.mark())  # within the lane that says nothing to whoever is beside it
        given.sum()
        given.add_(1)


BREAKS = [
    (
        other_order,
        2,
        r"exchange 0 \(tag [12]\) .* tag 1 with 3 .*, tag 2|exchange 0 \(tag 2\) .* tag 2 with 3 .* tag 1 ",
    ),
    (nobody_receives, 2, r"rank 0: exchange 0 .* waits for rank 1 to receive from rank 0 for 1.5 s and more"),
    (sent_is_changed, 2, r"what it sends to rank [01] was changed before it was waited for"),
    (destination_is_written, 2, r"where it receives from rank [01] was written before it was waited for"),
    (
        destination_is_taken_twice,
        2,
        r"exchange 1 .* takes memory that rank [01]: exchange 0 .* receives from rank [01]",
    ),
    (destination_is_read, 2, r"aten.sum.* reads where rank [01]: exchange 0 .* receives from rank [01], before"),
    (sent_is_written, 2, r"aten.add_.* writes what rank [01]: exchange 0 .* sends to rank [01], before that"),
    (never_waited_for, 2, r"exchange 0 \(tag 7\) of 'links': never waited for"),
    (blocked_host, 2, r"exchange 0 .* of '(one|two)' waits for rank [01] to"),
    (connecting_host, 2, r"of '(one|two)' connects a new pair: the host waits for rank [01] for 1.5 s"),
    (some_of_its_ranks, 3, r"is the first of 'links', which is made at its first use: the host waits for rank 2 for"),
    (queued_host, 2, r"of '(one|two)' waits for rank [01] to"),
    (collectives_in_another_order, 2, r"different collectives: rank 0: all_reduce of 3 .*; rank 1: all_reduce of 4"),
    (parts_of_other_sizes, 2, r"different sizes: rank 0 sends 2 elements to rank 1, which expects 3"),
    (nobody_else_gathers, 2, r"rank 0: collective 0 \(all_gather of 3 .*\) of ranks \[0, 1\] waits for the other"),
    (gathered_is_read, 2, r"aten.sum.* reads where rank [01]: collective 0 .* receives, before that is waited for"),
    (gathered_in_place_is_written, 2, r"collective 0 .*: (what it sends was changed|where it receives was written)"),
    (mark_is_not_waited_for, 1, r"aten.sum.* reads what aten.add_.* writes in the lane, and nobody has waited"),
    (what_a_lane_reads_is_written, 1, r"aten.add_.* writes what aten.sum.* reads in the lane, and nobody has"),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("body", "num_ranks", "message"), BREAKS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_break_of_a_rule_is_named(body: Callable[[int], None], num_ranks: int, message: str) -> None:
    with pytest.raises(StrictError, match=message):
        run_ranks(body, num_ranks)


def test_what_only_some_rules_forbid_passes_without_them() -> None:
    def body(rank: int) -> None:
        two_communicators(rank, Rules())
        some_of_them_after_a_collective(rank)
        transport = communicator()
        if rank < 2:
            swap(transport, rank)

    run_ranks(body, 2)


# --- Mutants of our own code that plain gloo runs to the end: the strict transport names each of them.
def step(rank: int, transport: Transport) -> None:
    """A step of the stack of `test_push`, with pulls and pushes on one communicator."""
    with mock.patch.object(test_push, "TorchTransport", return_value=transport):
        test_push.one_step(rank)


def pushes_in_the_order_they_are_ready(rank: int, transport: Transport) -> None:
    """A rank without a backward starts with the first bucket, the others with the last."""

    def issue_ready(self: Pushes, *, ending: bool = False) -> None:
        started = self.__dict__.setdefault("started", set())
        for index, bucket in enumerate(self.buckets):
            if not self._unready[index] and index not in started:
                started.add(index)
                self._handles.append(bucket.link.push(bucket.grads, bucket.masters, tag=self.first_tag + index))

    with mock.patch.object(Pushes, "_issue_ready", issue_ready):
        step(rank, transport)


def a_pull_that_is_not_waited_for(rank: int, transport: Transport) -> None:
    """Neither before the use of its parameters nor at the end."""

    def finish(self: Pulls) -> None:
        for bucket, handle in self._handles.items():
            if bucket != 2:
                handle.wait()

    wait = Pulls.wait
    skips_one = mock.patch.object(Pulls, "wait", lambda self, bucket: bucket == 2 or wait(self, bucket))
    with skips_one, mock.patch.object(Pulls, "finish", finish):
        step(rank, transport)


def memory_that_is_used_again_too_early(rank: int, transport: Transport) -> None:
    """Each push takes the memory of the one before, without waiting for its end."""

    def all_at_once(sizes: tuple[int, ...], room: int) -> tuple[Window, ...]:
        return tuple(Window(0, size, 0) for size in sizes)

    with mock.patch.object(pushes, "in_turn", all_at_once):
        step(rank, transport)


MUTANTS = [
    (pushes_in_the_order_they_are_ready, r"exchange 4 .* meets another one: tag 1\d with .* here, tag 1\d with"),
    (a_pull_that_is_not_waited_for, r"reads where rank \d: exchange 2 \(tag 2\) of 'links' receives from"),
    (memory_that_is_used_again_too_early, r"(writes what|takes memory that) rank \d: exchange 4 \(tag 13\)"),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("mutant", "message"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_mutant_is_named(mutant: Callable[[int, Transport], None], message: str) -> None:
    def body(rank: int) -> None:
        transport = communicator()
        with StrictMemory([transport]):
            mutant(rank, transport)
        transport.close()

    with pytest.raises(StrictError, match=message):
        run_ranks(body, 4)


RULES = {"connect": Rules(connect=True), "lazy": Rules(lazy=True), "blocking": Rules(blocking=True)}


@pytest.mark.drawn
@pytest.mark.parametrize("rule", RULES)
def test_pushes_that_wait_for_memory_pass(rule: str) -> None:
    """With room for one push, whatever the transport's rules, and with the bits of all of them at once."""

    def body(rank: int) -> bool:
        sums = []
        for room in (None, 1):
            transport = communicator(rules=RULES[rule])
            made = mock.patch.object(test_push, "TorchTransport", return_value=transport)
            with StrictMemory([transport]), made:
                sums.append(test_push.one_step(rank, room)[2])
            transport.close()
        return all(torch.equal(*both) for both in zip(*sums, strict=True))

    assert run_ranks(body, 4) == [True] * 4


def test_plain_gloo_sees_no_mutant_and_a_strict_step_passes() -> None:
    def body(rank: int) -> None:
        for mutant, _ in MUTANTS:
            mutant(rank, TorchTransport())
            dist.barrier()
        transport = communicator(rules=Rules(connect=True, lazy=True))
        with StrictMemory([transport]):
            step(rank, transport)
        transport.close()

    run_ranks(body, 4)
