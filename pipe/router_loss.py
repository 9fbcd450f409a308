"""The logits of a router in; the loss that has it use all experts alike, and the gradient of that, out.

[Note: the routers' loss]
Of one router and one sequence of n tokens: let c_e be how many tokens have expert e among their k most probable ones,
and p_te the softmax of token t's logits. With E experts the sequence's loss is

    E * sum over e of (c_e / n) * (sum over t of p_te / n)

For two tokens with the probabilities (.9 .1) and (.6 .4), and k = 1: c = (2, 0), so 2 * (2/2 * 1.5/2) = 1.5; it is k, 1
here, where all experts are used alike. That is the load balancing loss of the Switch Transformer (arXiv 2101.03961,
eq. 4 to 6) as transformers has it, but for each sequence by itself (as arXiv 2412.19437, eq. 17 to 20): a product of
two means over all tokens of a batch would depend on which sequences make a micro-batch, and so on the plan.

In the step's loss a sequence's router loss counts as much as the losses of its tokens do together: a sequence with 10
of 50 targets counts 1/5 of its router loss, times the model's coefficient. Several routers count by their mean. So a
step of one sequence has the loss that transformers gives a batch of it, but for this: transformers adds up counts and
probabilities of all layers before it multiplies them, as if expert 3 of one layer were expert 3 of another.

Counts have no gradient. That of p_te is E * c_e / n^2 times what the sequence counts, so it is known without any
message as soon as the counts of the whole sequence are: they are added over the ranks that share its tokens, and over
its slices, whose forwards have all run when the first backward comes. The gradient joins that of what the router hands
on, as in Megatron-LM's MoEAuxLossAutoScaler; the stages send nothing more than before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Routed(NamedTuple):
    """Which sequences the rows of a router's logits are of, and what their router losses count."""

    sequence: Tensor  # (rows,) its number in the pack
    weights: Tensor  # (sequences,) what multiplies the sum over e of c_e * (sum over t of p_te)
    counts: Callable[[], Tensor]  # (sequences, E) c_e of whole sequences; asked for in the backward


def probabilities_of(logits: Tensor) -> Tensor:
    """Softmax of logits (rows, E), in FP32 at least."""
    return torch.softmax(logits.detach().to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def totals_of(logits: Tensor, sequence: Tensor, num_sequences: int, top_k: int) -> Tensor:
    """c_e and the sum over t of p_te for the rows at hand: (sequences, 2 * E)."""
    probabilities = probabilities_of(logits)
    used = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    totals = probabilities.new_zeros(num_sequences, 2 * logits.shape[-1])
    return totals.index_add_(0, sequence, torch.cat((used, probabilities), dim=-1))


def balanced(routed: Routed | None, logits: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`outputs` of a router as they are; in the backward its logits (rows, E) get the gradient of its loss as well.

    None stands for what is not known where a layer is computed again; nothing goes backward through that.
    """
    found: tuple[Tensor, ...] = _Balanced.apply(routed, logits, *outputs)
    return found


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, routed: Routed | None, logits: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.routed = routed
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits)
        return tuple(out.clone() for out in outputs)  # views could not be written to in place by what follows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        sequence, weights, counts = ctx.routed
        probabilities = probabilities_of(logits)
        of_rows = (weights.unsqueeze(-1) * counts()).to(probabilities.dtype)[sequence]
        mean = (probabilities * of_rows).sum(dim=-1, keepdim=True)
        return None, (probabilities * (of_rows - mean)).to(logits.dtype), *gradients
