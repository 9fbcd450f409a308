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

A plan and this rank's local buffers go in, as with a `Link`; steps follow each other as [Note: lanes] says.

[Note: checksum] Element p of a message counts as its bits, read as an integer, times the odd number 2 (p + base) + 1;
sums wrap at 2^64. If one element is wrong, the sum changes by the difference of its bits times an odd number. That is
never a multiple of 2^64, so one wrong element is always seen. Differences of several elements could cancel, but each
place has a factor of its own, so that elements which changed places do not simply do so. `base` is 2^40 times the
number of the hop, more than a message has elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ds_hydra.zero_hetero.contributions import Contribution, Cover, order_contributions
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import padded
from ds_hydra.zero_hetero.scratch_plan import Window, end_of, piece_of, runs_of, twin_push_windows
from ds_hydra.zero_hetero.transfer_plan import Slice, TransferPlan
from ds_hydra.zero_hetero.transport import Collectives, Envelope, Lane, Part, Transport, Work
from ds_hydra.zero_hetero.twin_plan import Shared, TwinPull, TwinPush


class Scratch:
    """Scratch memory of one rank; one strategy at a time uses it."""

    def __init__(self, device: torch.device | str, num_bytes: int = 0):
        self._block = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @classmethod
    def within(cls, block: Tensor) -> Scratch:
        """Scratch memory in these bytes, which somebody else uses when nothing is under way."""
        scratch = cls(block.device)
        scratch._block = block
        return scratch

    @property
    def num_bytes(self) -> int:
        """Bytes that are held now."""
        return self._block.numel()

    def fit(self, num_bytes: int) -> None:
        """Hold exactly this many bytes from now on, with arbitrary contents. Nothing may be under way.

        So a step holds what its own strategy needs, and what only another one needed is there for activations.
        """
        if num_bytes != self.num_bytes:
            device = self._block.device
            self._block = torch.empty(0, dtype=torch.uint8, device=device)  # both at once might not fit
            self._block = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def at(self, window: Window, dtype: torch.dtype) -> Tensor:
        """The bytes of a window, flat, as elements of `dtype`."""
        assert window.stop <= self.num_bytes, f"{window} is beyond the {self.num_bytes} bytes that were fitted"
        return self._block[window.start : window.stop].view(dtype)


class Cuts:
    """How a flat tensor is cut into tensors of given sizes, aligned. Cutting costs one call, however many they are."""

    def __init__(self, numels: Sequence[int]):
        self.numel = sum(padded(numel) for numel in numels)
        self._sizes: list[int] = []
        self._wanted: list[int] = []  # the others are gaps
        for numel in numels:
            self._wanted.append(len(self._sizes))
            self._sizes += [numel, padded(numel) - numel] if numel < padded(numel) else [numel]

    def of(self, buffer: Tensor) -> Sequence[Tensor]:
        """Tensors of shapes (numels[i],) with the memory of `buffer`, which has at least `numel` elements."""
        parts = buffer[: self.numel].split(self._sizes) if self._sizes else ()
        return parts if len(parts) == len(self._wanted) else [parts[index] for index in self._wanted]


class Hop(NamedTuple):
    """One rank's part of one transfer between two flat buffers, for those who check what was moved."""

    rank: int
    sends: tuple[Envelope, ...]
    recvs: tuple[Envelope, ...]
    local: tuple[Slice, ...]
    src: Tensor
    dst: Tensor


class Operations(NamedTuple):
    """What a rank asks of the network to move something once."""

    messages: int  # sends and receives, each run of a message by itself
    teams: tuple[int, ...] = ()  # the members of each collective

    @property
    def number(self) -> int:
        """Operations; a collective is one."""
        return self.messages + len(self.teams)

    @property
    def alone(self) -> int:
        """Sends and receives, if there were no collectives."""
        return self.messages + 2 * sum(members - 1 for members in self.teams)


class Movement(Protocol):
    """A pull or a push under way. Until `wait()` returns, neither of its buffers may be written.

    A movement that is over ignores further calls.
    """

    def advance(self) -> bool:
        """Begin the next step, which needs what the one before brings; False if there is none. See [Note: lanes]."""

    def wait_arrived(self) -> None:
        """Return when the destination is complete; the source may still be on its way."""

    def wait(self) -> None:
        """Return when the destination is complete and the source may be written again."""


