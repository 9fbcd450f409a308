"""The loss of a stage's tokens, their log-probabilities and predictions; logits are never all in memory.

A token's loss is the cross entropy, or a function of the user's own, which sees the logits of the whole vocabulary.

[Note: logit blocks]
A row of 32,768 tokens with a vocabulary of 131,072 has logits of 16 GiB in FP32. The head and the loss treat each token
alone, so they are computed for a block of tokens at a time: 256 tokens here, 128 MiB. Autograd would keep every block
for the backward, so each block is recomputed there: the head is computed twice. That is the way of losses and heads of
the user's own; the cross entropy of a plain head goes another one [Note: head and loss as one].

[Note: head and loss as one]
Autograd makes logits, keeps them, and goes back through them. In blocks [Note: logit blocks] that takes each product
of the head twice, and the weight's gradient is a sum of as many 16 bit tensors as there are blocks: of 128 of them it
is seven times as far from the truth as one product is. But the gradient of a cross entropy needs nothing that comes
later. So a block's logits become its loss, and at once, in their own memory, the gradient of the logits:

  logits (n, V)  =  x W'                                first product
  loss           =  log(sum(exp(logits))) - logits[label]
  logits        <-  weight * (softmax(logits) - onehot(label))
  dx (n, H)      =  logits W                            second product
  dW (V, H)     +=  logits' x                           third product, added up in FP32

A backward multiplies both by the gradient of the loss, a number. Where a schedule runs several forwards before the
first backward, only one of them holds its dW, as large as the head in FP32; the others make their gradients when their
backward comes, with the first product once more. Both ways give the same bits. A slice of a sequence that others follow
never holds one: their backwards come before its own, and would make theirs beside it.

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

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hydra.pipe.collectives import Group, copy_to_ranks, gather_last_dim
from ds_hydra.pipe.fused import kernels_for
from ds_hydra.pipe.model_plan import HEAD_LOGITS_AT_ONCE, LOGITS_AT_ONCE
from ds_hydra.pipe.rows import CANDIDATE_LOG_PROBS, ROUTED_EXPERTS, TEMPERATURE, FieldLayout, MicroBatch, Routing
from ds_hydra.pipe.weight_gradients import add_product
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.told import told_with_place

IGNORED = -100  # label of a token without a target, as in torch's cross_entropy

TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""A loss of the user's own: logits (T, V) in FP32 or FP64 and labels (T,) in, the loss of each token (T,) out.

logits[t] is to predict labels[t]. A label is always a word of the vocabulary: where nothing is to be learnt it is 0,
and what comes out is not used. T is any number of tokens, of any sequences."""


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Megatron's vocabulary parallel cross entropy: three reductions of one number a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_start: int, group: Group) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logits = logits.to(wide)
        # The loss of a token is log(sum of exp(logits)) - logit of its label. Shifting all logits by their maximum over
        # the whole vocabulary changes nothing of that, and no exp overflows.
        peak = logits.max(dim=-1).values
        if group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - peak.unsqueeze(-1)
        local = labels - vocab_start
        here = (local >= 0) & (local < logits.shape[-1])
        local = local.masked_fill(~here, 0)
        # The label's logit lies on one rank. Vocabulary 6 over two ranks and label 4: rank 1 finds it in its row 1, and
        # rank 0, with the rows 0..2, adds 0. An IGNORED label lies on no rank.
        target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        exponent = shifted.exp_()
        total = exponent.sum(dim=-1)
        if group is not None:
            # Both sums go in one message of two numbers a token; as two messages they would wait for the ranks twice.
            both = torch.stack((target, total))
            dist.all_reduce(both, group=group)
            target, total = both.unbind()
        ctx.save_for_backward(exponent.div_(total.unsqueeze(-1)), local, here, labels != IGNORED)
        return (total.log() - target).masked_fill(labels == IGNORED, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # The gradient is softmax - 1 at the label, softmax elsewhere. It is written over the saved probabilities: a
        # second tensor of this size would double the memory at the point where it is largest.
        probability, local, here, counted = ctx.saved_tensors
        probability.scatter_add_(-1, local.unsqueeze(-1), -here.to(probability.dtype).unsqueeze(-1))
        return probability.mul_((grad * counted).unsqueeze(-1)), None, None, None


def token_losses(logits: Tensor, labels: Tensor, vocab_start: int, group: Group) -> Tensor:
    """Cross entropy of each token, 0 where the label is IGNORED.

    logits (T, V_local) of this rank's vocabulary rows from `vocab_start`, labels (T,) in the whole vocabulary;
    returns (T,) in FP32 (FP64 for FP64 logits), equal on all ranks of the tensor parallel group.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, vocab_start, group)


def loss_of_values(token_loss: TokenLoss | None) -> TokenLoss:
    """What stages of a model whose head gives values are trained on in place of the cross entropy. ConfigError for a
    loss of logits."""
    if token_loss not in (None, squared_values):
        raise ConfigError(
            "the model gives a value for each token and no logits, which loss_fn is of: leave it out, and pass a loss "
            "of values to engine.forward_backward()"
        )
    return squared_values


def squared_values(values: Tensor, labels: Tensor) -> Tensor:
    """What a model of values is tried on before a step, by the self-check: half the square of each, (T, 1) to (T,)."""
    return values.squeeze(-1).square() / 2


def own_token_losses(
    function: TokenLoss, logits: Tensor, labels: Tensor, widths: tuple[int, ...], tp_rank: int, group: Group
) -> Tensor:
    """A user's loss of each token, 0 where the label is IGNORED; shapes as `token_losses` has them.

    The logits of all tensor parallel ranks, whose vocabulary rows are `widths`, are gathered in FP32 (FP64) first: what
    such a function does with them is not known.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    whole = gather_last_dim(logits.to(wide), widths, tp_rank, group)
    ignored = labels == IGNORED
    return function(whole, labels.masked_fill(ignored, 0)).to(wide).masked_fill(ignored, 0.0)


def blockwise_loss(
    hidden: Tensor,
    batch: MicroBatch,
    head: Callable[[Tensor, slice], Tensor],
    losses_of: Callable[[Tensor, Tensor], Tensor],
    *,
    vocab: int,
) -> Tensor:
    """Sum of the micro-batch's weights * token losses, (); `batch.token_losses`, if there, gets the losses themselves.

    `head` maps hidden (1, t, H) of a slice of tokens to logits (1, t, V_local), `losses_of` maps logits (t, V_local)
    and labels (t,) to losses (t,). At most LOGITS_AT_ONCE logits of `vocab` words each are in memory at a time
    [Note: logit blocks].
    """
    labels, weights = batch.labels, batch.weights
    assert labels is not None, "the last stage was given no labels"
    assert weights is not None, "the last stage was given no weights"

    def block_loss(part: Tensor, tokens: slice) -> Tensor:
        losses = losses_of(head(part, tokens).squeeze(0), labels[tokens])
        if batch.token_losses is not None:
            batch.token_losses[tokens] = losses.detach()
        return (losses * weights[tokens]).sum()

    return reduce(torch.add, _of_blocks(block_loss, hidden, vocab))


def _of_blocks(of_block: Callable[[Tensor, slice], Tensor], hidden: Tensor, vocab: int) -> list[Tensor]:
    """What is made of hidden states (1, T, H) in blocks, each with its tokens; of several blocks the backward makes
    each again [Note: logit blocks]."""
    blocks = list(_blocks(hidden.shape[1], vocab, LOGITS_AT_ONCE))
    if len(blocks) == 1:
        return [of_block(hidden, blocks[0])]
    return [checkpoint(of_block, hidden[:, one], one, use_reentrant=False) for one in blocks]


class HeadLoss:
    """Of one stage: computes the losses of micro-batches, and knows whether one of them holds its dW."""

    def __init__(
        self, vocab_start: int, widest: int, group: Group, sum_of: Callable[[Tensor], Tensor | None] = lambda _: None
    ):
        """`vocab_start`: the word of the first row of this rank's weight; `widest`: the most rows that a rank has;
        `sum_of` a weight: a wider tensor that its gradient is added to, None: autograd is to have the gradient."""
        self._vocab_start, self._widest, self._group, self.sum_of = vocab_start, widest, group, sum_of
        self._holds: weakref.ref[_Gradients] | None = None

    def __call__(self, hidden: Tensor, weight: Tensor, batch: MicroBatch) -> Tensor:
        """Sum of the micro-batch's weights * token losses, (); `batch.token_losses`, if there, gets the losses.

        hidden (1, T, H) is equal on all tensor parallel ranks, weight (V_local, H) has this rank's rows.
        """
        labels, weights = batch.labels, batch.weights
        assert labels is not None, "the last stage was given no labels"
        assert weights is not None, "the last stage was given no weights"
        targets = _Targets.of(labels, weights, self._vocab_start, len(weight), self._group)
        rows = copy_to_ranks(hidden.squeeze(0), self._group)
        chunk = batch.pack.chunk
        loss, losses = _HeadLoss.apply(rows, weight, targets, self, chunk is not None and not chunk.is_last)
        if batch.token_losses is not None:
            batch.token_losses.copy_(losses)
        return loss  # type: ignore[no-any-return]

    def logits(self, rows: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of rows, the same on all tensor parallel ranks, and their logits (n, V_local)."""
        for block in _blocks(len(rows), self._widest, HEAD_LOGITS_AT_ONCE):
            yield block, rows[block] @ weight.t()

    def gradients(self, rows: Tensor, weight: Tensor, needed: tuple[bool, bool], followed: bool) -> _Gradients | None:
        """What a forward adds its gradients up in; None if another one's backward comes before its own, or may."""
        if not any(needed) or followed or (self._holds is not None and self._holds() is not None):
            return None
        made = _Gradients.of(rows, weight, needed)
        self._holds = weakref.ref(made)
        return made


class _Targets(NamedTuple):
    """What each of T tokens is to predict; tensors of shape (T,)."""

    local: Tensor  # the label's row of this rank's weight, 0 where it has none here
    here: Tensor  # whether it has one
    counted: Tensor  # whether there is a label at all
    weights: Tensor
    group: Group

    @classmethod
    def of(cls, labels: Tensor, weights: Tensor, vocab_start: int, width: int, group: Group) -> _Targets:
        local = labels - vocab_start
        here = (local >= 0) & (local < width)
        return cls(local.masked_fill(~here, 0), here, labels != IGNORED, weights, group)

    def part(self, rows: slice) -> _Targets:
        local, here, counted, weights, group = self
        return _Targets(local[rows], here[rows], counted[rows], weights[rows], group)


class _Statistics(NamedTuple):
    """Of T tokens, over the whole vocabulary; (T,) in FP32, or FP64."""

    peak: Tensor  # the largest logit
    total: Tensor  # sum of exp(logit - peak)
    target: Tensor  # the label's logit - peak

    def part(self, rows: slice) -> _Statistics:
        return _Statistics(*(tensor[rows] for tensor in self))

    def fill(self, logits: Tensor, targets: _Targets) -> None:
        """Find them for logits (T, V_local): two reductions over the ranks, of three numbers a token in all."""
        kernels = kernels_for(logits) if logits.is_cuda else None
        own = None if kernels is None else kernels.statistics(logits, targets.local)
        self.peak.copy_(logits.amax(dim=-1) if own is None else own.peak)
        if targets.group is not None:
            dist.all_reduce(self.peak, op=dist.ReduceOp.MAX, group=targets.group)
        if own is not None:
            torch.sub(own.target, self.peak, out=self.target)
            torch.mul(own.total, (own.peak - self.peak).exp_(), out=self.total)
        else:
            for rows in _blocks(len(logits), logits.shape[1], LOGITS_AT_ONCE):
                shifted = self._shifted(logits, rows)
                self.target[rows] = shifted.gather(-1, targets.local[rows, None]).squeeze(-1)
                self.total[rows] = shifted.exp_().sum(dim=-1)
        self.target.masked_fill_(~targets.here, 0.0)
        if targets.group is not None:
            both = torch.stack((self.total, self.target))
            dist.all_reduce(both, group=targets.group)
            self.total.copy_(both[0]), self.target.copy_(both[1])

    def to_gradient(self, logits: Tensor, targets: _Targets) -> None:
        """Write over the logits the gradient of the weighted losses by them."""
        factor = (targets.weights * targets.counted).to(self.total.dtype)
        if logits.is_cuda and (kernels := kernels_for(logits)) is not None:
            kernels.to_gradient(logits, targets.local, self.peak, factor / self.total, factor * targets.here)
            return
        for rows in _blocks(len(logits), logits.shape[1], LOGITS_AT_ONCE):
            wide = self._shifted(logits, rows).exp_()
            wide.mul_((factor[rows] / self.total[rows]).unsqueeze(-1))
            at_label = -(factor[rows] * targets.here[rows]).unsqueeze(-1)
            logits[rows] = wide.scatter_add_(-1, targets.local[rows, None], at_label)

    def _shifted(self, logits: Tensor, rows: slice) -> Tensor:
        """Some rows of the logits less their peaks, in the wider type."""
        # Not by one operation: between types, on a CPU, it would take another copy.
        return logits[rows].to(self.peak.dtype, copy=True).sub_(self.peak[rows, None])


@dataclass
class _Gradients:
    """Of a micro-batch's loss: by its rows, in their type, and by the weight, in FP32 or wider; None: not needed."""

    dx: Tensor | None  # (T, H)
    dw: Tensor | None  # (V_local, H)

    @classmethod
    def of(cls, rows: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> _Gradients:
        wide = torch.promote_types(weight.dtype, torch.float32)
        made = torch.empty_like if len(rows) else torch.zeros_like  # the first block writes what others add to
        return cls(torch.empty_like(rows) if needed[0] else None, made(weight, dtype=wide) if needed[1] else None)

    def add(self, block: slice, dlogits: Tensor, rows: Tensor, weight: Tensor) -> None:
        """What the rows of a block, with this gradient of their logits, add."""
        if self.dx is not None:
            torch.mm(dlogits, weight, out=self.dx[block])
        if self.dw is not None:
            add_product(self.dw, dlogits.t(), rows[block], beta=int(block.start > 0), exact=True)

    def scaled(self, factor: Tensor, dtype: torch.dtype, total: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Both times the gradient of the loss, a number; the weight's in its own type, or added to `total`. They are
        not used again."""
        dx = None if self.dx is None else self.dx.mul_(factor)
        if self.dw is not None and total is not None:
            total.addcmul_(self.dw, factor.to(self.dw.dtype))
        return dx, None if self.dw is None or total is not None else _narrow(self.dw.mul_(factor), dtype)


class _HeadLoss(torch.autograd.Function):
    """See [Note: head and loss as one]. Returns the loss, and the losses (T,) of the tokens."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: _Targets, head: HeadLoss, followed: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(rows.dtype, torch.float32)
        found = _Statistics(*torch.empty((3, len(rows)), dtype=wide, device=rows.device))
        ctx.sums = head.gradients(rows, weight, ctx.needs_input_grad[:2], followed)
        for block, logits in head.logits(rows, weight):
            part = found.part(block)
            part.fill(logits, targets.part(block))
            if ctx.sums is not None:
                part.to_gradient(logits, targets.part(block))
                ctx.sums.add(block, logits, rows, weight)
        ctx.head, ctx.targets, ctx.found, ctx.dtype = head, targets, found, weight.dtype
        ctx.total = head.sum_of(weight) if ctx.needs_input_grad[1] else None
        # What is kept for each token is saved, for whoever counts that; dW is as large whatever the micro-batch.
        ctx.save_for_backward(*((rows, weight) if ctx.sums is None else (ctx.sums.dx,)))
        losses = (found.total.log() - found.target).masked_fill(~targets.counted, 0.0)
        ctx.mark_non_differentiable(losses)
        return (losses * targets.weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            rows, weight = ctx.saved_tensors
            sums = _Gradients.of(rows, weight, ctx.needs_input_grad[:2])
            for block, logits in ctx.head.logits(rows, weight):
                ctx.found.part(block).to_gradient(logits, ctx.targets.part(block))
                sums.add(block, logits, rows, weight)
        return *sums.scaled(grad, ctx.dtype, ctx.total), None, None, None


def _blocks(num_rows: int, width: int, at_once: int) -> Iterator[slice]:
    """Slices of the rows of a (num_rows, width) tensor, of `at_once` elements at most."""
    size = max(1, at_once // max(1, width))
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _narrow(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor in a type of half the size or its own, in its own memory."""
    if wide.dtype == dtype:
        return wide
    # Row i of the narrow one ends at i/2 of the wide one, so later rows may be written where earlier ones were read.
    flat = wide.view(-1)
    narrow = flat.view(dtype)[: len(flat)]
    narrow[:1] = flat[:1].clone()
    start = 1
    while start < len(flat):
        stop = min(2 * start, len(flat))
        narrow[start:stop] = flat[start:stop]
        start = stop
    return narrow.view(wide.shape)


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
    of_logits: int = 0  # the vocabulary, where the scores are the logits of all its words, whose loss takes these

    @property
    def num_scores(self) -> int:
        if self.valued or self.of_logits:
            return self.of_logits or 1
        found = self.layout.find(self.candidates)
        return CANDIDATES + (0 if found is None else found[0].columns)

    def losses(self, scores: Tensor, numbers: Tensor) -> Tensor:
        """The loss of each token, (T,), from its scores (T, num_scores) and its fields (T, columns)."""
        assert self.loss is not None, "there is something to train on"
        fields = self.fields(numbers, scores.dtype)
        if self.of_logits:
            return self.loss(scores, fields)
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

    parts, ignored = _of_blocks(of_block, hidden, vocab), labels == IGNORED
    scores = parts[0] if len(parts) == 1 else torch.cat(parts)
    scores = scores.masked_fill(ignored.unsqueeze(-1), 0.0)
    if scored.found is not None:
        scored.found.copy_(scores.detach())
    if objective.loss is None:
        return scores.new_zeros(())
    losses = objective.losses(scores, numbers).masked_fill(ignored, 0.0)
    return (losses * weights).sum()


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
        self._blocks.append(self._function(logits[None], labels[None]).reshape(len(labels), -1))

    def found(self) -> Tensor:
        """(tokens, k)."""
        return torch.cat(self._blocks)


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
