"""Collectives by the rules of NCCL, over gloo: the ranks of a group compare what each of them has started.

A collective must be the same one on all ranks of its group, in their order, of the same sizes: gloo takes some that
NCCL hangs at. That is compared when it runs, in a line [strict_line], and not before it: so one that is started
asynchronously may be ahead of the other ranks, and shows only to who waits for it. What rank i sends to rank j in an
all-to-all is compared with what j expects of i.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.strict_line import Line, Operation, Owner, Part, Rules, StrictError

# What each of them writes and what it reads, by the names of its arguments; one name twice: in place.
COLLECTIVES = {
    "all_reduce": ("tensor", "tensor"),
    "all_gather": ("tensor_list", "tensor"),
    "all_gather_single": ("output_tensor", "input_tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),  # as it is called before torch 2.13
    "reduce_scatter_single": ("output", "input"),
    "reduce_scatter_tensor": ("output", "input"),
    "all_to_all_single": ("output", "input"),
    "broadcast": ("tensor", "tensor"),
}
_TEXT = 256  # bytes
_Group = dist.ProcessGroup


class StrictCollectives(Owner):
    """Starts the collectives of one rank."""

    def __init__(self, rules: Rules | None = None, line_of: Callable[[_Group], Line | None] | None = None):
        """`line_of`: on which line a group's collectives run; None: on none, as those that a host runs itself. Without
        it each group has a line of its own."""
        super().__init__(rules or Rules(), dist.get_rank())
        self._lines: dict[_Group, Line] = {}
        self._line_of = line_of or self._own_line
        self.started: Counter[_Group] = Counter()
        self._gather = dist.all_gather

    def call(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """A collective, by the arguments of torch's; what torch returns."""
        arguments["group"] = group = arguments["group"] or dist.distributed_c10d._get_default_group()
        if type(group) is not dist.ProcessGroup:  # a stand-in for one, in a stage that is built on trial
            return original(**arguments)
        line = self._line_of(group)
        if line is None:
            self.compare(original.__name__, arguments, "")
            return original(**arguments)
        collective = _Collective(self, line, original, arguments)
        self.started[group] += 1
        self.start(collective)
        if arguments["async_op"]:
            return collective
        collective.wait()
        return None

    def compare(self, name: str, arguments: Mapping[str, Any], what: str) -> None:
        """StrictError unless all ranks of the group have come to the same collective."""
        group: _Group = arguments["group"]
        own = torch.frombuffer(bytearray(_text(name, arguments).encode()[:_TEXT].ljust(_TEXT)), dtype=torch.uint8)
        texts = [bytes(row.tolist()).decode().strip() for row in self._table(own, group, what)]
        if len(set(texts)) > 1:
            calls = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise StrictError(f"ranks of one group call different collectives: {calls}")
        if name == "all_to_all_single":
            send, receive = (_splits(arguments, key, group.size()) for key in ("input", "output"))
            self._compare_parts(self._table(torch.tensor([send, receive]), group, what))

    def _compare_parts(self, table: Tensor) -> None:
        """`table[i]`: what rank i sends to each, and expects of each."""
        sent, expected = table[:, 0], table[:, 1].T
        for i, j in (sent != expected).nonzero().tolist():
            raise StrictError(
                f"an all-to-all of different sizes: rank {i} sends {sent[i, j]} elements to rank {j}, which expects "
                f"{expected[i, j]}"
            )

    def _table(self, own: Tensor, group: _Group, what: str) -> Tensor:
        table = own.new_empty((group.size(), *own.shape))
        if what:
            self.rules.wait(self._gather(list(table.unbind()), own, group=group, async_op=True), what)
        else:
            self._gather(list(table.unbind()), own, group=group)
        return table

    def _own_line(self, group: _Group) -> Line:
        if group not in self._lines:
            self._lines[group] = Line()
        return self._lines[group]

    def close(self) -> None:
        """StrictError that names collectives that were never waited for."""
        self.refuse_unwaited()
        for line in self._lines.values():
            line.close()


class _Collective(Operation):
    """One collective; it runs on copies of what it was given."""

    def __init__(self, owner: StrictCollectives, line: Line, original: Callable[..., Any], arguments: dict[str, Any]):
        self.number, self._original, self._arguments = owner.started[arguments["group"]], original, arguments
        self._of = owner
        self._written, self._read = COLLECTIVES[original.__name__]
        into, given = arguments[self._written], arguments[self._read]
        self._many = not isinstance(into, Tensor)
        writes = [Part("receives", tensor) for tensor in (into if self._many else (into,))]
        self._in_place = self._written == self._read
        super().__init__(owner, line, () if self._in_place else (Part("sends", given),), writes)
        if self._in_place:
            self.arrived = [given.detach().clone()]

    def __str__(self) -> str:
        group = self._arguments["group"]
        ranks = dist.get_process_group_ranks(group)
        text = _text(self._original.__name__, self._arguments)
        return f"rank {self.owner.rank}: collective {self.number} ({text}) of ranks {ranks}"

    def run(self) -> None:
        """Compare it with the other ranks', and do it."""
        self._of.sleep_in_line()
        self._of.compare(self._original.__name__, self._arguments, f"{self} waits for the other ranks")
        written: Any = self.arrived if self._many else self.arrived[0]
        changed = {self._written: written} | ({} if self._in_place else {self._read: self.copies[0]})
        self._original(**self._arguments | changed | {"async_op": False})


@contextmanager
def strict_collectives(owner: StrictCollectives | None = None) -> Iterator[StrictCollectives]:
    """Collectives within it are strict; at the end each of them must have been waited for."""
    owner = owner or StrictCollectives()
    with ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, _strict(getattr(dist, name), owner)))
        yield owner
    owner.close()


def _strict(original: Callable[..., Any], owner: StrictCollectives) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return owner.call(original, dict(given.arguments))

    return collective


def _text(name: str, arguments: Mapping[str, Any]) -> str:
    """What all ranks must have in common."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if name == "all_to_all_single":  # its sizes may differ
        return f"{name} of {tensors[0].dtype}"
    others = [f"{key} {arguments[key]}" for key in ("op", "src", "group_src") if arguments.get(key) is not None]
    sizes = {part.numel() for part in arguments.get("tensor_list") or ()}
    return " ".join([f"{name} of {tensors[0].numel()} {tensors[0].dtype}", *others, *(f"into {n}" for n in sizes)])


def _splits(arguments: Mapping[str, Any], key: str, count: int) -> Sequence[int]:
    """Elements of the parts of an all-to-all's input or output."""
    given = arguments[f"{key}_split_sizes"]
    return list(given) if given else [arguments[key].numel() // count] * count
