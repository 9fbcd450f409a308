"""A team's buffers in, the same buffers with what the others have out: gathers and trades of equal parts.

These are the two collectives that twins use [Note: twins]. The ranks of a team call them together, in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from ds_hydra.zero_hetero.transport import Transport, Work


def start_gather(out: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to bring what each rank of the group has, (n,), to all of them: (ranks * n,), in the group's order."""
    # Its name is another one before torch 2.13.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    work = gather(out, own, group=group, async_op=True)
    assert work is not None, "this rank is in the group, so the collective has started"
    return work


def start_scatter(out: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to add what all ranks of the group have, (ranks * n,), and to hand each its part of the sum, (n,)."""
    # Its name is another one before torch 2.13.
    scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    work = scatter(out, whole, group=group, async_op=True)
    assert work is not None, "this rank is in the group, so the collective has started"
    return work


class Collectives(Protocol):
    """Collectives of any teams of ranks. A buffer has one part for each member, all equal, in the members' order."""

    def gather(self, buffer: Tensor, members: Sequence[int], *, tag: int = 0) -> Work:
        """Start to bring everybody's own part to all; each member has its part in place already."""

    def trade(self, src: Tensor, dst: Tensor, members: Sequence[int], *, tag: int = 0) -> Work:
        """Start to bring to the k-th member everybody's k-th part of `src`, in the order of the members."""


class MessageCollectives:
    """By messages between all members, for networks that match them by tag (gloo) and where each of them is timed."""

    def __init__(self, transport: Transport, rank: int):
        self.transport, self.rank = transport, rank

    def gather(self, buffer: Tensor, members: Sequence[int], *, tag: int = 0) -> Work:
        parts = buffer.chunk(len(members))
        own = members.index(self.rank)
        sends = [(members[peer], parts[own]) for peer in _after(own, len(members))]
        recvs = [(members[peer], parts[peer]) for peer in _before(own, len(members))]
        return self.transport.exchange(sends, recvs, tag)

    def trade(self, src: Tensor, dst: Tensor, members: Sequence[int], *, tag: int = 0) -> Work:
        leaving, coming = src.chunk(len(members)), dst.chunk(len(members))
        own = members.index(self.rank)
        coming[own].copy_(leaving[own])
        sends = [(members[peer], leaving[peer]) for peer in _after(own, len(members))]
        recvs = [(members[peer], coming[peer]) for peer in _before(own, len(members))]
        return self.transport.exchange(sends, recvs, tag)


class GroupCollectives:
    """By the collectives of a process group for each team (NCCL): one operation, however many members."""

    def __init__(self, group_of: Callable[[tuple[int, ...]], dist.ProcessGroup]):
        """`group_of` returns the group of a team; its ranks are the team's, in ascending order."""
        self._group_of = group_of

    def gather(self, buffer: Tensor, members: Sequence[int], *, tag: int = 0) -> Work:
        group = self._group_of(tuple(members))
        return _Started(start_gather(buffer, buffer.chunk(len(members))[group.rank()], group))

    def trade(self, src: Tensor, dst: Tensor, members: Sequence[int], *, tag: int = 0) -> Work:
        work = dist.all_to_all_single(dst, src, group=self._group_of(tuple(members)), async_op=True)
        return _Started(work)


class _Started:
    """One collective that is under way."""

    def __init__(self, work: dist.Work | None):
        assert work is not None, "this rank is in the group, so the collective has started"
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    wait_receives = wait


def _after(own: int, count: int) -> list[int]:
    """The others, the next one first: so that not all of them turn to the first member at once."""
    return [(own + step) % count for step in range(1, count)]


def _before(own: int, count: int) -> list[int]:
    """The others, the one before first: in the order in which they turn to this one."""
    return [(own - step) % count for step in range(1, count)]
