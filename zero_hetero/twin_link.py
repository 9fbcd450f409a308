"""LNK with twins: a bucket's parts enter and are gathered, or are traded, summed and leave. See [Note: twins].

A plan and this rank's local buffers go in, as with a `Link`; steps follow each other as [Note: lanes] says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_hydra.zero_hetero.collectives import Collectives
from ds_hydra.zero_hetero.envelope import Envelope
from ds_hydra.zero_hetero.lane import Lane
from ds_hydra.zero_hetero.link import SUM_BLOCK_ON_CPU, Handle, Link
from ds_hydra.zero_hetero.mover import Hop, Operations
from ds_hydra.zero_hetero.scratch_plan import Window, end_of, piece_of, twin_push_windows
from ds_hydra.zero_hetero.transfer_plan import TransferPlan
from ds_hydra.zero_hetero.transport import Transport
from ds_hydra.zero_hetero.twin_plan import Shared, TwinPull, TwinPush

LEAVE_TAG = 1 << 20
"""Added to the tag of a push: what leaves is of another dtype than what is traded."""
_STEPS = 2  # of a pull: what enters, and a gather


class Steps:
    """A pull or push of several steps, each of which reads what the one before has brought. See `Movement`."""

    def __init__(self, first: Handle, later: Sequence[Callable[[], Handle]], lane: Lane):
        self._begun, self._later, self._lane = [first], list(later), lane
        self._mark: Any = None
        self._over = False

    def advance(self) -> bool:
        """See `Movement`."""
        if not self._later:
            return False
        with self._lane.aside():
            self._begun[-1].wait_arrived()
            self._begun.append(self._later.pop(0)())
            self._mark = self._lane.mark()
        return True

    def wait_arrived(self) -> None:
        """See `Movement`."""
        if self._over:
            return
        while self.advance():
            pass
        if self._mark is not None:
            self._lane.wait(self._mark)
        self._begun[-1].wait_arrived()

    def wait(self) -> None:
        """See `Movement`."""
        if not self._over:
            self.wait_arrived()
            # Earlier steps have arrived long ago; waiting for them as well frees their sends and scratch memory.
            for handle in reversed(self._begun):
                handle.wait()
            self._over = True


class _TwinLink:
    """One rank's part of what twins share, and of the transfer beside it: what enters, or leaves."""

    def __init__(
        self, plan: Shared, beside: TransferPlan, rank: int, transport: Transport, collectives: Collectives, lane: Lane
    ):
        self.rank, self._beside = rank, Link(beside, rank, transport)
        self.members, self.part = plan.part_of(rank)
        self._collectives, self._lane = collectives, lane

    @property
    def sent_numel(self) -> int:
        """Elements that this rank sends to others, in both steps, if it sends to each by itself."""
        return self._beside.sent_numel + (len(self.members) - 1) * self.part

    @property
    def received_numel(self) -> int:
        """Elements that this rank receives from others, in both steps."""
        return self._beside.received_numel + (len(self.members) - 1) * self.part


class TwinPullLink(_TwinLink):
    """Runs one rank's part of a `TwinPull`; see `Mover`. The destination buffer has the twins' padded size."""

    def __init__(self, plan: TwinPull, rank: int, transport: Transport, *, collectives: Collectives, lane: Lane):
        super().__init__(plan, plan.enter, rank, transport, collectives, lane)

    @property
    def operations(self) -> Operations:
        """See `Mover.operations`."""
        return Operations(self._beside.operations.messages, (len(self.members),) if self.part else ())

    @property
    def pull_scratch(self) -> int:
        """Elements of scratch memory that a pull takes: parts are gathered in place."""
        return self._beside.pull_scratch

    def pull(
        self, src: Tensor, dst: Tensor, *, tag: int = 0, scratch: Tensor | None = None, cast: Tensor | None = None
    ) -> Steps:
        """See `PullMover.pull`."""
        later = [partial(self._gather, dst, tag)] if self.part else []
        # Both steps may use one tag: a transport delivers what has one tag in the order in which it was sent.
        return Steps(self._beside.pull(src, dst, tag=tag, scratch=scratch, cast=cast), later, self._lane)

    def _gather(self, buffer: Tensor, tag: int) -> Handle:
        parts = buffer.narrow(0, 0, len(self.members) * self.part)
        return Handle(self._collectives.gather(parts, self.members, tag=tag), _nothing)

    def hops(self, src: Tensor, dst: Tensor) -> tuple[Hop, ...]:
        """See `Mover.hops`."""
        found = list(self._beside.hops(src, dst))
        if self.part:
            places = [
                Envelope.of_intervals(peer, [(index * self.part, self.part)]) for index, peer in enumerate(self.members)
            ]
            own = places.pop(self.members.index(self.rank))
            sends = tuple(own._replace(peer=place.peer) for place in places)
            found.append(Hop(self.rank, sends, tuple(places), (), dst, dst))
        # All ranks number the steps of all buckets alike, also those who have fewer steps [Note: checksum].
        return *found, *[Hop(self.rank, (), (), (), dst, dst)] * (_STEPS - len(found))


