"""Sequence parallel ranks beyond what attention's heads divide into: those with the same heads share the queries.

[Note: shared queries]
Of sp = u * g ranks u share the heads, and the g ranks that compute the same ones share the tokens whose queries they
compute. A rank needs the keys and values of all tokens that these see, so keys and values go to g ranks, and their
gradients are added up. A token sees those before it, so later queries cost more: each rank gets an interval of the row
with an equal part of the work. Two heads over sp = 4, a row with one sequence of 12 tokens:

  rank          0          1          2          3
  outside       0..3       3..6       6..9       9..12     tokens
  computes      0..8 of a  0..8 of b  8..12 of a 8..12 of b
  with keys     0..8       0..8       0..12      0..12

The queries 0..8 see 36 keys, and 8..12 see 42. The ranks' own tokens are as ever; all of this is one all-to-all in and
one out, whose parts are uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_hydra.pipe.contexts import Reach
from ds_hydra.pipe.overlapped import AllToAll
from ds_hydra.pipe.rows import Pack, position_ids


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
    positions = position_ids(lengths, 0, sum(lengths), past=past)
    seen = positions + 1 if reach.most is None else np.minimum(positions, reach.most) + 1
    total = np.cumsum(seen)
    cuts = [0]
    for part in range(1, count):
        wanted = int(np.searchsorted(total, total[-1] * part / count))
        cuts.append(min(max(wanted, cuts[-1] + 1), len(seen) - count + part))
    # A token's first key stands as far before it as its position is from that of the key.
    firsts = [start - at + reach.first(at) for start, at in zip(cuts, positions[cuts].tolist(), strict=True)]
    ends = pairwise([*cuts, len(seen)])
    return tuple(RowPart(start, stop, max(0, first), stop) for (start, stop), first in zip(ends, firsts, strict=True))


class BySharedQueries:
    """The exchange of heads where ranks with the same heads share the queries [Note: shared queries]."""

    def __init__(self, pack: Pack, parts: int, reach: Reach):
        """`parts` ranks share the heads: rank i has those of number i % parts."""
        self._pack, self.parts = pack, parts
        found = row_parts(pack.lengths, pack.past, reach, pack.sp // parts)
        if pack.chunk is not None:  # slices behind this one may have any of its keys
            found = tuple(part._replace(first=0, last=pack.num_tokens) for part in found)
        self._of = [found[rank // parts] for rank in range(pack.sp)]
        ends = [0, *accumulate(pack.tokens)]
        self._tokens = list(pairwise(ends))
        self.part = self._of[pack.sp_rank]
        self.head = pack.sp_rank % parts

    def incoming(self, part: Sequence[Tensor]) -> AllToAll:
        """Own tokens' heads out, other tokens' own heads in; `part` has queries (T_local, parts, heads, d), and keys
        and values likewise, or none."""
        mine = self._tokens[self._pack.sp_rank]
        send = [self._numel(part, self._of[rank], mine) for rank in range(self._pack.sp)]
        receive = [self._numel(part, self.part, tokens) for tokens in self._tokens]
        return AllToAll(send, receive, self._pack.sp_group)

    def packed(self, part: Sequence[Tensor]) -> Tensor:
        """What each rank is sent, flat, one after the other."""
        mine = self._tokens[self._pack.sp_rank]
        return torch.cat([
            x[self._rows(index, to, mine), rank % self.parts].reshape(-1)
            for rank, to in enumerate(self._of)
            for index, x in enumerate(part)
        ])  # fmt: skip

    def rows(self, flat: Tensor, part: Sequence[Tensor]) -> list[Tensor]:
        """What has come: queries, keys and values of own heads, (tokens, heads, d) each."""
        found: list[list[Tensor]] = [[] for _ in part]
        sizes = [
            self._size(self._rows(index, self.part, tokens)) * x.shape[2:].numel()
            for tokens in self._tokens
            for index, x in enumerate(part)
        ]
        for number, piece in enumerate(flat.split(sizes)):
            index = number % len(part)
            found[index].append(piece.view(-1, *part[index].shape[2:]))
        return [torch.cat(pieces) for pieces in found]

    def outgoing(self, width: int) -> AllToAll:
        """The way back of what is made of queries: so many numbers a token."""
        mine = self._tokens[self._pack.sp_rank]
        send = [width * self._size(self.part.overlap(tokens)) for tokens in self._tokens]
        receive = [width * self._size(to.overlap(mine)) for to in self._of]
        return AllToAll(send, receive, self._pack.sp_group)

    def returned(self, flat: Tensor, heads: int, size: int) -> Tensor:
        """What has come back: own tokens with all heads, (T_local, parts, heads, size)."""
        mine = self._tokens[self._pack.sp_rank]
        pieces = flat.split([heads * size * self._size(to.overlap(mine)) for to in self._of])
        by_heads = [torch.cat(pieces[head :: self.parts]).view(-1, heads, size) for head in range(self.parts)]
        return torch.stack(by_heads, dim=1)

    def _numel(self, part: Sequence[Tensor], to: RowPart, tokens: tuple[int, int]) -> int:
        return sum(self._size(self._rows(index, to, tokens)) * x.shape[2:].numel() for index, x in enumerate(part))

    def _rows(self, index: int, to: RowPart, tokens: tuple[int, int]) -> slice:
        """Which of some tokens' queries, the first tensor of a part, or keys and values a rank is sent."""
        return to.overlap(tokens, keys=index > 0)

    @staticmethod
    def _size(rows: slice) -> int:
        return int(rows.stop - rows.start)
