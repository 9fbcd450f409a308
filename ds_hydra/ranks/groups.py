"""A strategy in; its tensor and sequence parallel process groups, each made once for all strategies, out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch.distributed as dist

from ds_hydra.pipe.placement import Strategy


def needed_groups(strategy: Strategy) -> Iterable[tuple[int, ...]]:
    """Rank tuples of the tensor and sequence parallel groups of a strategy; groups of one need none."""
    for pipeline in strategy.pipelines:
        for stage in pipeline.stages:
            if stage.tp > 1:
                for sp_rank in range(stage.sp):
                    yield stage.tp_ranks(stage.ranks[sp_rank * stage.tp])
            if stage.sp > 1:
                for tp_rank in range(stage.tp):
                    yield stage.sp_ranks(stage.ranks[tp_rank])


class GroupCache:
    """Process groups by their ranks, kept for the life of the world. `make` makes the group of some of its ranks."""

    # A process group costs threads and file descriptors, on GPUs a communicator with buffers too. The strategies
    # "2*tp2" and "tp2 + 2*tp1" both need the group (0, 1); it is made for the first of them and used by both.
    # torch demands that all ranks make a group, in the same order, also those outside it. The order follows from the
    # strategy, which is equal on all ranks.

    def __init__(self, make: Callable[[tuple[int, ...]], dist.ProcessGroup]):
        self._make = make
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def create(self, strategy: Strategy) -> None:
        """Make the groups of a strategy that do not exist yet. Every rank of the world must call it."""
        for ranks in needed_groups(strategy):
            if ranks not in self._groups:
                self._groups[ranks] = self._make(ranks)

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of exactly these ranks; None for a single rank."""
        return self._groups[ranks] if len(ranks) > 1 else None

    def __iter__(self) -> Iterator[dist.ProcessGroup]:
        """Those that this rank is in, in the order in which they were made."""
        outside = dist.GroupMember.NON_GROUP_MEMBER
        return (group for group in self._groups.values() if group is not outside)

    def __len__(self) -> int:
        return len(self._groups)
