"""A loss by what a teacher finds likely: its top words for each token, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ds_hydra.pipe.rows import CANDIDATE_LOG_PROBS


@dataclass(frozen=True)
class Distillation:
    """KL divergence between a teacher's distribution q and the model's p, in the mean over tokens (arXiv 1503.02531;
    the direction as in arXiv 2306.13649, section 3). It is over the teacher's top k words and, as one more, all others:

        "forward"   sum of q (log q - log p)
        "reverse"   sum of p (log p - log q)

    Without the `tail` the sum is over the k words alone. Columns: `teacher_ids` (k a token), whole numbers, and
    `teacher_log_probs` (k a token), at the place of the token that they are a distribution of: a teacher's logits at
    token i - 1 belong to token i.
    """

    direction: Literal["forward", "reverse"] = "forward"
    tail: bool = True
    candidates: str = "teacher_ids"

    def __call__(self, log_probs: Tensor, entropy: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """The loss of each token, (T,)."""
        own, teacher = fields[CANDIDATE_LOG_PROBS], fields["teacher_log_probs"]
        if self.tail:
            own, teacher = (torch.cat((one, _rest(one)), dim=-1) for one in (own, teacher))
        if self.direction == "forward":
            return (teacher.exp() * (teacher - own)).sum(dim=-1)
        return (own.exp() * (own - teacher)).sum(dim=-1)


def _rest(log_probs: Tensor) -> Tensor:
    """The log-probability (T, 1) of all other words; rounding leaves at least a last bit of it."""
    least = torch.finfo(log_probs.dtype).eps
    return (1 - log_probs.exp().sum(dim=-1, keepdim=True)).clamp_min(least).log()
