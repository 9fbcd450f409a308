"""Copies small tensors between host and device without making the host wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def readable(host: Tensor, device: torch.device) -> Tensor:
    """In memory that cannot be paged out, from which a device copies by itself: for a copy from other memory the host
    would have to wait."""
    return host.pin_memory() if device.type == "cuda" else host


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, for which nothing waits."""
    return readable(host, device).to(device, non_blocking=True)


def readable_soon(numbers: Tensor) -> Callable[[], list[int]]:
    """Numbers of a device, copied to the host from now on; what reads them waits for that copy and nothing later."""
    host = numbers.to("cpu", non_blocking=True)  # to memory that a device writes by itself, as torch makes it
    copied = torch.cuda.Event() if numbers.device.type == "cuda" else None
    if copied is not None:
        copied.record()

    def read() -> list[int]:
        if copied is not None:
            copied.synchronize()
        return host.tolist()  # type: ignore[no-any-return]

    return read
