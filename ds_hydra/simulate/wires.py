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
        remote = slices.src != slices.dst
        # One key a pair, by sender and then by how far away the receiver is; slices of one pair are one message.
        away = (slices.dst[remote] - slices.src[remote]) % n
        keys, index = np.unique(slices.src[remote] * n + away, return_inverse=True)
        elements = np.bincount(index, weights=slices.length[remote], minlength=len(keys))
        src, far = np.divmod(keys, n)
        dst = (src + far) % n
        crosses = src // links.node_size != dst // links.node_size
        latency = np.where(crosses, links.between.latency_s, links.inside.latency_s)
        rate = np.where(crosses, links.between.bytes_per_s, links.inside.bytes_per_s)
        wire = elements * element_bytes / rate
        senders, sender = np.unique(src, return_inverse=True)
        sent, before = _running(wire, sender, len(senders))
        order = np.argsort(dst * n + far)
        receivers, first, receiver = np.unique(dst[order], return_index=True, return_inverse=True)
        received, earlier = _running(wire[order], receiver, len(receivers))
        return cls(senders, sent, receivers, received, first, sender[order], (before + latency)[order] - earlier)


def _running(wire: Floats, group: Ints, num_groups: int) -> tuple[Floats, Floats]:
    """Wire time of each group, and before each message of its group. Groups stand one after the other, in order."""
    total = np.bincount(group, weights=wire, minlength=num_groups).astype(np.float64)
    groups_before = np.cumsum(total) - total
    return total, np.cumsum(wire) - wire - groups_before[group]


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