class Mover(Protocol):
    """One rank's part of a transfer from a source layout to a destination layout, to be run any number of times.

    A link of twins pulls or pushes; a plain one does either.
    """

    @property
    def sent_numel(self) -> int:
        """Elements that this rank sends to others, in all steps."""

    @property
    def received_numel(self) -> int:
        """Elements that this rank receives from others, in all steps."""

    @property
    def operations(self) -> Operations:
        """Messages and collectives that this rank takes part in."""


class PullMover(Mover, Protocol):
    """A mover that pulls."""

    @property
    def pull_scratch(self) -> int:
        """Elements of scratch memory that a pull takes."""

    def pull(
        self, src: Tensor, dst: Tensor, *, tag: int = 0, scratch: Tensor | None = None, cast: Tensor | None = None
    ) -> Movement:
        """Start to copy everybody's `src` to everybody's `dst`, the local buffers of the two layouts.

        Both are flat and contiguous; dst's dtype is also the one on the wire. Elements of `dst` outside the plan stay
        as they are. `scratch` is flat memory of that dtype with at least `pull_scratch` elements, the transfer's until
        it has been waited for; None: memory of its own. `cast`, where src has another dtype: memory of its shape and
        the wire's dtype, likewise the transfer's. Raises `PlanError` for buffers that do not fit the plan.
        """

    def hops(self, src: Tensor, dst: Tensor) -> Sequence[Hop]:
        """The transfers that `pull(src, dst)` consists of, in order."""


class PushMover(Mover, Protocol):
    """A mover that pushes."""

    def push_bytes(self, src: torch.dtype, wire: torch.dtype, dst: torch.dtype) -> int:
        """Bytes of scratch memory that a push takes, for the dtypes of source, wire and destination."""

    def push(
        self,
        src: Tensor,
        dst: Tensor,
        *,
        wire_dtype: torch.dtype | None = None,
        accumulate: bool = False,
        tag: int = 0,
        scratch: Tensor | None = None,
    ) -> Movement:
        """Start to sum everybody's `src`, the contributions, into everybody's `dst`.

        Waiting fills the whole of `dst`, with zeros where nobody contributes. With `accumulate` it adds to what
        `dst` holds, as a later phase of a step must: see [Note: order of a sum]. `dst` is not touched before one
        waits, so pushes into one `dst` add up in the order in which they are waited for.

        Sums are taken in dst's dtype and in an order that the plan fixes, so they are the same to the bit each
        time. Messages travel as `wire_dtype` (default: src's own). `scratch`: `push_bytes` bytes, the transfer's
        until it has been waited for; None: memory of its own. Raises `PlanError` for buffers that do not fit the plan.
        """


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


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 20  # elements that are widened to 64 bits at a time
_HOP_SHIFT = 40  # messages have fewer than 2^40 elements


def checksums_of(hops: Sequence[Hop], ranks: int, *, first: int = 0) -> Tensor:
    """int64 of shape (2, ranks) on CPU: of all that this rank sent to each rank, and of what it holds from each.

    Each of `hops` was a pull between flat tensors as they were on the wire. The sum of what rank i sent to j equals
    that of what j holds from i, unless something was changed on the way or afterwards. `first` is the number of the
    first of the hops.
    """
    totals = torch.zeros(2, ranks, dtype=torch.int64, device=hops[0].src.device)
    for index, (rank, sends, recvs, local, src, dst) in enumerate(hops, start=first):
        base = index << _HOP_SHIFT
        for envelope in sends:
            totals[0, envelope.peer] += _checksum(src, envelope.parts, base)
        for envelope in recvs:
            totals[1, envelope.peer] += _checksum(dst, envelope.parts, base)
        for src_offset, dst_offset, length in local:
            # A local move has no message; its elements count by their place in the source on both sides.
            totals[0, rank] += _checksum(src, [Part(src_offset, src_offset, length)], base)
            totals[1, rank] += _checksum(dst, [Part(dst_offset, src_offset, length)], base)
    return totals.cpu()


def _checksum(buffer: Tensor, parts: Iterable[Part], base: int) -> Tensor:
    """The sum of the parts' elements, a scalar; see [Note: checksum]. They count by their place in the message."""
    bits = buffer.detach().view(_BITS[buffer.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for part in parts:
        for start in range(0, part.length, _BLOCK):
            stop = min(start + _BLOCK, part.length)
            first = base + part.position + start
            # int64 products and sums wrap, which is what is wanted here.
            odd = torch.arange(first, first + stop - start, device=buffer.device).mul_(2).add_(1)
            total += odd.mul_(bits[part.offset + start : part.offset + stop]).sum()
    return total
