"""The nodes of a job, and which class of device each of its ranks has: known once, the same on every rank. Pure."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

NodeSize = int | tuple[int, ...]
"""Ranks of a node, which are consecutive: one number where all nodes have as many, but for a last one that may have
fewer; else the number of each node in turn."""


@lru_cache(maxsize=64)
def _ends(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(sizes))


def node_of(rank: int, node_size: NodeSize) -> int:
    """The node that a rank is on, counted from 0. Of nodes of 7 and 8 ranks the second begins with rank 7."""
    return rank // node_size if isinstance(node_size, int) else bisect_right(_ends(node_size), rank)


def nodes_of(ranks: NDArray[np.int64], node_size: NodeSize) -> NDArray[np.int64]:
    """The same of many ranks at once."""
    return ranks // node_size if isinstance(node_size, int) else np.searchsorted(_ends(node_size), ranks, side="right")


def node_ranks(num_ranks: int, node_size: NodeSize) -> Iterator[range]:
    """The ranks of each node that holds any of the ranks 0..num_ranks-1."""
    ends = range(node_size, num_ranks + node_size, node_size) if isinstance(node_size, int) else _ends(node_size)
    first = 0
    for end in ends:
        if first < num_ranks:
            yield range(first, min(end, num_ranks))
        first = end


def ranks_of_each_node(ranks: Sequence[int], node_size: NodeSize) -> int:
    """How many of some ranks in rising order each of their nodes has; 0 where there is one node, or they have unequally
    many."""
    found = Counter(node_of(rank, node_size) for rank in ranks)
    return found[node_of(ranks[0], node_size)] if len(found) > 1 == len(set(found.values())) else 0


def largest_node(node_size: NodeSize) -> int:
    """Ranks of the node that has most."""
    return node_size if isinstance(node_size, int) else max(node_size)


def node_size_of(num_ranks: int, node_size: NodeSize) -> NodeSize:
    """The same of the first so many ranks alone: 6 of them on nodes of 8 are on one node of 6."""
    return as_node_size([len(ranks) for ranks in node_ranks(num_ranks, node_size)])


def as_node_size(sizes: Sequence[int]) -> NodeSize:
    """The ranks of each node in turn, as one number where that says the same."""
    alike = all(size == sizes[0] for size in sizes[:-1]) and sizes[-1] <= sizes[0]
    return sizes[0] if alike else tuple(sizes)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks 0, 1, 2, ... stand on one node after the other. Ranks of one device class are as fast, and hold as much.

    Example: of 16 H800 on two nodes beside seven H20 on a third, `sizes` are (8, 8, 7) and `devices` 16 times "h800"
    and 7 times "h20".
    """

    sizes: tuple[int, ...]  # ranks of each node
    devices: tuple[str, ...] = ()  # the class of each rank; none where all are alike

    @classmethod
    def of(cls, num_ranks: int, node_size: NodeSize) -> Cluster:
        """Ranks that are all alike."""
        return cls(tuple(map(len, node_ranks(num_ranks, node_size))))

    @property
    def num_ranks(self) -> int:
        return sum(self.sizes)

    @property
    def node_size(self) -> NodeSize:
        """Ranks of a node, for all that only asks which ranks share one."""
        return as_node_size(self.sizes)

    @property
    def classes(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each device class, in rank order; none where all are alike."""
        found: dict[str, list[int]] = {}
        for rank, device in enumerate(self.devices):
            found.setdefault(device, []).append(rank)
        return {device: tuple(ranks) for device, ranks in found.items()}

    @property
    def mixed(self) -> bool:
        """Whether there are devices of several classes."""
        return len(set(self.devices)) > 1

    @property
    def digest(self) -> bytes:
        """Of where ranks stand and what they are; empty where nodes and devices are alike.

        A plan names no ranks: which rank runs which stage follows from it and, where ranks differ, from this.
        """
        if not self.mixed and isinstance(self.node_size, int):
            return b""
        return hashlib.sha256(repr((self.sizes, self.devices)).encode()).digest()

    def ranks_beside(self, rank: int) -> int:
        """Ranks of the node of a rank, itself among them."""
        return self.sizes[node_of(rank, self.node_size)]

    def __str__(self) -> str:
        """Such as "15 ranks, nodes of 8 and 7", with the classes where there are several."""
        nodes = " and ".join(map(str, dict.fromkeys(self.sizes)))
        text = f"{self.num_ranks} ranks, nodes of {nodes}"
        return f"{text}: {listed(self)}" if self.mixed else text


def listed(cluster: Cluster) -> str:
    """The classes of a cluster with their ranks, such as "8 of h800 (ranks 0..7), 7 of h20 (ranks 8..14)"."""
    return ", ".join(f"{len(ranks)} of {device} (ranks {_shown(ranks)})" for device, ranks in cluster.classes.items())


def _shown(ranks: tuple[int, ...]) -> str:
    """Runs of ranks, such as "0..7, 16..23"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("..".join(map(str, run)) for run in runs)
