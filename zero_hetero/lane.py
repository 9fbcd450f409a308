"""Begins the later steps of a transfer: on a stream of its own on a GPU, between computations on a CPU.

[Note: lanes] The second step of a transfer can begin when the first has arrived. On a GPU that is a matter of queues: a
stream of its own waits for the first step, does what has to be done between the two, and starts the second, while the
host has long gone on and the kernels of the model run in their own stream. So all steps are issued at once, in one
order on all ranks. Where a wait holds up the host (gloo), a later step is issued at a point of the program where every
rank has started all first steps; there a rank that waits keeps nobody from what it waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Lane(Protocol):
    """Where later steps are begun, and how computing waits for what is done there."""

    early: bool
    """Whether they are issued at once [Note: lanes]."""

    def aside(self) -> Any:
        """A context: what is started in it waits for all that was started before, but nothing waits for it."""

    def mark(self) -> Any:
        """Within `aside`: the moment at which all that was started in it is done."""

    def wait(self, mark: Any) -> None:
        """What is started from now on waits for a mark."""


class HostLane:
    """For devices that are done when a call returns."""

    def __init__(self, *, early: bool = False) -> None:
        self.early = early

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def mark(self) -> None:
        """All is done already."""

    def wait(self, mark: None) -> None:
        """All is done already."""


class DeviceLane:
    """A stream of its own on a CUDA device."""

    early = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)
