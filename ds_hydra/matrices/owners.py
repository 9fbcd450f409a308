"""Assigns matrices to the ranks that orthogonalize them. Pure: no torch.

[Note: whole matrices] Rank r holds the r-th interval of every bucket, so nearly every matrix is cut. One more layout
has whole matrices, each on one rank, its owner. What is formed element by element on the even intervals travels there,
what is made of whole matrices comes back, and each rank updates its intervals by it. Nothing else moves: momentum lies
where Adam's moments do, so checkpoints, new cuts and copies of other ranks know nothing of owners.

Owners are dealt over the whole model, longest first, each to the rank that has least to do so far. Matrices that lie
one after the other in a bucket, as the experts of a stack that is cut by experts and the heads of a weight that is
orthogonalized head by head, are dealt one by one. The experts of a stack that is cut by its rows or columns are mixed
in flat order [Note: flat order] and have one owner.

Example: matrices of costs 5, 4, 3, 3, 3 on 2 ranks: rank 0 gets 5 and 3, rank 1 4 and 3, and the last 3, so that they
end with 8 and 10.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from ds_hydra.pipe.model_plan import Bucket
from ds_hydra.zero_hetero.layout import Layout, Piece, padded

Kind = Literal["gram", "standard", "torch"]
FEW_STEPS = 5  # iterations, where nothing else is said
MOST_APART = 1024  # matrices of a parameter that are dealt one by one
NEAR_EVEN = 1.05  # of the mean, that the busiest rank may have


@dataclass(frozen=True, slots=True)
class MatrixParam:
    """A parameter that is one matrix, or several of equal shape."""

    bucket: int  # of the trained ones
    name: str
    start: int  # its first element in the bucket
    shape: tuple[int, ...]  # as the user has it
    dim: int | None  # which is outermost in flat order, in `parts`
    parts: int = 1
    heads: int = 1  # blocks of rows that are orthogonalized each by itself

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def batch(self) -> tuple[int, int, int]:
        """How many matrices it is, and of which rows and columns: heads, stacks; filters of four dimensions are one."""
        if len(self.shape) == 2:
            return self.heads, self.shape[0] // self.heads, self.shape[1]
        if len(self.shape) == 4:
            return 1, self.shape[0], math.prod(self.shape[1:])
        return math.prod(self.shape[:-2]), self.shape[-2], self.shape[-1]

    @property
    def apart(self) -> bool:
        """Whether its matrices lie one after the other in the bucket, and are not filters of single channels."""
        return self.dim in (None, 0) and self.parts == 1 and self.batch[0] <= MOST_APART


class Owned(NamedTuple):
    """Matrices [first, last) of a parameter, by its number, and the rank that owns them."""

    param: int
    first: int
    last: int
    rank: int


def matrix_params(buckets: Sequence[Bucket], heads: dict[str, int]) -> tuple[MatrixParam, ...]:
    """Parameters of the trained buckets that are orthogonalized: the keys of `heads`, with how many blocks each has."""
    found: list[MatrixParam] = []
    for index, bucket in enumerate(bucket for bucket in buckets if bucket.trainable):
        starts = accumulate((param.numel for param in bucket.params), initial=0)
        for param, start in zip(bucket.params, starts, strict=False):
            if param.name in heads:
                rule = param.rule
                blocks = heads[param.name]
                found.append(MatrixParam(index, param.name, start, param.shape, rule.dim, rule.parts, blocks))
    return tuple(found)


def iteration_flops(rows: int, columns: int, kind: Kind, steps: int = FEW_STEPS) -> int:
    """Floating point operations of the iteration of one matrix: products alone, two for each multiply-add.

    The standard form takes per step two products of the small side's square by the matrix and one of two squares; the
    Gram form, with its restart before the third step, iterates on the squares (`newton_schulz`).
    """
    small, large = sorted((rows, columns))
    wide, square = 2 * small * small * large, 2 * small**3
    if kind != "gram" or small == large:
        return steps * (2 * wide + square)
    restarts = int(steps > 2)
    squares = steps  # of Z = b R + c R R
    squares += sum(step not in (0, 2) for step in range(steps))  # Q = a Q + Z Q, where it is not begun anew
    squares += 2 * sum(step < steps - 1 and step != 1 for step in range(steps))  # R goes on
    return (2 + 2 * restarts) * wide + squares * square


def deal(costs: Sequence[tuple[int, int, bool]], num_ranks: int) -> tuple[Owned, ...]:
    """Owners of all matrices, in the order of parameters and of the matrices in each.

    `costs`: of each parameter its number of matrices, the cost of one, and whether they may have owners of their own.
    """
    units = [
        (cost if apart else cost * count, param, first, first + 1 if apart else count)
        for param, (count, cost, apart) in enumerate(costs)
        for first in (range(count) if apart else (0,))
    ]
    units.sort(key=lambda unit: (-unit[0], *unit[1:]))
    heap = [(0, rank) for rank in range(num_ranks)]
    owners: dict[tuple[int, int, int], int] = {}
    for cost, *unit in units:
        load, rank = heapq.heappop(heap)
        owners[tuple(unit)] = rank  # type: ignore[index]
        heapq.heappush(heap, (load + cost, rank))
    merged: list[Owned] = []
    for (param, first, last), rank in sorted(owners.items()):
        before = merged[-1] if merged else None
        if before is not None and (before.param, before.last, before.rank) == (param, first, rank):
            merged[-1] = before._replace(last=last)
        else:
            merged.append(Owned(param, first, last, rank))
    return tuple(merged)


def loads(costs: Sequence[tuple[int, int, bool]], owned: Sequence[Owned], num_ranks: int) -> tuple[int, ...]:
    """What each rank has to do."""
    found = [0] * num_ranks
    for param, first, last, rank in owned:
        found[rank] += (last - first) * costs[param][1]
    return tuple(found)


def interval(param: MatrixParam, first: int, last: int) -> tuple[int, int]:
    """Elements [start, stop) of the bucket that some of a parameter's matrices are."""
    each = param.numel // param.batch[0]
    return param.start + first * each, param.start + last * each


