"""What sequences that ranks share take besides computing: messages that attention does not hide. Pure: no torch.

[Note: rows over nodes]
Inside a node the exchange of heads takes what all-to-alls of as many GPUs were measured to take. Between nodes go
contiguous messages from one rank to another, at the speed of the links, as rings are counted. How many bytes these have
follows from a row's sequences: two nodes that hold 8K tokens each of four sequences of 4K send each other nothing, and
of one sequence of 16K the first computes 11.6K, so it needs 3.6K queries, keys and values of the second, gives it 8K
keys and values, and brings 3.6K outputs back. Where all ranks of two nodes share the heads, half of all crosses; those
of more nodes pay an all-to-all of all of them, as it was measured. A step of the exchange takes what the busiest node
sends or is sent. Planning counts a token as in a row with one sequence of 16K, or of its own if that is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.head_sharing import most_of_room, row_parts
from ds_hydra.pipe.rows import Overlap, Reach, cut_heads
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape

_ALONE, _STEP = 16_384, 1024  # tokens of a row with one sequence, at least, and between those that are computed
_OVERLAP = Overlap()
Waits = tuple[tuple[float, float], ...]
"""Shares of the messages and of the attention beside them; exposed is the most that such messages take longer."""


@dataclass(frozen=True, slots=True)
class WaitingCost(SchemeCost):
    """Costs of sequences that ranks share: those above `alone` tokens wait for messages of `message` ms a token, but
    for what goes on during the sequence's attention, as `waits` has it."""

    message: float = 0.0
    waits: Waits = ((1.0, 1.0),)
    alone: int = 0
    heads: int = 0  # of a rank in attention, where messages overlap by groups of them
    kv_heads: int = 0
    by_row: bool = False  # loads wait as rows of their own micro-batch's tokens do

    def sequence_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> NDArray[np.float64]:
        """What each sequence adds to its micro-batch, in ms."""
        tokens = np.asarray(lengths, dtype=np.float64)
        attention, messages = self.a * tokens * tokens, np.where(tokens > self.alone, self.message * tokens, 0.0)
        exposed = np.zeros(len(tokens))
        for moved, computed in self.waits:
            exposed = np.maximum(exposed, moved * messages - computed * attention)
        return self.b * tokens + attention + exposed

    def load_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> float:
        """One micro-batch, in ms; see `SchemeCost`."""
        if self.by_row:
            return SchemeCost.load_ms(self.without_waits, lengths) + self.row_waits_ms(lengths)
        return SchemeCost.load_ms(self, lengths)  # a class with slots has no `super()`

    def row_waits_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> float:
        """What messages of a row leave exposed, beside the attention of all its sequences."""
        tokens = np.asarray(lengths, dtype=np.float64)
        messages, attention = self.message * float(tokens.sum()), self.a * float((tokens * tokens).sum())
        waits = waits_of(int(tokens.sum()) // self.uniform.sp, self.heads, self.kv_heads)
        return max(moved * messages - computed * attention for moved, computed in waits)

    @property
    def in_rows(self) -> WaitingCost:
        """The same as micro-batches really take it: how many groups of heads overlap depends on their tokens."""
        return replace(self, by_row=self.heads > 0)

    @property
    def without_waits(self) -> SchemeCost:
        """The same as if messages took no time."""
        return SchemeCost(*fields_of(self))


Fields = tuple[
    ParallelScheme | PipelineShape, float, float, float, int, int, Shares | None, str, tuple[float, ...], float
]


def fields_of(cost: SchemeCost) -> Fields:
    """What any entry of a table made here has, in order."""
    return (
        cost.scheme, cost.a, cost.b, cost.c, cost.max_length, cost.util_length, cost.shares, cost.derived, cost.stages,
        cost.floor,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def waits_of(tokens: int, heads: int, kv_heads: int, coming: float = 0.75) -> Waits:
    """How Ulysses' messages wait, of a rank with so many tokens and heads [Note: exchange in groups].

    What comes in, three quarters of all if `coming` says nothing else, goes first, group by group, then what goes out;
    a group is computed when its own has come, and the one before it is done. So attention ends no sooner than some
    groups have come, some are computed after that, and what they and those behind them make has gone. Each choice of
    these is one of the waits.
    """
    groups = cut_heads(_OVERLAP.groups_of(tokens), heads, kv_heads)
    ends = [0.0, *(heads_before / heads for heads_before in accumulate(groups))]
    found = {1.0: 1.0}  # all messages, with all of the attention meanwhile: by what goes on, the most that is moved
    for first, last in combinations(range(len(ends)), 2):
        computed = round(1.0 - (ends[last] - ends[first]), 9)
        moved = coming * ends[first + 1] + (1.0 - coming) * (1.0 - ends[last - 1])
        found[computed] = max(moved, found.get(computed, 0.0))
    return tuple((moved, computed) for computed, moved in found.items())


class Crossing(NamedTuple):
    """What the busiest node exchanges with others before attention and after it, in tokens' queries."""

    coming: float
    going: float


@lru_cache(maxsize=100_000)
def crossing(lengths: tuple[int, ...], nodes: int, keys: float) -> Crossing:
    """Of a row that so many nodes share; `keys`: heads of keys over those of queries."""
    total = sum(lengths)
    parts = row_parts(lengths, 0, Reach(), nodes)
    ends = list(pairwise(total * node // nodes for node in range(nodes + 1)))
    queries, rows = np.zeros((nodes, nodes)), np.zeros((nodes, nodes))  # from node to node
    for receiver, part in enumerate(parts):
        for sender, held in enumerate(ends):
            if sender != receiver:
                for found, kind in ((queries, False), (rows, True)):
                    overlap = part.overlap(held, keys=kind)
                    found[sender, receiver] = overlap.stop - overlap.start
    return Crossing(_busiest(queries + 2.0 * keys * rows), _busiest(queries))


def crossing_by_heads(lengths: tuple[int, ...], nodes: int, keys: float) -> Crossing:
    """The same where all nodes compute all tokens, each other heads."""
    leaves = sum(lengths) / nodes * (1.0 - 1.0 / nodes)
    return Crossing(leaves * (1.0 + 2.0 * keys), leaves)


def _busiest(moved: NDArray[np.float64]) -> float:
    return float(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))


@dataclass(frozen=True, slots=True)
class TwoHopCost(WaitingCost):
    """Costs of sequences that ranks of several nodes share [Note: rows over nodes]."""

    inside: float = 0.0  # ms that heads of a token take inside a node, forward and backward
    between: float = 0.0  # ms that a token's queries take from node to node, forward and backward
    keys: float = 1.0  # heads of keys over those of queries
    nodes: int = 2
    by_heads: bool = False  # nodes share the heads too, and not the queries [Note: heads over nodes]
    over_all: WaitingCost | None = None  # of rows that have no memory for keys of other nodes

    def sequence_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> NDArray[np.float64]:
        """See `SchemeCost`. A token waits as in a long row, also of a short sequence: it is packed with longer ones,
        whose attention hides its messages. What fills a row by itself may have no memory for keys of other nodes."""
        tokens = np.asarray(lengths, dtype=np.float64)
        steps = {int(length) // _STEP for length in tokens if length > _ALONE}
        rows = sorted({_ALONE, *(_STEP * (step + above) for step in steps for above in (0, 1))})
        of_a_token = np.interp(tokens, rows, [self._waits_ms((row,)) / row for row in rows])
        found = SchemeCost.sequence_ms(self, lengths) + of_a_token * tokens
        return (
            found if self.over_all is None else np.where(tokens > self._most, self.over_all.sequence_ms(lengths), found)
        )

    def row_waits_ms(self, lengths: NDArray[np.int64] | Sequence[int]) -> float:
        """What messages of a row leave exposed, group by group; see `WaitingCost`."""
        row = tuple(int(length) for length in lengths)
        if self.over_all is not None and sum(row) > self._most:
            return self.over_all.row_waits_ms(row)
        return self._waits_ms(row)

    def _waits_ms(self, row: tuple[int, ...]) -> float:
        tokens = sum(row)
        groups = cut_heads(_OVERLAP.groups_of(tokens // self.uniform.sp), self.heads, self.kv_heads)
        moved = (crossing_by_heads if self.by_heads else crossing)(row, self.nodes, self.keys)
        attention = self.a * sum(length * length for length in row)
        return two_hops_ms(
            groups, attention, self.inside * tokens, moved.coming * self.between, moved.going * self.between
        )

    @property
    def _most(self) -> float:
        """Tokens of a row for which there is memory for keys of other nodes."""
        return most_of_room(self.nodes) * self.max_length


def two_hops_ms(groups: Sequence[int], attention: float, inside: float, coming: float, going: float) -> float:
    """How much longer a row takes than its attention: messages one after the other, as ranks start them
    [Note: two hops]."""
    shares = [n / sum(groups) for n in groups]
    link = computed = 0.0  # when what was started so far will have been sent, and computed
    ends: dict[tuple[str, int], float] = {}

    def send(kind: str, number: int, of_all: float) -> None:
        nonlocal link
        if 0 <= number < len(shares):
            ends[kind, number] = link = max(link, computed) + of_all * shares[number]

    def wait(kind: str, number: int) -> None:
        nonlocal computed
        computed = max(computed, ends.get((kind, number), 0.0))

    def hop(number: int) -> None:
        wait("near", number)
        send("far", number, coming)
        send("near", number + 2, 0.75 * inside)

    def hop_back(number: int) -> None:
        wait("back", number)
        send("home", number, 0.25 * inside)

    send("near", 0, 0.75 * inside)
    send("near", 1, 0.75 * inside)
    hop(0)
    for number, share in enumerate(shares):
        hop(number + 1)
        wait("far", number)
        computed += attention * share
        send("back", number, going)
        hop_back(number - 1)
    hop_back(len(shares) - 1)
    return max(link, computed) - attention
