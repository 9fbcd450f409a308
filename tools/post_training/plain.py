"""Every loss that is shipped, beside the same for one process: sequence by sequence, as its paper has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hydra.losses import DPO, GSPO, Distillation, PolicyLoss, ValueLoss, dapo, dr_grpo, grpo, ppo
from ds_hydra.pipe.loss import IGNORED

Item = dict[str, Any]
Scores = tuple[Tensor, ...]
"""Of one sequence: log p of its tokens (T,), entropies (T,), log p of all words (T, V); or values (T,)."""


class Compared(NamedTuple):
    """A loss as it is handed to the engine, and the loss of all sequences of all ranks that it has to be."""

    loss: Any
    plain: Callable[[list[Item], list[Scores]], Tensor]
    mixes: bool | None = None
    fields: tuple[str, ...] = ()  # the columns that it is given beside the temperature


def learnt(item: Item) -> Tensor:
    """Which tokens are learnt: not the first, which nothing predicts."""
    known = item["labels"] != IGNORED
    known[0] = False
    return known


def _clipped(item: Item, scores: Scores, low: float, high: float, kl: float = 0.0, bonus: float = 0.0) -> Tensor:
    """The losses of a sequence's learnt tokens."""
    known = learnt(item)
    own, entropy = scores[0][known], scores[1][known]
    ratio = torch.exp(own - item["old_log_probs"][known])
    advantage = item["advantages"][known]
    limited = torch.where(
        ratio > 1 + high, 1 + high + 0 * ratio, torch.where(ratio < 1 - low, 1 - low + 0 * ratio, ratio)
    )
    gained = torch.where(ratio * advantage < limited * advantage, ratio * advantage, limited * advantage)
    apart = item["reference_log_probs"][known] - own
    return -gained + kl * (torch.exp(apart) - apart - 1) - bonus * entropy


def _policy(average: str, low: float = 0.2, high: float = 0.2, **more: float) -> Callable[..., Tensor]:
    def loss(items: list[Item], scores: list[Scores]) -> Tensor:
        found = [_clipped(item, one, low, high, **more) for item, one in zip(items, scores, strict=True)]
        if average == "tokens":
            return torch.cat(found).mean()
        if average == "sequences":
            return torch.stack([one.mean() for one in found]).mean()
        return torch.stack([one.sum() / 64 for one in found]).mean()

    return loss


def _gspo(items: list[Item], scores: list[Scores]) -> Tensor:
    found = []
    for item, (own, _, _) in zip(items, scores, strict=True):
        known = learnt(item)
        ratio = torch.exp((own - item["old_log_probs"])[known].mean())
        advantage = item["advantages"][known].mean()
        found.append(-torch.min(ratio * advantage, torch.clamp(ratio, 0.95, 1.05) * advantage))
    return torch.stack(found).mean()


def _dpo(kind: str, smoothing: float) -> Callable[..., Tensor]:
    def loss(items: list[Item], scores: list[Scores]) -> Tensor:
        sums = [
            (own - item["reference_log_probs"])[learnt(item)].sum()
            for item, (own, _, _) in zip(items, scores, strict=True)
        ]
        found = []
        for first in range(0, len(items), 2):
            better, worse = (first, first + 1) if items[first]["chosen"] else (first + 1, first)
            margin = sums[better] - sums[worse]
            if kind == "ipo":
                found.append((margin - 1 / (2 * 0.1)) ** 2)
            else:
                found.append((1 - smoothing) * F.softplus(-0.1 * margin) + smoothing * F.softplus(0.1 * margin))
        return torch.stack(found).mean()

    return loss


def _distilled(direction: str, tail: bool) -> Callable[..., Tensor]:
    def loss(items: list[Item], scores: list[Scores]) -> Tensor:
        found = []
        for item, (_, _, log_p) in zip(items, scores, strict=True):
            for token in learnt(item).nonzero().flatten().tolist():
                p = [log_p[token, word].exp() for word in item["teacher_ids"][token]]
                q = [torch.exp(one) for one in item["teacher_log_probs"][token]]
                if tail:
                    p, q = [*p, 1 - torch.stack(p).sum()], [*q, 1 - torch.stack(q).sum()]
                left, right = (q, p) if direction == "forward" else (p, q)
                found.append(torch.stack([a * torch.log(a / b) for a, b in zip(left, right, strict=True)]).sum())
        return torch.stack(found).mean()

    return loss


