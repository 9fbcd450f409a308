"""One process that stands for many ranks: groups whose collectives move nothing, and work that may not fit.

is computed before each is waited for.

It lets one rank compute its true share of a stage [Note: how an entry is made].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.profiling.links import Collective, Counted
from ds_hydra.zero_hetero.clock import Clock, Moment

T = TypeVar("T")


def within_memory(work: Callable[[], T], control: dist.ProcessGroup | None = None) -> T | None:
    """The result of `work`, or None on all ranks where one of them has run out of device memory.

    `control` takes tensors on the CPU; None is the default group, or a rank alone. `work` must not communicate: a rank
    that fails in it would leave the others waiting.
    """
    try:
        result = work()
    except torch.OutOfMemoryError:
        result = None
    missing = torch.tensor([result is None], dtype=torch.int32)
    if dist.is_initialized():
        dist.all_reduce(missing, op=dist.ReduceOp.MAX, group=control)
    if missing.item():
        free_unused()
        return None
    return result


def free_unused() -> None:
    """Give back to the device what the allocator keeps for later, in pieces that may fit nothing else."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Done(dist.Work):
    """What was asked of a group: when its copies began, when it started for good, and when it is waited for."""

    def __init__(self, group: LocalGroup, call: Collective) -> None:
        super().__init__()
        self._group, self.call = group, call
        self.asked = self.started = group.clock.now()
        group.asked.append((self, self.started, False))

    def wait(self, timeout: Any = None) -> bool:
        self._group.asked.append((self, self._group.clock.now(), True))
        return True


class StoodIn(NamedTuple):
    """What was asked of a group, and the copies that it made for that; the device must have done all of it."""

    clock: Clock
    asked: tuple[tuple[_Done, Moment, bool], ...]  # each with its moment, and whether that is of a wait, in order

    @property
    def seconds(self) -> float:
        """What standing in took."""
        return sum(self.clock.seconds(one.asked, one.started) for one, _, waits in self.asked if not waits)

    def calls(self, since: Moment) -> tuple[Counted, ...]:
        """All that was asked for since a moment, in order."""
        copied, started, waited = 0.0, dict[_Done, float](), dict[_Done, float]()
        for one, moment, waits in self.asked:
            if waits:
                waited.setdefault(one, self.clock.seconds(since, moment) - copied)
            else:
                copied += self.clock.seconds(one.asked, one.started)
                started[one] = self.clock.seconds(since, one.started) - copied
        return tuple(Counted(one.call, begun, waited.get(one, begun)) for one, begun in started.items())


class LocalGroup(dist.ProcessGroup):
    """Stands in for a group of `num_ranks`; `take` tells what was asked of it, and what standing in took.

    `clock` is the one of whoever takes these seconds off a time. Wall time off CPU time could leave less than nothing
    on a machine that others use too, and the host's time off a device's would take off the launch of a copy only.

    What would have been received is filled with this rank's own values: memory that nobody wrote may hold
    numbers that are slow to compute with. Where each `near` of the ranks are on a node, what stays in one counts as an
    all-to-all of so many, and what goes to one rank of each other node as messages from rank to rank.
    """

    def __init__(self, rank: int, num_ranks: int, clock: Clock, near: int = 0) -> None:
        super().__init__(rank, num_ranks)  # type: ignore[call-arg]
        self.num_ranks, self.clock, self._near = num_ranks, clock, near
        self.asked: list[tuple[_Done, Moment, bool]] = []

    def take(self) -> StoodIn:
        """All since it was last taken."""
        asked, self.asked = tuple(self.asked), []
        return StoodIn(self.clock, asked)

    @contextmanager
    def _instead_of(self, operation: str, num_bytes: int, among: int = 0) -> Iterator[_Done]:
        """Copies that stand in for what the network would have brought: their time is not the stage's own."""
        done = _Done(self, Collective(operation, among or self.num_ranks, num_bytes))
        yield done
        done.started = self.clock.now()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        (tensor,) = tensors
        return _Done(self, Collective("all_reduce", self.num_ranks, tensor.nbytes))

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Done:
        ((parts, mine),) = zip(outputs, inputs, strict=True)
        with self._instead_of("all_gather", mine.nbytes * self.num_ranks) as done:
            for part in parts:
                part.copy_(mine)
        return done

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Done:
        with self._instead_of("all_gather", output.nbytes) as done:
            output.view(self.num_ranks, -1).copy_(source.view(1, -1))
        return done

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Done:
        # In a ring each rank passes as many parts on as in a gather; no figure of its own is measured.
        with self._instead_of("all_gather", source.nbytes) as done:
            output.copy_(source[: output.numel()])
        return done

    # What torch before 2.13 calls them.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # type: ignore[assignment]

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> _Done:
        # Uneven all-to-alls receive more or less than they send: what there is no value for is filled with ones.
        shared, near = min(output.numel(), source.numel()), self._near
        peers = [i for i, sizes in enumerate(zip(input_sizes, output_sizes, strict=True)) if any(sizes)]
        num_bytes, operation, among = max(output.nbytes, source.nbytes), "all_to_all", 0
        if near and max(peers) < near:
            among = near
        elif near > 1 and all(peer % near == 0 for peer in peers):  # [Note: heads inside a node]
            operation, among = "p2p", 2
            num_bytes = source.element_size() * max(sum(input_sizes[1:]), sum(output_sizes[1:]))
        with self._instead_of(operation, num_bytes, among) as done:
            output[:shared].copy_(source[:shared])
            output[shared:].fill_(1.0)
        return done
