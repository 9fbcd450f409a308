"""What the ranks of each node send over the one cable that they share in, how much later it is through than alone, out.
Pure.

[Note: a node's cable]
Hosts in a cloud often have one network card for all of their ranks. Transfers that are on it together have equal parts,
each until it is through: of 1, 2 and 4 bytes at a byte a second the first is through after 3 s, the second after 5 s
and the last after 7 s, where each alone would take as long as it has bytes. What an exchange puts on the cable begins
when that of the exchange before is through, whichever communicator it is of. What ranks of a node send to each other
goes through its memory, beside the cable, and waits for nothing that is on it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ds_hydra.zero_hetero.nodes import NodeSize, nodes_of

Floats = NDArray[np.float64]


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
