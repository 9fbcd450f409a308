"""Differentiable collectives of one explicit group: the few that tensor and sequence parallelism need.

Every function takes the group it talks to; None stands for a group of one, where all of them do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


# Each backward below belongs to the computation of all ranks together, not to that of one rank. Two ranks hold the same
# x = 3; rank 0 computes 2 * x, rank 1 computes 5 * x, and the results are added:
#
#   `sum_over_ranks`   6 + 15 = 21 on both ranks; a change of the 6 changes the 21 by as much, so the gradient stays
#   `copy_to_ranks`    rank 0 finds the gradient 2 for its x, rank 1 finds 5; the one x that both copied has 7
#
# Between the two calls each rank differentiates its own part alone.
class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


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


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> Tensor:
        ctx.widths, ctx.rank = widths, rank
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

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # No sum over ranks: every rank goes on to compute the same from the gathered tensor, so each has the complete
        # gradient already and keeps its own columns of it.
        start = sum(ctx.widths[: ctx.rank])
        return grad[..., start : start + ctx.widths[ctx.rank]], None, None, None


class _SplitLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> Tensor:
        ctx.widths, ctx.rank, ctx.group = widths, rank, group
        start = sum(widths[:rank])
        return x[..., start : start + widths[rank]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _GatherLastDim.apply(grad, ctx.widths, ctx.rank, ctx.group), None, None, None


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """Identity whose backward sums the gradients over the group (Megatron's f)."""
    return x if group is None else _CopyToRanks.apply(x, group)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Sum over the group whose backward is the identity (Megatron's g). May overwrite `x`."""
    return x if group is None else _SumOverRanks.apply(x, group)


def gather_last_dim(x: Tensor, widths: tuple[int, ...], rank: int, group: Group) -> Tensor:
    """Concatenate the ranks' slices of the last dimension; `widths` are their sizes, in rank order."""
    return x if group is None else _GatherLastDim.apply(x, widths, rank, group)


def split_last_dim(x: Tensor, widths: tuple[int, ...], rank: int, group: Group) -> Tensor:
    """This rank's slice of the last dimension; backward gathers the slices' gradients."""
    return x if group is None else _SplitLastDim.apply(x, widths, rank, group)
