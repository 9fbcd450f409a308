"""A transport for tests that forgives as little as NCCL does, over gloo: a group in, exchanges that name what is wrong.

gloo matches messages by tag, sends without the receiver, and fills a destination at some time before it is waited for.
So code that NCCL would hang or corrupt passes on it. Here, on one communicator (one `StrictTransport`):

  order       two ranks match their messages by the order in which they start them; tags and sizes are compared
  serial      an exchange begins when the one before has ended, as kernels on one stream do
  rendezvous  a message lasts until both ends have come to it, an exchange until all its messages are done
  memory      a destination holds NaN until it is waited for, and nobody may write to it, nor to what is being sent

and if `Rules` say so: the first message of a pair connects it, for which the host waits (as NCCL's set-up does); the
first exchange waits for all ranks of the group (as a communicator that is made at its first use does); every exchange
blocks the host (as CUDA_LAUNCH_BLOCKING, the loading of a kernel, or an allocation may at any time); all communicators
of a rank share one line (as streams do that share a hardware queue: CUDA_DEVICE_MAX_CONNECTIONS=1).

Collectives have the same rules in `strict_collectives`; `strict_memory` sees reads and writes of such memory in the
operation that does them. Without it a read of NaN shows only in results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.zero_hetero.transport import Parcel, Work
from tests.support.strict_line import Line, Operation, Owner, Part, Rules, StrictError
from tests.support.strict_memory import StrictMemory

__all__ = ["Exchange", "Rules", "StrictError", "StrictMemory", "StrictTransport"]

_SENDING, _RECEIVING, _PAYLOAD, _CONNECT, _LAZY = range(1, 6)  # tags on gloo


class StrictTransport(Owner):
    """One communicator of a gloo group that nothing else uses; every rank of the group makes it."""

    serial = True

    def __init__(
        self, group: dist.ProcessGroup, name: str = "links", rules: Rules | None = None, line: Line | None = None
    ):
        """`line`: what its exchanges share with other operations; None: they have one of their own."""
        super().__init__(rules or Rules(), group.rank())
        self.group, self.name, self.num_ranks = group, name, group.size()
        self.started = 0
        self.made = False  # whether all its ranks have used it
        self.connected: set[tuple[int, int]] = set()
        self.line, self._shares = line or Line(), line is not None

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], tag: int = 0) -> Work:
        """As `Transport.exchange`. StrictError names what breaks a rule, here or in `wait`."""
        if not sends and not recvs:
            return _Nothing()
        exchange = Exchange(self, sends, recvs, tag)
        if self.rules.lazy and not self.made:
            everyone = [rank for rank in range(self.num_ranks) if rank != self.rank]
            why = f"{exchange} is the first of {self.name!r}, which is made at its first use"
            self._meet(everyone, _LAZY, why)
        self.made = True
        if self.rules.connect:
            self._connect(exchange)
        self.started += 1
        self.start(exchange)
        return exchange

    def close(self) -> None:
        """End the communicator. StrictError names exchanges that were never waited for."""
        self.refuse_unwaited()
        if not self._shares:
            self.line.close()

    def _connect(self, exchange: Exchange) -> None:
        pairs = {(self.rank, peer) for peer in exchange.to} | {(peer, self.rank) for peer in exchange.sources}
        new = sorted(pairs - self.connected)
        self._meet([sum(pair) - self.rank for pair in new], _CONNECT, f"{exchange} connects a new pair")
        self.connected |= pairs

    def _meet(self, peers: Sequence[int], tag: int, why: str) -> None:
        """The host waits until these ranks have come here too."""
        works = [self.isend(torch.ones(1), peer, tag) for peer in peers]
        for peer in peers:
            self.rules.wait(self.irecv(torch.empty(1), peer, tag), f"{why}: the host waits for rank {peer}")
        for work in works:
            work.wait()

    def isend(self, message: Tensor, peer: int, tag: int) -> dist.Work:
        """Start to send over gloo."""
        work = dist.isend(message, group=self.group, group_dst=peer, tag=tag)
        assert work is not None, "this rank is in the group"
        return work

    def irecv(self, buffer: Tensor, peer: int, tag: int) -> dist.Work:
        """Start to receive over gloo."""
        work = dist.irecv(buffer, group=self.group, group_src=peer, tag=tag)
        assert work is not None, "this rank is in the group"
        return work


class Exchange(Operation):
    """One exchange of a `StrictTransport`."""

    def __init__(self, transport: StrictTransport, sends: Sequence[Parcel], recvs: Sequence[Parcel], tag: int):
        self.transport, self.tag, self.number = transport, tag, transport.started
        self.to, self.sources = [peer for peer, _ in sends], [peer for peer, _ in recvs]
        reads = [Part(f"sends to rank {peer}", message) for peer, message in sends]
        writes = [Part(f"receives from rank {peer}", buffer) for peer, buffer in recvs]
        super().__init__(transport, transport.line, reads, writes)

    def __str__(self) -> str:
        return f"rank {self.transport.rank}: exchange {self.number} (tag {self.tag}) of {self.transport.name!r}"

    def run(self) -> None:
        """All messages. What is sent leaves at once, so that no order of waits matters."""
        transport, left = self.transport, list[dist.Work]()
        transport.sleep_in_line()
        for peer, message in zip(self.to, self.copies, strict=True):
            left.append(transport.isend(self._header(message), peer, _SENDING))
            left.append(transport.isend(message, peer, _PAYLOAD))
        for peer, message in zip(self.sources, self.arrived, strict=True):
            left.append(transport.isend(self._header(message), peer, _RECEIVING))
        for peer, message in zip(self.sources, self.arrived, strict=True):
            self._compare(message, peer, _SENDING)
            transport.rules.wait(transport.irecv(message, peer, _PAYLOAD), f"{self} waits for rank {peer}")
        for peer, message in zip(self.to, self.copies, strict=True):
            self._compare(message, peer, _RECEIVING)
        for work in left:
            transport.rules.wait(work, f"{self} waits until what it sends has left")

    def _header(self, message: Tensor) -> Tensor:
        """What both ends must agree on: tag, elements and bytes of an element."""
        return torch.tensor([self.tag, message.numel(), message.element_size()])

    def _compare(self, message: Tensor, peer: int, tag: int) -> None:
        """Wait for the peer's header of a message and compare it with our own."""
        transport, theirs, ours = self.transport, torch.empty(3, dtype=torch.int64), self._header(message)
        does = "send to" if tag == _SENDING else "receive from"
        came = transport.irecv(theirs, peer, tag)
        transport.rules.wait(came, f"{self} waits for rank {peer} to {does} rank {transport.rank}")
        if not torch.equal(theirs, ours):
            raise StrictError(
                f"{self} meets another one: {_words(ours)} here, {_words(theirs)} on rank {peer}; messages match "
                "by order, so both ranks must start their exchanges in one order"
            )


def _words(header: Tensor) -> str:
    tag, numel, size = header.tolist()
    return f"tag {tag} with {numel} elements of {size} bytes"


class _Nothing:
    def wait(self) -> None:
        pass

    wait_receives = wait
