"""Ranks and bytes in, seconds of transfers and collectives out; ports that serve one transfer at a time. Pure.

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
from ds_hydra.zero_hetero.nodes import NodeSize, node_of, nodes_of


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

    def transfer_s(self, sender: int, receiver: int, num_bytes: float) -> float:
        """Seconds from the start of a lone transfer to its arrival; 0 for a rank's own."""
        if sender == receiver:
            return 0.0
        speed = self.speed(sender, receiver)
        return speed.latency_s + speed.wire_s(num_bytes)

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
