"""LNK, the operator that moves mutual slices between two layouts (Hydraulis, section 5.2, figure 9).

A transfer plan and this rank's two local buffers go in; messages and local moves follow the plan. Nothing is decided
here: peers, sizes and order come from the plan, which every rank has, so no rank waits for what nobody sends.

[Note: order of messages] A link starts all sends and receives of a transfer at once and only then does its local moves,
so that messages are on their way while it copies. Between two ranks there is one message per transfer and direction,
which may travel in several runs [Note: runs].
Transfers under way together are told apart by their tags; those that share a tag, and all of them where there are no
tags (NCCL), by the order in which they started, which is the same on every rank. The order of the messages within one
transfer is only a matter of speed: each rank begins with its next neighbour (of 4 ranks, rank 1 sends to 2, 3, 0 and
receives from 0, 3, 2), so that not all of them turn to rank 0 first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ds_hydra.zero_hetero.contributions import Contribution, Cover, order_contributions
from ds_hydra.zero_hetero.envelope import Envelope
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.mover import Hop, Operations
from ds_hydra.zero_hetero.scratch import Cuts
from ds_hydra.zero_hetero.scratch_plan import runs_of
from ds_hydra.zero_hetero.transfer_plan import Slice, TransferPlan
from ds_hydra.zero_hetero.transport import Transport, Work

# Elements of a sum that are finished before the next: with one contribution they stay in a core's second-level
# cache. On an accelerator each term of a sum is a kernel, so there a sum is not cut.
SUM_BLOCK_ON_CPU = 1 << 16


class Handle:
    """A pull or push under way, in one step; see `Movement`."""

    def __init__(self, work: Work, arrived: Callable[[], None]):
        self._work: Work | None = work  # None once all is over
        self._arrived: Callable[[], None] | None = arrived  # scatters or sums; None once it has

    def advance(self) -> bool:
        """Nothing to begin: a plain link has one step."""
        return False

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


class Link:
    """Runs one rank's part of a transfer plan, any number of times. The plan's ranks are the ranks of `transport`."""

    def __init__(self, plan: TransferPlan, rank: int, transport: Transport):
        if not 0 <= rank < plan.num_ranks:
            raise PlanError(f"rank {rank} is not among the {plan.num_ranks} ranks of the transfer plan")
        self.rank = rank
        self.transport = transport
        # See [Note: order of messages].
        sends = sorted(plan.sends(rank), key=lambda message: (message.dst - rank) % plan.num_ranks)
        recvs = sorted(plan.recvs(rank), key=lambda message: (rank - message.src) % plan.num_ranks)
        self.sends = tuple(_at_sender(message.dst, message.slices) for message in sends)
        self.recvs = tuple(_at_receiver(message.src, message.slices) for message in recvs)
        # The same, as it travels: see [Note: runs].
        self._leaving = tuple(_at_sender(m.dst, run) for m in sends for run in runs_of(m.slices))
        self._coming = tuple(tuple(_at_receiver(m.src, run) for run in runs_of(m.slices)) for m in recvs)
        self.local = plan.local(rank)
        self.src_numel = max([0, *(one.end for one in self.sends), *(s.src_offset + s.length for s in self.local)])
        self.dst_numel = max([0, *(one.end for one in self.recvs), *(s.dst_offset + s.length for s in self.local)])
        self._sum_terms: dict[tuple[int, int | None, bool], tuple[Contribution, ...]] = {}
        # What several peers get is gathered once: replicas of one shape all want the same parts of a shard.
        self._gathered = {run.parts: run for run in self._leaving if not run.in_place}
        self._landing = tuple(run for message in self._coming for run in message if not run.in_place)
        self._pull_cuts = Cuts([run.numel for run in (*self._gathered.values(), *self._landing)])
        received = [message.numel for message in self.recvs]
        self._push_cuts = {
            cast: Cuts([*(run.numel for run in self._leaving if cast or not run.in_place), *received])
            for cast in (False, True)
        }

    @cached_property
    def _sent_in_place(self) -> Cover:
        """What peers are sent out of the source itself; several may be sent overlapping intervals."""
        covered = Cover()
        for run in self._leaving:
            if run.in_place:
                covered.add(run.parts[0].offset, run.parts[0].offset + run.numel)
        return covered

    @property
    def pull_scratch(self) -> int:
        """Elements of scratch memory that a pull takes."""
        return self._pull_cuts.numel

    def push_scratch(self, *, cast: bool) -> int:
        """Elements of scratch memory, in the wire's dtype, that a push takes; `cast`: the source has another dtype."""
        return self._push_cuts[cast].numel

    def push_bytes(self, src: torch.dtype, wire: torch.dtype, dst: torch.dtype) -> int:
        """Bytes of scratch memory that a push takes, for the dtypes of source, wire and destination."""
        return wire.itemsize * self.push_scratch(cast=wire != src)

    @property
    def operations(self) -> Operations:
        """See `Mover.operations`."""
        return Operations(len(self._leaving) + sum(map(len, self._coming)))

    @property
    def sent_numel(self) -> int:
        """Elements that this rank sends to others."""
        return sum(envelope.numel for envelope in self.sends)

    @property
    def received_numel(self) -> int:
        """Elements that this rank receives from others."""
        return sum(envelope.numel for envelope in self.recvs)

    def pull(
        self, src: Tensor, dst: Tensor, *, tag: int = 0, scratch: Tensor | None = None, cast: Tensor | None = None
    ) -> Handle:
        """See `PullMover.pull`."""
        self._check(src, dst)
        wire = src if src.dtype == dst.dtype else cast
        if wire is None or wire.dtype != dst.dtype or wire.shape != src.shape:
            raise PlanError(f"rank {self.rank} pulls {src.dtype} into {dst.dtype}; give memory to cast the source to")
        space = iter(self._pull_cuts.of(_scratch(scratch, self.pull_scratch, dst.dtype, dst.device)))
        if wire is not src:  # all else is cast where it is copied
            for start, stop in zip(self._sent_in_place.starts, self._sent_in_place.stops, strict=True):
                wire[start:stop].copy_(src[start:stop])
        gathered = {parts: run.gather(src, next(space)) for parts, run in self._gathered.items()}
        landing = list(zip(self._landing, space, strict=True))
        spread = iter(landing)
        sends = [(run.peer, run.interval(wire) if run.in_place else gathered[run.parts]) for run in self._leaving]
        recvs = [
            (run.peer, run.interval(dst) if run.in_place else next(spread)[1])
            for message in self._coming
            for run in message
        ]
        work = self.transport.exchange(sends, recvs, tag)
        for src_offset, dst_offset, length in self.local:
            dst.narrow(0, dst_offset, length).copy_(src.narrow(0, src_offset, length))

        def arrived() -> None:
            for run, message in landing:
                run.scatter(message, dst)

        return Handle(work, arrived)

    def push(
        self,
        src: Tensor,
        dst: Tensor,
        *,
        wire_dtype: torch.dtype | None = None,
        accumulate: bool = False,
        tag: int = 0,
        scratch: Tensor | None = None,
    ) -> Handle:
        """See `Mover.push`; contributions are added one after the other in rank order, the rank's own in its turn.

        `scratch`: `push_bytes` bytes, the transfer's until it has been waited for.
        """
        self._check(src, dst)
        wire = wire_dtype or src.dtype
        cast = wire != src.dtype
        given = None if scratch is None else scratch.view(wire)
        space = iter(self._push_cuts[cast].of(_scratch(given, self.push_scratch(cast=cast), wire, src.device)))
        sends = [
            (run.peer, run.interval(src) if run.in_place and not cast else run.gather(src, next(space)))
            for run in self._leaving
        ]
        # Contributions never land in `dst` itself, not even those of one interval: all of them are held until every one
        # has come, so that they can be added in rank order and not as they arrive.
        messages = {envelope.peer: next(space) for envelope in self.recvs}
        recvs = [
            (run.peer, part)
            for runs in self._coming
            for run, part in zip(runs, _parts(messages[runs[0].peer], runs), strict=True)
        ]
        work = self.transport.exchange(sends, recvs, tag)
        return Handle(work, lambda: self._sum({self.rank: src} | messages, dst, accumulate))

    def hops(self, src: Tensor, dst: Tensor) -> tuple[Hop, ...]:
        """See `Mover.hops`."""
        return (Hop(self.rank, self.sends, self.recvs, self.local, src, dst),)

    def _sum(self, messages: dict[int, Tensor], dst: Tensor, accumulate: bool) -> None:
        """Sum the senders' messages into `dst`; `messages[rank]` of the rank itself is its whole source buffer."""
        on_cpu = dst.device.type == "cpu"
        terms = self._terms(dst.numel(), SUM_BLOCK_ON_CPU if on_cpu else None, accumulate)
        # On a CPU adding across dtypes takes many times as long as casting first and adding then. An accelerator casts
        # while it adds, and needs no memory for it. The bits are the same.
        widest = max(
            (t.length for t in terms if on_cpu and t.sender is not None and messages[t.sender].dtype != dst.dtype),
            default=0,
        )
        cast = torch.empty(widest, dtype=dst.dtype, device=dst.device)
        for sender, src_offset, dst_offset, length, first in terms:
            target = dst.narrow(0, dst_offset, length)
            if sender is None:
                target.zero_()
                continue
            source = messages[sender].narrow(0, src_offset, length)
            if first:
                target.copy_(source)  # casts while it writes
            elif source.dtype == dst.dtype or not on_cpu:
                target.add_(source)
            else:
                target.add_(cast.narrow(0, 0, length).copy_(source))

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


def _at_sender(peer: int, slices: Sequence[Slice]) -> Envelope:
    return Envelope.of_intervals(peer, ((piece.src_offset, piece.length) for piece in slices))


def _at_receiver(peer: int, slices: Sequence[Slice]) -> Envelope:
    return Envelope.of_intervals(peer, ((piece.dst_offset, piece.length) for piece in slices))


def _parts(message: Tensor, runs: Sequence[Envelope]) -> Sequence[Tensor]:
    """A message cut into its runs."""
    return (message,) if len(runs) == 1 else message.split([run.numel for run in runs])


def _scratch(given: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The scratch memory of a transfer: what was given, which must do, or memory of its own."""
    if given is None:
        return torch.empty(numel, dtype=dtype, device=device)
    assert given.dtype == dtype, f"scratch memory of {given.dtype} for messages of {dtype}"
    assert given.numel() >= numel, f"{given.numel()} elements of scratch memory, the transfer needs {numel}"
    return given
