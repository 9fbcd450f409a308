"""Transports start the sends and receives that a plan decided; collectives, those that twins use [Note: twins].

A transport decides nothing: both sides took peers, order and sizes from the same plan. The ranks of a team call their
collectives together, in one order: gathers and trades of equal parts.

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

A message whose elements lie side by side in the local buffer is sent from it, or received into it, as it is. Any
other is copied through scratch memory: gathered before it is sent, scattered after it has arrived.

[Note: lanes] The second step of a transfer can begin when the first has arrived. On a GPU that is a matter of queues: a
stream of its own waits for the first step, does what has to be done between the two, and starts the second, while the
host has long gone on and the kernels of the model run in their own stream. So all steps are issued at once, in one
order on all ranks. Where a wait holds up the host (gloo), a later step is issued at a point of the program where every
rank has started all first steps; there a rank that waits keeps nobody from what it waits for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Part(NamedTuple):
    """`length` elements at `offset` of a local buffer and at `position` of a message."""

    offset: int
    position: int
    length: int


class Envelope(NamedTuple):
    """One rank's side of one message: its parts in message order; a single part needs no copy."""

    peer: int
    numel: int
    parts: tuple[Part, ...]

    @classmethod
    def of_intervals(cls, peer: int, intervals: Iterable[tuple[int, int]]) -> Envelope:
        """From (offset, length) in message order; neighbours that touch become one part.

        The intervals (4, 2), (6, 3), (20, 1) of a buffer are 6 elements in two parts: 5 from offset 4, 1 from 20.
        """
        parts: list[Part] = []
        numel = 0
        for offset, length in intervals:
            if parts and parts[-1].offset + parts[-1].length == offset:
                parts[-1] = parts[-1]._replace(length=parts[-1].length + length)
            else:
                parts.append(Part(offset, numel, length))
            numel += length
        return cls(peer, numel, tuple(parts))

    @property
    def end(self) -> int:
        """The least length of a local buffer that holds every part."""
        return max((part.offset + part.length for part in self.parts), default=0)

    @property
    def in_place(self) -> bool:
        """Whether the message is one interval of the local buffer, and so needs no copy."""
        return len(self.parts) == 1

    def interval(self, buffer: Tensor) -> Tensor:
        """The message where it lies in the local buffer, shape (numel,), if it is `in_place`."""
        return buffer.narrow(0, self.parts[0].offset, self.numel)

    def gather(self, src: Tensor, message: Tensor) -> Tensor:
        """Copy the elements from their places in `src` into `message`, shape (numel,), and cast them to its dtype."""
        for offset, position, length in self.parts:
            message.narrow(0, position, length).copy_(src.narrow(0, offset, length))
        return message

    def scatter(self, message: Tensor, dst: Tensor) -> None:
        """Copy the elements of `message`, shape (numel,), to their places in `dst`."""
        for offset, position, length in self.parts:
            dst.narrow(0, offset, length).copy_(message.narrow(0, position, length))


class Lane(Protocol):
    """Where later steps are begun, and how computing waits for what is done there."""

    early: bool
    """Whether they are issued at once [Note: lanes]."""

    def aside(self) -> Any:
        """A context: what is started in it waits for all that was started before, but nothing waits for it."""

    def mark(self) -> Any:
        """Within `aside`: the moment at which all that was started in it is done."""

    def wait(self, mark: Any) -> None:
        """What is started from now on waits for a mark."""


class HostLane:
    """For devices that are done when a call returns."""

    def __init__(self, *, early: bool = False) -> None:
        self.early = early

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def mark(self) -> None:
        """All is done already."""

    def wait(self, mark: None) -> None:
        """All is done already."""


class DeviceLane:
    """A stream of its own on a CUDA device."""

    early = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


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
