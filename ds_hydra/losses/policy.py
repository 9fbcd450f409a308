"""Losses of policy gradients: PPO, GRPO and its kin, which clip the ratio of a token or of a whole answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ds_hydra.zero_hetero.errors import ConfigError

Fields = Mapping[str, Tensor]
Average = Literal["tokens", "sequences", "constant"]


@dataclass(frozen=True)
class PolicyLoss:
    """PPO's clipped loss of each token (arXiv 1707.06347, eq. 7), with r = exp(log_probs - old_log_probs):

        -min(r A, clip(r, 1 - clip, 1 + clip_high) A)  +  kl KL  -  entropy_bonus H

    KL is the estimate exp(d) - d - 1 with d = reference_log_probs - log_probs (arXiv 2402.03300, eq. 4).

    Columns: `advantages`, a number of a token or of a whole sequence. `old_log_probs`, a number of a token; without it
    r is 1 and has the gradient of log_probs, as in the first update. `reference_log_probs`, a number of a
    token, where `kl` is not 0. `average` says what tokens count: "tokens", all alike; "sequences", in each sequence the
    mean of its tokens; "constant", 1/max_tokens of a sequence each.
    """

    clip: float = 0.2
    clip_high: float | None = None  # None: as `clip`
    kl: float = 0.0
    entropy_bonus: float = 0.0
    average: Average = "tokens"
    max_tokens: int = 0  # of an answer, for "constant"

    def __post_init__(self) -> None:
        if self.average not in ("tokens", "sequences", "constant") or (self.average == "constant") != (
            self.max_tokens > 0
        ):
            raise ConfigError(
                f'average must be "tokens", "sequences", or "constant" with max_tokens, but is {self.average!r} with '
                f"max_tokens {self.max_tokens}"
            )

    @property
    def normaliser(self) -> str:
        """What the sum of all tokens' losses is divided by."""
        return "tokens" if self.average == "tokens" else "sequences"

    def __call__(self, log_probs: Tensor, entropy: Tensor, fields: Fields) -> Tensor:
        """The loss of each token, (T,)."""
        ratio = (log_probs - fields.get("old_log_probs", log_probs.detach())).exp()
        loss = clipped(ratio, fields["advantages"], self.clip, self.clip_high)
        if self.kl:
            apart = fields["reference_log_probs"] - log_probs
            loss = loss + self.kl * (apart.exp() - apart - 1)
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * entropy
        if self.average == "tokens":
            return loss
        return loss / (self.max_tokens if self.average == "constant" else fields["num_targets"].clamp_min(1))


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float | None) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A); shapes (n,)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + (low if high is None else high)) * advantages)


def ppo(clip: float = 0.2, *, entropy_bonus: float = 0.0, kl: float = 0.0) -> PolicyLoss:
    """PPO, in the mean over tokens (arXiv 1707.06347, eq. 7 and 9, whose value function is another model's)."""
    return PolicyLoss(clip, kl=kl, entropy_bonus=entropy_bonus)


def grpo(clip: float = 0.2, *, kl: float = 0.04) -> PolicyLoss:
    """GRPO, in the mean over answers of the mean over their tokens (DeepSeekMath, arXiv 2402.03300, eq. 3)."""
    return PolicyLoss(clip, kl=kl, average="sequences")


def dr_grpo(max_tokens: int, clip: float = 0.2, *, kl: float = 0.0) -> PolicyLoss:
    """Dr. GRPO, in which a token counts the same in long and short answers (arXiv 2503.20783, section 3.2).

    `max_tokens` is the constant that the sum over an answer is divided by. Give advantages that are not divided by
    their deviation: `group_advantages(..., scaled=False)`.
    """
    return PolicyLoss(clip, kl=kl, average="constant", max_tokens=max_tokens)


def dapo(clip: float = 0.2, clip_high: float = 0.28) -> PolicyLoss:
    """DAPO, in the mean over the tokens of all answers, with its higher upper clip (arXiv 2503.14476, eq. 8)."""
    return PolicyLoss(clip, clip_high)


@dataclass(frozen=True)
class GSPO:
    """GSPO, which clips the ratio of whole answers (arXiv 2507.18071, eq. 5 and 7):

        s = exp(mean over an answer's tokens of log_probs - old_log_probs),   -min(s A, clip(s) A)

    Columns as of `PolicyLoss`; the advantage of an answer is the mean of its tokens'. In the mean over answers.
    """

    clip: float = 3e-4
    clip_high: float | None = 4e-4

    @property
    def mixes_tokens(self) -> bool:
        """It needs all tokens of a sequence."""
        return True

    def __call__(self, log_probs: Tensor, entropy: Tensor, fields: Fields) -> Tensor:
        """The loss of each answer, (sequences,)."""
        of = answers(fields)
        ratio = mean_by(log_probs - fields.get("old_log_probs", log_probs.detach()), of).exp()
        return clipped(ratio, mean_by(fields["advantages"], of), self.clip, self.clip_high)


def answers(fields: Fields) -> Tensor:
    """Which of the sequences that have targets each target is of, (T,): 0, 1, 2, ... without gaps."""
    return torch.unique(fields["sequence"], return_inverse=True)[1]


def mean_by(values: Tensor, of: Tensor) -> Tensor:
    """The mean of the values (T,) of each of the groups 0, 1, ..., of which `of` (T,) names each value's."""
    counts = torch.bincount(of)
    return torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, of, values) / counts


def group_advantages(rewards: Tensor, groups: Tensor, *, scaled: bool = True) -> Tensor:
    """Rewards (n,) less the mean of those of the same group, over their deviation if `scaled`, (n,) (arXiv 2402.03300,
    section 4.1.2). `groups` (n,) are any whole numbers, equal for answers to one prompt. A group of one gets 0."""
    of = torch.unique(groups, return_inverse=True)[1]
    less = rewards - mean_by(rewards, of)[of]
    if not scaled:
        return less
    counts = torch.bincount(of)
    deviation = (mean_by(less.square(), of) * counts / (counts - 1).clamp_min(1)).sqrt()
    return less / (deviation[of] + 1e-4)
