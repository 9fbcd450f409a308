"""Process groups by their ranks, each made once for all strategies; what they take of a device, and how they are ended.

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

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_hydra.pipe.placement import Strategy

CONNECTING = "connecting"  # how names of an activity begin in which ranks only meet
_LAZY = "TORCH_GLOO_LAZY_INIT"

# Bytes of buffers of communicators and pairs, which connect when the candidates are known: 6 to 13 of the ones and 42
# to 128 of the others, with 4 to 10 MiB for a channel and peer.
ROOM_FOR_COMMUNICATORS = 3 << 30

Ranks = tuple[int, ...]


@contextmanager
def pairs_connect_when_used() -> Iterator[None]:
    """gloo groups made within this connect a pair of ranks by its first message, and not all pairs at start."""
    # torch has no argument for it. 1024 ranks whose pairs all connect have 1023 sockets each for every group, as many
    # as a process may have open on many systems.
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LAZY]
        else:
            os.environ[_LAZY] = before


@contextmanager
def side_groups() -> Iterator[None]:
    """Groups made within it by some ranks alone, or with processes of others, wait for no other rank.

    torch makes a group by splitting the default group where that is bound to its device, which is a call of all its
    ranks: one that rank 0 makes with the processes of an inference engine would wait for ever.
    """
    everyone = dist.group.WORLD if dist.is_initialized() else None
    device = None if everyone is None else everyone.bound_device_id
    if everyone is None or device is None:
        yield
        return
    everyone.bound_device_id = None
    try:
        yield
    finally:
        everyone.bound_device_id = device


def wait_at_most(timeout: timedelta, groups: Iterable[dist.ProcessGroup]) -> None:
    """How long a rank waits for others in one collective of these groups from now on, whoever made them."""
    for group in dict.fromkeys(groups):
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def needed_groups(strategy: Strategy) -> Iterable[Ranks]:
    """Rank tuples of the tensor and sequence parallel groups of a strategy; groups of one need none."""
    for pipeline in strategy.pipelines:
        for stage in pipeline.stages:
            if stage.tp > 1:
                for sp_rank in range(stage.sp):
                    yield stage.tp_ranks(stage.ranks[sp_rank * stage.tp])
            if stage.sp > 1:
                for tp_rank in range(stage.tp):
                    yield stage.sp_ranks(stage.ranks[tp_rank])


def apart(groups: Iterable[Ranks]) -> list[tuple[Ranks, ...]]:
    """The groups in few sets, in each of which all have one width and no rank in common, so that one call makes them.

    (0 1) (2 3) (1 2) (0 1 2 3) come in three sets: (0 1) (2 3), then (1 2), then (0 1 2 3).
    """
    sets: list[list[Ranks]] = []
    taken: list[set[int]] = []
    for ranks in groups:
        fitting = (i for i, one in enumerate(sets) if len(one[0]) == len(ranks) and taken[i].isdisjoint(ranks))
        at = next(fitting, len(sets))
        if at == len(sets):
            sets.append([])
            taken.append(set())
        sets[at].append(ranks)
        taken[at].update(ranks)
    return [tuple(one) for one in sets]


def make_groups(
    everyone: dist.ProcessGroup, groups: Sequence[Ranks], timeout: timedelta | None = None, options: Any = None
) -> dist.ProcessGroup | None:
    """Make groups that have no rank in common, out of all ranks, and return the one that this rank got.

    Where the backend can split a group (NCCL, on a device that it knows), one call makes all of them. Elsewhere every
    rank makes each of them, and gets None if it is in no one. Every rank must call it, with the same groups and options
    of their backend.
    """
    rank = dist.get_rank(everyone)
    if not _can_be_split(everyone):
        found = [(ranks, dist.new_group(list(ranks), timeout, pg_options=options)) for ranks in groups]
        return next((group for ranks, group in found if rank in ranks), None)
    # Who is in none of them gets a group of its own: torch names a group by how many its ranks have made, and all of
    # them must have made equally many.
    others = set(range(dist.get_world_size(everyone))).difference(*groups)
    parts = [list(ranks) for ranks in groups] + [[other] for other in sorted(others)]
    return dist.split_group(everyone, parts, timeout, options)


def _can_be_split(everyone: dist.ProcessGroup) -> bool:
    # torch (2.11 and later ones) reads past the end of an empty list where the group that is split is not the first one
    # of NCCL in this process, as when a script starts torch.distributed twice, or after a loss (pytorch PR 192109).
    device = everyone.bound_device_id
    backend: Any = None if device is None else everyone._get_backend(device)
    return backend is not None and backend.uid == 0


class GroupCache:
    """Process groups by their ranks, kept for the life of the world.

    `make` makes groups that have no rank in common, and returns what this rank got.
    """

    # A process group costs threads and file descriptors, on GPUs a communicator with buffers too. The strategies
    # "2*tp2" and "tp2 + 2*tp1" both need the group (0, 1); it is made for the first of them and used by both.
    # torch demands that all ranks make a group, in the same order, also those outside it. The order follows from the
    # strategy, which is equal on all ranks.

    def __init__(self, rank: int, make: Callable[[Sequence[Ranks]], dist.ProcessGroup | None]):
        self._rank, self._make = rank, make
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {}
        self.calls = 0  # of `make`: each is one meeting of all ranks where the backend can split a group

    def create(self, needed: Iterable[Ranks]) -> None:
        """Make those groups that do not exist yet. Every rank of the world must call it, with the same groups."""
        for together in apart(ranks for ranks in dict.fromkeys(needed) if ranks not in self._groups):
            own = self._make(together)
            self._groups |= {ranks: own if self._rank in ranks else None for ranks in together}
            self.calls += 1

    def get(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """The group of exactly these ranks, this one among them; None for a single rank."""
        return self.of_team(ranks) if len(ranks) > 1 else None

    def of_team(self, ranks: Ranks) -> dist.ProcessGroup:
        """The group of these ranks, which are several."""
        group = self._groups[ranks]
        assert group is not None, f"rank {self._rank} is not in {ranks}"
        return group

    def __iter__(self) -> Iterator[dist.ProcessGroup]:
        """Those that this rank is in, in the order in which they were made."""
        return (group for group in self._groups.values() if group is not None)

    def __len__(self) -> int:
        return len(self._groups)


# A message keeps its multiprocessors, of which a GPU has about a hundred, until the slowest peer has done its part. Two
# to four of them fill a link of 25 to 50 GB/s between nodes; eight leave room for links inside a node.
MOST_CTAS = 8


def nccl_options(*, background: bool = False, urgent: bool = False) -> Any:
    """Options for `new_group`; None, which takes torch's own, where this torch has no NCCL.

    `background`: what computing goes on beside takes few multiprocessors. `urgent`: what computing waits for comes
    before other work that stands in the device's queues.
    """
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        return None
    options = nccl.Options(is_high_priority_stream=urgent)
    if background:
        options.config.max_ctas = MOST_CTAS
    return options


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
