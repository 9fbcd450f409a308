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
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MARK, _MEMORY = "ds-hydra mark", "[memory]"
_SENT, _GONE = "ds-hydra-sent", "ds-hydra-gone"


class Allocations:
    """While entered it follows the memory of one device's tensors; afterwards it tells the bytes, more or less than at
    the beginning."""

    def __init__(self, device: torch.device, *, sends: bool = False):
        """`sends`: whether tensors are sent to other ranks meanwhile; it makes every operation slower."""
        self._device, self._sent = device, _Sent() if sends and device.type == "cpu" else nullcontext()
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
            self._sent.__enter__()
        return self

    def mark(self) -> None:
        """The next of `held` is what is held now."""
        gc.collect()
        if self._device.type == "cuda":
            self.held.append(torch.cuda.memory_allocated(self._device) - self._before)
        else:
            _note(_MARK)

    def __exit__(self, *error: Any) -> None:
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self._device) - self._before
            return
        self._sent.__exit__(*error)
        self._profile.__exit__(*error)
        now, given = 0, dict[int, _Block]()  # by address
        sent: dict[str, _Block | None] = {}
        events = _all(self._profile.kineto_results.experimental_event_tree(), False)
        for event, of_gloo in sorted(events, key=_begin):
            what, _, told = event.name.partition(" ")
            if event.name == _MEMORY:
                size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
                if size < 0 and address not in given:
                    now += size  # it was there before
                before = given.pop(address, None)
                now -= before.size if before else 0
                if size > 0:
                    given[address] = _Block(0 if of_gloo else size)
                    now += given[address].size
                self.peak = max(self.peak, now)
            elif event.name == _MARK:
                self.held.append(now)
            elif what == _SENT:
                sent[told] = given.get(int(told.split()[1]))
            elif what == _GONE and (block := sent.pop(told)) and given.get(address := int(told.split()[1])) is block:
                now -= given.pop(address).size


@dataclass(eq=False, slots=True)
class _Block:
    size: int


class _Sent(TorchDispatchMode):
    """Notes what is sent, and when it is gone, whichever thread was the last to let go of it."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count()
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}  # by address; and the number of the note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            for tensor in (one for one in tree_leaves(args) if isinstance(one, Tensor)):
                storage = tensor.untyped_storage()
                if (address := storage.data_ptr()) not in self._there:
                    self._there[address] = StorageWeakRef(storage), (number := next(self._numbers))
                    _note(f"{_SENT} {number} {address}")
        out = func(*args, **(kwargs or {}))
        for address, (kept, number) in list(self._there.items()):
            if kept.expired():
                del self._there[address]
                _note(f"{_GONE} {number} {address}")
        return out


def _note(text: str) -> None:
    with record_function(text):
        pass


def _begin(event: tuple[Any, bool]) -> int:
    return event[0].start_time_ns  # type: ignore[no-any-return]


def _all(events: Iterable[Any], within: bool) -> Iterator[tuple[Any, bool]]:
    """Events and those within them, and whether each is within a process group's operation."""
    for event in events:
        yield event, within
        yield from _all(event.children, within or event.name.startswith("c10d::"))
