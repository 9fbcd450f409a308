"""Mutants of our own code that plain gloo runs to the end: the strict transport names each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_hydra.zero_hetero.layout import even_layout
from ds_hydra.zero_hetero.link import Handle, Link
from ds_hydra.zero_hetero.pulls import Pulls
from ds_hydra.zero_hetero.pushes import Pushes
from ds_hydra.zero_hetero.transfer_plan import plan_transfer
from ds_hydra.zero_hetero.transport import TorchTransport, Transport
from tests.gloo import test_link, test_push
from tests.gloo.test_strict import communicator
from tests.support.ranks import run_ranks
from tests.support.strict import Rules, StrictError, StrictMemory


def step(rank: int, transport: Transport) -> None:
    """A step of the stack of `test_push`, with pulls and pushes on one communicator."""
    with mock.patch.object(test_push, "TorchTransport", return_value=transport):
        test_push.one_step(rank)


def pushes_in_the_order_they_are_ready(rank: int, transport: Transport) -> None:
    """A rank without a backward starts with the first bucket, the others with the last."""

    def issue_ready(self: Pushes) -> None:
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


def a_buffer_that_is_used_again_too_early(rank: int, transport: Transport) -> None:
    """What a message is packed into, or received into, is lent again while the message is on its way."""

    def give_back_at_once(self: Link, *args: Any, **options: Any) -> Handle:
        handle = push(self, *args, **options)
        handle._finished()
        return handle

    push = Link.push
    layout = test_link.heterogeneous(4)
    plan = plan_transfer(even_layout(layout.numel, 4), layout).transposed()
    source = test_link.local_values(layout, rank, torch.ones(layout.numel), 0)
    with mock.patch.object(Link, "push", give_back_at_once):
        link = Link(plan, rank, transport)
        sums = [torch.empty(even_layout(layout.numel, 4).sizes[rank]) for _ in range(3)]
        handles = [link.push(source * index, total, tag=index) for index, total in enumerate(sums)]
        for handle in handles:
            handle.wait()


MUTANTS = [
    (pushes_in_the_order_they_are_ready, r"exchange 4 .* meets another one: tag 1\d with .* here, tag 1\d with"),
    (a_pull_that_is_not_waited_for, r"reads where rank \d: exchange 2 \(tag 2\) of 'links' receives, before that"),
    (a_buffer_that_is_used_again_too_early, r"(writes what|takes memory that) rank \d: exchange 0 \(tag 0\)"),
]


@pytest.mark.parametrize(("mutant", "message"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_mutant_is_named(mutant: Callable[[int, Transport], None], message: str) -> None:
    def body(rank: int) -> None:
        transport = communicator()
        with StrictMemory([transport]):
            mutant(rank, transport)
        transport.close()

    with pytest.raises(StrictError, match=message):
        run_ranks(body, 4)


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
