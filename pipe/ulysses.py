"""Ulysses sequence parallelism: tokens spread over ranks outside attention, heads spread inside it.

[Note: exchange of heads]
Attention needs all tokens of a sequence but treats each head alone. Two ranks, a row of 5 tokens, heads a b c d:

            outside attention            inside attention
  rank 0    tokens 0 1,   a b c d        tokens 0 1 2 3 4,   a b
  rank 1    tokens 2 3 4, a b c d        tokens 0 1 2 3 4,   c d

To get there rank 0 sends its two tokens' heads c and d to rank 1, and receives the heads a and b of three tokens. One
all-to-all carries q, k and v; a second brings the outputs back. Shares may be uneven and are known on the host. If
there are fewer key/value heads than ranks, they are repeated, so that each rank has those that its queries need.

[Note: exchange in groups]
Nothing can be computed until that message has come, nor beside the second one. So a long row is exchanged in groups of
heads. What comes in of all groups is started at once; a group is computed when its own has come, and what it makes goes
out while the next one is computed. With four groups, messages in (i) and out (o) above what is computed:

  messages    i0 i1 i2 i3  o0     o1     o2     o3
  computed       |---0---||---1---||---2---||---3---|

Only i0 and o3 are waited for with nothing to compute. So where it can be these groups are small: of 16 heads in eight
groups the first and the last have one head each, and a sixteenth of all bytes is waited for, not an eighth. The
backward does the same from group 3 down to group 0. Of 8 query heads and 2 key/value heads on a rank:

  group           0      1      2      3
  query heads     0 1    2 3    4 5    6 7
  key head        0      0      1      1         it comes with the first group that needs it

Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ds_hydra.pipe.head_sharing import RowPart, head_parts
from ds_hydra.pipe.overlapped import AllToAll, start, wait
from ds_hydra.pipe.reach import ALL, Reach
from ds_hydra.pipe.rows import Pack, cut_heads

if TYPE_CHECKING:
    from ds_hydra.pipe.shared_queries import TwoHops


class HeadGroup(NamedTuple):
    """Some heads, of all tokens of a row, or of a part of it [Note: shared queries]."""

    q: Tensor  # (T, heads, d)
    k: Tensor  # (T, kv_heads, d)
    v: Tensor  # (T, kv_heads, d_v)
    first_head: int = 0  # of the query heads, among those of all sequence parallel ranks
    keys: int = 0  # number of its key/value heads among the rank's groups of them, which several groups may share
    part: RowPart | None = None  # whose queries these are, and from which token on there are keys


Part = Sequence[Tensor]
"""Some heads of each rank: queries, and keys and values or none."""


class Hop(Protocol):
    """How ranks exchange some of what attention computes with."""

    def incoming(self, part: Part) -> AllToAll:
        """The message in."""

    def packed(self, part: Part) -> Tensor:
        """What it takes, flat: what goes to one rank lies together."""

    def rows(self, flat: Tensor, part: Part) -> list[Tensor]:
        """What it brings, of own heads: (tokens, heads, d) for each tensor of the part."""

    def outgoing(self, width: int) -> AllToAll:
        """The message back, of so many numbers a token."""

    def returned(self, flat: Tensor, heads: int, size: int) -> Tensor:
        """What it brings, of own tokens."""


@dataclass(frozen=True)
class Team:
    """Some ranks of a sequence parallel group, and the tokens of each, or of it and its neighbours."""

    pack: Pack
    ranks: range
    tokens: tuple[int, ...]

    @property
    def index(self) -> int:
        """Which of them this rank is."""
        return self.ranks.index(self.pack.sp_rank)

    def all_to_all(self, send: Sequence[int], receive: Sequence[int]) -> AllToAll:
        """A message among them, of so many elements to and from each."""
        # Nothing goes to the group's others, which have one of their own meanwhile, so no other group has to be made.
        return AllToAll(self._of_group(send), self._of_group(receive), self.pack.sp_group)

    def _of_group(self, sizes: Sequence[int]) -> list[int]:
        found = [0] * self.pack.sp
        found[self.ranks.start : self.ranks.stop : self.ranks.step] = sizes
        return found


def over_heads(
    q: Tensor, k: Tensor, v: Tensor, pack: Pack, attend: Callable[[HeadGroup], Tensor], reach: Reach = ALL
) -> Tensor:
    """All heads of some tokens, q (T_local, heads, d), k (T_local, kv_heads, d) and v, in; what `attend` makes of them,
    (T_local, heads, d_v).

    `attend` computes (T, heads, d_v) for one group of heads, in order [Note: exchange in groups]. Where ranks share the
    queries besides, these see as far as `reach` says [Note: shared queries].
    """
    sharers = head_parts(pack.sp, q.shape[1], k.shape[1], near=pack.near, sliced=pack.frugal or pack.chunk is not None)
    # 8 query heads and 2 key/value heads over sp = 4: rank 1 computes the query heads 2 and 3, which use key head 0.
    # Repeated, the key heads are 0 0 1 1, one for each rank; autograd adds the gradients of the two copies.
    if k.shape[1] < sharers:
        k, v = (x.repeat_interleave(sharers // k.shape[1], dim=1) for x in (k, v))
    heads, kv_heads = q.shape[1] // sharers, k.shape[1] // sharers
    of_groups = cut_heads(pack.head_groups, heads, kv_heads)
    groups, firsts = len(of_groups), [0, *accumulate(of_groups)]
    sharing = groups // min(groups, kv_heads)  # groups with the same keys
    queries = _cut(q, sharers, of_groups)
    of_keys = [n * sharing * kv_heads // heads for n in of_groups[::sharing]]
    keys, values = (_cut(x, sharers, of_keys) for x in (k, v))
    parts = [
        (queries[i],) if i % sharing else (queries[i], keys[i // sharing], values[i // sharing]) for i in range(groups)
    ]
    exchange, block, row_part = _exchange(pack, sharers, reach, parts)
    shared: list[Tensor] = []  # keys and values
    for i in range(groups):
        own_q, *fresh = exchange.come()
        shared = fresh or shared
        own_k, own_v = shared
        first = block * heads + firsts[i]
        exchange.leave(attend(HeadGroup(own_q, own_k, own_v, first_head=first, keys=i // sharing, part=row_part)))
    return torch.cat(exchange.back(), dim=-2).flatten(1, -2)


def _cut(x: Tensor, parts: int, of_groups: Sequence[int]) -> tuple[Tensor, ...]:
    """(T_local, heads, d) -> for each group of every rank's heads (T_local, parts, its heads, d)."""
    return x.unflatten(1, (parts, -1)).split(list(of_groups), dim=2)


