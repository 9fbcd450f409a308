"""Differentiable collectives of one explicit group: of features, and of rows.

Every function takes the group it talks to; None stands for a group of one, where all of them do nothing.

Rows are the last dimension but one, and all dimensions before it must be 1. Every rank holds as many of them: rank i of
n has the i-th of n equal parts. The group may be None only as long as nothing runs, in a stage that is built on trial.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.pipe.rows import Pack
from ds_hydra.zero_hetero import transport

Group = dist.ProcessGroup | None
Move = Callable[[Tensor], Tensor]


class _Moved(torch.autograd.Function):
    """What one function makes of a tensor, and another one of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


# Each backward below belongs to the computation of all ranks together, not to that of one rank. Two ranks hold the same
# x = 3; rank 0 computes 2 * x, rank 1 computes 5 * x, and the results are added:
#
#   `sum_over_ranks`   6 + 15 = 21 on both ranks; a change of the 6 changes the 21 by as much, so the gradient stays
#   `copy_to_ranks`    rank 0 finds the gradient 2 for its x, rank 1 finds 5; the one x that both copied has 7
#
# Between the two calls each rank differentiates its own part alone.
class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.contiguous()
        dist.all_reduce(total, group=group)
        if total is x:  # so that autograd knows it as a tensor that may be written to in place again
            ctx.mark_dirty(x)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """Identity whose backward sums the gradients over the group (Megatron's f)."""
    return x if group is None else _Moved.apply(x, lambda x: x.view_as(x), partial(_summed, group=group))


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Sum over the group whose backward is the identity (Megatron's g). May overwrite `x`."""
    return x if group is None else _SumOverRanks.apply(x, group)


def gather_last_dim(x: Tensor, widths: tuple[int, ...], rank: int, group: Group) -> Tensor:
    """Concatenate the ranks' slices of the last dimension; `widths` are their sizes, in rank order."""
    # The backward sums nothing: every rank goes on to compute the same from the gathered tensor, so each has the
    # complete gradient already and keeps its own columns of it.
    gathered, own = partial(_all_columns, widths=widths, group=group), partial(_own_columns, widths=widths, rank=rank)
    return x if group is None else _Moved.apply(x, gathered, own)


def split_last_dim(x: Tensor, widths: tuple[int, ...], rank: int, group: Group) -> Tensor:
    """This rank's slice of the last dimension; backward gathers the slices' gradients."""
    own, gathered = partial(_own_columns, widths=widths, rank=rank), partial(_all_columns, widths=widths, group=group)
    return x if group is None else _Moved.apply(x, own, gathered)


def _summed(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


def _own_columns(x: Tensor, widths: tuple[int, ...], rank: int) -> Tensor:
    start = sum(widths[:rank])
    return x[..., start : start + widths[rank]]


def _all_columns(x: Tensor, widths: tuple[int, ...], group: Group) -> Tensor:
    parts = [x.new_empty((*x.shape[:-1], width)) for width in widths]
    if len(set(widths)) == 1:
        dist.all_gather(parts, x.contiguous(), group=group)
    else:
        # Gloo and NCCL gather equal sizes only: 7 columns over 2 ranks are widths 3 and 4, so rank 0 sends a fourth
        # column of zeros, which is cut off again on arrival.
        wide = x.new_zeros((*x.shape[:-1], max(widths)))
        wide[..., : x.shape[-1]] = x
        padded = [torch.empty_like(wide) for _ in widths]
        dist.all_gather(padded, wide, group=group)
        parts = [part[..., :width] for part, width in zip(padded, widths, strict=True)]
    return torch.cat(parts, dim=-1)


def sharers(group: Group) -> dist.ProcessGroup:
    """The group of the ranks that share rows."""
    assert group is not None, "rows are shared by the ranks of a group"
    return group


class Pending(NamedTuple):
    """A collective that is under way; nothing may write to what it was given until it is waited for."""

    out: Tensor
    given: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        self.work.wait()
        return self.out


def start_gather(x: Tensor, group: Group) -> Pending:
    """Begin to gather the rows of all ranks: (..., t, f) -> (..., n * t, f)."""
    x = x.contiguous()
    ranks = sharers(group)
    out = x.new_empty(_with_rows(x, ranks.size() * x.shape[-2]))
    return Pending(out, x, transport.start_gather(out.view(-1), x.view(-1), ranks))


def start_sum(x: Tensor, group: Group) -> Pending:
    """Begin to add what all ranks have, and to hand each its own rows of the sum: (..., n * t, f) -> (..., t, f)."""
    x = x.contiguous()
    ranks = sharers(group)
    out = x.new_empty(_with_rows(x, x.shape[-2] // ranks.size()))
    return Pending(out, x, transport.start_scatter(out.view(-1), x.view(-1), ranks))


def _with_rows(x: Tensor, rows: int) -> tuple[int, ...]:
    assert x.shape[:-2].numel() == 1, f"rows of {tuple(x.shape)} do not lie together"
    return (*x.shape[:-2], rows, x.shape[-1])


def _own(x: Tensor, group: Group) -> Tensor:
    ranks = sharers(group)
    rows = x.shape[-2] // ranks.size()
    return x.narrow(-2, ranks.rank() * rows, rows)


def _all(x: Tensor, group: Group) -> Tensor:
    return start_gather(x, group).wait()


def _sum(x: Tensor, group: Group) -> Tensor:
    return start_sum(x, group).wait()


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, of which each goes on to compute a part: the backward adds the parts' gradients."""
    return _Moved.apply(x, partial(_all, group=group), partial(_sum, group=group))


def scatter_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's rows of the sum of what all ranks have; the backward gathers the gradients of all rows."""
    return _Moved.apply(x, partial(_sum, group=group), partial(_all, group=group))


def own_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's rows of what is equal on all ranks; the backward gathers the gradients of all rows."""
    # Cloned: a view would keep the rows of all ranks in memory.
    return _Moved.apply(x, lambda x: _own(x, group).clone(), partial(_all, group=group))


def all_rows(x: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, with which each goes on to compute the same: the backward takes the own rows' gradient."""
    return _Moved.apply(x, partial(_all, group=group), partial(_own, group=group))


def _gathered(x: Tensor, pack: Pack) -> Tensor:
    """The tokens of all sequence parallel ranks, the first dimension."""
    most = max(pack.tokens)
    padded = x.new_zeros((most, *x.shape[1:]))  # gathered is what is equally large
    padded[: len(x)] = x
    parts = start_gather(padded.view(most, -1), pack.sp_group).wait().view(pack.sp, *padded.shape)
    if min(pack.tokens) == most:
        return parts.view(pack.sp * most, *x.shape[1:])
    return torch.cat([part[:tokens] for part, tokens in zip(parts, pack.tokens, strict=True)])


def _scattered(x: Tensor, pack: Pack) -> Tensor:
    """The own tokens of the sum of what all sequence parallel ranks have of all of them."""
    most = max(pack.tokens)
    padded = x.new_zeros((pack.sp, most, *x.shape[1:]))
    for place, part in zip(padded, x.split(pack.tokens), strict=True):
        place[: len(part)] = part
    start, stop = pack.local
    own, shape = start_sum(padded.view(pack.sp * most, -1), pack.sp_group).wait(), (stop - start, *x.shape[1:])
    return own if own.shape == shape else own[: stop - start].view(shape).clone()  # others may write to no view


def all_of_row(x: Tensor, dim: int, pack: Pack) -> Tensor:
    """The tokens of all sequence parallel ranks along a dimension, of which each goes on to compute with some: the
    backward adds their gradients. Ranks may have a token more than others."""
    there, back = partial(_gathered, pack=pack), partial(_scattered, pack=pack)
    return x if pack.sp == 1 else _Moved.apply(x.movedim(dim, 0), there, back).movedim(0, dim)


def own_of_sum(x: Tensor, pack: Pack) -> Tensor:
    """The own tokens of the sum of what each sequence parallel rank has of all tokens, (tokens, ...); the backward
    gathers the gradients of all tokens."""
    return x if pack.sp == 1 else _Moved.apply(x, partial(_scattered, pack=pack), partial(_gathered, pack=pack))
