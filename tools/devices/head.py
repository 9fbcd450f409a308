"""A head's gradient in many blocks of tokens: head and loss as one function beside autograd through each block.

A layer of 16 bit, random hidden states and labels; the truth is the same in FP64. Time and memory are of this machine's
CPU, and taken in turn in one process. `plain_head` pairs the one function with a plain head: all logits at once, and
torch's cross entropy of them in FP32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from unittest import mock

import torch
from torch import Tensor

from ds_hydra.pipe import loss
from ds_hydra.pipe.loss import HeadLoss, blockwise_loss, token_losses
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.profiling.stage_memory import Allocations
from tools import aims
from tools.devices.table import Table

TOKENS, WIDTH, VOCABULARY = 512, 64, 131072
BLOCKS, QUICK = (1, 4, 16, 128), (1, 16)
_TURNS = 3
MIB = 2**20

LossOf = Callable[[Tensor, Tensor, MicroBatch], Tensor]


@dataclass(frozen=True)
class _Found:
    gradient: Tensor  # of the weight
    seconds: float  # of CPU
    peak: int  # bytes


def heads(quick: bool) -> Table:
    """Errors, CPU time and peak memory of both ways; quick: a sixteenth of the vocabulary, in few blocks."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = VOCABULARY // 16 if quick else VOCABULARY
    hidden = torch.randn((1, TOKENS, WIDTH), generator=generator).bfloat16()
    weight = (0.1 * torch.randn((vocabulary, WIDTH), generator=generator)).bfloat16()
    labels = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    truth = _run(_by_autograd, hidden.double(), weight.double(), labels).gradient
    rows: list[Sequence[object]] = []
    missed: list[str] = []
    alone: float | None = None
    for blocks in QUICK if quick else BLOCKS:
        size = -(-TOKENS // blocks) * vocabulary
        with mock.patch.object(loss, "HEAD_LOGITS_AT_ONCE", size), mock.patch.object(loss, "LOGITS_AT_ONCE", size):
            before, found = (_run(way, hidden, weight, labels) for way in (_by_autograd, _as_one))
        errors = [float((one.gradient.double() - truth).norm() / truth.norm()) for one in (before, found)]
        alone = alone or errors[1]
        rows.append([blocks, *(f"{error:.2e}" for error in errors), round(errors[1] / alone, 3), aims.HEAD,
                     round(before.seconds, 2), round(found.seconds, 2), round(before.peak / MIB),
                     round(found.peak / MIB)])  # fmt: skip
        if errors[1] > aims.HEAD * alone:
            missed.append(
                f"{blocks} blocks: the weight's error is {errors[1] / alone:.2f} of one block's (aim {aims.HEAD})"
            )
    headers = ["blocks", "error, autograd", "as one", "to one block", "aim", "CPU s, autograd", "as one",
               "peak MiB, autograd", "as one "]  # fmt: skip
    title = f"head and loss: {TOKENS} tokens of {WIDTH} features, {vocabulary} words, 16 bit"
    return Table(title, headers, rows, missed)


def plain_head(quick: bool) -> Table:
    """CPU time and peak memory beside a plain head's, by turns; quick: a sixteenth of the vocabulary."""
    vocabulary = VOCABULARY // 16 if quick else VOCABULARY
    table = Table(
        f"head and loss as one function beside a plain head: {TOKENS} tokens of {WIDTH} features, {vocabulary} words",
        ["CPU s, plain", "as one", "over plain", "aim", "peak MiB, plain", "as one ", "over plain ", "aim ", "apart"],
    )
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((1, TOKENS, WIDTH), generator=generator).bfloat16()
    weight = (0.1 * torch.randn((vocabulary, WIDTH), generator=generator)).bfloat16()
    labels = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    turns = [[_run(way, hidden, weight, labels) for way in (_plain, _as_one)] for _ in range(_TURNS)]
    seconds, ratio = zip(*((one.seconds, one.seconds / plain.seconds) for plain, one in turns), strict=True)
    plain, one = turns[-1]
    apart = float((one.gradient.double() - plain.gradient.double()).norm() / plain.gradient.double().norm())
    time_ratio, peak_ratio = median(ratio), one.peak / plain.peak
    table.rows.append(
        [round(median(seconds) / time_ratio, 2), round(median(seconds), 2), round(time_ratio, 2), aims.HEAD_TIME,
         round(plain.peak / MIB), round(one.peak / MIB), round(peak_ratio, 2), aims.HEAD_PEAK, f"{apart:.1e}"]
    )  # fmt: skip
    if time_ratio > aims.HEAD_TIME:
        table.missed.append(f"head: {time_ratio:.2f} of a plain head's time (aim {aims.HEAD_TIME})")
    if peak_ratio > aims.HEAD_PEAK:
        table.missed.append(f"head: {peak_ratio:.2f} of a plain head's peak memory (aim {aims.HEAD_PEAK})")
    return table


def _run(loss_of: LossOf, hidden: Tensor, weight: Tensor, labels: Tensor) -> _Found:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    batch = MicroBatch(
        Pack((TOKENS,)), torch.zeros(1, TOKENS), None, labels, torch.full((TOKENS,), 1.0 / TOKENS, dtype=wide)
    )
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with Allocations(hidden.device) as allocated:
        began = time.process_time()
        loss_of(hidden, weight, batch).backward()  # type: ignore[no-untyped-call]
        seconds = time.process_time() - began
    assert weight.grad is not None, "it is trained"
    return _Found(weight.grad, seconds, allocated.peak)


def _as_one(hidden: Tensor, weight: Tensor, batch: MicroBatch) -> Tensor:
    return HeadLoss(0, len(weight), None)(hidden, weight, batch)


def _plain(hidden: Tensor, weight: Tensor, batch: MicroBatch) -> Tensor:
    assert batch.labels is not None, "it is the last stage's"
    return torch.nn.functional.cross_entropy((hidden[0] @ weight.t()).float(), batch.labels)


def _by_autograd(hidden: Tensor, weight: Tensor, batch: MicroBatch) -> Tensor:
    def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
        return token_losses(logits, targets, 0, None)

    return blockwise_loss(hidden, batch, lambda part, _: part @ weight.t(), losses_of, vocab=len(weight))
