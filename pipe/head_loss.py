"""Hidden states, a head's weight and labels in, the weighted cross entropy out, with both gradients made on the way.

[Note: head and loss as one]
Autograd makes logits, keeps them, and goes back through them. In blocks [Note: logit blocks] that takes each product
of the head twice, and the weight's gradient is a sum of as many 16 bit tensors as there are blocks: of 128 of them it
is seven times as far from the truth as one product is. But the gradient of a cross entropy needs nothing that comes
later. So a block's logits become its loss, and at once, in their own memory, the gradient of the logits:

  logits (n, V)  =  x W'                                first product
  loss           =  log(sum(exp(logits))) - logits[label]
  logits        <-  weight * (softmax(logits) - onehot(label))
  dx (n, H)      =  logits W                            second product
  dW (V, H)     +=  logits' x                           third product, added up in FP32, rounded once

A backward multiplies both by the gradient of the loss, a number. Where a schedule runs several forwards before the
first backward, only one of them holds its dW, as large as the head in FP32; the others make their gradients when their
backward comes, with the first product once more. Both ways give the same bits. A slice of a sequence that others follow
never holds one: their backwards come before its own, and would make theirs beside it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.pipe.collectives import Group, copy_to_ranks
from ds_hydra.pipe.fused import kernels_for
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.model_plan import HEAD_LOGITS_AT_ONCE, LOGITS_AT_ONCE
from ds_hydra.pipe.rows import MicroBatch

_WEIGHT_ROWS = 8192  # of dW that are added at once where a product has another type: it is a tensor of its own


class HeadLoss:
    """Of one stage: computes the losses of micro-batches, and knows whether one of them holds its dW."""

    def __init__(self, vocab_start: int, widest: int, group: Group):
        """`vocab_start`: the word of the first row of this rank's weight; `widest`: the most rows that a rank has."""
        self._vocab_start, self._widest, self._group = vocab_start, widest, group
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
        return cls(
            torch.empty_like(rows) if needed[0] else None, torch.zeros_like(weight, dtype=wide) if needed[1] else None
        )

    def add(self, block: slice, dlogits: Tensor, rows: Tensor, weight: Tensor) -> None:
        """What the rows of a block, with this gradient of their logits, add."""
        if self.dx is not None:
            torch.mm(dlogits, weight, out=self.dx[block])
        if self.dw is not None:
            _add_product(self.dw, dlogits.t(), rows[block])

    def scaled(self, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Both times the gradient of the loss, a number; the weight's in its own type. They are not used again."""
        dx, dw = (None if one is None else one.mul_(factor) for one in (self.dx, self.dw))
        return dx, None if dw is None else _narrow(dw, dtype)


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
        return *sums.scaled(grad, ctx.dtype), None, None, None


def _blocks(num_rows: int, width: int, at_once: int) -> Iterator[slice]:
    """Slices of the rows of a (num_rows, width) tensor, of `at_once` elements at most."""
    size = max(1, at_once // max(1, width))
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (a, b) += left (a, n) right (n, b), added up in the type of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    if right.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        return
    right = right.to(total.dtype)
    for start in range(0, len(total), _WEIGHT_ROWS):  # where no product of 16 bit factors is had in FP32
        rows = slice(start, start + _WEIGHT_ROWS)
        total[rows].addmm_(left[rows].to(total.dtype), right)


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
