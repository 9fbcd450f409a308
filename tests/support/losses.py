"""Losses that users write: one number for each token, from logits (T, V) and labels (T,)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """(1 - p)^2 of the cross entropy: tokens that the model is sure of count little (arXiv 1708.02002)."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with a tenth of the target spread over the vocabulary."""
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)


def by_word(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy weighted by the word that is to be predicted, with a z-loss on the normaliser."""
    weights = 0.5 + torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device) / logits.shape[-1]
    normaliser = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(-1, labels[:, None]).squeeze(-1)
    return weights[labels] * (normaliser - chosen) + 1e-2 * normaliser**2


OWN = {"focal": focal, "smoothed": smoothed, "by word": by_word}
