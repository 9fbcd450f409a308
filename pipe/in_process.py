"""All ranks of a pipeline in one process: threads that take turns, with real collectives between them in memory.

One rank runs at a time. When it waits for another, the next one that can go on does so, in the order of ranks. So two
runs of one program do the same in the same order, no code under the ranks has to be safe for threads, and a wait
that nobody will end is told at once, with what every rank waits for, where a job of processes hangs until its time-out.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.zero_hetero.transport import InProcessTransport, Parcel, Post, Transport, Work

Result = TypeVar("Result")

_REDUCE: tuple[tuple[Any, Callable[[Tensor, Tensor], Tensor]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
)


class InProcessRanks:
    """Ranks 0..num_ranks-1 of one process and the groups and transports between them.

    Tensors must be on the CPU: there a backward runs in the thread that asked for it, so backwards of several ranks can
    wait for each other. A CUDA device has one thread for the backwards of all of them, which would wait for itself.
    """

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._waits: dict[int, _Wait] = {}
        self._running: list[int] = []  # ranks whose program has not ended
        self._error: BaseException | None = None
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._post = Post()

    def group(self, members: Sequence[int], rank: int) -> dist.ProcessGroup:
        """The process group of `members` as `rank`, one of them, sees it; all that name the same members share it."""
        meeting = self._meetings.setdefault(tuple(members), _Meeting(tuple(members)))
        return _MemoryGroup(self, meeting, rank)

    def transport(self, rank: int) -> Transport:
        """Point-to-point messages of `rank`; peers are ranks."""
        return _MemoryTransport(self, self._post, rank)

    def run(self, program: Callable[[int], Result]) -> list[Result]:
        """Call `program(rank)` on all ranks, each in a thread of its own; their results, by rank.

        The first error of a rank ends the others and is raised here; the ranks cannot be used after that. Grad mode is
        the caller's. Whatever else belongs to the caller's thread (autocast, function modes) does not reach the ranks.
        """
        results: list[Any] = [None] * self.num_ranks
        self._running, grad = list(range(self.num_ranks)), torch.is_grad_enabled()

        def body(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                if self._error is None:
                    with torch.set_grad_enabled(grad):
                        results[rank] = program(rank)
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._running.remove(rank)
                self._hand_on(rank)

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return results

    def wait_until(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let the other ranks run until `ready()`; `what` says what `rank` waits for."""
        if ready():
            return
        self._waits[rank] = _Wait(ready, what)
        self._hand_on(rank)
        self._turns[rank].acquire()
        del self._waits[rank]
        if self._error is not None:
            raise _AbandonedError

    def _hand_on(self, rank: int) -> None:
        """Give the turn to the next rank that can go on; after an error every rank can, to its end."""
        in_turn = sorted(self._running, key=lambda peer: (peer - rank - 1) % self.num_ranks)
        for peer in in_turn:
            wait = self._waits.get(peer)
            if self._error is not None or wait is None or wait.ready():
                self._turns[peer].release()
                return
        if in_turn:
            waits = "; ".join(f"rank {peer} waits for {self._waits[peer].what}" for peer in sorted(in_turn))
            ended = "" if len(in_turn) == self.num_ranks else "; the other ranks have ended"
            self._error = RuntimeError(f"no rank can go on: {waits}{ended}")
            self._turns[in_turn[0]].release()


class _Wait(NamedTuple):
    ready: Callable[[], bool]
    what: str


class _AbandonedError(BaseException):
    """Ends a rank that waits after another has failed; no `except Exception` on the way may keep it."""


class _Offer(NamedTuple):
    """What one rank hands in for a collective; `kind` must be the same on all ranks."""

    kind: tuple[Any, ...]
    source: Tensor
    targets: Sequence[Tensor]
    send: Sequence[int] = ()  # elements for each rank
    receive: Sequence[int] = ()


_Work = Callable[[Sequence[_Offer]], None]


