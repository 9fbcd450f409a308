"""Ulysses sequence parallelism: tokens spread over ranks outside attention, heads spread inside it.

[Note: exchange of heads]
Attention needs all tokens of a sequence but treats each head alone. Two ranks, a row of 5 tokens, heads a b c d:

            outside attention            inside attention
  rank 0    tokens 0 1,   a b c d        tokens 0 1 2 3 4,   a b
  rank 1    tokens 2 3 4, a b c d        tokens 0 1 2 3 4,   c d

To get there rank 0 sends its two tokens' heads c and d to rank 1, and receives the heads a and b of three tokens. One
all-to-all carries q, k and v; a second brings the outputs back. Shares may be uneven and are known on the host. If
there are fewer key/value heads than ranks, they are repeated, so that each rank has those that its queries need.

Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hydra.pipe.collectives import exchange_rows
from ds_hydra.pipe.rows import Pack


def scatter_heads(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens, some heads: (T_local, heads, d) -> (T, heads / sp, d), and k and v likewise.

    sp must divide the query heads, and divide or be divided by the key/value heads.
    """
    # 8 query heads and 2 key/value heads over sp = 4: rank 1 computes the query heads 2 and 3, which use key head 0.
    # Repeated, the key heads are 0 0 1 1, one for each rank; autograd adds the gradients of the two copies.
    if k.shape[1] < pack.sp:
        k, v = (x.repeat_interleave(pack.sp // k.shape[1], dim=1) for x in (k, v))
    shapes = [(x.shape[1] // pack.sp, x.shape[2]) for x in (q, k, v)]
    columns = [heads * dim for heads, dim in shapes]
    width = sum(columns)
    # (T_local, sp, width); no dimension is left open, for T_local may be 0
    rows = torch.cat([x.reshape(len(x), pack.sp, n) for x, n in zip((q, k, v), columns, strict=True)], dim=-1)
    mine = pack.tokens[pack.sp_rank]
    # The receiving rank becomes the outermost dimension, so that what goes to one rank lies together. What arrives is
    # ordered by sending rank, and ranks hold consecutive intervals of the row: it is the row's order already.
    flat = exchange_rows(
        rows.transpose(0, 1).reshape(-1),
        [mine * width] * pack.sp,
        [tokens * width for tokens in pack.tokens],
        pack.sp_group,
    )
    parts = flat.view(pack.num_tokens, width).split(columns, dim=-1)
    q, k, v = (part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True))
    return q, k, v


def gather_heads(out: Tensor, pack: Pack) -> Tensor:
    """Back to all heads of some tokens: (T, heads / sp, d) -> (T_local, heads, d)."""
    heads, dim = out.shape[1:]
    mine = pack.tokens[pack.sp_rank]
    flat = exchange_rows(
        out.reshape(-1),
        [tokens * heads * dim for tokens in pack.tokens],
        [mine * heads * dim] * pack.sp,
        pack.sp_group,
    )
    return flat.view(pack.sp, mine, heads, dim).transpose(0, 1).reshape(mine, pack.sp * heads, dim)
