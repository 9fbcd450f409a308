"""Work in; the bytes that its tensors hold at moments of it, and at most, out.

On a GPU the allocator tells. On a CPU torch's profiler does: it is told of all memory that is given and taken back,
inside of operators too, which the process's size does not show. It is told by the threads that it follows. A thread of
a process group is none of them, and may be the last that lets go of a tensor that was sent: nobody tells of that. So a
block counts until it is taken back, or its address is given out again.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

_MARK, _MEMORY = "ds-hydra mark", "[memory]"


class Allocations:
    """While entered it follows the memory of one device's tensors; afterwards it tells the bytes, more or less than at
    the beginning."""

    def __init__(self, device: torch.device):
        self._device = device
        self.held: list[int] = []  # at each mark
        self.peak = 0

    def __enter__(self) -> Allocations:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # torch's profiler would print that it starts
            self._profile: Any = profile(profile_memory=True)
            self._profile.__enter__()
        return self

    def mark(self) -> None:
        """The next of `held` is what is held now."""
        gc.collect()
        if self._device.type == "cuda":
            self.held.append(torch.cuda.memory_allocated(self._device) - self._before)
        else:
            with record_function(_MARK):
                pass

    def __exit__(self, *error: Any) -> None:
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self._device) - self._before
            return
        self._profile.__exit__(*error)
        now, given = 0, dict[int, int]()  # bytes by address
        for event in sorted(_all(self._profile.kineto_results.experimental_event_tree()), key=_begin):
            if event.name == _MEMORY:
                size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
                now -= given.pop(address, 0 if size > 0 else -size)
                if size > 0:
                    now, given[address] = now + size, size
                self.peak = max(self.peak, now)
            elif event.name == _MARK:
                self.held.append(now)


def _begin(event: Any) -> int:
    return event.start_time_ns  # type: ignore[no-any-return]


def _all(events: Iterable[Any]) -> Iterator[Any]:
    """Events and those within them."""
    for event in events:
        yield event
        yield from _all(event.children)
