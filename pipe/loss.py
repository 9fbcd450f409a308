"""Token losses from vocabulary shards, in chunks of tokens so that full logits never stand in memory at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hydra.pipe.collectives import Group
from ds_hydra.pipe.model_plan import LOGITS_AT_ONCE

IGNORED = -100  # label of a token without a target, as in torch's cross_entropy


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Megatron's vocabulary parallel cross entropy: three reductions of one number a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_start: int, group: Group) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logits = logits.to(wide)
        peak = logits.max(dim=-1).values
        if group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - peak.unsqueeze(-1)
        local = labels - vocab_start
        here = (local >= 0) & (local < logits.shape[-1])
        local = local.masked_fill(~here, 0)
        target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        exponent = shifted.exp_()
        total = exponent.sum(dim=-1)
        if group is not None:
            both = torch.stack((target, total))
            dist.all_reduce(both, group=group)
            target, total = both.unbind()
        ctx.save_for_backward(exponent.div_(total.unsqueeze(-1)), local, here, labels != IGNORED)
        return (total.log() - target).masked_fill(labels == IGNORED, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probability, local, here, counted = ctx.saved_tensors
        probability.scatter_add_(-1, local.unsqueeze(-1), -here.to(probability.dtype).unsqueeze(-1))
        return probability.mul_((grad * counted).unsqueeze(-1)), None, None, None


def token_losses(logits: Tensor, labels: Tensor, vocab_start: int, group: Group) -> Tensor:
    """Cross entropy of each token, 0 where the label is IGNORED.

    logits (T, V_local) of this rank's vocabulary rows from `vocab_start`, labels (T,) in the whole vocabulary;
    returns (T,) in FP32 (FP64 for FP64 logits), equal on all ranks of the tensor parallel group.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, vocab_start, group).to(
        torch.float64 if logits.dtype == torch.float64 else torch.float32
    )


def chunked_loss(
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_start: int,
    vocab_local: int,
    group: Group,
) -> Tensor:
    """Sum of weights * token losses; `head` maps hidden (1, t, H) to logits (1, t, V_local).

    Chunks are recomputed in the backward, so that logits of at most LOGITS_AT_ONCE stand in memory.
    """

    def chunk_loss(part: Tensor, part_labels: Tensor, part_weights: Tensor) -> Tensor:
        losses = token_losses(head(part).squeeze(0), part_labels, vocab_start, group)
        return (losses * part_weights).sum()

    num_tokens = hidden.shape[1]
    size = max(1, LOGITS_AT_ONCE // max(1, vocab_local))
    if num_tokens <= size:
        return chunk_loss(hidden, labels, weights)
    total: Tensor | None = None
    for start in range(0, num_tokens, size):
        part = slice(start, start + size)
        args = (hidden[:, part], labels[part], weights[part])
        loss = checkpoint(chunk_loss, *args, use_reentrant=False)
        total = loss if total is None else total + loss
    assert total is not None, "a micro-batch has at least one token"
    return total
