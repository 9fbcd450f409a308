"""Layouts of flat tensors: buckets, and which rank holds which intervals of them. Pure: no torch.

[Note: mutual slices] Two layouts of one flat tensor cut it at different places. Their common refinement is cut where
either of them is; its intervals are the mutual slices of Hydraulis, section 5.2. 12 elements cut at 4 and 8 by one
layout and at 6 by the other have the mutual slices [0, 4), [4, 6), [6, 8) and [8, 12). The paper cuts into LCM(N, TP)
equal parts instead, here LCM(3, 2) = 6 of 2 elements each, and needs N and TP to divide the tensor; intervals are as
few as can be and need nothing to divide anything.

Plans for 1024 ranks hold a million intervals; as int64 columns they cost milliseconds, as objects a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ds_hydra.zero_hetero.errors import PlanError

Column = NDArray[np.int64]


class Overlaps(NamedTuple):
    """Pairs of intervals that meet: row i says that `left[i]` and `right[i]` share [start, stop)."""

    left: Column  # index into the left intervals, ascending
    right: Column  # index into the right intervals, ascending within one left interval
    start: Column
    stop: Column


def overlaps(left_start: Column, left_stop: Column, right_start: Column, right_stop: Column) -> Overlaps:
    """The common refinement of any intervals (left) with sorted, disjoint ones (right).

    All columns int64; left of shape (L,), right of shape (R,). The result has one row per meeting pair; where the left
    intervals are disjoint too, that is fewer than L + R rows.

    Left [0, 6), [6, 12) and right [0, 4), [4, 8), [8, 12) give the rows (left, right, start, stop)
    (0, 0, 0, 4), (0, 1, 4, 6), (1, 1, 6, 8), (1, 2, 8, 12).
    """
    # A left interval meets the right ones from the first that ends behind its start up to the last that begins before
    # its stop. Right intervals are sorted and disjoint, so both are binary searches and those between all meet it.
    first = np.searchsorted(right_stop, left_start, side="right")
    last = np.searchsorted(right_start, left_stop, side="left")
    left, right = expand(first, np.maximum(last, first))  # none where it lies in a gap: `last` may be below `first`
    start = np.maximum(left_start[left], right_start[right])
    stop = np.minimum(left_stop[left], right_stop[right])
    return Overlaps(left, right, start, stop)


def expand(first: Column, last: Column) -> tuple[Column, Column]:
    """Every (i, j) with first[i] <= j < last[i], in order, as two columns.

    first (3, 7, 0) and last (5, 7, 1) give i = (0, 0, 2) and j = (3, 4, 0).
    """
    counts = last - first
    owner = np.repeat(np.arange(len(counts)), counts)
    # A running index, set back to `first` at the beginning of each owner's run.
    run_start = np.cumsum(counts) - counts
    index = np.arange(len(owner)) - np.repeat(run_start - first, counts)
    return owner, index


def sum_by(group: Column, num_groups: int, values: Column) -> Column:
    """Sum of `values` for each group, of shape (num_groups,); exact for sums below 2**53."""
    # bincount adds in float64, which holds whole numbers up to 2**53: far more elements than a model has.
    return np.bincount(group, weights=values, minlength=num_groups).astype(np.int64)


def sorted_by(first: Column, then: Column, n: int) -> Column:
    """The stable order by one column of ranks and then by another, both below `n`, at most 65,536."""
    # Where nearly every pair of ranks has one message, each is put at its place in a table of all pairs: a million of
    # them take a fifth of the time of sorting. Sorting 16 bit numbers takes a tenth of that of wide ones.
    if 2 * len(first) > n * n:
        table = np.full(n * n, -1)
        table[first * n + then] = np.arange(len(first))
        order = table[table >= 0]
        if len(order) == len(first):
            return order
    order = np.argsort(then.astype(np.uint16), kind="stable")
    return order[np.argsort(first[order].astype(np.uint16), kind="stable")]


def first_conflict(group: Column, start: Column, stop: Column) -> tuple[int, int] | None:
    """The first two intervals of one group that overlap, as indices, or None; all columns of shape (n,)."""
    order = np.lexsort((start, group))
    group, start, stop = group[order], start[order], stop[order]
    # Sorted by start, intervals of one group are disjoint exactly when no one begins before the one before it ends.
    conflict = np.flatnonzero((group[1:] == group[:-1]) & (start[1:] < stop[:-1]))
    if not len(conflict):
        return None
    at = int(conflict[0])
    return int(order[at]), int(order[at + 1])


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A transformer layer, the embeddings or the head: its parameters one after the other, without gaps.

    This is all that masters need to know of a bucket: names and sizes. Shapes, shard rules and what is trained are
    known one folder above, to the `Bucket` of `pipe.model_plan`. Raises PlanError for an empty or repeated parameter.
    """

    name: str
    params: tuple[tuple[str, int], ...]  # (parameter name, elements), in flat order
    owners: tuple[int, ...] = ()  # ranks that own its masters, in rising order; none: all do

    def __post_init__(self) -> None:
        names = [name for name, _ in self.params]
        # Counting each name costs the square of their number, so it is done only where some name does occur twice.
        twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        if twice:
            raise PlanError(f"bucket {self.name!r} lists {sorted(twice)} twice; a parameter belongs to it once")
        for name, numel in self.params:
            if numel < 1:
                raise PlanError(f"bucket {self.name!r}: parameter {name!r} has {numel} elements; leave it out")

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return sum(numel for _, numel in self.params)

    @property
    def offsets(self) -> dict[str, int]:
        """Where each parameter begins in the bucket, in elements."""
        ends = accumulate(numel for _, numel in self.params)
        return {name: end - numel for (name, numel), end in zip(self.params, ends, strict=True)}


