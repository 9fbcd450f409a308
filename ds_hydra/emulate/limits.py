"""Ranks asked for and what the machine allows in; nothing, or a ConfigError that says why not, out. Pure: no torch."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple

from ds_hydra.ranks.host_memory import available_bytes, number_in
from ds_hydra.zero_hetero.errors import ConfigError

# What one rank takes, and some more for further strategies. With 4 strategies each of 8 ranks held 104 MiB that it
# shared with no other, each of 24 ranks 108 MiB; they had up to 19 threads.
RANK_BYTES = 128 << 20
RANK_TASKS = 48  # processes and threads
_COUNTLESS = 1 << 62
_FILES_BESIDE, _FILES_PER_PEER = 64, 6  # a rank holds a connection to every peer in each of its groups


class Limits(NamedTuple):
    """What is left for the ranks of an emulated cluster, and open files that one process may have."""

    memory_bytes: int
    tasks: int
    files: int


def machine_limits() -> Limits:
    """What this machine, this user and this container allow at present."""
    soft_tasks, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    soft_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks = [_COUNTLESS if soft_tasks == resource.RLIM_INFINITY else soft_tasks - _tasks_of_user()]
    most, used = (number_in(f"/sys/fs/cgroup/pids.{name}") for name in ("max", "current"))
    tasks += [most - (used or 0)] if most is not None else []
    files = _COUNTLESS if soft_files == resource.RLIM_INFINITY else soft_files
    return Limits(available_bytes(), min(tasks), files)


def check_ranks(num_ranks: int, limits: Limits) -> None:
    """Raise ConfigError for a number of ranks below 1, or more than can be forked."""
    if num_ranks < 1:
        raise ConfigError(f"an emulated cluster of {num_ranks} ranks; give at least 1")
    per_rank = {
        "bytes of memory": (RANK_BYTES, limits.memory_bytes),
        "processes and threads": (RANK_TASKS, limits.tasks),
    }
    for what, (each, left) in per_rank.items():
        if num_ranks * each > left:
            raise ConfigError(
                f"an emulated cluster of {num_ranks} ranks needs about {num_ranks * each:,} {what} but there are "
                f"{left:,} left: at most {max(0, left // each)} ranks can be forked. Emulate fewer, or free some"
            )
    files = _FILES_BESIDE + _FILES_PER_PEER * num_ranks
    if files > limits.files:
        raise ConfigError(
            f"an emulated cluster of {num_ranks} ranks needs about {files:,} open files in each rank but a process may "
            f"have {limits.files:,}: raise the limit (ulimit -n) or emulate fewer"
        )


def _tasks_of_user() -> int:
    """Threads of this user's processes, which RLIMIT_NPROC counts."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.getuid():
                count += len(os.listdir(folder / "task"))
        except OSError:
            continue  # it has ended meanwhile
    return count
