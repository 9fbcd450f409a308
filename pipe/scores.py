"""Logits in; of each token the log-probability of its label and of other words, and the entropy, out.

The vocabulary is spread over tensor parallel ranks, and no rank ever has the logits of all of it.

[Note: scores]
Of a token with logits z over temperature, p = softmax(z) and H = -sum(p log p), a step may want

  log p[label]     the log-probability of what follows it
  H                the entropy
  log p[word]      of k words that a field names, such as those that a teacher finds likely

With m the largest logit, all follow from sum(exp(z - m)), sum(exp(z - m) (z - m)) and the z of these words, which are
sums over the ranks: two messages, as for the cross entropy, of k + 3 numbers a token. Backwards, for the gradients g of
the log-probabilities and h of the entropy, dL/dz = sum over the words of g (onehot(word) - p) - h p (log p + H).

Of a model whose head gives one number, the value of what follows the tokens so far, that number is the only score. All
tensor parallel ranks have the head whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hydra.pipe.collectives import Group
from ds_hydra.pipe.fields import CANDIDATE_LOG_PROBS, ROUTED_EXPERTS, TEMPERATURE, FieldLayout, Routing
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.model_plan import LOGITS_AT_ONCE

ScoreLoss = Callable[..., Tensor]
"""A loss of log-probabilities: the log-probability (T,) of each of T tokens, the entropy (T,) of what might have stood
in its place, and the fields by name, (T,) or (T, k), in; the loss of each token, (T,), out. Or one of values: the value
(T,) of what comes before each of T tokens, and the fields, in."""

_NO_FIELDS = FieldLayout()
LOG_PROB, ENTROPY, CANDIDATES = 0, 1, 2  # columns of the scores; those of the candidates come last
VALUE = 0  # the column of a value


@dataclass(frozen=True)
class Objective:
    """What a step makes of its tokens' scores; equal for all micro-batches and ranks."""

    loss: ScoreLoss | None = None  # None: the scores themselves are wanted
    layout: FieldLayout = _NO_FIELDS
    candidates: str = ""  # the field of words whose log-probabilities the loss wants
    valued: bool = False  # whether the scores are values
    routing: Routing | None = None  # where choices of experts are among the fields, or wanted
    keeps_routes: bool = False  # whether the experts that are chosen are wanted

    @property
    def num_scores(self) -> int:
        if self.valued:
            return 1
        found = self.layout.find(self.candidates)
        return CANDIDATES + (0 if found is None else found[0].columns)

    def losses(self, scores: Tensor, numbers: Tensor) -> Tensor:
        """The loss of each token, (T,), from its scores (T, num_scores) and its fields (T, columns)."""
        assert self.loss is not None, "there is something to train on"
        fields = self.fields(numbers, scores.dtype)
        if self.valued:
            return self.loss(scores[:, VALUE], fields)
        if self.candidates:
            fields[CANDIDATE_LOG_PROBS] = scores[:, CANDIDATES:]
        return self.loss(scores[:, LOG_PROB], scores[:, ENTROPY], fields)

    def fields(self, numbers: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The columns (T, columns) as fields of this type, or of int64."""
        found: dict[str, Tensor] = {}
        for field, columns in self.layout.places():
            if field.name == ROUTED_EXPERTS:
                continue
            part = numbers[:, columns] if field.width else numbers[:, columns.start]
            found[field.name] = part.to(torch.int64 if field.whole else dtype)
        return found

    def words(self, labels: Tensor, numbers: Tensor) -> Tensor:
        """The words whose log-probabilities are wanted, (T, num_scores - 1); -100 where there is none."""
        found = self.layout.find(self.candidates)
        if found is None:
            return labels.unsqueeze(-1)
        return torch.cat((labels.unsqueeze(-1), numbers[:, found[1]].to(torch.int64)), dim=-1)

    def temperature(self, numbers: Tensor) -> Tensor | None:
        """Of each token, (T,); None where it is 1."""
        found = self.layout.find(TEMPERATURE)
        return None if found is None else numbers[:, found[1].start]


@dataclass(frozen=True)
class Scored:
    """What is asked of the scores of one micro-batch, on its last stage."""

    objective: Objective
    numbers: Tensor  # (T_local, columns) in FP64, see [Note: fields]
    found: Tensor | None = None  # (T_local, num_scores) in FP64, where they are written, if they are wanted


class _Scores(torch.autograd.Function):
    """See [Note: scores]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, words: Tensor, temperature: Tensor | None, vocab_start: int, group: Group
    ) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        shifted = logits.to(wide, copy=True)
        if temperature is not None:
            temperature = temperature.to(wide).unsqueeze(-1)
            shifted.div_(temperature)
        peak = shifted.amax(dim=-1)
        if group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shifted.sub_(peak.unsqueeze(-1))
        local = words - vocab_start
        here = (local >= 0) & (local < logits.shape[-1])
        local = local.masked_fill(~here, 0)
        at_words = shifted.gather(-1, local).masked_fill(~here, 0.0)
        exponent = shifted.exp()
        total, spread = exponent.sum(dim=-1), shifted.mul_(exponent).sum(dim=-1)
        del shifted
        if group is not None:
            sums = torch.cat((at_words, total.unsqueeze(-1), spread.unsqueeze(-1)), dim=-1)
            dist.all_reduce(sums, group=group)
            at_words, total, spread = sums[:, :-2], sums[:, -2], sums[:, -1]
        log_total = total.log()
        entropy = log_total - spread / total
        ctx.save_for_backward(exponent.div_(total.unsqueeze(-1)), local, here, entropy, temperature)
        log_probs = at_words - log_total.unsqueeze(-1)
        return torch.cat((log_probs[:, :1], entropy.unsqueeze(-1), log_probs[:, 1:]), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        probability, local, here, entropy, temperature = ctx.saved_tensors
        of_entropy = grad[:, ENTROPY].unsqueeze(-1)
        of_words = torch.cat((grad[:, :1], grad[:, CANDIDATES:]), dim=-1)
        # p log p is 0 where p has become 0, and its factor in the entropy's gradient too.
        out = torch.xlogy(probability, probability).mul_(-of_entropy)
        out.sub_(probability.mul_(of_words.sum(dim=-1, keepdim=True) + of_entropy * entropy.unsqueeze(-1)))
        out.scatter_add_(-1, local, of_words * here)
        if temperature is not None:
            out.div_(temperature)
        return out, None, None, None, None


def token_scores(
    logits: Tensor, words: Tensor, vocab_start: int, group: Group, temperature: Tensor | None = None
) -> Tensor:
    """Log-probability of the first word of each token, entropy, log-probabilities of its other words: (T, 2 + k).

    logits (T, V_local) of this rank's vocabulary rows from `vocab_start`, words (T, 1 + k) in the whole vocabulary,
    temperature (T,); returns FP32 (FP64 for FP64 logits), equal on all ranks of the tensor parallel group. The
    log-probability of a word that is none, such as IGNORED, means nothing.
    """
    return _Scores.apply(logits, words, temperature, vocab_start, group)  # type: ignore[no-any-return]


def scored_loss(
    hidden: Tensor,
    scored: Scored,
    labels: Tensor,
    weights: Tensor,
    head: Callable[[Tensor, slice], Tensor],
    scores_of: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    *,
    vocab: int,
) -> Tensor:
    """Sum of the micro-batch's weights * losses, (), 0 where the scores alone are wanted; a token without a label has
    scores and a loss of 0.

    `head` maps hidden (1, t, H) of a slice of tokens to logits (1, t, V_local), `scores_of` maps logits (t, V_local),
    words (t, 1 + k) and temperatures (t,) or None to scores (t, 2 + k). The backward makes each block of logits of
    `vocab` words again [Note: logit blocks].
    """
    objective, numbers = scored.objective, scored.numbers
    words, temperature = objective.words(labels, numbers), objective.temperature(numbers)

    def of_block(part: Tensor, tokens: slice) -> Tensor:
        given = None if temperature is None else temperature[tokens].masked_fill(labels[tokens] == IGNORED, 1.0)
        return scores_of(head(part, tokens).squeeze(0), words[tokens], given)

    size = max(1, LOGITS_AT_ONCE // max(1, vocab))
    slices = [slice(start, start + size) for start in range(0, len(labels), size)]
    if len(slices) == 1:
        scores = of_block(hidden, slices[0])
    else:
        parts = [checkpoint(of_block, hidden[:, one], one, use_reentrant=False) for one in slices]
        scores = torch.cat(parts)
    ignored = labels == IGNORED
    scores = scores.masked_fill(ignored.unsqueeze(-1), 0.0)
    if scored.found is not None:
        scored.found.copy_(scores.detach())
    if objective.loss is None:
        return scores.new_zeros(())
    losses = objective.losses(scores, numbers).masked_fill(ignored, 0.0)
    return (losses * weights).sum()