class TwinPushLink(_TwinLink):
    """Runs one rank's part of a `TwinPush`; sources have the twins' padded size. See `Mover.push`.

    Every contribution to a trade, a rank's own too, is rounded to the wire's dtype; sums leave in the masters'.
    """

    def __init__(self, plan: TwinPush, rank: int, transport: Transport, *, collectives: Collectives, lane: Lane):
        super().__init__(plan, plan.leave, rank, transport, collectives, lane)
        self._piece = piece_of(len(self.members), self.part)

    @property
    def operations(self) -> Operations:
        """See `Mover.operations`."""
        pieces = -(-self.part // self._piece) if self.part else 0
        return Operations(self._beside.operations.messages, (len(self.members),) * pieces)

    def push_bytes(self, src: torch.dtype, wire: torch.dtype, dst: torch.dtype) -> int:
        """Bytes of scratch memory that a push takes, for the dtypes of source, wire and destination."""
        return end_of(self._windows(src, wire, dst))

    def _windows(self, src: torch.dtype, wire: torch.dtype, dst: torch.dtype) -> tuple[Window, ...]:
        leave = self._beside.push_scratch(cast=not self.part and src != dst)
        return twin_push_windows(len(self.members), self.part, leave, (wire.itemsize, dst.itemsize), cast=wire != src)

    def push(
        self,
        src: Tensor,
        dst: Tensor,
        *,
        wire_dtype: torch.dtype | None = None,
        accumulate: bool = False,
        tag: int = 0,
        scratch: Tensor | None = None,
    ) -> Handle | Steps:
        """See `Mover.push`; `scratch`: `push_bytes` bytes, the transfer's until it has been waited for."""
        wire = wire_dtype or src.dtype
        out = partial(self._beside.push, dst=dst, wire_dtype=dst.dtype, accumulate=accumulate, tag=tag + LEAVE_TAG)
        if not self.part:
            return out(src, scratch=scratch)
        if scratch is None:
            scratch = torch.empty(self.push_bytes(src.dtype, wire, dst.dtype), dtype=torch.uint8, device=src.device)
        own, came, sums, rest = (
            scratch[window.start : window.stop] for window in self._windows(src.dtype, wire, dst.dtype)
        )
        members, total = len(self.members), sums.view(dst.dtype)[: self.part]
        parts = src[: members * self.part].view(members, self.part)
        begun: list[Handle] = []

        def trade(start: int) -> Handle:
            """Begin with the piece from element `start` of every part on; the one before is over then."""
            for before in begun[-1:]:
                before.wait()  # all of it: its memory is this one's
            piece = parts[:, start : start + self._piece]
            shape, numel = piece.shape, piece.numel()
            if wire != src.dtype or self._piece < self.part:
                piece = own.view(wire)[:numel].view(shape).copy_(piece)
            rows, target = came.view(wire)[:numel].view(shape), total[start : start + shape[1]]
            work = self._collectives.trade(piece.view(-1), rows.view(-1), self.members, tag=tag)
            begun.append(Handle(work, lambda: _sum(rows, target)))
            return begun[-1]

        later = [partial(trade, start) for start in range(self._piece, self.part, self._piece)]
        return Steps(trade(0), [*later, lambda: out(total, scratch=rest)], self._lane)


def _nothing() -> None:
    """What has arrived is at its place."""


def _sum(rows: Tensor, total: Tensor) -> None:
    """Add up the rows (contributors, elements) into `total` (elements,), in its dtype."""
    if total.device.type != "cpu":
        # One kernel, however many rows; it adds them in an order that follows from the shape alone.
        torch.sum(rows, dim=0, dtype=total.dtype, out=total)
        return
    # One row after the other. A block stays in cache until every row has been added to it; to cast a part first and
    # then add it takes a fraction of the time of adding across dtypes.
    cast = torch.empty(min(SUM_BLOCK_ON_CPU, total.numel()), dtype=total.dtype)
    for start in range(0, total.numel(), SUM_BLOCK_ON_CPU):
        block = total[start : start + SUM_BLOCK_ON_CPU]
        first, *others = rows[:, start : start + block.numel()]
        block.copy_(first)
        for part in others:
            block.add_(part if part.dtype == block.dtype else cast[: block.numel()].copy_(part))
