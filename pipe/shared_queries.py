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

The queries 0..8 see 36 keys, and 8..12 see 42. The ranks' own tokens are as ever. Each u neighbours exchange heads as
Ulysses does, for the 6 tokens that they hold together. Then each rank sends the ranks with the same heads what they
need of these: to each of them one message that lies together. So it is on the way back.

[Note: two hops]
Where neighbours are the ranks of a node, messages of the second hop (x) are slow, and of the first (i) quick. Group by
group the second hop starts when the first has come, one group ahead of attention; what goes out takes both back (o, h),
one group behind it:

  messages    i0 i1 x0 i2 x1     o0 x2      o1 h0      o2 h1 h2
  computed            |---0---|  |---1---|  |---2---|
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ds_hydra.pipe.head_sharing import RowPart, row_parts
from ds_hydra.pipe.overlapped import AllToAll, start, wait
from ds_hydra.pipe.reach import Reach
from ds_hydra.pipe.rows import Pack
from ds_hydra.pipe.ulysses import ByHeads, Hop, Part, Team


class BySharedQueries:
    """What ranks with the same heads send each other [Note: shared queries]."""

    def __init__(self, team: Team, pack: Pack, reach: Reach):
        self._team = team
        found = row_parts(pack.lengths, pack.past, reach, len(team.tokens))
        if pack.chunk is not None:  # slices behind this one may have any of its keys
            found = tuple(part._replace(first=0, last=pack.num_tokens) for part in found)
        tokens = list(pairwise([0, *accumulate(team.tokens)]))
        self._of, self._tokens = found, tokens
        self.part, self._mine = found[team.index], tokens[team.index]

    def incoming(self, part: Part) -> AllToAll:
        """The message in; `part` has queries (tokens of the rank and its neighbours, heads, d), and keys and values
        likewise, or none."""
        send = [self._numel(part, to, self._mine) for to in self._of]
        return self._team.all_to_all(send, [self._numel(part, self.part, tokens) for tokens in self._tokens])

    def packed(self, part: Part) -> Tensor:
        """What it takes, flat: what goes to one rank lies together."""
        pieces = (x[_rows(i, to, self._mine)].reshape(-1) for to in self._of for i, x in enumerate(part))
        return torch.cat(list(pieces))

    def rows(self, flat: Tensor, part: Part) -> list[Tensor]:
        """What it brings of queries, keys and values, (tokens, heads, d) each."""
        found: list[list[Tensor]] = [[] for _ in part]
        sizes = [
            _size(i, self.part, tokens) * x.shape[1:].numel() for tokens in self._tokens for i, x in enumerate(part)
        ]
        for number, piece in enumerate(flat.split(sizes)):
            index = number % len(part)
            found[index].append(piece.view(-1, *part[index].shape[1:]))
        return [torch.cat(pieces) for pieces in found]

    def outgoing(self, width: int) -> AllToAll:
        """The way back of what is made of queries, so many numbers a token. It comes in the order of the tokens."""
        send = [width * _size(0, self.part, tokens) for tokens in self._tokens]
        return self._team.all_to_all(send, [width * _size(0, to, self._mine) for to in self._of])

    def returned(self, flat: Tensor, heads: int, size: int) -> Tensor:
        """What has come back: own tokens, (T_local, 1, heads, size)."""
        return flat.view(-1, 1, heads, size)

    @staticmethod
    def _numel(part: Part, to: RowPart, tokens: tuple[int, int]) -> int:
        return sum(_size(i, to, tokens) * x.shape[1:].numel() for i, x in enumerate(part))


def _rows(index: int, to: RowPart, tokens: tuple[int, int]) -> slice:
    """Which of some tokens' queries, the first tensor of a part, or keys and values a rank is sent."""
    return to.overlap(tokens, keys=index > 0)


def _size(index: int, to: RowPart, tokens: tuple[int, int]) -> int:
    rows = _rows(index, to, tokens)
    return int(rows.stop - rows.start)


class TwoHops:
    """The exchange of heads among neighbours and then of queries, keys and values [Note: two hops]."""

    def __init__(self, near: ByHeads, far: Hop, parts: Sequence[Part]):
        self._near, self._far = near, far
        self._left = list(parts)
        self._coming: list[tuple[AllToAll, Tensor, Part]] = []  # on the first hop
        self._ahead: list[tuple[AllToAll, Tensor, Part]] = []  # on the second hop
        self._behind: list[tuple[AllToAll, Tensor, int]] = []  # on the first hop back, with how many heads
        self._going: list[tuple[AllToAll, Tensor, torch.Size]] = []  # on the second, with the shape that a token has
        self._size = 0
        self._start([], min(2, len(parts)))
        self._hop()

    def _start(self, far: Sequence[tuple[AllToAll, Tensor, Part]], near: int) -> None:
        """Begin messages of the second hop, given with what they take, and then some more of the first."""
        begun, self._left = self._left[:near], self._left[near:]
        messages = [*far, *((self._near.incoming(part), self._near.packed(part), part) for part in begun)]
        started, self._token = start([one for one, _, _ in messages], [x for _, x, _ in messages])
        under_way = [(one, x, part) for (one, _, part), x in zip(messages, started, strict=True)]
        self._ahead += under_way[: len(far)]
        self._coming += under_way[len(far) :]

    def _hop(self) -> None:
        """Send the next group of heads on, if there is one."""
        if self._coming:
            message, started, part = self._coming.pop(0)
            (flat,) = wait([message], [started], self._token)
            rows = self._near.rows(flat, part)
            self._start([(self._far.incoming(rows), self._far.packed(rows), rows)], 1)

    def come(self) -> list[Tensor]:
        """The next group's queries, and keys and values if it has its own."""
        self._hop()
        message, started, rows = self._ahead.pop(0)
        (flat,) = wait([message], [started], self._token)
        return self._far.rows(flat, rows)

    def leave(self, out: Tensor) -> None:
        """Send what was made of them."""
        message, self._size = self._far.outgoing(out.shape[1:].numel()), out.shape[2]
        (started,), self._token = start([message], [out.reshape(-1)])
        self._behind.append((message, started, out.shape[1]))
        if len(self._behind) > 1:
            self._hop_back()

    def _hop_back(self) -> None:
        message, started, heads = self._behind.pop(0)
        (flat,) = wait([message], [started], self._token)
        rows = self._far.returned(flat, heads, self._size)
        message, shape = self._near.outgoing(rows.shape[1:].numel()), rows.shape[1:]
        (started,), self._token = start([message], [rows.reshape(-1)])
        self._going.append((message, started, shape))

    def back(self) -> list[Tensor]:
        """What has come back of all groups: own tokens, (T_local, neighbours, their blocks, heads, size) each."""
        self._hop_back()
        messages, started, shapes = zip(*self._going, strict=True)
        came = wait(messages, started, self._token)
        return [
            self._near.returned(x, blocks * heads, size).unflatten(2, (blocks, heads))
            for x, (blocks, heads, size) in zip(came, shapes, strict=True)
        ]
