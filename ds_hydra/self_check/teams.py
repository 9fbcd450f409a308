"""A world and a number of runs in; the ranks that share the runs out among them out. Pure: no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from ds_hydra.zero_hetero.nodes import NodeSize, node_of, node_ranks

_AT_A_TIME = 4  # runs that a rank does before another helps: they take as long as making a small model

Run = TypeVar("Run")


class Team(NamedTuple):
    """Ranks that share the runs out among them, one run in turn to each."""

    ranks: tuple[int, ...]
    of_node: int  # at most so many on one node

    def share(self, rank: int, runs: Sequence[Run]) -> Sequence[Run]:
        """The runs of a rank."""
        return runs[self.ranks.index(rank) :: len(self.ranks)] if rank in self.ranks else []


def teams(num_ranks: int, node_size: NodeSize, num_runs: int) -> Iterator[Team]:
    """Who does the runs; then, for those that this team could not do, one rank of each node.

    The first team has as many ranks as there is work for, taken from the nodes in turn. Its ranks divide what a node
    may give, so that a model may be too large for them; alone on its node, a rank has all of it. With 6 ranks on nodes
    of 4 and 10 runs: ranks 0, 4 and 1, of which 0 and 1 share a node; then ranks 0 and 4.
    """
    nodes = list(node_ranks(num_ranks, node_size))
    in_turn = [rank for turn in zip_longest(*nodes) for rank in turn if rank is not None]
    helpful = max(1, min(num_ranks, -(-num_runs // _AT_A_TIME)))
    for size in dict.fromkeys((helpful, min(helpful, len(nodes)))):
        ranks = tuple(in_turn[:size])
        yield Team(ranks, max(Counter(node_of(rank, node_size) for rank in ranks).values()))
