"""A transport for tests that forgives as little as NCCL does, over gloo: a group in, exchanges that name what is wrong.

gloo matches messages by tag, sends without the receiver, and fills a destination at some time before it is waited for.
So code that NCCL would hang or corrupt passes on it. Here, on one communicator (one `StrictTransport`):

  order       two ranks match their messages by the order in which they start them; tags and sizes are compared
  serial      an exchange begins when the one before has ended, as kernels on one stream do
  rendezvous  a message lasts until both ends have come to it, an exchange until all its messages are done
  memory      a destination holds NaN until it is waited for, and nobody may write to it, nor to what is being sent

and if `Rules` say so: the first message of a pair connects it, for which the host waits (as NCCL's set-up does); the
first exchange waits for all ranks of the group (as a communicator that is made at its first use does); every exchange
blocks the host (as CUDA_LAUNCH_BLOCKING, the loading of a kernel, or an allocation may at any time).

`StrictMemory` sees reads and writes of such buffers in the operation that does them; without it a read of NaN shows
only in results.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_hydra.zero_hetero.transport import Parcel, Work

_SENDING, _RECEIVING, _PAYLOAD, _CONNECT, _LAZY = range(1, 6)  # tags on gloo


class StrictError(AssertionError):
    """What a network with NCCL's rules would hang at or get wrong."""


@dataclass(frozen=True)
class Rules:
    """What is checked besides order, serial exchanges, rendezvous and memory."""

    connect: bool = False
    lazy: bool = False
    blocking: bool = False
    stall_s: float = 30.0  # after which a wait counts as one for ever


