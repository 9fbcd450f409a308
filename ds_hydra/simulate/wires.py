"""Who sends how many bytes to whom, and when each rank is ready, in; when all of it has arrived out. Pure.

All messages of one exchange, between any number of ranks, are computed at once, as columns. [Note: ports] says what
happens to one message; a rank sends its messages of an exchange one after the other, next neighbour first, and
receives them in the order in which its neighbours, the nearest first, send them, as the runtime lists them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hydra.simulate.links import LinkModel
from ds_hydra.zero_hetero.transfer_plan import TransferPlan

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Parcels(NamedTuple):
    """The messages of one exchange, prepared for ports; times in seconds.

    `sent` and `received` are the wire times of all messages of each rank in `senders` and `receivers`. The other
    columns are by message, those of one receiver one after the other from `first` on: `sender` is an index into
    `senders`, and `slack` how much later the head comes than the sender begins, less the wire time of the receiver's
    messages before this one.
    """

    senders: Ints
    sent: Floats
    receivers: Ints
    received: Floats
    first: Ints
    sender: Ints
    slack: Floats

    @classmethod
    def of_plan(cls, plan: TransferPlan, links: LinkModel, element_bytes: int) -> Parcels:
        """The messages between ranks of a transfer plan; what a rank keeps for itself is none."""
        n, slices = plan.num_ranks, plan.slices
        remote = np.flatnonzero(slices.src != slices.dst)
        src, dst, length = slices.src[remote], slices.dst[remote], slices.length[remote]
        far = (dst - src) % n
        order = _sorted_by(src, far)
        # Slices of one pair stand next to each other now, and are one message.
        first = _begins((src * n + far)[order])
        elements = np.add.reduceat(length[order], first) if len(first) else length
        src, dst, far = (column[order][first] for column in (src, dst, far))
        crosses = src // links.node_size != dst // links.node_size
        latency = np.where(crosses, links.between.latency_s, links.inside.latency_s)
        rate = np.where(crosses, links.between.bytes_per_s, links.inside.bytes_per_s)
        wire = elements * element_bytes / rate
        first_out = _begins(src)
        sent, before = _running(wire, first_out)
        order = _sorted_by(dst, far)
        first_in = _begins(dst[order])
        received, earlier = _running(wire[order], first_in)
        sender = np.repeat(np.arange(len(first_out)), np.diff(first_out, append=len(src)))[order]
        slack = (before + latency)[order] - earlier
        return cls(src[first_out], sent, dst[order][first_in], received, first_in, sender, slack)


def _sorted_by(first: Ints, then: Ints) -> Ints:
    """The order by one column and then by another, of ranks: sorting 16 bit numbers takes a tenth of the time."""
    order = np.argsort(then.astype(np.uint16), kind="stable")
    return order[np.argsort(first[order].astype(np.uint16), kind="stable")]


def _begins(column: Ints) -> Ints:
    """Where each value begins, in a column in which equal ones follow each other."""
    return np.flatnonzero(np.diff(column, prepend=-1))


def _running(wire: Floats, first: Ints) -> tuple[Floats, Floats]:
    """Wire time of each rank's messages, which begin at `first`, and of those that stand before each of them."""
    counts = np.diff(first, append=len(wire))
    before = np.cumsum(wire) - wire
    total = np.add.reduceat(wire, first) if len(first) else np.zeros(0)
    return total, before - np.repeat(before[first], counts)


class Exchanged(NamedTuple):
    """One exchange by rank, in seconds; a rank without messages is through when it was ready."""

    left_from: Floats  # its first message begins to leave
    left: Floats  # its last message has left
    came_from: Floats  # the head of its first message is there, and its port is free
    came: Floats  # its last message has arrived


class Wires:
    """The ports of all ranks for one communicator, through one step. [Note: ports]"""

    def __init__(self, num_ranks: int) -> None:
        self._out_free, self._in_free = np.zeros(num_ranks), np.zeros(num_ranks)

    def exchange(self, parcels: Parcels, ready: Floats) -> Exchanged:
        """Send all parcels, each rank from its time `ready` (num_ranks,) on; later exchanges queue behind this one."""
        left_from, left = ready.copy(), ready.copy()
        came_from, came = ready.copy(), ready.copy()
        senders, sent, receivers, received, first, sender, slack = parcels
        if not len(senders):
            return Exchanged(left_from, left, came_from, came)
        begin = np.maximum(ready, self._out_free)[senders]
        left_from[senders], left[senders] = begin, begin + sent
        self._out_free[senders] = left[senders]
        # An incoming port that serves wire times w1, w2, ... whose heads come at h1, h2, ... is through at
        #   w1 + w2 + ... + max(free, h1, h2 - w1, h3 - w1 - w2, ...),
        # since from the last moment on at which it stood idle it has worked without a pause.
        heads = begin[sender] + slack
        free = np.maximum(self._in_free[receivers], np.maximum.reduceat(heads, first))
        came[receivers] = free + received
        came_from[receivers] = np.maximum(self._in_free[receivers], heads[first])
        self._in_free[receivers] = came[receivers]
        return Exchanged(left_from, left, came_from, came)
