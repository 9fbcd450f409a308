"""Losses of a critic, which learns what a sequence will come to from each of its tokens on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, maximum

from ds_hydra.zero_hetero.errors import ConfigError


@dataclass(frozen=True)
class ValueLoss:
    """The squared error of each token's value V (arXiv 1707.06347, eq. 9), halved, and clipped as OpenAI's baselines,
    TRL and verl (`compute_value_loss`) do:

        max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2

    Columns: `returns`, R, and `old_values`, V_old, a number of a token each, at the token's own place, where
    `engine.values` has the value that comes before it; without `clip` no old values are read.
    """

    clip: float | None = 0.2  # None: nothing is clipped

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip must be positive, or None, but is {self.clip!r}")

    @property
    def normaliser(self) -> str:
        """What the sum of all tokens' losses is divided by."""
        return "tokens"

    def __call__(self, values: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """The loss of each token, (T,)."""
        returns = fields["returns"]
        loss = (values - returns).square()
        if self.clip is not None:
            old = fields["old_values"]
            loss = maximum(loss, (values.clamp(old - self.clip, old + self.clip) - returns).square())
        return loss / 2
