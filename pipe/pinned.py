"""Small tensors of the host in; the same on the device, copied while the host goes on, out."""

from __future__ import annotations

import torch
from torch import Tensor


def readable(host: Tensor, device: torch.device) -> Tensor:
    """In memory that cannot be paged out, from which a device copies by itself: for a copy from other memory the host
    would have to wait."""
    return host.pin_memory() if device.type == "cuda" else host


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, for which nothing waits."""
    return readable(host, device).to(device, non_blocking=True)
