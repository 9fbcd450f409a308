"""The memory of this machine or container that processes can still take. Pure: no torch."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int:
    """Of the machine, or of the container where that has less left."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    held, most = (number_in(f"/sys/fs/cgroup/memory.{name}") for name in ("current", "max"))
    return available if most is None else min(available, most - (held or 0))


def number_in(path: str) -> int | None:
    """The number in a file; None where there is no such file, or it says "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