class StrictTransport:
    """One communicator of a gloo group that nothing else uses; every rank of the group makes it."""

    def __init__(self, group: dist.ProcessGroup, name: str = "links", rules: Rules | None = None):
        self.group, self.name, self.rules = group, name, rules or Rules()
        self.rank, self.num_ranks = group.rank(), group.size()
        self.unwaited: list[Exchange] = []
        self.started = 0
        self.made = False  # whether all its ranks have used it
        self.connected: set[tuple[int, int]] = set()
        self._queue: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._failure: StrictError | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"strict {name}")
        self._thread.start()

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], tag: int = 0) -> Work:
        """As `Transport.exchange`. StrictError names what breaks a rule, here or in `wait`."""
        if not sends and not recvs:
            return _Nothing()
        exchange = Exchange(self, sends, recvs, tag)
        for other in self.unwaited:
            other.refuse_overlap(exchange)
        if self.rules.lazy and not self.made:
            everyone = [rank for rank in range(self.num_ranks) if rank != self.rank]
            why = f"{exchange} is the first of {self.name!r}, which is made at its first use"
            self._meet(everyone, _LAZY, why)
        self.made = True
        if self.rules.connect:
            self._connect(exchange)
        self.started += 1
        exchange.begin()
        self.unwaited.append(exchange)
        self._queue.put(exchange)
        if self.rules.blocking:
            exchange.wait_over()
        return exchange

    def collective(self) -> None:
        """All ranks come to a collective on the same communicator, which begins when every exchange has ended."""
        for exchange in list(self.unwaited):
            exchange.wait_over()
        self.made = True

    def close(self) -> None:
        """End the communicator. StrictError names exchanges that were never waited for."""
        self._queue.put(None)
        if self.unwaited:
            raise StrictError(f"{', '.join(map(str, self.unwaited))}: never waited for")
        self._thread.join()

    def raise_failure(self) -> None:
        """Raise what has gone wrong in an earlier exchange."""
        if self._failure is not None:
            raise self._failure

    def _connect(self, exchange: Exchange) -> None:
        pairs = {(self.rank, peer) for peer, _ in exchange.sends} | {(peer, self.rank) for peer, _ in exchange.recvs}
        new = sorted(pairs - self.connected)
        self._meet([sum(pair) - self.rank for pair in new], _CONNECT, f"{exchange} connects a new pair")
        self.connected |= pairs

    def _meet(self, peers: Sequence[int], tag: int, why: str) -> None:
        """The host waits until these ranks have come here too."""
        works = [self._isend(torch.ones(1), peer, tag) for peer in peers]
        for peer in peers:
            self._wait(self._irecv(torch.empty(1), peer, tag), f"{why}: the host waits for rank {peer}")
        for work in works:
            work.wait()

    def _serve(self) -> None:
        while (exchange := self._queue.get()) is not None:
            if self._failure is None:
                try:
                    self._run(exchange)
                except StrictError as error:
                    self._failure = error
            exchange.over.set()

    def _run(self, exchange: Exchange) -> None:
        """All messages of one exchange. What is sent leaves at once, so that no order of waits matters."""
        left: list[dist.Work] = []
        for (peer, _), message in zip(exchange.sends, exchange.copies, strict=True):
            left.append(self._isend(exchange.header(message), peer, _SENDING))
            left.append(self._isend(message, peer, _PAYLOAD))
        for peer, buffer in exchange.recvs:
            left.append(self._isend(exchange.header(buffer), peer, _RECEIVING))
        for (peer, _), message in zip(exchange.recvs, exchange.arrived, strict=True):
            self._compare(exchange, message, peer, _SENDING)
            self._wait(self._irecv(message, peer, _PAYLOAD), f"{exchange} waits for rank {peer}")
        for (peer, _), message in zip(exchange.sends, exchange.copies, strict=True):
            self._compare(exchange, message, peer, _RECEIVING)
        for work in left:
            self._wait(work, f"{exchange} waits until what it sends has left")

    def _compare(self, exchange: Exchange, message: Tensor, peer: int, tag: int) -> None:
        """Wait for the peer's header of a message and compare it with our own."""
        theirs, ours = torch.empty(3, dtype=torch.int64), exchange.header(message)
        does = "send to" if tag == _SENDING else "receive from"
        self._wait(self._irecv(theirs, peer, tag), f"{exchange} waits for rank {peer} to {does} rank {self.rank}")
        if not torch.equal(theirs, ours):
            raise StrictError(
                f"{exchange} meets another one: {_words(ours)} here, {_words(theirs)} on rank {peer}; messages match "
                "by order, so both ranks must start their exchanges in one order"
            )

    def _isend(self, message: Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.isend(message, group=self.group, group_dst=peer, tag=tag)
        assert work is not None, "this rank is in the group"
        return work

    def _irecv(self, buffer: Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.irecv(buffer, group=self.group, group_src=peer, tag=tag)
        assert work is not None, "this rank is in the group"
        return work

    def _wait(self, work: dist.Work, what: str) -> None:
        try:
            work.wait(timedelta(seconds=self.rules.stall_s))
        except RuntimeError as error:
            raise StrictError(f"{what} for {self.rules.stall_s} s and more: it would wait for ever") from error


class Exchange:
    """One exchange of a `StrictTransport`, from its start until it is waited for."""

    def __init__(self, transport: StrictTransport, sends: Sequence[Parcel], recvs: Sequence[Parcel], tag: int):
        self.transport, self.sends, self.recvs, self.tag = transport, list(sends), list(recvs), tag
        self.number = transport.started
        self.over = threading.Event()
        self.copies = [message.clone() for _, message in sends]
        self.arrived = [torch.empty_like(buffer) for _, buffer in recvs]

    def __str__(self) -> str:
        return f"rank {self.transport.rank}: exchange {self.number} (tag {self.tag}) of {self.transport.name!r}"

    def header(self, message: Tensor) -> Tensor:
        """What both ends must agree on: tag, elements and bytes of an element."""
        return torch.tensor([self.tag, message.numel(), message.element_size()])

    def begin(self) -> None:
        """From now on destinations hold nothing that could be taken for data."""
        for _, buffer in self.recvs:
            buffer.fill_(_nothing(buffer))

    def wait_over(self) -> None:
        """Return when all messages are done, without touching the destinations."""
        self.over.wait()
        self.transport.raise_failure()

    def wait(self) -> None:
        """As `Work.wait`; StrictError if what was sent or the destinations have been written to meanwhile."""
        if self not in self.transport.unwaited:
            return
        self.transport.unwaited.remove(self)
        self.wait_over()
        for (peer, message), copy in zip(self.sends, self.copies, strict=True):
            if not torch.equal(_bytes(message), _bytes(copy)):
                raise StrictError(f"{self}: what it sends to rank {peer} was changed before it was waited for")
        for peer, buffer in self.recvs:
            if not torch.equal(_bytes(buffer), _bytes(torch.full_like(buffer, _nothing(buffer)))):
                raise StrictError(f"{self}: where it receives from rank {peer} was written before it was waited for")
        for (_, buffer), message in zip(self.recvs, self.arrived, strict=True):
            buffer.copy_(message)

    wait_receives = wait

    def refuse_overlap(self, later: Exchange) -> None:
        """StrictError if a later exchange takes memory of this one, which has not been waited for."""
        for what, parcels, others in (
            ("receives into", self.recvs, [*later.sends, *later.recvs]),
            ("sends from", self.sends, later.recvs),
        ):
            for _, buffer in parcels:
                if any(overlap(buffer, other) for _, other in others):
                    raise StrictError(f"{later} takes memory that {self} {what}, before that is waited for")


class StrictMemory(TorchDispatchMode):
    """Within it, any operation that uses the memory of an exchange that has not been waited for is a StrictError."""

    def __init__(self, transports: Sequence[StrictTransport]):
        """Of these transports, and of those that are put into the list later."""
        super().__init__()
        self.transports = transports

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        unwaited = [exchange for transport in self.transports for exchange in transport.unwaited]
        if unwaited and not _only_looks(func):
            for position, argument in enumerate(func._schema.arguments):
                value = args[position] if position < len(args) else (kwargs or {}).get(argument.name)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        _refuse_use(func, tensor, writes, unwaited)
        return func(*args, **(kwargs or {}))


def _refuse_use(func: Any, tensor: Tensor, writes: bool, unwaited: Sequence[Exchange]) -> None:
    for exchange in unwaited:
        if any(overlap(tensor, buffer) for _, buffer in exchange.recvs):
            does = "writes" if writes else "reads"
            raise StrictError(f"{func} {does} where {exchange} receives, before that is waited for")
        if writes and any(overlap(tensor, buffer) for _, buffer in exchange.sends):
            raise StrictError(f"{func} writes what {exchange} sends, before that is waited for")


def _only_looks(func: Any) -> bool:
    """Whether an operation makes a view or takes a shape, and reads nothing."""
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
    return views or func._schema.name.split("::")[1].startswith(("empty", "new_empty", "zeros_like", "ones_like"))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may share memory: whether the bytes from their first to their last element do."""
    (start, stop), (first, last) = _span(one), _span(other)
    return max(start, first) < min(stop, last)


def _span(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _nothing(buffer: Tensor) -> Any:
    return float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _words(header: Tensor) -> str:
    tag, numel, size = header.tolist()
    return f"tag {tag} with {numel} elements of {size} bytes"


class _Nothing:
    def wait(self) -> None:
        pass

    wait_receives = wait


with StrictMemory(()):  # the first mode of a process imports for more than a second: let it be before ranks fork
    torch.ones(1).add_(1)
