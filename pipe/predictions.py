"""The logits of a micro-batch's tokens in; what a user's function makes of each, kept, out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.told import told_with_place

TokenFunction = Callable[[Tensor, Tensor], Tensor]
"""Logits (1, T, V) of any T tokens and their labels (1, T), those that the logits are to predict, in; one number for
each token, (1, T), or k of them, (1, T, k), out. It must treat each token alone: an argmax does."""


class Predictions:
    """What a function makes of the tokens of one micro-batch that a rank holds, block by block."""

    def __init__(self, function: TokenFunction):
        self._function = function
        self._blocks: list[Tensor] = []  # in the order of the tokens

    def take(self, logits: Tensor, labels: Tensor) -> None:
        """The next tokens: logits (t, V) and labels (t,)."""
        self._blocks.append(_of_tokens(self._function, logits, labels))

    def found(self) -> Tensor:
        """(tokens, k)."""
        return torch.cat(self._blocks)


def _of_tokens(function: TokenFunction, logits: Tensor, labels: Tensor) -> Tensor:
    out = function(logits.unsqueeze(0), labels.unsqueeze(0))
    return out.reshape(len(labels), -1)


def width_of(function: TokenFunction, vocabulary: int) -> int:
    """The numbers that a function gives for each token. ConfigError if it does not treat each token alone."""
    form = "a function of predictions must map logits (1, T, V) and labels (1, T) to (1, T) or (1, T, k)"
    logits = torch.randn((3, vocabulary), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(3) % vocabulary
    try:
        whole, part = function(logits[None], labels[None]), function(logits[None, 1:], labels[None, 1:])
    except Exception as error:
        raise ConfigError(f"{form}; for 3 tokens it raised {told_with_place(error)}") from error
    if not isinstance(whole, Tensor) or whole.dim() not in (2, 3) or whole.shape[:2] != (1, 3):
        what = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
        raise ConfigError(f"{form}, but for 3 tokens it returned {what}")
    if part.shape != whole[:, 1:].shape or not torch.allclose(whole[:, 1:].double(), part.double(), rtol=1e-5):
        raise ConfigError(f"{form}, but what it gives for one token depends on others: blocks of tokens run apart")
    return whole[0, 0].numel()
