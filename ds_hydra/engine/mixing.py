"""The scores of a rank's sequences and a loss that mixes their tokens in; what each score counts in it out.

See [Note: losses of log-probabilities].
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ds_hydra.data.columns import IGNORE_INDEX
from ds_hydra.data.tokens import Float64Array, TokenSequence
from ds_hydra.engine.loss_watch import Watch, names_of, refuse_leaves
from ds_hydra.engine.objectives import Asked, check_returned, fields_of, released_on_meta
from ds_hydra.pipe.loss import Objective
from ds_hydra.pipe.rows import SEQUENCE, Field, FieldLayout

MIXING_FORM = (
    "a loss that mixes tokens must be a function of the log_probs (T,) and entropy (T,), or the values (T,), and the "
    "fields of all targets that a rank has handed in that returns losses (n,), whose sum over the normaliser is "
    "trained on"
)
_GRADIENTS = "gradients of the loss by the scores"


class Mixed(NamedTuple):
    """What a loss that mixes tokens makes of those of one rank."""

    total: float  # of its losses
    num_losses: int
    sequences: list[TokenSequence]  # with what their scores count, in as many more columns


def counted(sequence: TokenSequence, beside: Float64Array) -> TokenSequence:
    """A sequence with what its scores count, (tokens, num_scores), behind its fields."""
    return sequence._replace(fields=np.column_stack([fields_of(sequence), beside]))


def mix(
    asked: Asked,
    layout: FieldLayout,
    sequences: Sequence[TokenSequence],
    scores: Sequence[Float64Array],
    model: nn.Module | None,
    device: torch.device,
) -> Mixed:
    """Call a loss that mixes tokens on the scores of this rank's sequences, (tokens, num_scores) each. ConfigError for
    what it must not return or read."""
    known = [one.labels != IGNORE_INDEX for one in sequences]
    numbers = np.concatenate([fields_of(one)[of] for one, of in zip(sequences, known, strict=True)])
    numbers = np.column_stack([numbers, np.repeat(np.arange(len(known)), [int(of.sum()) for of in known])])
    found = np.concatenate([one[of] for one, of in zip(scores, known, strict=True)])
    leaf = torch.from_numpy(found).to(device).requires_grad_()
    objective = Objective(asked.loss, layout.and_also(Field(SEQUENCE, 0, True)), valued=asked.valued)
    with torch.enable_grad(), released_on_meta():
        watch = Watch(names_of(model), MIXING_FORM)
        try:
            with watch if asked.watched else contextlib.nullcontext():
                losses = objective.losses(leaf, torch.from_numpy(numbers).to(device))
        except Exception:
            watch.refuse()  # which says more than an error by what it has read
            raise
        check_returned(losses, leaf, MIXING_FORM, None)
        refuse_leaves(losses, leaf, lambda: names_of(model), "a loss that mixes tokens")
        (gradients,) = torch.autograd.grad(losses.double().sum(), leaf)
    counts = iter(np.split(gradients.cpu().numpy(), np.cumsum([int(of.sum()) for of in known])[:-1]))
    weighed = []
    for sequence, of in zip(sequences, known, strict=True):
        beside: Float64Array = np.zeros((len(of), objective.num_scores))
        beside[of] = next(counts)
        weighed.append(counted(sequence, beside))
    return Mixed(float(losses.detach().double().sum()), len(losses), weighed)


def of_mixed(layout: FieldLayout, *, valued: bool) -> Objective:
    """The second run of a loss that mixes tokens, whose sequences `mix` has given."""
    loss, width = (_by_gradient, 1) if valued else (_by_gradients, 2)
    return Objective(loss, layout.and_also(Field(_GRADIENTS, width, False)), valued=valued)


def _by_gradient(values: Tensor, fields: dict[str, Tensor]) -> Tensor:
    return fields[_GRADIENTS].squeeze(-1) * values


def _by_gradients(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    of_log_prob, of_entropy = fields[_GRADIENTS].unbind(dim=-1)
    return of_log_prob * log_probs + of_entropy * entropy
