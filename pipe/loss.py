"""Hidden states and labels in, the weighted loss out; vocabulary spread over ranks, logits never all in memory.

A token's loss is the cross entropy, or a function of the user's own, which sees the logits of the whole vocabulary.

[Note: logit blocks]
A row of 32,768 tokens with a vocabulary of 131,072 has logits of 16 GiB in FP32. The head and the loss treat each token
alone, so they are computed for a block of tokens at a time: 256 tokens here, 128 MiB. Autograd would keep every block
for the backward, so each block is recomputed there: the head is computed twice. That is the way of losses and heads of
the user's own; the cross entropy of a plain head goes another one [Note: head and loss as one].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hydra.pipe.collectives import Group, gather_last_dim
from ds_hydra.pipe.model_plan import LOGITS_AT_ONCE
from ds_hydra.pipe.rows import MicroBatch
from ds_hydra.zero_hetero.errors import ConfigError

IGNORED = -100  # label of a token without a target, as in torch's cross_entropy

TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""A loss of the user's own: logits (T, V) in FP32 or FP64 and labels (T,) in, the loss of each token (T,) out.

logits[t] is to predict labels[t]. A label is always a word of the vocabulary: where nothing is to be learnt it is 0,
and what comes out is not used. T is any number of tokens, of any sequences."""


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Megatron's vocabulary parallel cross entropy: three reductions of one number a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_start: int, group: Group) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logits = logits.to(wide)
        # The loss of a token is log(sum of exp(logits)) - logit of its label. Shifting all logits by their maximum over
        # the whole vocabulary changes nothing of that, and no exp overflows.
        peak = logits.max(dim=-1).values
        if group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - peak.unsqueeze(-1)
        local = labels - vocab_start
        here = (local >= 0) & (local < logits.shape[-1])
        local = local.masked_fill(~here, 0)
        # The label's logit lies on one rank. Vocabulary 6 over two ranks and label 4: rank 1 finds it in its row 1, and
        # rank 0, with the rows 0..2, adds 0. An IGNORED label lies on no rank.
        target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        exponent = shifted.exp_()
        total = exponent.sum(dim=-1)
        if group is not None:
            # Both sums go in one message of two numbers a token; as two messages they would wait for the ranks twice.
            both = torch.stack((target, total))
            dist.all_reduce(both, group=group)
            target, total = both.unbind()
        ctx.save_for_backward(exponent.div_(total.unsqueeze(-1)), local, here, labels != IGNORED)
        return (total.log() - target).masked_fill(labels == IGNORED, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # The gradient is softmax - 1 at the label, softmax elsewhere. It is written over the saved probabilities: a
        # second tensor of this size would double the memory at the point where it is largest.
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


def loss_of_values(token_loss: TokenLoss | None) -> TokenLoss:
    """What stages of a model whose head gives values are trained on in place of the cross entropy. ConfigError for a
    loss of logits."""
    if token_loss not in (None, squared_values):
        raise ConfigError(
            "the model gives a value for each token and no logits, which loss_fn is of: leave it out, and pass a loss "
            "of values to engine.forward_backward()"
        )
    return squared_values


def squared_values(values: Tensor, labels: Tensor) -> Tensor:
    """What a model of values is tried on before a step, by the self-check: half the square of each, (T, 1) to (T,)."""
    return values.squeeze(-1).square() / 2


def own_token_losses(
    function: TokenLoss, logits: Tensor, labels: Tensor, widths: tuple[int, ...], tp_rank: int, group: Group
) -> Tensor:
    """A user's loss of each token, 0 where the label is IGNORED; shapes as `token_losses` has them.

    The logits of all tensor parallel ranks, whose vocabulary rows are `widths`, are gathered in FP32 (FP64) first: what
    such a function does with them is not known.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    whole = gather_last_dim(logits.to(wide), widths, tp_rank, group)
    ignored = labels == IGNORED
    return function(whole, labels.masked_fill(ignored, 0)).to(wide).masked_fill(ignored, 0.0)


def blockwise_loss(
    hidden: Tensor,
    batch: MicroBatch,
    head: Callable[[Tensor, slice], Tensor],
    losses_of: Callable[[Tensor, Tensor], Tensor],
    *,
    vocab: int,
) -> Tensor:
    """Sum of the micro-batch's weights * token losses, (); `batch.token_losses`, if there, gets the losses themselves.

    `head` maps hidden (1, t, H) of a slice of tokens to logits (1, t, V_local), `losses_of` maps logits (t, V_local)
    and labels (t,) to losses (t,). At most LOGITS_AT_ONCE logits of `vocab` words each are in memory at a time
    [Note: logit blocks].
    """
    labels, weights = batch.labels, batch.weights
    assert labels is not None, "the last stage was given no labels"
    assert weights is not None, "the last stage was given no weights"

    def block_loss(part: Tensor, tokens: slice) -> Tensor:
        losses = losses_of(head(part, tokens).squeeze(0), labels[tokens])
        if batch.token_losses is not None:
            batch.token_losses[tokens] = losses.detach()
        return (losses * weights[tokens]).sum()

    num_tokens = hidden.shape[1]
    size = max(1, LOGITS_AT_ONCE // max(1, vocab))
    if num_tokens <= size:
        return block_loss(hidden, slice(0, num_tokens))
    total: Tensor | None = None
    for start in range(0, num_tokens, size):
        part = slice(start, start + size)
        loss = checkpoint(block_loss, hidden[:, part], part, use_reentrant=False)
        total = loss if total is None else total + loss
    assert total is not None, "a micro-batch has at least one token"
    return total
