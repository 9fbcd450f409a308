"""Ends NCCL's communicators when a rank is gone, and says whether what has come through them can be believed.

[Note: aborting]
On a device a wait is a kernel that looks for the other end's data until it comes, and the host waits for the kernel. A
communicator that is aborted lets its kernels end, and the host goes on as if all had come: nothing raises, and what is
in the buffers may be anything. Nor does it end alone. A kernel that gives up tells its peer that data is there, so that
a rank which does not know of the fault yet may go on with nonsense, and send it further.

  all at once   of all communicators, each in a thread of its own: ending one waits for all kernels of the device, also
                for those of a communicator that has not been told yet
  first         before a rank lets go of anything: freeing memory of the device waits for its kernels, too
  believed      is what a rank has that passes `check` when the host has waited for the device: when all that was under
                way ended, no abort of its own had begun. What a peer's abort has spoiled is told by a message of all to
                all over the host, as the vote is: who has aborted does not send it, and all begin anew
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist


def nccl_backends() -> list[Any]:
    """Those of all process groups of this process."""
    kind, cuda = getattr(dist, "ProcessGroupNCCL", None), torch.device("cuda")
    groups = [group for group in list(dist.distributed_c10d._world.pg_map) if cuda in group._device_types]
    backends = [group._get_backend(cuda) for group in groups]
    return [backend for backend in backends if kind is not None and isinstance(backend, kind)]


class Aborting:
    """Of one process, from fault to fault. `backends` gives what is there to be aborted."""

    def __init__(self, backends: Callable[[], Iterable[Any]] = nccl_backends) -> None:
        self._backends, self._threads = backends, dict[Any, threading.Thread]()
        self._begun, self._lock = threading.Event(), threading.Lock()

    def abort(self, within: float | None = None) -> None:
        """Abort all for which that has not begun; it returns when all are aborted, whoever began it, or after so many
        seconds: where a communicator is being made by another thread, its abort waits for that."""
        deadline = None if within is None else time.monotonic() + within
        with self._lock:
            self._begun.set()  # before anything ends
            for backend in self._backends():
                if backend not in self._threads:
                    self._threads[backend] = threading.Thread(target=backend.abort, daemon=True, name="aborting")
                    self._threads[backend].start()
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def check(self) -> None:
        """RuntimeError if an abort has begun since `resume` [Note: aborting]."""
        if self._begun.is_set():
            raise RuntimeError("NCCL's communicators of this rank were aborted, since another rank is gone")

    def resume(self) -> None:
        """All groups are gone; those that are made from now on are others."""
        with self._lock:
            self._threads.clear()
            self._begun.clear()
