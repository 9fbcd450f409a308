"""Operations under way, and what is done in a lane, in; a StrictError in the operation that uses their memory out.

On a device the work of a lane may still be to come when the host has long left it [Note: lanes]. `StrictLane` does it
at once, as the host's lane does, but remembers what it has read and written: until a mark that was set after it is
waited for, whoever else reads what the lane writes, or writes what it uses, does not wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.strict_line import Operation, Owner, StrictError, overlap, span


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
