"""One training step and one evaluation: by the plain model one sequence at a time, and by all ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hydra.pipe.in_process import InProcessRanks
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.placement import Pipeline, Strategy
from ds_hydra.pipe.rows import MicroBatch
from ds_hydra.pipe.runtime import StageRuntime
from ds_hydra.pipe.schedules.actions import Slot
from ds_hydra.pipe.schedules.registry import evaluation_slots, training_slots
from ds_hydra.pipe.stage import ModelSource, StageModule, StagePlace, from_flat, shard_view, to_flat
from ds_hydra.plan.phase import MicroBatchPlan
from ds_hydra.step.batching import build_batches
from ds_hydra.watchdog import Activity
from ds_hydra.zero_hetero.clock import Stopwatch

CPU = torch.device("cpu")
_SCHEDULE = "1f1b"  # which stages and groups are right does not depend on the order of micro-batches


@dataclass(frozen=True)
class Data:
    """Token sequences and which of them are packed together: micro-batches of positions in `sequences`."""

    sequences: tuple[npt.NDArray[np.int64], ...]
    packs: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.sequences]

    def load(self, sequence: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens and the next tokens, IGNORED after the last."""
        tokens = self.sequences[sequence]
        return tokens, np.append(tokens[1:], IGNORED)


@dataclass(frozen=True)
class Outcome:
    """Summed token losses of a training step and of an evaluation, and the step's gradients by parameter name."""

    loss: float
    eval_loss: float
    gradients: dict[str, Tensor]


def uneven_data(vocabulary: int, lengths: Sequence[Sequence[int]]) -> Data:
    """Random tokens in packs of these lengths; the lowest ids, which are often padding, are left out."""
    draw = np.random.default_rng(0)
    flat = [length for pack in lengths for length in pack]
    sequences = tuple(draw.integers(4, vocabulary, length) for length in flat)
    starts = np.cumsum([0, *(len(pack) for pack in lengths)])
    return Data(sequences, tuple(tuple(range(a, b)) for a, b in pairwise(starts)))


def train_plain(model: Any, data: Data, order: Sequence[int] | None = None) -> tuple[float, dict[str, Tensor]]:
    """The model's own forward and backward on each sequence alone: the loss and the gradients by name."""
    model.zero_grad(set_to_none=True)
    model.train()
    loss = sum(_plain_loss(model, data, i, backward=True) for i in order or range(len(data.sequences)))
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return loss, gradients


def evaluate_plain(model: Any, data: Data) -> float:
    """The loss of each sequence alone, in evaluation."""
    model.eval()
    with torch.no_grad():
        return sum(_plain_loss(model, data, i, backward=False) for i in range(len(data.sequences)))


def _plain_loss(model: Any, data: Data, sequence: int, *, backward: bool) -> float:
    tokens, targets = (torch.from_numpy(values) for values in data.load(sequence))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    if backward:
        loss.backward()
    return float(loss.detach())


def run_pipeline(source: ModelSource, pipeline: Pipeline, data: Data, *, eval_source: ModelSource) -> Outcome:
    """All ranks 0.. of a pipeline in this process, in FP64: its own stages, schedule, messages and layouts.

    `eval_source` is evaluated: `source`, or the same model with the dropout that training is compared without.
    """
    loss, gradients = _train(source, pipeline, data)
    return Outcome(loss, _evaluate(eval_source, pipeline, data), gradients)


def _train(source: ModelSource, pipeline: Pipeline, data: Data) -> tuple[float, dict[str, Tensor]]:
    ranks, values = InProcessRanks(len(pipeline.ranks)), flat_values(source)
    totals = {bucket.name: torch.zeros(bucket.numel, dtype=torch.float64) for bucket in source.plan.buckets}

    def program(rank: int) -> float:
        worker = RankOfPipeline(source, pipeline, rank, ranks)
        grads = worker.install(values)
        loss = worker.train(data)
        worker.contribute(grads, totals)
        return loss

    loss = sum(ranks.run(program))
    gradients: dict[str, Tensor] = {}
    for bucket in source.plan.buckets:
        start = 0
        for param in bucket.params:
            flat = totals[bucket.name][start : start + param.numel]
            if bucket.trainable:
                gradients[param.name] = from_flat(flat, param.shape, param.rule.dim, param.rule.parts)
            start += param.numel
    return loss, gradients


