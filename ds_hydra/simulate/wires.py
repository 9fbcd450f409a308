"""Who sends how many bytes to whom, and when each rank is ready, in; when all of it has arrived out. Pure.

All messages of one exchange, between any number of ranks, are computed at once, as columns. [Note: ports] says what
happens to one message; a rank sends its messages of an exchange one after the other, next neighbour first, as the
runtime lists them, and receives them in the order in which their heads come.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.node_cables import NodeCables
from ds_hydra.simulate.routes import Floats, Ints, Routes, begins_of, counts_of
from ds_hydra.zero_hetero.transfer_plan import TransferPlan

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