def own_mixing(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss of a user's own that mixes the tokens of a group of sequences, entropies too."""
    group = fields["pair"] - fields["pair"].min()
    sums = torch.zeros(int(group.max()) + 1, dtype=log_probs.dtype).index_add(0, group, log_probs * entropy)
    return sums[torch.bincount(group) > 0].tanh()


def _own_mixing(items: list[Item], scores: list[Scores]) -> Tensor:
    found = []
    for first in range(0, len(items), 2):
        two = zip(items[first : first + 2], scores[first : first + 2], strict=True)
        both = [(own * entropy)[learnt(item)].sum() for item, (own, entropy, _) in two]
        found.append(torch.tanh(both[0] + both[1]))
    return torch.stack(found).mean()


def own_of_tokens(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss of a user's own of tokens."""
    return (entropy * fields["advantages"]).sin() * log_probs


def _own_of_tokens(items: list[Item], scores: list[Scores]) -> Tensor:
    found = [
        (torch.sin(entropy * item["advantages"]) * own)[learnt(item)]
        for item, (own, entropy, _) in zip(items, scores, strict=True)
    ]
    return torch.cat(found).mean()


def _value_loss(clip: float | None) -> Callable[..., Tensor]:
    def loss(items: list[Item], scores: list[Scores]) -> Tensor:
        found = []
        for item, (values,) in zip(items, scores, strict=True):
            for token in learnt(item).nonzero().flatten().tolist():
                value, target, old = values[token], item["returns"][token], item["old_values"][token]
                errors = [(value - target) ** 2]
                if clip is not None:
                    errors.append((torch.min(torch.max(value, old - clip), old + clip) - target) ** 2)
                found.append(0.5 * torch.stack(errors).max())
        return torch.stack(found).mean()

    return loss


def own_of_values(values: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss of a user's own that mixes the values of a sequence."""
    errors = values * fields["returns"]
    return (
        torch.zeros(int(fields["sequence"].max()) + 1, dtype=values.dtype)
        .index_add(0, fields["sequence"], errors)
        .tanh()
    )


def _own_of_values(items: list[Item], scores: list[Scores]) -> Tensor:
    found = [
        torch.tanh((values * item["returns"])[learnt(item)].sum())
        for item, (values,) in zip(items, scores, strict=True)
    ]
    return torch.stack(found).mean()


_POLICY = ("advantages", "old_log_probs")
_KL = (*_POLICY, "reference_log_probs")
_PAIRS = ("pair", "chosen", "reference_log_probs")
_TEACHER = ("teacher_ids", "teacher_log_probs")

LOSSES: dict[str, Compared] = {
    "PPO": Compared(ppo(entropy_bonus=0.3), _policy("tokens", bonus=0.3), fields=_POLICY),
    "GRPO": Compared(grpo(kl=0.1), _policy("sequences", kl=0.1), fields=_KL),
    "Dr. GRPO": Compared(dr_grpo(64), _policy("constant"), fields=_POLICY),
    "DAPO": Compared(dapo(), _policy("tokens", 0.2, 0.28), fields=_POLICY),
    "GSPO": Compared(GSPO(0.05, 0.05), _gspo, fields=_POLICY),
    "DPO": Compared(DPO(), _dpo("sigmoid", 0.0), fields=_PAIRS),
    "DPO, smoothed": Compared(DPO(label_smoothing=0.2), _dpo("sigmoid", 0.2), fields=_PAIRS),
    "IPO": Compared(DPO(kind="ipo"), _dpo("ipo", 0.0), fields=_PAIRS),
    "distillation": Compared(Distillation(), _distilled("forward", True), fields=_TEACHER),
    "distillation, reverse": Compared(Distillation("reverse"), _distilled("reverse", True), fields=_TEACHER),
    "distillation, no tail": Compared(Distillation(tail=False), _distilled("forward", False), fields=_TEACHER),
    "own, of tokens": Compared(own_of_tokens, _own_of_tokens, fields=("advantages",)),
    "own, mixing": Compared(own_mixing, _own_mixing, mixes=True, fields=("pair",)),
    "every option": Compared(
        PolicyLoss(0.1, 0.3, kl=0.2, entropy_bonus=0.1, average="sequences"),
        _policy("sequences", 0.1, 0.3, kl=0.2, bonus=0.1),
        fields=_KL,
    ),
}

_VALUES = ("returns", "old_values")
# Of models whose head has one output.
VALUE_LOSSES: dict[str, Compared] = {
    "values": Compared(ValueLoss(), _value_loss(0.2), fields=_VALUES),
    "values, not clipped": Compared(ValueLoss(None), _value_loss(None), fields=_VALUES),
    "values, mixing": Compared(own_of_values, _own_of_values, mixes=True, fields=_VALUES),
}
ALL_LOSSES = LOSSES | VALUE_LOSSES
