"""A transport that forgives as little as NCCL does, over gloo: exchanges, collectives, whole engines."""

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

from ds_hydra.zero_hetero.transport import Parcel, Work
from tests.support.strict_line import Line, Operation, Owner, Part, Rules, StrictError, StrictLane, StrictMemory

# --- A transport for tests that forgives as little as NCCL does, over gloo: a group in, exchanges that name
# what is wrong. gloo matches messages by tag, sends without the receiver, and fills a destination at some time
# before it is waited for. So code that NCCL would hang or corrupt passes on it. Here, on one communicator (one
# `StrictTransport`): order two ranks match their messages by the order in which they start them; tags and sizes
# are compared serial an exchange begins when the one before has ended, as kernels on one stream do rendezvous a
# message lasts until both ends have come to it, an exchange until all its messages are done memory a
# destination holds NaN until it is waited for, and nobody may write to it, nor to what is being sent and if
# `Rules` say so: the first message of a pair connects it, for which the host waits (as NCCL's set-up does); the
# first exchange waits for all ranks of the group (as a communicator that is made at its first use does); every
# exchange blocks the host (as CUDA_LAUNCH_BLOCKING, the loading of a kernel, or an allocation may at any time);
# all communicators of a rank share one line (as streams do that share a hardware queue:
# CUDA_DEVICE_MAX_CONNECTIONS=1). Collectives have the same rules in `strict_collectives`; `strict_memory` sees
# reads and writes of such memory in the operation that does them. Without it a read of NaN shows only in
# results.
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


# --- Collectives by the rules of NCCL, over gloo: the ranks of a group compare what each of them has started. A
# collective must be the same one on all ranks of its group, in their order, of the same sizes: gloo takes some
# that NCCL hangs at. That is compared when it runs, in a line [strict_line], and not before it: so one that is
# started asynchronously may be ahead of the other ranks, and shows only to who waits for it. What rank i sends
# to rank j in an all-to-all is compared with what j expects of i.
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


# --- NCCL's rules for a whole engine: within `strict_world` its links, edges, lane and collectives are strict
# ones. The world is laid out as on devices: small messages have a gloo group of their own, and so have the
# stages' edges, and every team of twins. What one communicator carries, exchanges and collectives alike, runs
# in the order of its start; by the rule `one_queue` all that a rank starts does.
@contextmanager
def strict_world(rules: Rules | None = None) -> Iterator[list[StrictTransport]]:
    """Worlds made within it are strict; the transports so far. At the end every exchange must have been waited for."""
    from ds_hydra.ranks import world

    rules = rules or Rules()
    made: list[StrictTransport] = []
    lanes: list[StrictLane] = []
    devices = OnDevices(rules)
    collectives = StrictCollectives(rules, devices.line_of)
    owners: list[Owner] = [collectives]

    def transport(group: dist.ProcessGroup, **_: Any) -> StrictTransport:
        own = dist.new_group(list(range(group.size())))
        made.append(StrictTransport(own, ("links", "edges")[len(made) % 2], rules, devices.line_of(group)))
        devices.transports[group] = made[-1]
        owners.append(made[-1])
        return made[-1]

    def lane(*, early: bool) -> StrictLane:
        assert early, "the default group is NCCL's"
        lanes.append(StrictLane())
        return lanes[-1]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(world, "TorchTransport", transport))
        stack.enter_context(mock.patch.object(world, "HostLane", lane))
        stack.enter_context(mock.patch.object(world, "dist", devices))
        stack.enter_context(strict_collectives(collectives))
        stack.enter_context(StrictMemory(owners, lanes))
        yield made
    for strict in made:
        strict.close()
    devices.close()


@contextmanager
def one_push_at_a_time() -> Iterator[None]:
    """Engines made within it have room for one push."""
    from ds_hydra.step import strategy_runtime

    with mock.patch.object(strategy_runtime, "room_for_pushes", return_value=0):
        yield


class OnDevices:
    """torch.distributed, but for a default group that is NCCL's: groups are, unless they are made as gloo's."""

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()
        self._of_hosts: set[dist.ProcessGroup] = set()
        self._lines: dict[dist.ProcessGroup | None, Line] = {}
        self.transports: dict[dist.ProcessGroup, StrictTransport] = {}

    def get_backend(self, group: dist.ProcessGroup) -> str:
        return "nccl"

    def new_group(
        self, ranks: Any, timeout: Any = None, backend: str | None = None, options: Any = None
    ) -> dist.ProcessGroup:
        group = dist.new_group(ranks, timeout, backend)
        if backend == "gloo":
            self._of_hosts.add(group)
        return group

    def line_of(self, group: dist.ProcessGroup) -> Line | None:
        """On which line a group's messages and collectives run; None for those of hosts."""
        if group in self._of_hosts:
            return None
        if group in self.transports:
            self.transports[group].made = True
        key = None if self._rules.one_queue else group
        if key not in self._lines:
            self._lines[key] = Line()
        return self._lines[key]

    def close(self) -> None:
        """Return when everything is over."""
        for line in self._lines.values():
            line.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)
