"""How many of a stage's sequence parallel ranks share the heads of attention; the others share the queries. Pure.

[Note: heads inside a node]
Ulysses over several nodes sends most of all queries, keys, values and outputs from node to node. If only the ranks of a
node share the heads, and nodes share the queries [Note: shared queries], keys and values cross the nodes, and of
queries and outputs those of tokens that another node computes. What crosses is counted here for a row with one
sequence, in units of all its queries: two nodes compute the tokens 0..0.71 and 0.71..1 of it, and hold 0..0.5 and
0.5..1. With as many key/value heads as query heads:

  Ulysses over all    half of queries, keys, values and outputs                              2.0
  heads in a node     queries and outputs of 0.5..0.71, its keys and values to the first
                      node, and those of 0..0.5 to the second                                1.83

A slice's queries see about equally many keys, but keys and values of all its tokens go to both nodes, as later slices
need them: 2.0 again, and no fewer than by Ulysses. With an eighth of the key/value heads it is 0.25 in place of 1.13.
Ranks also keep the keys of both nodes, which memory is not planned for. So a pipeline of several stages, and one stage
with a row of nearly as many tokens as it may hold, do with whole sequences as with slices.

[Note: heads over nodes]
Where all ranks share the heads, they do so in two hops too: those of a node for the node's tokens, then ranks of
different nodes, each half of what it has. As many bytes cross as in one hop, in messages from one rank to one rank of
each other node. Two nodes of two ranks, eight heads:

  rank            0        1        2        3
  first hop       a b c d  e f g h  a b c d  e f g h    of its node's tokens
  second hop      a b      e f      c d      g h        of all tokens

[Note: who shares heads]
Tensor parallel ranks hold the parameters of their own heads. Sequence parallel ranks hold the same ones, gather the
tokens of the row, and each of them computes some of these heads for all tokens. So rank (i, j) of tp * sp has part
i * sp + j of the heads, where so many parts are possible. Where they are not, ranks that stand next to each other in
the row share the heads as far as they can, for the sequences that overlap their tokens. Two heads over sp = 4:

  sp rank           0      1      2      3
  tokens            0..3   4..7   8..11  12..15
  computes of       0..7   0..7   8..15  8..15
  head              0      1      0      1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from ds_hydra.pipe.rows import Reach, position_ids, split_tokens
from ds_hydra.zero_hetero.nodes import NodeSize, largest_node


@dataclass(frozen=True, slots=True)
class HeadDegrees:
    """In how many parts the heads of a module can be computed, each by another rank."""

    parts: tuple[int, ...] = ()  # none: every rank computes the whole
    groups: int = 0  # of its norm: of more parts than that, several add up the squares of a group; 0: of no number

    def shared_by(self, tp: int, sp: int) -> tuple[int, int]:
        """How many tensor parallel ranks share the heads, and how many sequence parallel ones what each of these has;
        1: every rank computes the whole."""
        by_tp = tp if tp in self.parts else 1
        fits = (n for n in range(sp, 1, -1) if sp % n == 0 and by_tp * n in self.parts)
        # Squares are added up over all sequence parallel ranks, which must run the same sequences for that.
        alone = (n for n in fits if n == sp or not self.groups or by_tp * n <= self.groups)
        return by_tp, next(alone, 1)


@dataclass(frozen=True, slots=True)
class BoxSize:
    """What planning needs to know of a module that runs once for each sequence [Note: boxes]."""

    weights: int  # elements of its matrices
    recurrent: bool = False  # its time grows with the length alone
    carried: int = 0  # bytes of what a slice of a sequence hands on
    heads: HeadDegrees = HeadDegrees()

    def share(self, tp: int, sp: int) -> float:
        """What one rank computes of it, for the tokens of a long sequence, and keeps of what it hands on."""
        by_tp, by_sp = self.heads.shared_by(tp, sp)
        return 1.0 / (by_tp * by_sp)


Boxes = tuple[tuple[BoxSize, ...], ...]
"""Of each layer of a model; empty where all tokens meet by the attention interface."""


def state_bytes(boxes: Boxes, tp: int = 1, sp: int = 1) -> float:
    """What a rank keeps, in some layers together, for a slice that others follow: the states that it hands on, and
    their gradients."""
    return 2.0 * sum(box.carried * box.share(tp, sp) for of in boxes for box in of)


def most_of_room(nodes: int) -> float:
    """Of the tokens that a micro-batch may have: with so many there is memory for what a rank of several nodes keeps
    more.

    Of two, the first node keeps 1.41 times as many queries and outputs, and as many keys and values: 1.66 times the
    queries' bytes more, an eighth of the least that a layer keeps, 8 times the input's bytes and 5.4 of an MLP's. So
    seven eighths. Of n nodes the first computes the square root of n times as many queries as it holds.
    """
    return 1.0 / (1.0 + (math.sqrt(nodes) - 1.0) / (math.sqrt(2.0) - 1.0) / 7.0)


@lru_cache(maxsize=256)  # every layer of every micro-batch asks
def head_parts(sp: int, heads: int, kv_heads: int, tp: int = 1, *, near: int = 0, sliced: bool = False) -> int:
    """How many of so many sequence parallel ranks share the heads that `tp` leaves to each of its ranks.

    As many as divide them, and divide or are a multiple of the key/value heads; but the `near` ranks of each node, if
    there are several nodes with as many, where less crosses the nodes then [Note: heads inside a node]. `sliced`: of
    rows that have a slice of a sequence, or no memory for more than those.
    """
    heads, kv_heads = max(1, heads // tp), max(1, kv_heads // tp)

    def fits(n: int) -> bool:
        return sp % n == heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    most = next(n for n in range(sp, 0, -1) if fits(n))
    if not 0 < near < most == sp or not fits(near):
        return most
    queries, keys = from_other_nodes(sp // near, sliced=sliced)
    inside = queries + keys * max(kv_heads, near) / heads
    over_all = (1.0 - near / sp) * (1.0 + max(kv_heads, sp) / heads)
    return near if inside < over_all - 1e-9 else most


def near_ranks(sp: int, tp: int, node_size: NodeSize | None) -> int:
    """The `near` ranks of a stage that begins where a node does; 0 where it is in one node (None: all ranks are), or
    nodes have unequally many."""
    if node_size is None:
        return 0
    size = largest_node(node_size)
    near = size // tp
    return near if size % tp == 0 < near < sp and sp % near == 0 else 0


def from_other_nodes(nodes: int, *, sliced: bool = False) -> tuple[float, float]:
    """Of which shares of a row nodes need queries, and keys, that others hold, all nodes together."""
    ends = [(node / nodes) ** (1.0 if sliced else 0.5) for node in range(nodes + 1)]
    held = [node / nodes for node in range(nodes + 1)]
    both = sum(
        max(0.0, min(stop, last) - max(start, first))
        for (start, stop), (first, last) in zip(pairwise(ends), pairwise(held), strict=True)
    )
    return 1.0 - both, sum(1.0 if sliced else stop for stop in ends[1:]) - 1.0


class RowPart(NamedTuple):
    """An interval of a row's tokens, whose queries a rank computes."""

    start: int
    stop: int
    first: int  # the first token of the row whose keys are at hand
    last: int  # the end of those

    def overlap(self, tokens: tuple[int, int], *, keys: bool = False) -> slice:
        """Which of some tokens it has among its queries, or its keys, counted from their first."""
        start, stop = (self.first, self.last) if keys else (self.start, self.stop)
        low, high = max(tokens[0], start), min(tokens[1], stop)
        return slice(low - tokens[0], max(low, high) - tokens[0])


@lru_cache(maxsize=256)
def row_parts(lengths: tuple[int, ...], past: int, reach: Reach, count: int) -> tuple[RowPart, ...]:
    """A row in so many intervals of about equal work, none empty; the first sequence begins at position `past`."""
    if reach.both_ways:
        even = pairwise(accumulate(split_tokens(sum(lengths), count), initial=0))
        return tuple(RowPart(start, stop, 0, sum(lengths)) for start, stop in even)
    positions = position_ids(lengths, 0, sum(lengths), past=past)
    seen = positions + 1 if reach.most is None else np.minimum(positions, reach.most) + 1
    total = np.concatenate(([0], np.cumsum(seen)))
    cuts = [0]
    for part in range(1, count):
        wanted = int(np.abs(total - total[-1] * part / count).argmin())
        cuts.append(min(max(wanted, cuts[-1] + 1), len(seen) - count + part))
    # A token's first key stands as far before it as its position is from that of the key.
    firsts = [start - at + reach.first(at) for start, at in zip(cuts, positions[cuts].tolist(), strict=True)]
    ends = pairwise([*cuts, len(seen)])
    return tuple(RowPart(start, stop, max(0, first), stop) for (start, stop), first in zip(ends, firsts, strict=True))
