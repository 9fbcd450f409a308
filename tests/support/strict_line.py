"""Operations in; run in a thread one after the other, as kernels on a stream are, with memory that must be left alone.

An `Operation` is an exchange or a collective. From its start until it is waited for, what it writes holds nothing that
could be taken for data, and nobody may write to it, nor to what it reads.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_MOST_SLEEP_S = 0.02


class StrictError(AssertionError):
    """What a network with NCCL's rules would hang at or get wrong."""


@dataclass(frozen=True)
class Rules:
    """What is checked besides order, serial operations, rendezvous and memory; any of them together."""

    connect: bool = False
    lazy: bool = False
    blocking: bool = False
    one_queue: bool = False
    sleeps: int | None = None  # seed of pauses of up to 20 ms, before operations are started and before they run
    stall_s: float = 30.0  # after which a wait counts as one for ever

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for a part of an operation. StrictError, which says `what` it was, when it takes too long."""
        try:
            work.wait(timedelta(seconds=self.stall_s))
        except RuntimeError as error:
            raise StrictError(f"{what} for {self.stall_s} s and more: it would wait for ever") from error


class Line:
    """Runs operations one after the other, in the order in which they are started."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="strict line")
        self._thread.start()

    def put(self, operation: Operation) -> None:
        """Run it when all before it are over."""
        self._queue.put(operation)

    def close(self) -> None:
        """Return when all is over."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (operation := self._queue.get()) is not None:
            if self.failure is None:
                try:
                    operation.run()
                except Exception as error:  # whatever it is, whoever waits for the operation must hear of it
                    self.failure = error
            operation.over.set()


class Owner:
    """Starts operations of one kind, and knows which of them have not been waited for."""

    def __init__(self, rules: Rules, rank: int):
        self.rules, self.rank = rules, rank
        self.unwaited: list[Operation] = []
        sleeps = [random.Random(f"{rules.sleeps} {rank} {place}") for place in ("host", "line")]
        self._host, self._in_line = sleeps

    def start(self, operation: Operation) -> None:
        """Put an operation on its line, and block the host if the rules say so."""
        for other in self.unwaited:
            other.refuse_overlap(operation)
        self._sleep(self._host)
        operation.begin()
        self.unwaited.append(operation)
        operation.line.put(operation)
        if self.rules.blocking:
            operation.wait_over()

    def sleep_in_line(self) -> None:
        """The pause before an operation runs, if the rules have pauses."""
        self._sleep(self._in_line)

    def refuse_unwaited(self) -> None:
        """StrictError that names operations that were never waited for."""
        if self.unwaited:
            raise StrictError(f"{', '.join(map(str, self.unwaited))}: never waited for")

    def _sleep(self, drawn: random.Random) -> None:
        if self.rules.sleeps is not None:
            time.sleep(_MOST_SLEEP_S * drawn.random() ** 4)  # mostly short ones, so that a step takes seconds


class Part(NamedTuple):
    """Memory that an operation reads or writes, and how it is told: "sends to rank 1", say."""

    does: str
    tensor: Tensor


class Operation(ABC):
    """One exchange or collective, from its start until it is waited for.

    `copies` are what it reads and `arrived` what it will have written; it runs with these alone.
    """

    def __init__(self, owner: Owner, line: Line, reads: Sequence[Part], writes: Sequence[Part]):
        self.owner, self.line, self.reads, self.writes = owner, line, tuple(reads), tuple(writes)
        self.over = threading.Event()
        self.copies = [part.tensor.detach().clone() for part in reads]
        self.arrived = [torch.empty_like(part.tensor, requires_grad=False) for part in writes]
        self._blank: list[Tensor] = []

    @abstractmethod
    def run(self) -> None:
        """Do it, in the line's thread. StrictError for what breaks a rule."""

    @torch.no_grad()
    def begin(self) -> None:
        """From now on what it writes holds nothing that could be taken for data, but for what it also reads."""
        for part in self.writes:
            part.tensor.fill_(_nothing(part.tensor))
        for part, copy in zip(self.reads, self.copies, strict=True):
            if any(overlap(part.tensor, written.tensor) for written in self.writes):
                part.tensor.copy_(copy)
        self._blank = [part.tensor.detach().clone() for part in self.writes]

    def wait_over(self) -> None:
        """Return when it has been done, without touching what it writes."""
        self.over.wait()
        if self.line.failure is not None:
            raise self.line.failure

    @torch.no_grad()
    def wait(self) -> None:
        """As `Work.wait`; StrictError if what it reads or writes has been written to meanwhile."""
        if self not in self.owner.unwaited:
            return
        self.owner.unwaited.remove(self)
        self.wait_over()
        for part, copy in zip(self.reads, self.copies, strict=True):
            if not _equal(part.tensor, copy):
                raise StrictError(f"{self}: what it {part.does} was changed before it was waited for")
        for part, blank in zip(self.writes, self._blank, strict=True):
            if not _equal(part.tensor, blank):
                raise StrictError(f"{self}: where it {part.does} was written before it was waited for")
        for part, message in zip(self.writes, self.arrived, strict=True):
            part.tensor.copy_(message)

    wait_receives = wait

    def refuse_overlap(self, later: Operation) -> None:
        """StrictError if a later operation takes memory of this one, which has not been waited for."""
        for mine, others in ((self.writes, (*later.reads, *later.writes)), (self.reads, later.writes)):
            for part in mine:
                if any(overlap(part.tensor, other.tensor) for other in others):
                    raise StrictError(f"{later} takes memory that {self} {part.does}, before that is waited for")


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may share memory: whether the bytes from their first to their last element do."""
    (start, stop), (first, last) = span(one), span(other)
    return max(start, first) < min(stop, last)


def span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor and of the one behind its last; equal for one without memory."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return 0, 0
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _nothing(buffer: Tensor) -> Any:
    return float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max


def _equal(one: Tensor, other: Tensor) -> bool:
    """To the bit, as a NaN is not even equal to itself."""
    return torch.equal(*(tensor.detach().contiguous().view(torch.uint8) for tensor in (one, other)))
