"""Bytes that tensors hold at moments of some work, and at most."""

from __future__ import annotations

from threading import Thread
from time import sleep

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ds_hydra.pipe.row_collectives import start_sum
from ds_hydra.profiling.allocations import Allocations
from ds_hydra.testing import run_ranks

SIZE = 1 << 18


def block() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8)


def test_what_is_held_and_at_most() -> None:
    with Allocations(torch.device("cpu")) as found:
        first, second = block(), block()
        found.mark()
        del first, second
        found.mark()
    assert found.held == [2 * SIZE, 0]
    assert found.peak == 2 * SIZE


def test_what_another_thread_frees_does_not_count_for_ever() -> None:
    # Threads of process groups let go of what was sent, and the profiler does not follow them.
    with Allocations(torch.device("cpu")) as found:
        for _ in range(100):
            held = [block()]
            thread = Thread(target=held.clear)
            thread.start()
            thread.join()
    assert SIZE <= found.peak <= 20 * SIZE


def test_what_was_sent_is_gone_with_the_last_thread_that_lets_go_of_it_and_gloos_copies_do_not_count() -> None:
    def run(rank: int) -> tuple[list[int], int]:
        with Allocations(torch.device("cpu"), sends=True) as found:
            held = [block()]
            dist.broadcast(held[0], src=0)
            there = StorageWeakRef(held[0].untyped_storage())
            thread = Thread(target=held.clear)
            thread.start()
            thread.join()
            while not there.expired():  # gloo's thread may still have the operation that is over
                sleep(0.001)
            torch.empty(0)  # any operation
            found.mark()
            sent = block()[:, None]
            came = start_sum(sent, dist.group.WORLD).wait()
            assert torch.equal(came, sent)
        return found.held, found.peak

    assert run_ranks(run, 1) == [([0], 2 * SIZE)]
