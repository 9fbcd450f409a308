"""Transports: start the sends and receives that a plan decided, and wait for them.

A transport decides nothing: both sides took peers, order and sizes from the same plan.

[Note: bounded receives] All pulls of a step start at once, one per bucket, and a model has dozens of buckets. With the
receives of all of them open, ranks that share cores spend twice the time on the same bytes. So over gloo on one machine
only a few exchanges have open receives. The next one opens when an earlier one is waited for, and a step waits for its
buckets in the order in which it started them.

Between machines there is no such bound. gloo tells a peer of an open receive over the connection of the pair, behind
all that it sends to that peer itself. A receive that opens late is told of when the cable has carried what this rank
sends, and the peer sends only then: the cable would carry one direction after the other.

The bound cannot lock the ranks up. Sends are never held back, so a rank needs nothing of its peers but that they have
started; and waiting for an exchange opens its receives, and those of all that started before it, whatever the bound.
With a bound of 2 and exchanges 0 to 5 started, 0 and 1 are open. Waiting for 4 opens 2, 3 and 4. Exchanges open in the
order of their start in any case, because messages of one pair and tag meet their receives in the order in which these
were opened.
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

    def wait_receives(self) -> None:
        """Return when all receives may be read; needs no more of the peers than that they have started."""

    def wait(self) -> None:
        """Return when all receives may be read and all sends may be overwritten."""


class Transport(Protocol):
    """Moves buffers between ranks; the seam where tests stand in for a process group."""

    @property
    def serial(self) -> bool:
        """Whether exchanges end in the order of their start, so that who has waited for one need wait for none before
        it."""

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], tag: int = 0) -> Work:
        """Start all of `sends` and `recvs`. Two ranks exchange in the same order what has the same tag."""


class TorchTransport:
    """Point-to-point operations of a torch process group; peers are ranks of that group.

    gloo matches by tag, so exchanges may be started in any order. NCCL has no tags: there every rank must start its
    exchanges in one global order.

    `max_open_receives` (gloo only; None: any number) bounds the exchanges whose receives are open at once; see
    [Note: bounded receives].
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, max_open_receives: int | None = None):
        self.group = group
        self.max_open_receives = max_open_receives
        self._opened: list[_Exchange] = []  # receives open, not yet waited for
        self._waiting: deque[_Exchange] = deque()  # receives not yet open, in the order of their start

    @property
    def serial(self) -> bool:
        """See `Transport`: an NCCL communicator is one stream."""
        return dist.get_backend(self.group) != "gloo"

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], tag: int = 0) -> Work:
        if not sends and not recvs:
            return _Batch([])
        if self.serial:
            # One NCCL group call: it runs sends and receives side by side, so that two ranks which send to each other
            # first do not wait for each other for ever.
            operations = [
                dist.P2POp(dist.irecv, buffer, group=self.group, tag=tag, group_peer=peer) for peer, buffer in recvs
            ]
            operations += [
                dist.P2POp(dist.isend, buffer, group=self.group, tag=tag, group_peer=peer) for peer, buffer in sends
            ]
            return _Batch(dist.batch_isend_irecv(operations))
        exchange = _Exchange(self, recvs, tag)
        if recvs:
            self._waiting.append(exchange)
            self._open_next()
        # Sends start at once, whatever the bound: the receives of others depend on them.
        exchange.sends = [
            _started(dist.isend(buffer, group=self.group, tag=tag, group_dst=peer)) for peer, buffer in sends
        ]
        return exchange

    def _open_next(self, until: _Exchange | None = None) -> None:
        """Open receives in the order of their start: as many as may be, and all up to `until`."""
        while self._waiting:
            full = self.max_open_receives is not None and len(self._opened) >= self.max_open_receives
            if full and (until is None or until.works is not None):
                return  # no room, and nobody waits for one that is not open yet
            exchange = self._waiting.popleft()
            exchange.works = [
                _started(dist.irecv(buffer, group=self.group, tag=exchange.tag, group_src=peer))
                for peer, buffer in exchange.recvs
            ]
            self._opened.append(exchange)

    def _close(self, exchange: _Exchange) -> None:
        """Receives have come: their place goes to the next exchange."""
        self._opened.remove(exchange)
        self._open_next()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group, so an operation has started"
    return work


class _Exchange:
    """One exchange over gloo; its receives may open later than its sends."""

    def __init__(self, transport: TorchTransport, recvs: Sequence[Parcel], tag: int):
        self.transport, self.recvs, self.tag = transport, list(recvs), tag
        self.sends: list[dist.Work] = []
        self.works: list[dist.Work] | None = None  # of the receives, once open

    def wait_receives(self) -> None:
        if not self.recvs:
            return
        self.transport._open_next(until=self)
        for work in self.works or ():
            work.wait()
        self.recvs = []
        self.transport._close(self)

    def wait(self) -> None:
        self.wait_receives()
        for work in self.sends:
            work.wait()
        self.sends = []


class _Batch:
    """Operations that can only be waited for together."""

    def __init__(self, works: Sequence[dist.Work]):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    wait_receives = wait


class InProcessTransport:
    """Several ranks in one process, for tests: `InProcessTransport(post, rank)`, one `Post` for all of them.

    Nothing blocks: start the exchanges of all ranks first, then wait.
    """

    serial = True  # a send is over when it has begun

    def __init__(self, post: Post, rank: int):
        self.post = post
        self.rank = rank

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], tag: int = 0) -> Work:
        for peer, buffer in sends:
            # A copy, as on a wire: the sender may write its buffer again before the receiver looks.
            self.post.boxes[self.rank, peer, tag].append(buffer.clone())
        return _Delivery(self.post, self.rank, list(recvs), tag)


class Post:
    """The messages on their way between the ranks of one process, first in first out for each pair and tag."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)


class _Delivery:
    """Receives of one exchange between ranks of one process; waiting takes them out of the post."""

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

    wait_receives = wait
