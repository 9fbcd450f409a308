"""Mutants of our own code that plain gloo runs to the end: the strict transport names each of them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero import pushes
from ds_hydra.zero_hetero.pushes import Pulls, Pushes
from ds_hydra.zero_hetero.scratch_plan import Window
from ds_hydra.zero_hetero.transport import TorchTransport, Transport
from tests.gloo import test_push
from tests.gloo.test_strict import communicator
from tests.support.strict import Rules, StrictError, StrictMemory


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
    (
        a_pull_that_is_not_waited_for,
        r"reads where rank \d: exchange 2 \(tag 2\) of 'links' receives from",
    ),
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
