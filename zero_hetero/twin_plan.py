"""Plans transfers in which ranks that hold the same share the work. Pure.

[Note: twins] Ranks whose local buffers hold the same are twins: under 8*tp8 the eight ranks of one TP rank. If each of
K twins took its buffer from the owners by itself, every owner would send the same to all of them, as many messages as
there are pipelines. So a bucket is pulled in two steps:

    enter    The twins cut their buffer into K equal parts, and the k-th of them receives the k-th part from its owners,
             at its final place. What a rank receives is as little as what it owns, and comes from few owners.
    gather   Each twin's part goes to all of them: one collective of a regular shape, which networks are built for.

A push goes the same way back:

    trade    Each twin gets everybody's contributions to its part, and adds them up by rank [Note: order of a sum].
    leave    The sums go to the owners of the masters, unrounded. Where ranks that are no twins contribute to one
             element (under tp2 + 2*tp1, say), or the twins of several nodes, the owner adds up their sums, by rank.

Example, without gaps: 2*tp1 on ranks 0 and 1, a bucket of 8 elements of which each owns half, as TP rank 0 of both
holds all of it: rank 0 has elements 0 to 3 already, its part; a gather of parts of 4 gives all 8 to both. A push trades
4 elements each way, and nothing has to leave. With other owners than twins, such as under 2*tp2 on 4 ranks, a part has
to enter first:

    elements    0 1 | 2 3 | 4 5 | 6 7      owners 0 to 3
    twins 0, 2  hold elements 0 to 3: rank 0 enters 0 and 1, its own, rank 2 enters 2 and 3 from rank 1
    twins 1, 3  hold elements 4 to 7: rank 1 enters 4 and 5 from rank 2, rank 3 enters 6 and 7, its own

Links inside a node are many times as fast as those between nodes. So where a node has several of the twins, those of
each node pull by themselves: they cut the buffer into as many parts as they are, which enter from owners on any node,
and gather inside. An element enters a node once then; it comes from its owner, to one rank of each node. Twins of which
no two share a node gather across nodes, in one step.

Pushes go the same way where every node has at least SUMMED_INSIDE of the twins: one sum of an element enters its
owner's node from each other node, and not what everyone there has. With n nodes of c twins an owner receives n - 1 sums
in FP32 for each of its elements from other nodes, where among all twins c (n - 1) contributions came to it and a sum
more: of 64*tp1 on nodes of 8 a 16 bit gradient sends a quarter of the bytes so. Two twins on each node would send as
many bytes as contributions that they did not add up.

In a model's layouts parts begin at multiples of 64 elements [Note: gaps], so a buffer is followed by some that nobody
reads: one of 1000 elements of 3 twins takes 3 parts of 384.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ds_hydra.zero_hetero.layout import Layout, Piece, padded
from ds_hydra.zero_hetero.nodes import NodeSize, node_of
from ds_hydra.zero_hetero.transfer_plan import SliceColumns, TransferPlan, plan_transfer

SUMMED_INSIDE = 3  # twins of a node at least, which add up before they send


@dataclass(frozen=True, slots=True)
class Twins:
    """Ranks whose local buffers hold the same [Note: twins]; the k-th of them brings in the k-th part."""

    ranks: tuple[int, ...]  # in their order
    apart: tuple[tuple[int, ...], ...] = ()  # those of each node, where these pull by themselves

    @classmethod
    def of(cls, ranks: Sequence[int], node_size: NodeSize) -> Twins:
        """These ranks; those of each node apart if a node of several has more than one of them."""
        by_node: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            by_node.setdefault(node_of(rank, node_size), []).append(rank)
        is_apart = 1 < len(by_node) < len(ranks)
        return cls(tuple(sorted(ranks)), tuple(map(tuple, by_node.values())) if is_apart else ())

    def part_of(self, numel: int, alignment: int) -> int:
        """Elements of one part of a buffer of `numel`."""
        return padded(-(-numel // len(self.ranks)), alignment)

    def padded(self, numel: int, alignment: int) -> int:
        """Elements of a buffer of `numel`, with those that follow it so that the parts of each transfer are equal."""
        return max(one.part_of(numel, alignment) * len(one.ranks) for one in (self, *self.pulling))

    @property
    def pulling(self) -> tuple[Twins, ...]:
        """Those who share a pull, and gather."""
        return tuple(map(Twins, self.apart)) or (self,)

    @property
    def pushing(self) -> tuple[Twins, ...]:
        """Those who trade, and add up by rank."""
        fewest = min(map(len, self.apart), default=0)
        return self.pulling if fewest >= SUMMED_INSIDE else (Twins(self.ranks),)


@dataclass(frozen=True, slots=True)
class Shared:
    """How twins share a bucket."""

    twins: tuple[Twins, ...]  # who gather, or trade, together
    parts: tuple[int, ...]  # elements of a part, for each of the twins; 0: they hold nothing of the bucket

    def part_of(self, rank: int) -> tuple[tuple[int, ...], int]:
        """The ranks that a rank gathers or trades with, itself among them, and the elements of a part; 0 if it pulls
        or pushes by itself, or nothing."""
        return next((one for one in self.teams if rank in one[0]), ((rank,), 0))

    @property
    def teams(self) -> list[tuple[tuple[int, ...], int]]:
        """Ranks that share a part of the work, with the elements of a part."""
        found = zip(self.twins, self.parts, strict=True)
        return [(twins.ranks, part) for twins, part in found if part and len(twins.ranks) > 1]


@dataclass(frozen=True, slots=True)
class TwinPull(Shared):
    """A bucket's pull: its parts enter, then the twins gather."""

    enter: TransferPlan

    @property
    def hops(self) -> tuple[TransferPlan, ...]:
        """All that moves, step by step, each member's part sent to each other twin."""
        gathers = self.teams
        return self.enter, *([_all_pairs(self.enter.num_ranks, gathers)] if gathers else [])