def _evaluate(source: ModelSource, pipeline: Pipeline, data: Data) -> float:
    ranks, values = InProcessRanks(len(pipeline.ranks)), flat_values(source)

    def program(rank: int) -> float:
        worker = RankOfPipeline(source, pipeline, rank, ranks)
        worker.install(values)
        return worker.evaluate(data)

    return sum(ranks.run(program))


def flat_values(source: ModelSource) -> dict[str, Tensor]:
    """Each bucket's parameters in flat order."""
    return {
        bucket.name: torch.cat(
            [to_flat(source.values[p.name], p.rule.dim, p.rule.parts).double() for p in bucket.params]
        )
        for bucket in source.plan.buckets
    }


class RankOfPipeline:
    """One rank: its stage, the parameters that it holds, and what it contributes to the gradients."""

    def __init__(self, source: ModelSource, pipeline: Pipeline, rank: int, ranks: InProcessRanks):
        self.rank, self._plan, self._strategy = rank, source.plan, Strategy((pipeline,))
        self.index, self._num_stages = pipeline.stage_index(rank), len(pipeline.stages)
        stage = pipeline.stages[self.index]
        tp_rank, sp_rank = stage.coordinates(rank)
        self.place = StagePlace(
            stage,
            self.index == 0,
            self.index == self._num_stages - 1,
            tp_rank,
            sp_rank,
            ranks.group(stage.tp_ranks(rank), rank) if stage.tp > 1 else None,
            ranks.group(stage.sp_ranks(rank), rank) if stage.sp > 1 else None,
        )
        self.module: StageModule = source.build(self.place, CPU, torch.float64)
        widths = (source.width(stage.first_layer), 0 if self.place.is_last else source.width(stage.last_layer))
        self._runtime = StageRuntime(
            self.module, pipeline, rank, ranks.transport(rank), widths, CPU, torch.float64,
            activity=Activity(), watch=Stopwatch(None),
        )  # fmt: skip

    def install(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give the stage its shards of the buckets' values; its empty gradient buffers, by bucket."""
        grads: dict[str, Tensor] = {}
        for bucket in self._plan.buckets:
            layout = self._plan.pull_layout(bucket, self._strategy)
            buffer = torch.empty(layout.sizes[self.rank], dtype=torch.float64)
            for start, stop, offset in layout.pieces[self.rank]:
                buffer[offset : offset + stop - start] = values[bucket.name][start:stop]
            grads[bucket.name] = torch.zeros_like(buffer)
            for slot in self._plan.slots(bucket, self.place.stage, self.place.tp_rank):
                parameter = self.module.install(slot, buffer)
                if bucket.trainable:
                    parameter.grad = shard_view(slot, grads[bucket.name])
        return grads

    def contribute(self, grads: dict[str, Tensor], totals: dict[str, Tensor]) -> None:
        """Add this rank's share of the gradients to each bucket's, as a push would."""
        for bucket in self._plan.buckets:
            for start, stop, offset in self._plan.push_layout(bucket, self._strategy).pieces[self.rank]:
                totals[bucket.name][start:stop] += grads[bucket.name][offset : offset + stop - start]

    def train(self, data: Data) -> float:
        """A step's forwards and backwards; this rank's share of the loss."""
        batches = self._batches(data)
        return self._run(training_slots(_SCHEDULE, len(batches), self._num_stages, self.index), batches)

    def evaluate(self, data: Data) -> float:
        """The forwards of an evaluation; this rank's share of the loss."""
        return self.forward(data, training=False)

    def forward(self, data: Data, *, training: bool) -> float:
        """The forwards alone, in training's or in evaluation's mode."""
        if training:
            self.module.module.train()
        else:
            self.module.module.eval()  # as the engine does
        batches = self._batches(data)
        return self._run(evaluation_slots(len(batches), self._num_stages, self.index), batches)

    def tokens(self, data: Data) -> list[int]:
        """Tokens that this rank holds of each pack."""
        return [batch.pack.tokens[self.place.sp_rank] for batch in self._batches(data)]

    def _batches(self, data: Data) -> Sequence[MicroBatch]:
        packs = [MicroBatchPlan.of_whole(pack, data.lengths) for pack in data.packs]
        return build_batches(packs, range(len(data.sequences)), self.place, data.load, "token", CPU).batches

    def _run(self, slots: Sequence[Slot], batches: Sequence[MicroBatch]) -> float:
        loss = self._runtime.run(slots, batches)
        return float(loss) if self.place.tp_rank == 0 else 0.0  # equal on all tensor parallel ranks
