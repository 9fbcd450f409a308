"""Tensors of a device that wait in the host's memory until their backward: put there while the layer computes, and
fetched one layer ahead.

[Note: fetched layers]
A layer that is computed again keeps its input from forward to backward. Over all layers these inputs are the largest
thing that grows with the tokens: 8 KiB a token and layer of an 8B model, 262 KB in all. A host has many times a
device's memory, and a copy is done long before the layer is: at 50 GB/s the 8 KiB take 0.16 us, and a layer's forward
some 0.7 us a token. So each input is copied while its layer runs forward, and comes back while the layer above runs
backward:

  compute   F0       F1       F2       F3        B3       B2       B1       B0
  copies    0 down   1 down   2 down   3 down    3 up,2 up  1 up   0 up

Two inputs are on the device meanwhile: one that is used, and one that comes or goes. Copies have a queue of their own,
beside the one that computes, and memory of the host that a device reads by itself, which is used again. Where a device
is the host itself, as in tests, the same copies are made at once.

What a stage receives from another one stays on the device: the gradient that goes back is that of this very tensor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hydra.zero_hetero.transport import DeviceLane, HostLane, Lane

_LEAVING = 4  # rows on their way to the host whose memory is held meanwhile


class HostStore:
    """The host's memory of one stage, and the queue of its copies."""

    def __init__(self, device: torch.device):
        self._device, self._pinned = device, device.type == "cuda"
        self._lane: Lane = DeviceLane(device) if self._pinned else HostLane()
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self._last: Waiting | None = None
        self.held = self.most = 0  # bytes on the host: now, and the most at one time

    def empty(self) -> None:
        """Give back memory of the host that is free, and count anew."""
        self._free.clear()
        self.held = self.most = 0

    def begin(self) -> None:
        """A forward begins: what it puts here is fetched in the reverse order."""
        self._last = None

    def put(self, tensor: Tensor) -> Waiting:
        """Copy a tensor to the host; what the layer before has put is there by now."""
        self.settle()
        host = self.memory(tensor.shape, tensor.dtype)
        self.down(tensor.detach(), host)
        self._last = Waiting(self, host, self._last)
        return self._last

    def settle(self) -> None:
        """Give the memory of what has left back, when it has."""
        while self._leaving:
            self._lane.wait(self._leaving.popleft()[0])

    def down(self, tensor: Tensor, host: Tensor) -> None:
        """Begin to copy a tensor to memory of the host; its own is held until that is done."""
        while len(self._leaving) >= _LEAVING:  # only then is it given to others
            self._lane.wait(self._leaving.popleft()[0])
        with self._lane.aside():
            host.copy_(tensor, non_blocking=True)
            self._leaving.append((self._lane.mark(), tensor))

    def up(self, host: Tensor) -> Coming:
        """Begin to copy from memory of the host."""
        there = torch.empty_like(host, device=self._device)  # of the queue that computes, which takes it over
        with self._lane.aside():
            there.copy_(host, non_blocking=True)
            return Coming(self._lane, self._lane.mark(), there)

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Of the host, of any values."""
        size = math.prod(shape)
        self.held += size * dtype.itemsize
        self.most = max(self.most, self.held)
        if free := self._free.get((size, dtype)):
            return free.pop().view(shape)
        return torch.empty(shape, dtype=dtype, pin_memory=self._pinned)

    def give_back(self, host: Tensor) -> None:
        """Memory that nothing needs any more but copies that have begun."""
        self.held -= host.nbytes
        self._free.setdefault((host.numel(), host.dtype), []).append(host)


class Coming(NamedTuple):
    """A tensor on its way to the device."""

    lane: Lane
    mark: Any
    tensor: Tensor

    def take(self) -> Tensor:
        """The tensor; what is computed from now on waits for it."""
        self.lane.wait(self.mark)
        return self.tensor


class Waiting:
    """A tensor that waits on the host, to be taken once."""

    def __init__(self, store: HostStore, host: Tensor, before: Waiting | None):
        self._store, self._host, self._before = store, host, before
        self._coming: Coming | None = None

    def fetch(self) -> Coming:
        """Begin to copy it back, if that has not begun."""
        if self._coming is None:
            self._coming = self._store.up(self._host)
        return self._coming

    def take(self) -> Tensor:
        """The tensor on the device, and begin to fetch the one that was put before it."""
        self._store.settle()
        there = self.fetch().take()
        self._store.give_back(self._host)
        before, self._before, self._coming = self._before, None, None
        if before is not None:
            before.fetch()
        return there


class HostRows:
    """Rows of a sequence's tokens on the host; those before a slice come back while the layer before computes."""

    def __init__(self, store: HostStore):
        self._store, self._host = store, list[Tensor]()
        self._ahead: tuple[int, list[Coming]] = (0, [])
        self.end = 0  # of what was kept last

    def fetch(self, stop: int) -> None:
        """Begin to bring the rows before `stop`."""
        if stop and self._ahead[0] != stop:
            self._ahead = stop, [self._store.up(rows[:stop]) for rows in self._host]

    def take(self, stop: int) -> list[Tensor]:
        """The rows before `stop`."""
        self.fetch(stop)
        (_, coming), self._ahead = self._ahead, (0, [])
        return [one.take() for one in coming]

    def keep(self, rows: Sequence[Tensor], start: int, total: int) -> None:
        """Keep rows from `start` on, of `total` in all."""
        if not self._host:
            self._host = [self._store.memory((total, *x.shape[1:]), x.dtype) for x in rows]
        self.end = start + len(rows[0])
        for x, host in zip(rows, self._host, strict=True):
            self._store.down(x, host[start : self.end])

    def free(self) -> None:
        """Give all memory back."""
        for host in self._host:
            self._store.give_back(host)
        self._host, self._ahead = [], (0, [])
