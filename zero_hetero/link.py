"""LNK, the operator that moves mutual slices between two layouts (Hydraulis, section 5.2, figure 9).

A transfer plan and this rank's two local buffers go in; messages and local moves follow the plan. Nothing is decided
here: peers, sizes and order come from the plan, which every rank has, so no rank waits for what nobody sends.

[Note: order of messages] A link starts all sends and receives of a transfer at once and only then does its local moves,
so that messages are on their way while it copies. Between two ranks there is one message per transfer and direction.
Transfers under way together are told apart by their tags; those that share a tag, and all of them where there are no
tags (NCCL), by the order in which they started, which is the same on every rank. The order of the messages within one
transfer is only a matter of speed: each rank begins with its next neighbour (of 4 ranks, rank 1 sends to 2, 3, 0 and
receives from 0, 3, 2), so that not all of them turn to rank 0 first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_hydra.zero_hetero.buffer_pool import BufferPool
from ds_hydra.zero_hetero.contributions import Contribution, order_contributions
from ds_hydra.zero_hetero.envelope import Envelope, Part, Scratch
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.mover import Hop
from ds_hydra.zero_hetero.transfer_plan import TransferPlan
from ds_hydra.zero_hetero.transport import Transport, Work

# Elements of a sum that are finished before the next: with one contribution they stay in a core's second-level
# cache. On an accelerator each term of a sum is a kernel, so there a sum is not cut.
SUM_BLOCK_ON_CPU = 1 << 16


class Handle:
    """A pull or push under way, in one hop; see `Movement`."""

    def __init__(self, work: Work, arrived: Callable[[], None], finished: Callable[[], None]):
        self._work: Work | None = work  # None once all is over
        self._arrived: Callable[[], None] | None = arrived  # scatters or sums; None once it has
        self._finished = finished  # gives the scratch memory back

    def advance(self) -> None:
        """Nothing to begin: a plain link has one hop."""

    def wait_arrived(self) -> None:
        """Return when the destination is complete; the source may still be on its way. Repeats do nothing."""
        if self._work is not None and self._arrived is not None:
            arrived, self._arrived = self._arrived, None
            self._work.wait_receives()
            arrived()

    def wait(self) -> None:
        """Return when the destination is complete and the source is free again. Repeats do nothing."""
        if self._work is not None:
            self.wait_arrived()
            self._work.wait()
            self._work = None
            self._finished()


class Link:
    """Runs one rank's part of a transfer plan, any number of times.

    The plan's ranks are the ranks of `transport`. `buffers` is the scratch memory; links that share one pool need
    together only what is in use at once.
    """

    def __init__(self, plan: TransferPlan, rank: int, transport: Transport, *, buffers: BufferPool | None = None):
        if not 0 <= rank < plan.num_ranks:
            raise PlanError(f"rank {rank} is not among the {plan.num_ranks} ranks of the transfer plan")
        self.rank = rank
        self.transport = transport
        self.buffers = BufferPool() if buffers is None else buffers
        # See [Note: order of messages].
        self.sends = tuple(
            Envelope.of_intervals(message.dst, ((piece.src_offset, piece.length) for piece in message.slices))
            for message in sorted(plan.sends(rank), key=lambda message: (message.dst - rank) % plan.num_ranks)
        )
        self.recvs = tuple(
            Envelope.of_intervals(message.src, ((piece.dst_offset, piece.length) for piece in message.slices))
            for message in sorted(plan.recvs(rank), key=lambda message: (rank - message.src) % plan.num_ranks)
        )
        self.local = plan.local(rank)
        self.src_numel = max([0, *(one.end for one in self.sends), *(s.src_offset + s.length for s in self.local)])
        self.dst_numel = max([0, *(one.end for one in self.recvs), *(s.dst_offset + s.length for s in self.local)])
        self._sum_terms: dict[tuple[int, int | None, bool], tuple[Contribution, ...]] = {}

    @property
    def sent_numel(self) -> int:
        """Elements that this rank sends to others."""
        return sum(envelope.numel for envelope in self.sends)

    @property
    def received_numel(self) -> int:
        """Elements that this rank receives from others."""
        return sum(envelope.numel for envelope in self.recvs)

    def pull(self, src: Tensor, dst: Tensor, *, tag: int = 0) -> Handle:
        """See `Mover.pull`."""
        self._check(src, dst)
        if src.dtype != dst.dtype:
            raise PlanError(f"rank {self.rank} pulls {src.dtype} into {dst.dtype}; cast the source first")
        scratch = Scratch(self.buffers, src.dtype, src.device)
        # What several peers get is gathered once: replicas of one shape all want the same parts of a shard.
        gathered: dict[tuple[Part, ...], Tensor] = {}
        for envelope in self.sends:
            if envelope.parts not in gathered:
                gathered[envelope.parts] = envelope.outgoing(src, scratch)
        sends = [(envelope.peer, gathered[envelope.parts]) for envelope in self.sends]
        recvs = [(envelope.peer, envelope.landing(dst, scratch)) for envelope in self.recvs]
        work = self.transport.exchange(sends, recvs, tag)
        # The second hop of a relay pulls a buffer into itself; what stays at its place then needs no copy.
        in_place = src.data_ptr() == dst.data_ptr()
        for src_offset, dst_offset, length in self.local:
            if not (in_place and src_offset == dst_offset):
                dst.narrow(0, dst_offset, length).copy_(src.narrow(0, src_offset, length))

        def arrived() -> None:
            for envelope, (_, message) in zip(self.recvs, recvs, strict=True):
                envelope.scatter(message, dst)

        return Handle(work, arrived, scratch.give_back)

    def push(
        self,
        src: Tensor,
        dst: Tensor,
        *,
        wire_dtype: torch.dtype | None = None,
        accumulate: bool = False,
        tag: int = 0,
    ) -> Handle:
        """See `Mover.push`; contributions are added one after the other in rank order, the rank's own in its turn."""
        self._check(src, dst)
        scratch = Scratch(self.buffers, wire_dtype or src.dtype, src.device)
        sends = [(envelope.peer, envelope.outgoing(src, scratch)) for envelope in self.sends]
        # Contributions never land in `dst` itself, not even those of one interval: all of them are held until every one
        # has come, so that they can be added in rank order and not as they arrive.
        recvs = [(envelope.peer, scratch.take(envelope.numel)) for envelope in self.recvs]
        work = self.transport.exchange(sends, recvs, tag)

        def arrived() -> None:
            self._sum({self.rank: src, **dict(recvs)}, dst, accumulate)

        return Handle(work, arrived, scratch.give_back)

    def hops(self, src: Tensor, dst: Tensor) -> tuple[Hop, ...]:
        """See `Mover.hops`."""
        return (Hop(self.rank, self.sends, self.recvs, self.local, src, dst),)

    def _sum(self, messages: dict[int, Tensor], dst: Tensor, accumulate: bool) -> None:
        """Sum the senders' messages into `dst`; `messages[rank]` of the rank itself is its whole source buffer."""
        block = SUM_BLOCK_ON_CPU if dst.device.type == "cpu" else None
        terms = self._terms(dst.numel(), block, accumulate)
        # Adding across dtypes takes many times as long as casting first and adding then. One buffer for the longest
        # term is enough, since terms are added one after the other.
        widest = max(
            (term.length for term in terms if term.sender is not None and messages[term.sender].dtype != dst.dtype),
            default=0,
        )
        scratch = Scratch(self.buffers, dst.dtype, dst.device)
        cast = scratch.take(widest)
        for sender, src_offset, dst_offset, length, first in terms:
            target = dst.narrow(0, dst_offset, length)
            # `copy_` casts while it writes; the two ways to add give the same bits, one of them has no need of a cast.
            if sender is None:
                target.zero_()
                continue
            source = messages[sender].narrow(0, src_offset, length)
            if first:
                target.copy_(source)
            elif source.dtype == dst.dtype:
                target.add_(source)
            else:
                target.add_(cast.narrow(0, 0, length).copy_(source))
        scratch.give_back()

    def _terms(self, numel: int, block: int | None, accumulate: bool) -> tuple[Contribution, ...]:
        """The terms of a sum of `numel` elements; the plan fixes them, so they are worked out once."""
        key = numel, block, accumulate
        if key not in self._sum_terms:
            senders = {
                envelope.peer: [(p.position, p.offset, p.length) for p in envelope.parts] for envelope in self.recvs
            }
            senders[self.rank] = list(self.local)
            self._sum_terms[key] = order_contributions(senders.items(), numel, block, accumulate=accumulate)
        return self._sum_terms[key]

    def _check(self, src: Tensor, dst: Tensor) -> None:
        """Raise `PlanError` for a buffer that is not flat or too short for the plan; it may be longer."""
        for what, buffer, numel in (("source", src, self.src_numel), ("destination", dst, self.dst_numel)):
            if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.numel() < numel:
                raise PlanError(
                    f"rank {self.rank}: the {what} buffer has shape {tuple(buffer.shape)} and strides "
                    f"{buffer.stride()}, the transfer plan needs {numel} contiguous elements; give the local buffer "
                    f"of the {what} layout, flat"
                )
