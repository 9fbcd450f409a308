"""A loss of whole sequences in; what the tokens of each sequence count in a step, and the step's loss, out.

[Note: losses of whole sequences]
A loss of pairs or groups (DPO, ranking, policy gradients) is a function L of the sums s_i of several sequences' token
losses. Its gradient is the sum over i of dL/ds_i times the gradient of s_i, and dL/ds_i are plain numbers once all sums
are known. So a step runs twice: forward only, to learn the sums; then as ever, the tokens of sequence i counting
dL/ds_i times. A pair with the sums 12 and 15 and the loss softplus(s_0 - s_1 + 2), which is 0.31: sigmoid(-1) is 0.27,
so the tokens of the first count 0.27 and those of the second -0.27.

The sequences of a pair need not meet for that. They run where the plan puts them, also in slices, and a group may be
as large as what one rank hands in. The price is one more forward, about a third of the computing of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ds_hydra.engine.loss_watch import names_of, refuse_leaves
from ds_hydra.zero_hetero.errors import ConfigError

SequenceLoss = Callable[[Tensor], Tensor]
"""The summed token losses (n,), FP64, of the sequences that a rank has handed in, in that order, in; the loss of each
of its groups, (groups,), out. The step's loss is the mean over the groups of all ranks."""


class Weighed(NamedTuple):
    """What a function makes of the sums of one rank."""

    total: float  # of its groups' losses
    num_groups: int
    gradients: Tensor  # (n,) of the total, by the sums


def weigh(function: SequenceLoss, sums: Tensor, model: nn.Module | None = None) -> Weighed:
    """Call a loss of whole sequences on the sums (n,) of one rank. ConfigError for what it must not return, and for
    tensors beside the sums that want a gradient; those of the `model` are told by name."""
    leaf = sums.detach().clone().requires_grad_()
    with torch.enable_grad():
        form = (
            "sequence_loss must map the losses of a rank's sequences (n,) to the loss of each of its groups, (groups,)"
        )
        losses = function(leaf)
        if not isinstance(losses, Tensor) or losses.dim() != 1 or not len(losses):
            what = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise ConfigError(
                f"{form}, but returned {what}: leave their mean to the step, which takes that of all ranks"
            )
        if not losses.requires_grad:
            raise ConfigError(f"{form}, but what it returned has no gradient: compute it from the losses by torch")
        refuse_leaves(losses, leaf, lambda: names_of(model), "sequence_loss")
        total = losses.sum()
        (gradients,) = torch.autograd.grad(total, leaf)
    return Weighed(total.item(), len(losses), gradients)
