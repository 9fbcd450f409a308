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
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ds_hydra.pipe.contexts import ALL, Reach
from ds_hydra.pipe.overlapped import AllToAll, start, wait
from ds_hydra.pipe.rows import Pack, cut_heads
from ds_hydra.pipe.shape import head_parts

if TYPE_CHECKING:
    from ds_hydra.pipe.shared_queries import RowPart


class HeadGroup(NamedTuple):
    """Some heads, of all tokens of a row, or of a part of it [Note: shared queries]."""

    q: Tensor  # (T, heads, d)
    k: Tensor  # (T, kv_heads, d)
    v: Tensor  # (T, kv_heads, d_v)
    first_head: int = 0  # of the query heads, among those of all sequence parallel ranks
    keys: int = 0  # number of its key/value heads among the rank's groups of them, which several groups may share
    part: RowPart | None = None  # whose queries these are, and from which token on there are keys


class Way(Protocol):
    """How heads and tokens are exchanged. A part has some heads of each rank: queries, and keys and values or none."""

    parts: int
    """Ranks that share the heads."""
    head: int
    """Which of them this is."""

    @property
    def part(self) -> RowPart | None:
        """The part of the row whose queries it computes; None: all of it."""

    def incoming(self, part: Sequence[Tensor]) -> AllToAll:
        """The message in."""

    def packed(self, part: Sequence[Tensor]) -> Tensor:
        """What it takes, flat: what goes to one rank lies together."""

    def rows(self, flat: Tensor, part: Sequence[Tensor]) -> list[Tensor]:
        """What it brings, of own heads: (tokens, heads, d) for each tensor of the part."""

    def outgoing(self, width: int) -> AllToAll:
        """The message back, of so many numbers a token."""

    def returned(self, flat: Tensor, heads: int, size: int) -> Tensor:
        """What it brings: (T_local, parts, heads, size)."""


def over_heads(
    q: Tensor, k: Tensor, v: Tensor, pack: Pack, attend: Callable[[HeadGroup], Tensor], reach: Reach = ALL
) -> Tensor:
    """All heads of some tokens, q (T_local, heads, d), k (T_local, kv_heads, d) and v, in; what `attend` makes of them,
    (T_local, heads, d_v).

    `attend` computes (T, heads, d_v) for one group of heads, in order [Note: exchange in groups]. Where sp does not fit
    the heads, ranks share the queries, which see as far as `reach` says [Note: shared queries].
    """
    way = _way(pack, head_parts(pack.sp, q.shape[1], k.shape[1]), reach)
    # 8 query heads and 2 key/value heads over sp = 4: rank 1 computes the query heads 2 and 3, which use key head 0.
    # Repeated, the key heads are 0 0 1 1, one for each rank; autograd adds the gradients of the two copies.
    if k.shape[1] < way.parts:
        k, v = (x.repeat_interleave(way.parts // k.shape[1], dim=1) for x in (k, v))
    heads, kv_heads = q.shape[1] // way.parts, k.shape[1] // way.parts
    of_groups = cut_heads(pack.head_groups, heads, kv_heads)
    groups, firsts = len(of_groups), [0, *accumulate(of_groups)]
    sharing = groups // min(groups, kv_heads)  # groups with the same keys
    queries = _cut(q, way.parts, of_groups)
    of_keys = [n * sharing * kv_heads // heads for n in of_groups[::sharing]]
    keys, values = (_cut(x, way.parts, of_keys) for x in (k, v))
    parts = [
        (queries[i],) if i % sharing else (queries[i], keys[i // sharing], values[i // sharing]) for i in range(groups)
    ]
    coming = [way.incoming(part) for part in parts]
    pending, token = start(coming, [way.packed(part) for part in parts])
    shared: list[Tensor] = []  # keys and values
    going: list[AllToAll] = []
    returned: list[Tensor] = []
    for i, part in enumerate(parts):
        (flat,) = wait([coming[i]], [pending[i]], token)
        own_q, *fresh = way.rows(flat, part)
        shared = fresh or shared
        own_k, own_v = shared
        first = way.head * heads + firsts[i]
        out = attend(HeadGroup(own_q, own_k, own_v, first_head=first, keys=i // sharing, part=way.part))
        going.append(way.outgoing(out.shape[1:].numel()))
        (started,), token = start(going[-1:], [out.reshape(-1)])
        returned.append(started)
    came = zip(of_groups, wait(going, returned, token), strict=True)
    return torch.cat([way.returned(x, n, out.shape[-1]) for n, x in came], dim=2).flatten(1, 2)


def _cut(x: Tensor, parts: int, of_groups: Sequence[int]) -> tuple[Tensor, ...]:
    """(T_local, heads, d) -> for each group of every rank's heads (T_local, parts, its heads, d)."""
    return x.unflatten(1, (parts, -1)).split(list(of_groups), dim=2)


def _way(pack: Pack, parts: int, reach: Reach) -> Way:
    if parts == pack.sp:
        return _ByHeads(pack)
    from ds_hydra.pipe.shared_queries import BySharedQueries

    return BySharedQueries(pack, parts, reach)


class _ByHeads:
    """All tokens of own heads [Note: exchange of heads]."""

    part = None

    def __init__(self, pack: Pack):
        self._pack, self._mine = pack, pack.tokens[pack.sp_rank]
        self.parts, self.head = pack.sp, pack.sp_rank

    def incoming(self, part: Sequence[Tensor]) -> AllToAll:
        width = sum(x.shape[2:].numel() for x in part)
        send = [self._mine * width] * self.parts
        return AllToAll(send, [tokens * width for tokens in self._pack.tokens], self._pack.sp_group)

    def packed(self, part: Sequence[Tensor]) -> Tensor:
        # The receiving rank becomes the outermost dimension.
        return torch.cat([x.transpose(0, 1).flatten(2) for x in part], dim=-1).view(-1)

    def rows(self, flat: Tensor, part: Sequence[Tensor]) -> list[Tensor]:
        # It is ordered by sending rank, and ranks hold consecutive intervals of the row: it is the row's order already.
        columns = [x.shape[2:].numel() for x in part]
        found = flat.view(self._pack.num_tokens, sum(columns)).split(columns, dim=-1)
        return [rows.unflatten(-1, x.shape[2:]) for rows, x in zip(found, part, strict=True)]

    def outgoing(self, width: int) -> AllToAll:
        receive = [self._mine * width] * self.parts
        return AllToAll([tokens * width for tokens in self._pack.tokens], receive, self._pack.sp_group)

    def returned(self, flat: Tensor, heads: int, size: int) -> Tensor:
        return flat.view(self.parts, self._mine, heads, size).transpose(0, 1)
