"""Operations run one after the other in a thread, as kernels on a stream, with memory that must be left alone."""

from __future__ import annotations

import functools
import queue
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


# --- Operations under way, and what is done in a lane, in; a StrictError in the operation that uses their
# memory out. On a device the work of a lane may still be to come when the host has long left it [Note: lanes].
# `StrictLane` does it at once, as the host's lane does, but remembers what it has read and written: until a
# mark that was set after it is waited for, whoever else reads what the lane writes, or writes what it uses,
# does not wait for it.
class _Use(NamedTuple):
    """Bytes [start, stop) that are used in the lane; the tensor holds them, so that nobody else gets them meanwhile."""

    start: int
    stop: int
    writes: bool
    what: str
    tensor: Tensor


class StrictLane:
    """A lane whose work counts as still to come until its mark is waited for, within `StrictMemory`."""

    early = True

    def __init__(self) -> None:
        self.inside = 0  # how deep
        self._uses: dict[int, _Use] = {}  # that nobody has waited for, by number
        self._known: dict[tuple[int, int, bool], int] = {}  # by what is used and how: the latest of them
        self._count = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See `Lane`."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def mark(self) -> int:
        """See `Lane`."""
        assert self.inside, "a mark is set within the lane"
        return self._count

    def wait(self, mark: int) -> None:
        """See `Lane`. Waited for in the lane itself, a mark says nothing to whoever computes beside it."""
        if not self.inside:
            self._uses = {number: use for number, use in self._uses.items() if number >= mark}
            self._known = {key: number for key, number in self._known.items() if number >= mark}

    def note(self, what: str, tensor: Tensor, writes: bool) -> None:
        """An operation in the lane uses a tensor."""
        start, stop = span(tensor)
        if stop > start:
            self._uses.pop(self._known.get((start, stop, writes), -1), None)
            self._uses[self._count] = _Use(start, stop, writes, what, tensor)
            self._known[start, stop, writes] = self._count
            self._count += 1

    def refuse(self, what: str, tensor: Tensor, writes: bool) -> None:
        """StrictError if an operation beside the lane uses what the lane writes, or writes what the lane uses."""
        start, stop = span(tensor)
        for use in self._uses.values():
            if (use.writes or writes) and max(start, use.start) < min(stop, use.stop):
                does, lane_does = ("writes" if writes else "reads"), ("writes" if use.writes else "reads")
                raise StrictError(
                    f"{what} {does} what {use.what} {lane_does} in the lane, and nobody has waited for its mark"
                )


class StrictMemory(TorchDispatchMode):
    """Within it, any operation is a StrictError that uses the memory of an exchange or a collective that has not been
    waited for, or memory that a lane uses whose mark has not been waited for."""

    def __init__(self, owners: Sequence[Owner], lanes: Sequence[StrictLane] = ()):
        """Of these, and of those that are put into the lists later."""
        super().__init__()
        self.owners, self.lanes = owners, lanes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        unwaited = [operation for owner in self.owners for operation in owner.unwaited]
        if (unwaited or self.lanes) and not _only_looks(func):
            for position, (name, writes) in enumerate(_arguments(func)):
                value = args[position] if position < len(args) else (kwargs or {}).get(name)
                for tensor in (value,) if isinstance(value, Tensor) else tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        _refuse_use(func, tensor, writes, unwaited)
                        for lane in self.lanes:
                            (lane.note if lane.inside else lane.refuse)(str(func), tensor, writes)
        return func(*args, **(kwargs or {}))


def _refuse_use(func: Any, tensor: Tensor, writes: bool, unwaited: Sequence[Operation]) -> None:
    does = "writes" if writes else "reads"
    for operation in unwaited:
        for part in operation.writes:
            if overlap(tensor, part.tensor):
                raise StrictError(f"{func} {does} where {operation} {part.does}, before that is waited for")
        for part in operation.reads if writes else ():
            if overlap(tensor, part.tensor):
                raise StrictError(f"{func} writes what {operation} {part.does}, before that is waited for")


@functools.cache
def _arguments(func: Any) -> tuple[tuple[str, bool], ...]:
    """Of each argument of an operation the name, and whether it is written to."""
    infos = [(argument.name, argument.alias_info) for argument in func._schema.arguments]
    return tuple((name, info is not None and info.is_write) for name, info in infos)


@functools.cache
def _only_looks(func: Any) -> bool:
    """Whether an operation makes a view or takes a shape, and reads nothing."""
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
    return views or func._schema.name.split("::")[1].startswith(("empty", "new_empty", "zeros_like", "ones_like"))


with StrictMemory(()):  # the first mode of a process imports for more than a second: let it be before ranks fork
    torch.ones(1).add_(1)


# --- Operations in; run in a thread one after the other, as kernels on a stream are, with memory that must be
# left alone. An `Operation` is an exchange or a collective. From its start until it is waited for, what it
# writes holds nothing that could be taken for data, and nobody may write to it, nor to what it reads.
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
