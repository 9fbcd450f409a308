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
from typing import NamedTuple

import torch
from torch import Tensor

from ds_hydra.pipe.overlapped import AllToAll, start, wait
from ds_hydra.pipe.rows import Pack, cut_heads


class HeadGroup(NamedTuple):
    """Some heads, of all tokens of a row."""

    q: Tensor  # (T, heads, d)
    k: Tensor  # (T, kv_heads, d)
    v: Tensor  # (T, kv_heads, d_v)
    first_head: int = 0  # of the query heads, among those of all sequence parallel ranks
    keys: int = 0  # number of its key/value heads among the rank's groups of them, which several groups may share


def over_heads(q: Tensor, k: Tensor, v: Tensor, pack: Pack, attend: Callable[[HeadGroup], Tensor]) -> Tensor:
    """All heads of some tokens, q (T_local, heads, d), k and v, in; what `attend` makes of them, (T_local, heads, d_v).

    `attend` computes (T, heads, d_v) for one group of heads, in order [Note: exchange in groups]. sp must divide the
    query heads, and divide or be divided by the key/value heads.
    """
    # 8 query heads and 2 key/value heads over sp = 4: rank 1 computes the query heads 2 and 3, which use key head 0.
    # Repeated, the key heads are 0 0 1 1, one for each rank; autograd adds the gradients of the two copies.
    if k.shape[1] < pack.sp:
        k, v = (x.repeat_interleave(pack.sp // k.shape[1], dim=1) for x in (k, v))
    heads, kv_heads = q.shape[1] // pack.sp, k.shape[1] // pack.sp
    of_groups = cut_heads(pack.head_groups, heads, kv_heads)
    groups, firsts = len(of_groups), [0, *accumulate(of_groups)]
    sharing = groups // min(groups, kv_heads)  # groups with the same keys
    queries = _cut(q, pack.sp, of_groups)
    keys, values = (_cut(x, pack.sp, [n * sharing * kv_heads // heads for n in of_groups[::sharing]]) for x in (k, v))
    parts = [
        (queries[i],) if i % sharing else (queries[i], keys[i // sharing], values[i // sharing]) for i in range(groups)
    ]
    coming = [_to_heads(pack, sum(x.shape[2:].numel() for x in part)) for part in parts]
    # The receiving rank becomes the outermost dimension, so that what goes to one rank lies together.
    pending, token = start(
        coming, [torch.cat([x.transpose(0, 1).flatten(2) for x in part], dim=-1).view(-1) for part in parts]
    )
    shared: list[Tensor] = []  # keys and values
    going: list[AllToAll] = []
    returned: list[Tensor] = []
    for i, part in enumerate(parts):
        (flat,) = wait([coming[i]], [pending[i]], token)
        own_q, *fresh = _rows(flat, pack.num_tokens, [x.shape[2:] for x in part])
        shared = fresh or shared
        own_k, own_v = shared
        first = pack.sp_rank * heads + firsts[i]
        out = attend(HeadGroup(own_q, own_k, own_v, first_head=first, keys=i // sharing))
        going.append(_to_tokens(pack, out.shape[1:].numel()))
        (started,), token = start(going[-1:], [out.reshape(-1)])
        returned.append(started)
    mine = pack.tokens[pack.sp_rank]
    came = zip(of_groups, wait(going, returned, token), strict=True)
    outs = [x.view(pack.sp, mine, n, out.shape[-1]).transpose(0, 1) for n, x in came]
    return torch.cat(outs, dim=2).flatten(1, 2)


def _cut(x: Tensor, sp: int, of_groups: Sequence[int]) -> tuple[Tensor, ...]:
    """(T_local, heads, d) -> for each group of every rank's heads (T_local, sp, its heads, d)."""
    return x.unflatten(1, (sp, -1)).split(list(of_groups), dim=2)


def _rows(flat: Tensor, tokens: int, shapes: list[torch.Size]) -> list[Tensor]:
    """What has come for all tokens: one (tokens, *shape) for each shape."""
    # It is ordered by sending rank, and ranks hold consecutive intervals of the row: it is the row's order already.
    columns = [shape.numel() for shape in shapes]
    found = flat.view(tokens, sum(columns)).split(columns, dim=-1)
    return [x.unflatten(-1, shape) for x, shape in zip(found, shapes, strict=True)]


def _to_heads(pack: Pack, width: int) -> AllToAll:
    """Own tokens of all ranks' heads out, all tokens of own heads in; a rank's heads have `width` numbers a token."""
    mine = pack.tokens[pack.sp_rank]
    return AllToAll([mine * width] * pack.sp, [tokens * width for tokens in pack.tokens], pack.sp_group)


def _to_tokens(pack: Pack, width: int) -> AllToAll:
    """The way back."""
    mine = pack.tokens[pack.sp_rank]
    return AllToAll([tokens * width for tokens in pack.tokens], [mine * width] * pack.sp, pack.sp_group)
