"""Losses of log-probabilities and of values: of policies (PPO, GRPO and others), of pairs of answers of which one is
preferred, of a teacher's top words, and of a critic, which learns what a sequence will come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, maximum

from ds_hydra.pipe.rows import CANDIDATE_LOG_PROBS
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


@dataclass(frozen=True)
class DPO:
    """DPO of pairs (arXiv 2305.18290, eq. 7), in the mean over pairs, with h = the sum over an answer's tokens of
    log_probs - reference_log_probs, of the preferred one less that of the other:

        "sigmoid"   -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), where e is `label_smoothing`
        "ipo"       (h - 1 / (2 beta))^2 (IPO, arXiv 2310.12036, eq. 17)

    Columns: `pair`, a whole number of a sequence, equal for the two of a pair, which are of one rank. `chosen`, 1 for
    the preferred sequence and 0 for the other. `reference_log_probs`, a number of a token, as `engine.log_probs` of the
    reference model gives them.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    kind: Literal["sigmoid", "ipo"] = "sigmoid"

    @property
    def mixes_tokens(self) -> bool:
        """It needs all tokens of two sequences."""
        return True

    def __call__(self, log_probs: Tensor, entropy: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """The loss of each pair, (pairs,)."""
        apart = log_probs - fields["reference_log_probs"]
        of, first = answers(fields), _first(answers(fields))
        sums = torch.zeros(len(first), dtype=apart.dtype, device=apart.device).index_add(0, of, apart)
        pair, chosen = fields["pair"][first], fields["chosen"][first] > 0
        names, of_pair, counts = torch.unique(pair, return_inverse=True, return_counts=True)
        preferred = torch.bincount(of_pair[chosen], minlength=len(names))
        if bool((counts != 2).any()) or bool((preferred != 1).any()):
            at = int(((counts != 2) | (preferred != 1)).nonzero()[0])
            raise ConfigError(
                f"the pair {int(names[at])} has {int(counts[at])} sequences with a target on this rank, of which "
                f"{int(preferred[at])} are chosen: give both of each pair to one rank, one with chosen 1 and one with 0"
            )
        signs = torch.where(chosen, 1.0, -1.0).to(sums)
        margin = torch.zeros(len(names), dtype=sums.dtype, device=sums.device).index_add(0, of_pair, signs * sums)
        if self.kind == "ipo":
            return (margin - 1 / (2 * self.beta)).square()
        return -(1 - self.label_smoothing) * F.logsigmoid(self.beta * margin) - self.label_smoothing * F.logsigmoid(
            -self.beta * margin
        )


def _first(of: Tensor) -> Tensor:
    """The first place of each of 0, 1, 2, ... in (T,)."""
    places = torch.full((int(of.max()) + 1,), len(of), device=of.device)
    return places.scatter_reduce(0, of, torch.arange(len(of), device=of.device), "amin")


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
