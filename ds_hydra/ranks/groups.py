"""Process groups by rank tuple: made once, in the same order on every rank, and handed to who needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
    """Groups cost threads and file descriptors each, so equal rank tuples share one for the world's life.

    `make` makes the group of some of the world's ranks.
    """

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

    def __len__(self) -> int:
        return len(self._groups)