def whole_layout(
    numel: int, params: Sequence[MatrixParam], owned: Sequence[Owned], bucket: int, num_ranks: int
) -> Layout:
    """A bucket's matrices on their owners, in the order of the bucket, each at a multiple of the alignment."""
    pieces: list[list[Piece]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for number, first, last, rank in owned:
        if params[number].bucket == bucket:
            start, stop = interval(params[number], first, last)
            pieces[rank].append(Piece(start, stop, sizes[rank]))
            sizes[rank] += padded(stop - start)
    return Layout(numel, tuple(map(tuple, pieces)), tuple(sizes))


def master_parts(masters: Layout, params: Sequence[MatrixParam], bucket: int, shift: int) -> Layout:
    """A bucket's matrices as the masters have them, at the places of each rank's interval; and behind it, with a
    `shift`, those of the rank so many before it, of which it keeps a copy."""
    num_ranks = masters.num_ranks
    matrices = [(param.start, param.start + param.numel) for param in params if param.bucket == bucket]
    pieces: list[tuple[Piece, ...]] = []
    sizes: list[int] = []
    for rank in range(num_ranks):
        own: list[Piece] = []
        size = 0
        for of in (rank, (rank - shift) % num_ranks) if shift % num_ranks else (rank,):
            for start, stop, offset in masters.pieces[of]:
                cuts = ((max(start, lo), min(stop, hi)) for lo, hi in matrices)
                own += [Piece(lo, hi, size + offset + lo - start) for lo, hi in cuts if lo < hi]
            size += masters.sizes[of]
        pieces.append(tuple(own))
        sizes.append(size)
    return Layout(masters.numel, tuple(pieces), tuple(sizes))
