"""Sockets of a rank while a job of 12 starts as on devices, counted in its process.

The default group, which is NCCL's on devices, is gloo's here, and what it has open before the start is left out.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from ds_hydra.ranks.together import first_channel
from ds_hydra.testing import run_ranks
from tools import aims
from tools.devices.table import Table

RANKS = 12
MOMENTS = ("the first channel is there", "all have told a text over it", "it is closed")


def sockets(quick: bool) -> Table:
    """The busiest rank's sockets at each moment of a start."""
    found = run_ranks(sockets_of_start, RANKS, timeout=120)
    table = Table(f"sockets of a start on {RANKS} ranks: the busiest rank, default group left out",
                  ["moment", "sockets", "aim"])  # fmt: skip
    for index, moment in enumerate(MOMENTS):
        most = max(counts[index] for counts in found)
        table.rows.append([moment, most, aims.SOCKETS])
        if most > aims.SOCKETS:
            table.missed.append(f"{moment}: {most} sockets (aim {aims.SOCKETS})")
    return table


def sockets_of_start(rank: int) -> list[int]:
    """This rank's sockets at each of MOMENTS."""
    before, counts = open_sockets(), []

    def note() -> None:
        counts.append(open_sockets() - before)
        dist.barrier()  # or another rank, a step ahead, would be among this one's connections

    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        with first_channel() as channel:
            note()
            channel.texts("a host's name")
            note()
        note()
    return counts


def open_sockets() -> int:
    """Sockets of this process."""
    found = 0
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += os.readlink(handle).startswith("socket:")
    return found
