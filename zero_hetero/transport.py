"""Transports: start the sends and receives that a plan decided, and wait for them.

A transport decides nothing: both sides took peers, order and sizes from the same plan.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

Parcel = tuple[int, Tensor]  # (peer, contiguous buffer of shape (numel,))


class Work(Protocol):
    """Communication under way."""

    def wait(self) -> None:
        """Return when all sends may be overwritten and all receives may be read."""


class Transport(Protocol):
    """Moves buffers between ranks; the seam where tests stand in for a process group."""

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], tag: int = 0) -> Work:
        """Start all of `sends` and `recvs`. Two ranks exchange in the same order what has the same tag."""


class TorchTransport:
    """Point-to-point operations of a torch process group; peers are global ranks.

    gloo matches by tag, so exchanges may be started in any order. NCCL has no tags: there every rank must start its
    exchanges in one global order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], tag: int = 0) -> Work:
        operations = [dist.P2POp(dist.irecv, buffer, peer, self.group, tag) for peer, buffer in recvs]
        operations += [dist.P2POp(dist.isend, buffer, peer, self.group, tag) for peer, buffer in sends]
        return _Batch(dist.batch_isend_irecv(operations) if operations else [])


class _Batch:
    def __init__(self, works: Sequence[dist.Work]):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class InProcessTransport:
    """Several ranks in one process, for tests: `InProcessTransport(post, rank)`, one `Post` for all of them.

    Nothing blocks: start the exchanges of all ranks first, then wait.
    """

    def __init__(self, post: Post, rank: int):
        self.post = post
        self.rank = rank

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], tag: int = 0) -> Work:
        for peer, buffer in sends:
            self.post.boxes[self.rank, peer, tag].append(buffer.clone())
        return _Delivery(self.post, self.rank, list(recvs), tag)


class Post:
    """The messages on their way between the ranks of one process, first in first out for each pair and tag."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)


class _Delivery:
    def __init__(self, post: Post, rank: int, recvs: list[Parcel], tag: int):
        self.post, self.rank, self.recvs, self.tag = post, rank, recvs, tag

    def wait(self) -> None:
        for peer, buffer in self.recvs:
            box = self.post.boxes[peer, self.rank, self.tag]
            if not box:
                raise RuntimeError(
                    f"rank {self.rank} waits for a message with tag {self.tag} that rank {peer} has not sent; "
                    f"start the exchanges of all ranks before waiting for one"
                )
            message = box.popleft()
            if message.shape != buffer.shape or message.dtype != buffer.dtype:
                raise RuntimeError(
                    f"rank {peer} sent {tuple(message.shape)} of {message.dtype} with tag {self.tag}, rank "
                    f"{self.rank} expects {tuple(buffer.shape)} of {buffer.dtype}"
                )
            buffer.copy_(message)
        self.recvs = []
