"""Seconds of transfers and collectives over links whose ports serve one transfer at a time. Pure: no torch.

[Note: ports]
A rank has one outgoing and one incoming port for what its pulls and pushes exchange with the owners of masters, two
more for the gathers and trades of twins, and two for the messages between stages: each of the three goes over a
communicator of its own, and what waits in one of them holds up nothing in the others. A port serves one transfer at a
time, in the order in which they come to it, and a transfer holds it for bytes / bandwidth, its wire time. The latency
holds no port: it passes between the two. So a transfer is known from its two ends, each by itself:

    sender     begin   = the later of "ready" and "outgoing port free";  the port is free again at begin + wire time
               head    = begin + latency, when the first byte is at the receiver
    receiver   arrived = the later of "head" and "incoming port free", + wire time;  the port is free again then

Example with a latency of 1 and wire times of 4. Ranks 0 and 1 each send to rank 2 at time 0: both heads are there at
1. Rank 2 has the first message at 5 and the second at 9, because its port takes one at a time; the senders' ports are
free again at 4.

With `one_cable` the first two share a rank's link to other nodes. While both have something on it, each has half: a
transfer is later by what the other one has there in its time, at most by its own wire time, and the other's next one
waits as long. Half of the cable at both ends is half of it, so a receiver adds no more than the sender's lateness
leaves. Messages between stages are taken to be alone.

Pure.

[Note: a node's cable]
Hosts in a cloud often have one network card for all of their ranks. Transfers that are on it together have equal parts,
each until it is through: of 1, 2 and 4 bytes at a byte a second the first is through after 3 s, the second after 5 s
and the last after 7 s, where each alone would take as long as it has bytes. What an exchange puts on the cable begins
when that of the exchange before is through, whichever communicator it is of. What ranks of a node send to each other
goes through its memory, beside the cable, and waits for nothing that is on it.

All messages of one exchange, between any number of ranks, are computed at once, as columns. [Note: ports] says what
happens to one message; a rank sends its messages of an exchange one after the other, next neighbour first, as the
runtime lists them, and receives them in the order in which their heads come.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hydra.profiling.links import OPERATIONS, Collective, LinkFigure, Links, links_from_record
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.layout import sorted_by
from ds_hydra.zero_hetero.nodes import NodeSize, node_of, nodes_of
from ds_hydra.zero_hetero.transfer_plan import TransferPlan


class Speed(NamedTuple):
    """One direction of a link between two ranks."""

    latency_s: float
    bytes_per_s: float

    def with_end(self, other: Speed) -> Speed:
        """Of a link between two ranks of which one has this speed and one the other."""
        return Speed(max(self.latency_s, other.latency_s), min(self.bytes_per_s, other.bytes_per_s))

    def wire_s(self, num_bytes: float) -> float:
        """Seconds for which a transfer holds the ports at its two ends."""
        return num_bytes / self.bytes_per_s


Floats = NDArray[np.float64]

# For tables that say nothing of links: NVLink inside a node, a card of 200 Gb/s for each GPU between nodes.
INSIDE, BETWEEN = Speed(10e-6, 1.5e11), Speed(20e-6, 2.5e10)


class ClassLinks(NamedTuple):
    """Links among devices of one class."""

    device: str
    inside: Speed
    between: Speed


@dataclass(frozen=True)
class LinkModel:
    """Latency and bandwidth between any two ranks, on one node or on two.

    Where devices are of several classes, `devices` names each rank's and `classes` has the links among those of each.
    Two ranks of different classes send to each other as the slower of the two would among its own.

    Collectives take what `figures`, those of a measured cost table, say; where these say nothing, what a ring takes.
    """

    node_size: NodeSize
    inside: Speed = INSIDE
    between: Speed = BETWEEN
    figures: Links = field(default_factory=lambda: Links(()))
    one_cable: bool = False  # whether both communicators of pulls and pushes share a rank's link between nodes
    node_cable: bool = False  # whether all ranks of a node share one, as fast as `between` [Note: a node's cable]
    devices: tuple[str, ...] = ()
    classes: tuple[ClassLinks, ...] = ()

    def __post_init__(self) -> None:
        if min(sizes := (self.node_size,) if isinstance(self.node_size, int) else self.node_size) < 1:
            raise ConfigError(f"links: a node of {min(sizes)} ranks; give the ranks of one machine, at least 1")
        known = [("inside a node", self.inside), ("between nodes", self.between)]
        known += [(f"of {one.device}", speed) for one in self.classes for speed in (one.inside, one.between)]
        for name, (latency, rate) in known:
            if not (math.isfinite(latency) and latency >= 0 and math.isfinite(rate) and rate > 0):
                raise ConfigError(
                    f"links {name}: {latency} s and {rate} bytes/s; the latency must be at least 0 and the bandwidth "
                    "above 0"
                )

    @classmethod
    def of_table(
        cls,
        links: Mapping[str, Any] | None,
        node_size: NodeSize,
        *,
        inside: Speed | None = None,
        between: Speed | None = None,
        place: str = "links of the cost table",
        devices: tuple[str, ...] = (),
    ) -> LinkModel:
        """The links that a table file holds (`TableFile.links`); what it does not have is as given, or as assumed.

        What is given wins over the table's figure. With `devices`, the class of each rank, it may be
        `{"classes": {class: links}}` of tables of each, where they have some. Raises ConfigError, which names `place`,
        for figures that cannot be read.
        """
        if links is not None and "classes" in links:
            each = {
                device: cls.of_table(own, node_size, inside=inside, between=between, place=f"{place} of {device}")
                for device, own in links["classes"].items()
            }
            first = next(iter(each.values()))
            found = tuple(ClassLinks(device, one.inside, one.between) for device, one in each.items())
            return replace(first, devices=devices, classes=found)
        figures = Links(()) if links is None else links_from_record(links, place)
        return cls(
            node_size,
            inside or _point_to_point(figures, inter_node=False) or INSIDE,
            between or _point_to_point(figures, inter_node=True) or BETWEEN,
            figures,
        )

    @property
    def apart(self) -> bool:
        """Whether pulls and pushes have each rank's links to themselves."""
        return not (self.one_cable or self.node_cable)

    def crosses(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks lie on more than one node."""
        return len({node_of(rank, self.node_size) for rank in ranks}) > 1

    def speed(self, sender: int, receiver: int) -> Speed:
        """Of the link from one rank to another."""
        return self.slowest((sender, receiver))

    def slowest(self, ranks: Sequence[int]) -> Speed:
        """Of the links among these ranks: between two nodes, if they are on several."""
        crosses = self.crosses(ranks)
        if not self.classes:
            return self.between if crosses else self.inside
        return functools.reduce(Speed.with_end, (self._of_rank(rank, crosses=crosses) for rank in ranks))

    def _of_rank(self, rank: int, *, crosses: bool) -> Speed:
        """Of a rank's links with others of its class."""
        own = next((one for one in self.classes if one.device == self.devices[rank]), None)
        if own is None:
            return self.between if crosses else self.inside
        return own.between if crosses else own.inside

    def of_pairs(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """`speed` of many pairs at once: latency in s, bytes/s, and whether they are on two nodes, (pairs,) each."""
        crosses = nodes_of(src, self.node_size) != nodes_of(dst, self.node_size)
        if not self.classes:
            latency = np.where(crosses, self.between.latency_s, self.inside.latency_s)
            return latency, np.where(crosses, self.between.bytes_per_s, self.inside.bytes_per_s), crosses
        ranks = range(len(self.devices))
        inside, between = (np.array([self._of_rank(rank, crosses=two) for rank in ranks]) for two in (False, True))
        ends = [np.where(crosses[:, None], between[end], inside[end]) for end in (src, dst)]
        return np.maximum(*ends)[:, 0], np.minimum(*ends)[:, 1], crosses

    def collective_s(self, operation: str, ranks: Sequence[int], num_bytes: int) -> float:
        """Seconds of one collective of these ranks; bytes as `Collective` counts them. 0 for a rank alone.

        A ring over n ranks sends n - 1 times, each time 1/n of the bytes; an all-reduce goes round twice. ConfigError
        for an unknown operation.
        """
        if operation not in OPERATIONS:
            raise ConfigError(f"links: no collective {operation!r}; known: {', '.join(OPERATIONS)}")
        n, crosses = len(ranks), self.crosses(ranks)
        if n < 2:
            return 0.0
        if any(f.operation == operation and f.inter_node == crosses for f in self.figures.figures):
            return self.figures.ms(Collective(operation, n, num_bytes), inter_node=crosses) / 1e3
        speed = self.slowest(ranks)
        if operation == "p2p":
            return speed.latency_s + speed.wire_s(num_bytes)
        hops = (n - 1) * (2 if operation == "all_reduce" else 1)
        return hops * (speed.latency_s + speed.wire_s(num_bytes / n))


class Port:
    """One direction of one rank's link: serves one transfer at a time, in the order of the calls. [Note: ports]"""

    def __init__(self) -> None:
        self.free_s = 0.0

    def serve(self, ready_s: float, wire_s: float) -> float:
        """When a transfer begins that is ready at `ready_s`; the port is then taken for `wire_s`."""
        begin = max(ready_s, self.free_s)
        self.free_s = begin + wire_s
        return begin


def _point_to_point(links: Links, *, inter_node: bool) -> Speed | None:
    def matches(figure: LinkFigure) -> bool:
        return figure.operation == "p2p" and figure.inter_node == inter_node

    figure = next(filter(matches, links.figures), None)
    return None if figure is None else Speed(figure.latency_us / 1e6, figure.bytes_per_second)


Ints = NDArray[np.int64]


class Routes(NamedTuple):
    """Between whom the messages of a transfer plan go, whatever they hold: layers and embeddings have the same.

    `src` and `dst` are the plan's columns; a message is of the slices from one of `first` on, in the order `slices`.
    By message, as they leave: `latency` in seconds, `rate` in bytes/s and whether it `crosses` from one node to
    another; `order` is how they come.
    """

    src: Ints
    dst: Ints
    slices: Ints
    first: Ints
    latency: Floats
    rate: Floats
    crosses: NDArray[np.bool_]
    senders: Ints
    first_out: Ints
    order: Ints
    receivers: Ints
    first_in: Ints
    sender: Ints
    each: int

    @classmethod
    def of(cls, src: Ints, dst: Ints, n: int, links: LinkModel) -> Routes:
        """Of slices from ranks to others, of `n`."""
        given, far = (src, dst), (dst - src) % n
        slices = sorted_by(src, far, n)
        # Slices of one pair stand next to each other now, and are one message.
        first = begins_of((src * n + far)[slices])
        src, dst, far = (column[slices][first] for column in (src, dst, far))
        latency, rate, crosses = links.of_pairs(src, dst)
        first_out, order = begins_of(src), sorted_by(dst, far, n)
        coming = dst[order]
        first_in = begins_of(coming)
        sender = np.repeat(np.arange(len(first_out)), counts_of(first_out, len(src)))[order]
        counts = counts_of(first_in, len(coming))
        each = int(counts[0]) if len(counts) and (counts == counts[0]).all() else 0
        return cls(
            *given, slices, first, latency, rate, crosses, src[first_out], first_out, order, coming[first_in], first_in,
            sender, each,
        )  # fmt: skip

    def join(self, src: Ints, dst: Ints) -> bool:
        """Whether slices of these columns go the same ways."""
        return np.array_equal(self.src, src) and np.array_equal(self.dst, dst)


def begins_of(column: Ints) -> Ints:
    """Where each value begins, in a column in which equal ones follow each other."""
    new = np.ones(len(column), dtype=bool)
    np.not_equal(column[1:], column[:-1], out=new[1:])
    return np.flatnonzero(new)


def counts_of(first: Ints, end: int) -> Ints:
    """Entries from each of these on to the next, or to the end; numpy's `diff` takes five times as long for that."""
    counts = np.empty_like(first)
    if len(first):
        np.subtract(first[1:], first[:-1], out=counts[:-1])
        counts[-1] = end - first[-1]
    return counts


class NodeCables:
    """One direction of the cables of all nodes."""

    def __init__(self, num_ranks: int, node_size: NodeSize):
        self._node = nodes_of(np.arange(num_ranks), node_size)
        self._free = np.zeros(self._node[-1] + 1)  # by node, when its cable is

    def late(self, ranks: NDArray[np.int64], begin: Floats, cabled: Floats) -> Floats:
        """By how much transfers of these ranks that begin then, and would be so long on a cable of their own, are done
        later; seconds, (ranks,) each."""
        late = np.zeros(len(ranks))
        nodes = np.where(cabled > 0.0, self._node[ranks], -1)
        for node in np.unique(nodes[nodes >= 0]):
            own = np.flatnonzero(nodes == node)
            wire = np.sort(cabled[own])
            shared = np.cumsum(wire) + wire * np.arange(len(wire) - 1, -1, -1)
            start = max(self._free[node], begin[own].min())
            done = start + shared[np.searchsorted(wire, cabled[own])]
            late[own] = np.maximum(done - begin[own] - cabled[own], 0.0)
            self._free[node] = start + wire.sum()
        return late


_ROUNDING = 1e-12  # of sums of wire times, relative


class Parcels(NamedTuple):
    """The messages of one exchange, prepared for ports; times in seconds.

    `sent` and `received` are the wire times of all messages of each rank in `senders` and `receivers`, `leaving` and
    `entering` what of these goes from one node to another. The other columns are by message, those of one receiver one
    after the other from `first` on: `sender` is an index into `senders`, `lead` how much later than the sender begins
    the head comes, `gone` the share of `sent` that has left with it, `wire` the wire time and `earlier` that of the
    receiver's messages before this one. `each` receiver has so many messages; 0: not all have as many. Where links are
    `apart`, nobody asks for `leaving`, `entering` and `gone`, which are zeros or empty.
    """

    senders: Ints
    sent: Floats
    receivers: Ints
    received: Floats
    first: Ints
    sender: Ints
    lead: Floats
    gone: Floats
    wire: Floats
    earlier: Floats
    each: int
    leaving: Floats
    entering: Floats
    even: bool = False  # whether all messages of each receiver take equally long, and each has as many
    near: Parcels | None = None  # what goes to ranks of the same node, if that is apart [Note: a node's cable]

    @classmethod
    def of_plan(
        cls, plan: TransferPlan, links: LinkModel, element_bytes: int, known: list[Routes] | None = None
    ) -> Parcels:
        """The messages between ranks of a transfer plan; what a rank keeps for itself is none.

        `known` are the routes of plans before, over the same links; those of this one are added.
        """
        slices, known = plan.slices, [] if known is None else known
        src, dst, length = slices.src, slices.dst, slices.length
        remote = np.flatnonzero(src != dst)
        if len(remote) < len(src):
            src, dst, length = src[remote], dst[remote], length[remote]
        if not links.node_cable:
            return cls._of_columns(src, dst, length, plan.num_ranks, links, element_bytes, known)
        crosses = links.of_pairs(src, dst)[2]
        near, far = (
            cls._of_columns(src[own], dst[own], length[own], plan.num_ranks, links, element_bytes, known)
            for own in (~crosses, crosses)
        )
        return far._replace(near=near)

    @classmethod
    def _of_columns(
        cls, src: Ints, dst: Ints, length: Ints, n: int, links: LinkModel, element_bytes: int, known: list[Routes]
    ) -> Parcels:
        routes = next((one for one in known if one.join(src, dst)), None)
        if routes is None:
            routes = Routes.of(src, dst, n, links)
            known.append(routes)
        elements = length[routes.slices]
        if len(routes.first) < len(elements):
            elements = np.add.reduceat(elements, routes.first)
        wire = elements * element_bytes / routes.rate
        sent, before = _running(wire, routes.first_out)
        leaving, entering, gone = np.zeros(len(sent)), np.zeros(len(routes.receivers)), np.zeros(0)
        if not links.apart:
            far = wire * routes.crosses
            leaving, entering = _totals(far, routes.first_out), _totals(far[routes.order], routes.first_in)
            gone = ((before + wire) / np.repeat(sent, counts_of(routes.first_out, len(wire))))[routes.order]
        before += routes.latency
        wire, lead = wire[routes.order], before[routes.order]
        received, earlier = _running(wire, routes.first_in)
        return cls(
            routes.senders, sent, routes.receivers, received, routes.first_in, routes.sender, lead, gone, wire, earlier,
            routes.each, leaving, entering, _even(wire, routes.each),
        )  # fmt: skip


def _even(wire: Floats, each: int) -> bool:
    rows = wire.reshape(-1, each) if each else wire[:0]
    return bool(each and (rows == rows[:, :1]).all())


def _running(wire: Floats, first: Ints) -> tuple[Floats, Floats]:
    """Wire time of each rank's messages, which begin at `first`, and of those that stand before each of them."""
    before = np.cumsum(wire)
    before -= wire
    before -= np.repeat(before[first], counts_of(first, len(wire)))
    return _totals(wire, first), before


def _totals(column: Floats, first: Ints) -> Floats:
    """Sums of the runs that begin at `first`."""
    return np.add.reduceat(column, first) if len(first) else np.zeros(0)


class Exchanged(NamedTuple):
    """One exchange by rank, in seconds; a rank without messages is through when it was ready."""

    left_from: Floats  # its first message begins to leave
    left: Floats  # its last message has left
    came_from: Floats  # the head of its first message is there, and its port is free
    came: Floats  # its last message has arrived


class _Direction:
    """One direction of all ranks' ports for one communicator: until when each is taken, and when its cable was."""

    def __init__(self, num_ranks: int) -> None:
        self.free = np.zeros(num_ranks)
        self.beside: _Direction | None = None  # of the communicator that goes over the same cables
        self.nodes: NodeCables | None = None  # where all ranks of a node share one
        self._busy: list[tuple[Floats, Floats]] = []  # begin and end by rank, equal where there was none

    def take(self, ranks: Ints, begin: Floats, stop: Floats, cabled: Floats) -> None:
        """These ranks' ports are taken until `stop`, their cables from `begin` on where something goes over them."""
        self.free[ranks] = stop
        if self.beside is not None and cabled.any():
            start, end = self.free.copy(), self.free.copy()
            start[ranks] = np.where(cabled > 0.0, begin, stop)
            self._busy.append((start, end))

    def late(self, ranks: Ints, begin: Floats, cabled: Floats) -> Floats:
        """By how much transfers from `begin` on, so long on their cables, are done later as these are shared."""
        if self.nodes is not None:
            return self.nodes.late(ranks, begin, cabled)
        beside = self.beside
        if beside is None or not cabled.any():
            return np.zeros(len(ranks))
        # What is over for all can hold up nobody any more.
        while beside._busy and (beside._busy[0][1] <= np.maximum(self.free, beside._busy[0][0])).all():
            beside._busy.pop(0)
        late = np.zeros(len(ranks))
        for start, end in beside._busy:
            first, last = np.maximum(start[ranks], begin), end[ranks]
            late += np.where(first < begin + cabled + late, np.maximum(last - first, 0.0), 0.0)
        late = np.minimum(late, cabled)
        beside.free[ranks] += late  # what was begun there takes longer, too
        return late


class Wires:
    """The ports of all ranks for one communicator, through one step. [Note: ports]"""

    def __init__(self, num_ranks: int) -> None:
        self.out, self.into = _Direction(num_ranks), _Direction(num_ranks)
        self.near: Wires | None = None  # inside nodes, if that is apart

    @classmethod
    def pair(cls, num_ranks: int, links: LinkModel) -> tuple[Wires, Wires]:
        """Those of two communicators, which may go over the same cables."""
        pair = one, other = cls(num_ranks), cls(num_ranks)
        out, into = (NodeCables(num_ranks, links.node_size) if links.node_cable else None for _ in range(2))
        for own, beside in (pair, pair[::-1]):
            own.out.nodes, own.into.nodes = out, into
            own.near = cls(num_ranks) if links.node_cable else None
            if links.one_cable:
                own.out.beside, own.into.beside = beside.out, beside.into
        return one, other

    def exchange(self, parcels: Parcels, ready: Floats) -> Exchanged:
        """Send all parcels, each rank from its time `ready` (num_ranks,) on; later exchanges queue behind this one."""
        found = self._exchange(parcels, ready)
        if self.near is None or parcels.near is None:
            return found
        near = self.near._exchange(parcels.near, ready)
        picks = (np.minimum, np.maximum) * 2
        return Exchanged(*(pick(*both) for pick, both in zip(picks, zip(found, near, strict=True), strict=True)))

    def _exchange(self, parcels: Parcels, ready: Floats) -> Exchanged:
        left_from, left = ready.copy(), ready.copy()
        came_from, came = ready.copy(), ready.copy()
        senders, receivers = parcels.senders, parcels.receivers
        if not len(senders):
            return Exchanged(left_from, left, came_from, came)
        begin = np.maximum(ready, self.out.free)[senders]
        left_from[senders] = begin
        through = begin + parcels.sent
        late = self.out.late(senders, begin, parcels.leaving)
        left[senders] = through = through + late
        self.out.take(senders, begin, through, parcels.leaving)
        heads = np.take(begin, parcels.sender, mode="clip")  # without a check of each index: half of the time
        heads += parcels.lead
        known = np.zeros(len(receivers))
        if late.any():
            later = np.take(late, parcels.sender, mode="clip") * parcels.gone
            heads += later
            known = _of_each(np.maximum, later, parcels.first, parcels.each)
        begin = np.maximum(self.into.free[receivers], _of_each(np.minimum, heads, parcels.first, parcels.each))
        through = _served(parcels, heads, begin)
        began = np.maximum(begin, through - parcels.received)
        # Half of the cable at both ends is half of it.
        late = self.into.late(receivers, began, parcels.entering)
        through = through + np.maximum(late - known, 0.0)
        came_from[receivers], came[receivers] = begin, through
        self.into.take(receivers, began, through, parcels.entering)
        return Exchanged(left_from, left, came_from, came)


def _served(parcels: Parcels, heads: Floats, begin: Floats) -> Floats:
    """When each receiver's port is through, which begins at `begin` and serves messages as their heads come."""
    # The port is through at begin + all wire times if it never stands idle, as it does not even in the columns' order
    # where no head comes later than begin + the wire times before it: so it is for most receivers of most exchanges.
    through = begin + parcels.received
    slack = heads - parcels.earlier
    idle = _of_each(np.maximum, slack, parcels.first, parcels.each) > begin + _ROUNDING * through
    if idle.any():
        if idle.all():
            wires, first = parcels.wire, parcels.first
        elif parcels.each:
            heads, wires = (column.reshape(-1, parcels.each)[idle].ravel() for column in (heads, parcels.wire))
            first = np.arange(0, len(heads), parcels.each)
        else:
            counts = counts_of(parcels.first, len(heads))
            some = np.flatnonzero(np.repeat(idle, counts))
            heads, wires, first = heads[some], parcels.wire[some], np.cumsum(counts[idle]) - counts[idle]
        messages = _Messages(heads, wires, first, parcels.each, parcels.even, parcels.received[idle])
        through[idle] = _with_pauses(messages, through[idle])
    return through


def _of_each(pick: np.ufunc, column: Floats, first: Ints, each: int) -> Floats:
    """The largest, or the least, entry of each receiver's messages."""
    # Rows of one length are reduced without looking up where each begins.
    return pick.reduce(column.reshape(-1, each), axis=1) if each else pick.reduceat(column, first)


class _Messages(NamedTuple):
    """The columns of some parcels' receivers, with the wire times of all messages of each."""

    heads: Floats
    wire: Floats
    first: Ints
    each: int
    even: bool
    total: Floats


def _with_pauses(messages: _Messages, least: Floats) -> Floats:
    """When ports are through that may stand idle, but not before `least`: begin + all wire times."""
    # From the last moment on at which a port stood idle, it has worked without a pause. So it is through at the largest
    # of `least` and, for each head h, h + the wire times of what comes at h or later. Example with wire times of 4 and
    # heads at 0, 2 and 15: 0 + 12, 2 + 8 and 15 + 4, so it is through at 19.
    #
    # For that, messages must be sorted by their heads: a million of them in a layer's push on 1024 ranks. But few can
    # matter. As the port is not through before the last message, what comes before that - all wire times makes it no
    # later: in the example, only what comes after 19 - 12 = 7 is looked at.
    heads, wire, first, each, even, total = messages
    least = np.maximum(least, _of_each(np.maximum, heads + wire, first, each))
    if each:
        late = np.flatnonzero(heads.reshape(-1, each) > (least - total)[:, np.newaxis])
    else:
        late = np.flatnonzero(heads > np.repeat(least - total, counts_of(first, len(heads))))
    if not len(late):
        return least
    if even and 2 * len(late) > len(heads):
        # Which of a receiver's messages comes when is no matter.
        rows = np.sort(heads.reshape(-1, each), axis=1)
        rows += wire[::each, np.newaxis] * np.arange(each, 0, -1)
        return np.maximum(least, rows.max(axis=1))
    receiver = late // each if each else np.searchsorted(first, late, side="right") - 1
    # One key for both columns, as messages mostly are in this order already: then a stable sort is done at once.
    after = heads[late] - heads.min()
    order = np.argsort(receiver * (after.max() + 1.0) + after, kind="stable")
    late, receiver = late[order], receiver[order]
    begins = begins_of(receiver)
    rest, before = _running(wire[late], begins)
    stops = heads[late] + np.repeat(rest, counts_of(begins, len(late))) - before
    least[receiver[begins]] = np.maximum(least[receiver[begins]], np.maximum.reduceat(stops, begins))
    return least
