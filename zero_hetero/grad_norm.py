"""Gradient norm and clipping over owned elements: every element of the model counts once in the job."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_ON_CPU = 1 << 16  # elements that are squared in FP64 at once: 512 KiB, which stays in cache


def global_grad_norm(grads: Iterable[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """L2 norm of the gradients of the whole job; see `norm_and_words`."""
    return norm_and_words(grads, group, 0.0)[0]


def norm_and_words(grads: Iterable[Tensor], group: dist.ProcessGroup | None, word: float) -> tuple[Tensor, Tensor]:
    """L2 norm of the gradients of the whole job, a float64 scalar; and what each rank has said besides, (ranks,)."""
    table = norm_table(grads, group, word)
    return norm_of(table), table[:, 1]


def norm_of(table: Tensor) -> Tensor:
    """L2 norm of the gradients of the whole job, of a `norm_table`: a float64 scalar, equal to the bit on all ranks."""
    return table[:, 0].contiguous().sum().sqrt()


def norm_table(grads: Iterable[Tensor], group: dist.ProcessGroup | None, *words: float | Tensor) -> Tensor:
    """The sum of the squares of each rank's gradients, and what it has said besides: (ranks, 1 + words) float64.

    `grads`: what this rank owns, flat tensors of any dtype, at least one, possibly empty. Squares are summed in
    FP64, over the ranks of `group` in rank order. `group` None is a rank alone.
    """
    total: Tensor | None = None
    for grad in grads:
        squares = sum_of_squares(grad)
        total = squares if total is None else total + squares
    assert total is not None, "give the gradient shard even where it is empty"
    own = torch.stack((total, *(torch.as_tensor(word).to(total) for word in words)))
    if group is None or dist.get_world_size(group) == 1:
        return own[None]
    table = total.new_empty(dist.get_world_size(group), len(own))
    # Gathered and not all-reduced: every rank adds the same numbers in the same order, whatever the backend.
    dist.all_gather(list(table.unbind()), own, group=group)
    return table


def sum_of_squares(values: Tensor) -> Tensor:
    """Sum of squares in FP64, a scalar on the device of `values` (flat)."""
    if values.device.type != "cpu":
        return torch.linalg.vector_norm(values, dtype=torch.float64).square()
    # vector_norm(dtype=float64) takes six times as long on CPU.
    total = torch.zeros((), dtype=torch.float64)
    block = torch.empty(min(BLOCK_ON_CPU, values.numel()), dtype=torch.float64)
    for part in values.detach().split(BLOCK_ON_CPU):
        wide = block[: part.numel()].copy_(part)
        total += torch.dot(wide, wide)
    return total


def clip_(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale `grads` in place by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # On an accelerator `item` would wait for everything before it, which costs more than a multiplication by 1.
    if scale.device.type == "cpu" and scale.item() == 1.0:
        return
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))