def _exchange(
    pack: Pack, sharers: int, reach: Reach, parts: Sequence[Part]
) -> tuple[OneHop | TwoHops, int, RowPart | None]:
    """The messages of these parts; which of so many equal blocks of heads this rank computes, and the part of the row
    whose queries it does; None: all of it."""
    near = pack.near if sharers == pack.sp and 1 < pack.near < sharers else sharers  # ranks of the first hop
    first, block = pack.sp_rank - pack.sp_rank % near, pack.sp_rank % near
    inside = ByHeads(Team(pack, range(first, first + near), pack.tokens[first : first + near]))
    if near == pack.sp:
        return OneHop(inside, parts), block, None
    from ds_hydra.pipe.shared_queries import BySharedQueries, TwoHops

    of_each = tuple(sum(pack.tokens[start : start + near]) for start in range(0, pack.sp, near))
    team = Team(pack, range(block, pack.sp, near), of_each)
    if sharers == pack.sp:  # [Note: heads over nodes]
        of_nodes = [[x.unflatten(1, (near, -1)) for x in part] for part in parts]
        return TwoHops(inside, ByHeads(team), of_nodes), block * len(of_each) + team.index, None
    far = BySharedQueries(team, pack, reach)
    if sharers == 1:
        return OneHop(far, [[x.squeeze(1) for x in part] for part in parts]), block, far.part
    return TwoHops(inside, far, parts), block, far.part


class OneHop:
    """The exchange of heads, group by group [Note: exchange in groups]."""

    def __init__(self, hop: Hop, parts: Sequence[Part]):
        self._hop, self._parts = hop, parts
        self._coming = [hop.incoming(part) for part in parts]
        self._started, self._token = start(self._coming, [hop.packed(part) for part in parts])
        self._going: list[tuple[AllToAll, Tensor, int]] = []  # with how many heads
        self._came = self._size = 0

    def come(self) -> list[Tensor]:
        """The next group's queries, and keys and values if it has its own."""
        i, self._came = self._came, self._came + 1
        (flat,) = wait([self._coming[i]], [self._started[i]], self._token)
        return self._hop.rows(flat, self._parts[i])

    def leave(self, out: Tensor) -> None:
        """Send what was made of them."""
        message, self._size = self._hop.outgoing(out.shape[1:].numel()), out.shape[2]
        (started,), self._token = start([message], [out.reshape(-1)])
        self._going.append((message, started, out.shape[1]))

    def back(self) -> list[Tensor]:
        """What has come back of all groups: own tokens, (T_local, ranks, heads, size) each."""
        messages, started, heads = zip(*self._going, strict=True)
        came = wait(messages, started, self._token)
        return [self._hop.returned(x, n, self._size) for x, n in zip(came, heads, strict=True)]


class ByHeads:
    """All tokens of own heads [Note: exchange of heads]. Parts have (T_local, ranks, heads, d), or in place of a rank's
    heads those of each of several that share them further."""

    def __init__(self, team: Team):
        self._team, self._mine = team, team.tokens[team.index]

    def incoming(self, part: Part) -> AllToAll:
        width = sum(x.shape[2:].numel() for x in part)
        tokens = self._team.tokens
        return self._team.all_to_all([self._mine * width] * len(tokens), [n * width for n in tokens])

    def packed(self, part: Part) -> Tensor:
        # The receiving rank becomes the outermost dimension.
        return torch.cat([x.transpose(0, 1).flatten(2) for x in part], dim=-1).view(-1)

    def rows(self, flat: Tensor, part: Part) -> list[Tensor]:
        # It is ordered by sending rank, and ranks hold consecutive intervals of the row: it is the row's order already.
        columns = [x.shape[2:].numel() for x in part]
        found = flat.view(sum(self._team.tokens), sum(columns)).split(columns, dim=-1)
        return [rows.unflatten(-1, x.shape[2:]) for rows, x in zip(found, part, strict=True)]

    def outgoing(self, width: int) -> AllToAll:
        tokens = self._team.tokens
        return self._team.all_to_all([n * width for n in tokens], [self._mine * width] * len(tokens))

    def returned(self, flat: Tensor, heads: int, size: int) -> Tensor:
        return flat.view(len(self._team.tokens), self._mine, heads, size).transpose(0, 1)
