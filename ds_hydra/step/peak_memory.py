"""A device in; the most memory that torch's allocator has held on it since the last restart out."""

from __future__ import annotations

import torch


class PeakMemory:
    """The peak of one step at a time; on a CPU nobody counts, and it is 0."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def restart(self) -> None:
        """Count anew from what is held now."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> int:
        """Bytes."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
