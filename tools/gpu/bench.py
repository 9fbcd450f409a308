"""What every part of the GPU benchmark is given, how it times a call, and what it returns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Table(NamedTuple):
    """Columns for a reader; cells are text or numbers."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class Findings:
    """What one part has found; `figures` is plain JSON, `missed` holds a sentence for every aim that was missed."""

    summary: str
    tables: tuple[Table, ...]
    figures: dict[str, Any]
    missed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bench:
    """What a part is given.

    With `full` it measures shapes of real models on a GPU. Otherwise its shapes are tiny: then it shows that it runs,
    on any device, and its times mean nothing, so that no aim of speed is missed by them.
    """

    device: torch.device
    full: bool
    seconds: float  # that the part may take
    folder: Path  # of this run; a part finds in it what earlier parts have left
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that the part still has."""
        return self.seconds - (time.monotonic() - self.began)

    def pick(self, full: T, tiny: T) -> T:
        """One of two values: for real shapes, and for tiny ones."""
        return full if self.full else tiny

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give cached memory back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        """Begin to look for the memory's peak anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Most bytes of tensors at one time since `forget_peak`, by torch's allocator; None on a CPU without one."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def median_ms(self, call: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> float:
        """Median milliseconds of a call: on a GPU between two events of its stream, on a CPU of wall time."""
        for _ in range(warm_up):
            call()
        self.synchronize()
        if self.device.type != "cuda":
            return statistics.median(_wall_ms(call) for _ in range(repeats))
        # No wait between the calls: the host queues them ahead, as training does. A call that is bound by its launches
        # keeps the stream waiting for the host, and the events show that too.
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for before, after in events:
            before.record()
            call()
            after.record()
        self.synchronize()
        return statistics.median(before.elapsed_time(after) for before, after in events)


def _wall_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def device_name(device: torch.device) -> str:
    """The device's model for a reader."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def median_and_p90(values: Sequence[float]) -> tuple[float, float]:
    """Median and 90th percentile."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def gib(num_bytes: float | None) -> str:
    """GiB for a table; a dash where it is not known."""
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.2f}"
