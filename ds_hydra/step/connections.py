"""Strategies in, the pairs and teams of ranks that talk to each other under them out. Pure: no torch.

[Note: connections]
On NCCL the first message of a pair of ranks connects the two, and the host of each waits until the other has come to
it; a communicator that is made at its first use needs all its ranks then. Neither may happen within a step, where ranks
come to their messages at different times. Example: `tp4pp2` on 8 ranks. In the last backward rank 6 pushes to rank 2
for the first time, and waits for it. Rank 2 is in the first stage and waits for the gradient that rank 6 sends after
that backward. So before step 0 all ranks come together and exchange one element over every pair that is listed here,
and in every team.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import Stage, Strategy
from ds_hydra.pipe.rows import edge
from ds_hydra.pipe.transfers import plan_transfers, twins_of
from ds_hydra.zero_hetero.nodes import NodeSize
from ds_hydra.zero_hetero.twin_plan import TwinPull, TwinPush

Pairs = frozenset[tuple[int, int]]
"""(sender, receiver), global ranks."""


class Connections(NamedTuple):
    """Pairs of ranks, by the communicator on which they exchange messages."""

    links: Pairs  # pulls and pushes
    edges: Pairs  # between the stages of pipelines
    teams: tuple[tuple[int, ...], ...]  # ranks that gather or trade in pulls and pushes [Note: twins]


def connections_of(plan: ModelPlan, strategies: Iterable[Strategy], node_size: NodeSize) -> Connections:
    """All pairs that steps under these strategies use, whatever their batches; see [Note: connections]."""
    links: set[tuple[int, int]] = set()
    edges: set[tuple[int, int]] = set()
    teams: dict[tuple[int, ...], None] = {}
    for strategy in strategies:
        links |= link_pairs(plan, strategy, node_size)
        edges |= edge_pairs(strategy, token_sharding=plan.token_sharding)
        teams |= dict.fromkeys(team for team in teams_of(strategy, node_size))
    return Connections(frozenset(links), frozenset(edges), tuple(teams))


def link_pairs(plan: ModelPlan, strategy: Strategy, node_size: NodeSize) -> Pairs:
    """Pairs of the pulls and pushes of all buckets under one strategy; teams talk apart from them."""
    found: set[tuple[int, int]] = set()
    distinct = {id(transfers): transfers for transfers in plan_transfers(plan, strategy, node_size)}
    for pull, push in distinct.values():
        found |= (pull.enter if isinstance(pull, TwinPull) else pull).pairs
        if push is not None:
            found |= (push.leave if isinstance(push, TwinPush) else push).pairs
    return frozenset(found)


def teams_of(strategy: Strategy, node_size: NodeSize) -> Iterator[tuple[int, ...]]:
    """Teams of the pulls and pushes under one strategy, in one order; those of one step have no rank in common."""
    found = [twins for twins in twins_of(strategy, node_size) if len(twins.ranks) > 1]
    yield from (one.ranks for twins in found for one in twins.pulling if len(one.ranks) > 1)
    yield from (one.ranks for twins in found for one in twins.pushing if len(one.ranks) > 1)


def edge_pairs(strategy: Strategy, *, token_sharding: bool = False) -> Pairs:
    """Pairs of the edges of all pipelines: activations go one way, gradients the other."""
    found: set[tuple[int, int]] = set()
    for pipeline in strategy.pipelines:
        for before, after in pairwise(pipeline.stages):
            for src, dst in ((before, after), (after, before)):
                found |= _senders(src, dst, token_sharding)
    return frozenset(found)


def _senders(src: Stage, dst: Stage, token_sharding: bool) -> set[tuple[int, int]]:
    """Who sends rows to whom from one stage to another, for any number of tokens.

    With this number both stages cut the row evenly, and each sender has a token of every receiver of its. Two parts
    that have no token in common then have none with any other number: their cuts are floors of the even ones.
    """
    num_tokens = len(src.ranks) * len(dst.ranks)
    receives = edge(src, dst, num_tokens, token_sharding=token_sharding)[1]
    return {(rows.peer, receiver) for receiver, parts in receives.items() for rows in parts}
