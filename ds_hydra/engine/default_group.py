"""Torch's default process group, made anew for the ranks of a view."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ds_hydra.elastic.view import View

_ASK_S, _AGAIN_S = 1.0, 0.1  # for which a store that does not answer is asked at once, and after which again
BACKENDS = ("gloo", "nccl")  # of hosts, of devices: those whose waits can be ended


def make_default_group(view: View, rank: int, timeout_s: float, over: Callable[[], bool], device: torch.device) -> None:
    """Torch's, of the ranks of a view, each with its device; every one of them must call it. It gives up if the view is
    `over` meanwhile."""
    hook, timeout = sys.excepthook, timedelta(seconds=timeout_s)
    store = _store(view.store, timeout_s, over)
    # Torch names groups by this number, counts one that could not be made, and ranks find each other by the name.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        BACKENDS[device.type != "cpu"], store=dist.PrefixStore(f"epoch{view.epoch}", store), rank=rank,
        world_size=len(view.members), timeout=timeout, device_id=None if device.type == "cpu" else device,
    )  # fmt: skip
    sys.excepthook = hook  # torch puts one more around it each time, and takes none off
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(view.members)))
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # what the launcher said of nodes holds no more
        os.environ.pop(name, None)


def _store(address: tuple[str, int], timeout_s: float, over: Callable[[], bool]) -> dist.Store:
    """A connection to the store of a view, whose member may be gone."""
    # Torch asks again and again where nobody listens any more, and between that no socket is there that could be shut,
    # see [Note: freeing a thread]. So it is given little time at once, and only where somebody listens.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(address, timeout=_ASK_S).close()
            store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=_ASK_S))
        except (OSError, RuntimeError):
            if over() or time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_S)
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store