ALIGNMENT = 64  # elements: 128 bytes or more, as matrix products, copies and networks like it

Numel = TypeVar("Numel", int, Column)


def padded(numel: Numel, alignment: int = ALIGNMENT) -> Numel:
    """Elements that `numel` elements take, with the gap to the next ones."""
    return -(-numel // alignment) * alignment


class Piece(NamedTuple):
    """Elements [start, stop) of the flat tensor, held at `offset` of the rank's local buffer."""

    start: int
    stop: int
    offset: int


class PieceColumns(NamedTuple):
    """All pieces of a layout, by rank and then by start; int64 columns of shape (num_pieces,)."""

    rank: Column
    start: Column
    stop: Column
    offset: Column


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rank holds which intervals of a flat tensor of `numel` elements.

    `pieces[rank]` may be empty, several ranks may hold the same interval, and some intervals may be held by no
    rank. One rank's pieces overlap neither in the tensor nor in its buffer. All counts are elements.
    """

    numel: int
    pieces: tuple[tuple[Piece, ...], ...]  # per rank
    sizes: tuple[int, ...]  # per rank: length of its local buffer, at least the end of its last piece
    alignment: int = 1  # at multiples of which twins' parts of a buffer, and what follows it, begin [Note: gaps]

    @property
    def num_ranks(self) -> int:
        """Ranks of the job, those that hold nothing included."""
        return len(self.pieces)

    def held(self, rank: int) -> int:
        """Elements that `rank` holds."""
        return sum(piece.stop - piece.start for piece in self.pieces[rank])

    def columns(self) -> PieceColumns:
        """The pieces as sorted columns, for planners."""
        counts = [len(pieces) for pieces in self.pieces]
        # One flat pass over all numbers: for a million pieces this is far cheaper than a column at a time.
        flat = np.fromiter(chain.from_iterable(chain.from_iterable(self.pieces)), dtype=np.int64)
        start, stop, offset = flat.reshape(-1, 3).T
        rank = np.repeat(np.arange(self.num_ranks), counts)
        order = np.lexsort((start, rank))
        return PieceColumns(rank[order], start[order], stop[order], offset[order])

    def validate(self) -> PieceColumns:
        """The layout's `columns`. Raises `PlanError` if it contradicts itself."""
        if len(self.sizes) != len(self.pieces):
            raise PlanError(
                f"a layout has pieces for {len(self.pieces)} ranks but buffer sizes for {len(self.sizes)}; "
                f"give one size per rank, 0 for a rank that holds nothing"
            )
        columns = self.columns()
        self._check_bounds(columns)
        # Overlap in the tensor would count an element twice; overlap in the buffer would give one place two values.
        for what, begin in (("elements", columns.start), ("places in its local buffer", columns.offset)):
            conflict = first_conflict(columns.rank, begin, begin + columns.stop - columns.start)
            if conflict is not None:
                one, other = (_piece_at(columns, index) for index in conflict)
                raise PlanError(
                    f"rank {columns.rank[conflict[0]]} has the same {what} in two pieces, {one} and {other}; "
                    f"a rank holds each element once, so cut one of them"
                )
        return columns

    def _check_bounds(self, columns: PieceColumns) -> None:
        """Raise `PlanError` for a piece that is empty or leaves the tensor or its rank's buffer."""
        rank, start, stop, offset = columns
        size = np.array(self.sizes, dtype=np.int64)[rank]
        # All conditions at once over columns; which of them failed is found out for one bad piece only.
        bad = (start < 0) | (stop > self.numel) | (start >= stop) | (offset < 0) | (offset + stop - start > size)
        if not bad.any():
            return
        at = int(np.flatnonzero(bad)[0])
        piece = _piece_at(columns, at)
        if piece.start >= piece.stop:
            reason = "is empty; leave it out"
        elif piece.start < 0 or piece.stop > self.numel:
            reason = f"leaves the tensor's elements [0, {self.numel}); cut it to the tensor"
        else:
            reason = (
                f"does not fit its local buffer of {size[at]} elements, it would end at "
                f"{piece.offset + piece.stop - piece.start}; raise the rank's size or lower the offset"
            )
        raise PlanError(f"rank {rank[at]}: {piece} {reason}")


@lru_cache(maxsize=16)  # one for each kind of bucket
def even_layout(numel: int, num_ranks: int, owners: tuple[int, ...] = ()) -> Layout:
    """Rank r holds the r-th of `num_ranks` nearly equal intervals, without padding; or the k-th of `owners`, which are
    in rising order, the k-th of as many, and other ranks nothing.

    Cuts lie at floor(r * numel / num_ranks): 10 elements on 4 ranks are cut at 0, 2, 5, 7, 10. So sizes differ by at
    most one element for any number of ranks, and some ranks hold nothing where there are more ranks than elements.
    Raises `PlanError` without a rank to hold them, and for owners that are no such ranks.
    """
    if num_ranks < 1 or numel < 0:
        raise PlanError(f"cannot share {numel} elements among {num_ranks} ranks; there must be at least one rank")
    if list(owners) != sorted({*owners} & {*range(num_ranks)}):
        raise PlanError(f"owners {owners} are not some of {num_ranks} ranks in rising order")
    owners = owners or tuple(range(num_ranks))
    cuts = [place * numel // len(owners) for place in range(len(owners) + 1)]
    held = dict(zip(owners, pairwise(cuts), strict=True))
    return layout_of_intervals(numel, [held.get(rank, (0, 0)) for rank in range(num_ranks)])


def layout_of_intervals(numel: int, intervals: Sequence[tuple[int, int]]) -> Layout:
    """Rank r holds `intervals[r]` = (start, stop) and nothing else, at offset 0; empty intervals are left out."""
    pieces = tuple((Piece(start, stop, 0),) if stop > start else () for start, stop in intervals)
    return Layout(numel, pieces, tuple(max(0, stop - start) for start, stop in intervals))


def _piece_at(columns: PieceColumns, index: int) -> Piece:
    return Piece(int(columns.start[index]), int(columns.stop[index]), int(columns.offset[index]))