class _Meeting:
    """A group's next collective: the last rank to join computes it for all, and sums run in the order of ranks."""

    def __init__(self, members: tuple[int, ...]):
        self.members = members
        self.offers: dict[int, _Offer] = {}
        self.held = 0  # collectives so far

    def hold(self, ranks: InProcessRanks, rank: int, offer: _Offer, work: _Work) -> None:
        """Hand in `offer`; return when `work` has been done on the offers of all members, in their order."""
        assert offer.source.device.type == "cpu", "the ranks of one process compute on the CPU"
        self.offers[rank] = offer
        if len(self.offers) < len(self.members):
            number = self.held
            ranks.wait_until(rank, lambda: self.held > number, f"{offer.kind[0]} of ranks {self.members}")
            return
        offers = [self.offers[member] for member in self.members]
        self.offers, self.held = {}, self.held + 1
        if len({given.kind for given in offers}) > 1:
            asked = "; ".join(
                f"rank {member}: {given.kind}" for member, given in zip(self.members, offers, strict=True)
            )
            raise RuntimeError(f"the ranks of a group ask for different collectives: {asked}")
        with torch.no_grad():
            work(offers)


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _MemoryGroup(dist.ProcessGroup):
    """What `torch.distributed` calls for a collective of one group.

    Like gloo's, its results do not count as changes in place to autograd: they are written through `.data`.
    """

    def __init__(self, ranks: InProcessRanks, meeting: _Meeting, rank: int):
        super().__init__(meeting.members.index(rank), len(meeting.members))  # type: ignore[call-arg]
        self._ranks, self._meeting, self._rank = ranks, meeting, rank

    def _hold(self, kind: tuple[Any, ...], source: Tensor, targets: Sequence[Tensor], work: _Work) -> _Done:
        offer = _Offer((*kind, tuple(source.shape), source.dtype), source, targets)
        self._meeting.hold(self._ranks, self._rank, offer, work)
        return _Done()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        (tensor,) = tensors
        asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        # In this order: the left one knows the other.
        reduce = next(function for op, function in _REDUCE if asked == op)

        def work(offers: Sequence[_Offer]) -> None:
            total = offers[0].source.clone()
            for offer in offers[1:]:
                reduce(total, offer.source, out=total)  # type: ignore[call-arg]
            for offer in offers:
                offer.targets[0].data.copy_(total)

        return self._hold(("all_reduce", reduce.__name__), tensor, (tensor,), work)

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Done:
        (targets,), (source,) = outputs, inputs

        def work(offers: Sequence[_Offer]) -> None:
            for offer in offers:
                for target, given in zip(offer.targets, offers, strict=True):
                    target.data.copy_(given.source)

        return self._hold(("all_gather",), source, targets, work)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Done:
        def work(offers: Sequence[_Offer]) -> None:
            for offer in offers:
                offer.targets[0].data.copy_(torch.cat([given.source for given in offers]))

        return self._hold(("all_gather_single",), source, (output,), work)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Done:
        def work(offers: Sequence[_Offer]) -> None:
            total = offers[0].source.clone()
            for offer in offers[1:]:
                total += offer.source
            for offer, part in zip(offers, total.chunk(len(offers)), strict=True):
                offer.targets[0].data.copy_(part)

        return self._hold(("reduce_scatter_single",), source, (output,), work)

    # What torch before 2.13 calls them.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # type: ignore[assignment]

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> _Done:
        offer = _Offer(("all_to_all", source.dtype), source, (output,), tuple(input_sizes), tuple(output_sizes))
        self._meeting.hold(self._ranks, self._rank, offer, self._exchange)
        return _Done()

    def _exchange(self, offers: Sequence[_Offer]) -> None:
        members = self._meeting.members
        for to, taker in enumerate(offers):
            parts = [offer.source.split(list(offer.send))[to] for offer in offers]
            for giver, part, size in zip(members, parts, taker.receive, strict=True):
                if len(part) != size:
                    raise RuntimeError(f"rank {giver} sends {len(part)} to rank {members[to]}, which expects {size}")
            taker.targets[0].data.copy_(torch.cat(parts))


class _MemoryTransport:
    """`InProcessTransport` whose receives let the other ranks run until their messages are there."""

    serial = True

    def __init__(self, ranks: InProcessRanks, post: Post, rank: int):
        self._ranks, self._post, self._rank = ranks, post, rank
        self._inner = InProcessTransport(post, rank)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], tag: int = 0) -> Work:
        delivery = self._inner.exchange(sends, recvs, tag)
        expected = Counter(peer for peer, _ in recvs)
        boxes = [(self._post.boxes[peer, self._rank, tag], count) for peer, count in expected.items()]
        what = f"messages of ranks {tuple(expected)} with tag {tag}"
        return _Arrival(
            lambda: self._ranks.wait_until(self._rank, lambda: all(len(box) >= n for box, n in boxes), what), delivery
        )


class _Arrival:
    def __init__(self, arrive: Callable[[], None], delivery: Work):
        self._arrive, self._delivery = arrive, delivery
        self._arrived = False

    def wait_receives(self) -> None:
        if not self._arrived:
            self._arrive()
            self._arrived = True
        self._delivery.wait_receives()

    wait = wait_receives
