"""Work that may need more memory than a device has in; its result out, or the same None on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def within_memory(work: Callable[[], T], control: dist.ProcessGroup | None = None) -> T | None:
    """The result of `work`, or None on all ranks where one of them has run out of device memory.

    `control` takes tensors on the CPU; None is the default group, or a rank alone. `work` must not communicate: a rank
    that fails in it would leave the others waiting.
    """
    try:
        result = work()
    except torch.OutOfMemoryError:
        result = None
    missing = torch.tensor([result is None], dtype=torch.int32)
    if dist.is_initialized():
        dist.all_reduce(missing, op=dist.ReduceOp.MAX, group=control)
    if missing.item():
        free_unused()
        return None
    return result


def free_unused() -> None:
    """Give back to the device what the allocator keeps for later, in pieces that may fit nothing else."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
