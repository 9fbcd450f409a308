"""Logits of a rank's own batches, handed out with a gradient: one run forward to find them, one to train by it.

[Note: logits of batches]
A script may make its loss of the logits of its batch (distillation, rewards, a cross entropy of its own). They lie on
the last stages of the pipelines that run the batch's sequences. So the batches of a round run forward, and each rank
gets the logits z of what it has handed in, as a tensor of torch's own graph. What `backward` leaves there, G = dL/dz,
are plain numbers; a second run of the same plan trains on the sum of G z, whose gradient is that of L by the chain
rule. What `out.loss` counts in L is added to G: a loss's gradient by the logits follows from the logits.

Such a step counts each batch as DeepSpeed's loop does: 1 over gradient_accumulation_steps and ranks. Logits of an
evaluation are numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_hydra.data.tokens import TokenSequence
from ds_hydra.engine.data import Dispatched, Mine
from ds_hydra.engine.scoring import every_token, summed_loss
from ds_hydra.host.three_calls import Collected
from ds_hydra.pipe.loss import Objective
from ds_hydra.pipe.rows import Field, FieldLayout
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.engine.engine import HydraEngine

_GRADIENTS = "gradients of the loss by the logits"


class _Own(NamedTuple):
    """A batch of this rank in a run."""

    entry: Collected
    sequences: tuple[TokenSequence, ...]
    logits: Tensor  # (tokens, words)
    kept: Tensor  # (rows, length) which places are tokens


class Run(NamedTuple):
    """What has run forward, and is to be trained on."""

    handed: Dispatched
    own: list[_Own]

    @property
    def is_ready(self) -> bool:
        """Whether `backward` has come to all batches of this rank."""
        return all(one.entry.is_trained for one in self.own)


def forward(host: HydraEngine, mine: Mine, entries: Sequence[Collected], first: int) -> Run:
    """Run the batches of all ranks forward and hand each rank's its logits; `first` sequences of the step ran
    before."""
    crew, steps, step = host.crew, host.steps, host.global_steps
    with crew.activity("reading sequences"):
        mine = mine.checked(lambda _: steps.scoring.check_model(trains=True))
        handed = steps.shares.dispatch(mine, step=step, first=first, run=every_token)
    with crew.together("evaluation"):
        objective = Objective(of_logits=crew.job.source.vocab_size or 0)
        found, _ = steps.scoring.found_by(objective, handed, step + 1)
    own, begin = [], 0
    for entry, (share, _) in zip(entries, mine.batches, strict=True):
        parts = found[begin : (begin := begin + len(share.sequences))]
        numbers = torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, objective.of_logits)
        host.three_calls.hand_out(entry, in_rows(entry.batch, numbers))
        kept = _kept(entry.batch, len(numbers))
        own.append(_Own(entry, share.sequences, numbers.to(host.three_calls.dtype), kept))
    return Run(handed, own)


def in_rows(batch: Any, numbers: Tensor) -> Tensor:
    """Numbers (tokens, words) of a batch's tokens where the tokens stand in it, (rows, length, words); 0 at padding."""
    kept = _kept(batch, len(numbers))
    out = numbers.new_zeros((*kept.shape, numbers.shape[1]))
    out[kept] = numbers
    return out


def losses(host: HydraEngine, run: Run) -> list[float]:
    """The mean loss of each of this rank's batches."""
    return [float(_loss(host, one.logits, one.sequences)) for one in run.own]


def train(host: HydraEngine, run: Run) -> bool:
    """Train on what a script has made of the logits; they are let go of. Whether it has counted padding."""
    crew, steps = host.crew, host.steps
    words = crew.job.source.vocab_size or 0
    sequences: list[TokenSequence] = []
    padding = any(bool(given.cpu()[~one.kept].any()) for one in run.own if (given := one.entry.by_logits) is not None)
    for one in run.own:
        counts = _counts(host, one).double().cpu().numpy()
        begin = 0
        for sequence in every_token(one.sequences):
            part = counts[begin : (begin := begin + len(sequence.labels))]
            sequences.append(sequence._replace(fields=part))
        if one.entry.is_trained:  # and stays so
            one.entry.factor = one.entry.factor or 0.0
        one.entry.logits = one.entry.by_logits = None
    layout = FieldLayout((Field(_GRADIENTS, words, False),))
    delivered = steps.shares.deliver(run.handed.plan, sequences, run.handed.gathered, words)
    whole = host.three_calls.batches_of_update() * host.world_size
    steps.parts.add_objective(run.handed.planned, delivered, Objective(_linear, layout, of_logits=words), float(whole))
    return padding


def _linear(logits: Tensor, fields: dict[str, Tensor]) -> Tensor:
    return (fields[_GRADIENTS] * logits).sum(dim=-1)


def _counts(host: HydraEngine, one: _Own) -> Tensor:
    """What each logit counts, (tokens, words)."""
    entry, found = one.entry, torch.zeros_like(one.logits)
    if entry.by_logits is not None:
        found += entry.by_logits.cpu()[one.kept]
    if entry.factor:
        leaf = one.logits.detach().requires_grad_()
        with torch.enable_grad():
            (by_loss,) = torch.autograd.grad(_loss(host, leaf, one.sequences), leaf)
        found += entry.factor * by_loss
    return found


def _loss(host: HydraEngine, logits: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """The mean loss of a batch's targets, (), by its logits (tokens, words)."""
    summed, count = summed_loss(host.job.source, logits, sequences)
    return summed / count


def _kept(batch: Any, tokens: int) -> Tensor:
    """Which places of a batch (rows, length) are tokens. ConfigError where it is no such batch, or lacks some."""
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise ConfigError("logits are handed out for batches with a tensor input_ids (rows, length): collate them")
    mask = batch.get("attention_mask")
    kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    if int(kept.sum()) != tokens:
        raise ConfigError(
            f"logits are of all tokens of a batch, but {int(kept.sum()) - tokens} of {int(kept.sum())} belong to "
            "sequences that are left out or cut: give such of two tokens or more, within hydra.context_length"
        )
    return kept.cpu()