@dataclass(frozen=True, slots=True)
class TwinPush(Shared):
    """A bucket's push: the twins trade and sum, then their sums leave."""

    leave: TransferPlan

    @property
    def hops(self) -> tuple[TransferPlan, ...]:
        """All that moves, step by step; in a trade the k-th twin receives into the places of all twins, in order."""
        return _all_pairs(self.leave.num_ranks, self.teams, traded=True), self.leave


def plan_twin_pull(masters: Layout, held: Layout, twins: Sequence[Twins]) -> TwinPull:
    """Deliver `held` from `masters`, of which every element has one owner; `twins` hold each rank once.

    Raises PlanError as `plan_transfer` does.
    """
    held.validate()
    twins = [one for those in twins for one in those.pulling]
    parts = tuple(one.part_of(held.sizes[one.ranks[0]], held.alignment) for one in twins)
    entering = _of_parts(held, twins, parts, from_part=False)
    return TwinPull(tuple(twins), parts, plan_transfer(masters, entering))


def plan_twin_push(masters: Layout, contributed: Layout, twins: Sequence[Twins]) -> TwinPush:
    """Sum `contributed` into `masters`; buffers have the sizes of the pull, and twins contribute the same elements.

    Raises PlanError as `plan_transfer` does.
    """
    contributed.validate()
    twins = [one for those in twins for one in those.pushing]
    parts = tuple(one.part_of(contributed.sizes[one.ranks[0]], contributed.alignment) for one in twins)
    leaving = _of_parts(contributed, twins, parts, from_part=True)
    return TwinPush(tuple(twins), parts, plan_transfer(masters, leaving).transposed())


def _of_parts(held: Layout, twins: Sequence[Twins], parts: Sequence[int], *, from_part: bool) -> Layout:
    """What lies in each rank's own part of its buffer, with offsets in the buffer, or in the part: `from_part`."""
    pieces: list[tuple[Piece, ...]] = [()] * held.num_ranks
    sizes = [0] * held.num_ranks
    for one, part in zip(twins, parts, strict=True):
        if not part:
            continue
        mine = sorted(held.pieces[one.ranks[0]], key=lambda piece: piece.offset)
        at = 0  # the first piece that reaches into the part
        for index, rank in enumerate(one.ranks):
            begin, end = index * part, (index + 1) * part
            while at < len(mine) and _end(mine[at]) <= begin:
                at += 1
            own: list[Piece] = []
            for piece in mine[at:]:
                if piece.offset >= end:
                    break
                skip, cut = max(0, begin - piece.offset), max(0, _end(piece) - end)
                place = piece.offset + skip - (begin if from_part else 0)
                own.append(Piece(piece.start + skip, piece.stop - cut, place))
            pieces[rank], sizes[rank] = tuple(own), part if from_part else len(one.ranks) * part
    return Layout(held.numel, tuple(pieces), tuple(sizes))


def _end(piece: Piece) -> int:
    """Where a piece ends in its buffer."""
    return piece.offset + piece.stop - piece.start


@lru_cache(maxsize=2)
def _pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    """All ordered pairs of so many members, none with itself; read only."""
    i, j = np.nonzero(~np.eye(count, dtype=bool))
    i.flags.writeable = j.flags.writeable = False
    return i, j


def _all_pairs(num_ranks: int, teams: Sequence[tuple[Sequence[int], int]], *, traded: bool = False) -> TransferPlan:
    """Messages between all members of each team, given as (ranks, elements of a part).

    The i-th member sends its i-th part to the j-th, into the i-th place; or, `traded`, its j-th.
    """
    columns: list[tuple[np.ndarray, ...]] = []
    for ranks, numel in teams:
        members = np.array(ranks, dtype=np.int64)
        i, j = _pairs(len(members))
        columns.append((members[i], members[j], (j if traded else i) * numel, i * numel, np.full(len(i), numel)))
    if not columns:
        columns = [(np.zeros(0, dtype=np.int64),) * 5]
    return TransferPlan(num_ranks, SliceColumns(*map(np.concatenate, zip(*columns, strict=True))))
