"""Process groups by their ranks, each made once for all strategies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

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
