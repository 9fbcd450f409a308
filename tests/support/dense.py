"""The attention "dense" of references in FP64: Hugging Face's "eager" has an FP32 softmax in any dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Softcapped, windowed, causal attention with sinks over the whole score matrix, in the dtype of its inputs."""
    assert attention_mask is None, "no mask function is registered for it"
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])[None]
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if s_aux is not None:  # a score of each head for a key without a value
        scores = torch.cat((scores, s_aux[None, :, None, None].expand(1, -1, len(distance), 1)), dim=-1)
    weights = F.dropout(torch.softmax(scores, dim=-1)[..., : len(distance)], dropout)
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register("dense", dense_attention)
