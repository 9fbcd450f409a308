"""Bytes that tensors hold at moments of some work, and at most."""

from __future__ import annotations

from threading import Thread

import torch

from ds_hydra.profiling.allocations import Allocations

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
