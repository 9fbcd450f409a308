"""A process group of any size in one process: collectives move nothing, but are counted with their bytes.

It lets one rank compute its true share of a stage [Note: how an entry is made].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ds_hydra.profiling.links import Collective
from ds_hydra.zero_hetero.clock import Clock, Laps, Stopwatch


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class StoodIn(NamedTuple):
    """What was asked of a group, and the copies that it made for that."""

    calls: tuple[Collective, ...]
    laps: Laps

    @property
    def seconds(self) -> float:
        """What standing in took; the device must have done all that was started."""
        return sum(spent.whole_s for spent in self.laps.spent().values())


class LocalGroup(dist.ProcessGroup):
    """Stands in for a group of `num_ranks`; `take` tells what was asked of it, and what standing in took.

    `clock` is the one of whoever takes these seconds off a time. Wall time off CPU time could leave less than nothing
    on a machine that others use too, and the host's time off a device's would take off the launch of a copy only.

    What would have been received is filled with this rank's own values: memory that nobody wrote may hold
    numbers that are slow to compute with.
    """

    def __init__(self, rank: int, num_ranks: int, clock: Clock) -> None:
        super().__init__(rank, num_ranks)  # type: ignore[call-arg]
        self.num_ranks = num_ranks
        self._watch = Stopwatch(clock)
        self._calls: list[Collective] = []

    def take(self) -> StoodIn:
        """All since it was last taken."""
        calls, self._calls = tuple(self._calls), []
        return StoodIn(calls, self._watch.take())

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        for tensor in tensors:
            self._calls.append(Collective("all_reduce", self.num_ranks, tensor.nbytes))
        return _Done()

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Done:
        # The copies below stand in for what the network would have brought: their time is not the stage's own.
        with self._watch.lap("receive"):
            for parts, mine in zip(outputs, inputs, strict=True):
                self._calls.append(Collective("all_gather", self.num_ranks, mine.nbytes * self.num_ranks))
                for part in parts:
                    part.copy_(mine)
        return _Done()

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Done:
        self._calls.append(Collective("all_gather", self.num_ranks, output.nbytes))
        with self._watch.lap("receive"):
            output.view(self.num_ranks, -1).copy_(source.view(1, -1))
        return _Done()

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Done:
        # In a ring each rank passes as many parts on as in a gather; no figure of its own is measured.
        self._calls.append(Collective("all_gather", self.num_ranks, source.nbytes))
        with self._watch.lap("receive"):
            output.copy_(source[: output.numel()])
        return _Done()

    # What torch before 2.13 calls them.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # type: ignore[assignment]

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> _Done:
        self._calls.append(Collective("all_to_all", self.num_ranks, max(output.nbytes, source.nbytes)))
        # Uneven all-to-alls receive more or less than they send: what there is no value for is filled with ones.
        shared = min(output.numel(), source.numel())
        with self._watch.lap("receive"):
            output[:shared].copy_(source[:shared])
            output[shared:].fill_(1.0)
        return _Done()
