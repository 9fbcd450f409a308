"""A dataset in; the loss of each of its sequences, without an update, out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_hydra.data.sequences import SequenceData
from ds_hydra.engine.crew import Crew


@dataclass(frozen=True)
class Evaluation:
    """Losses of a dataset, equal on all ranks."""

    sums: npt.NDArray[np.float64]  # (sequences,) of its targets' losses
    num_targets: npt.NDArray[np.int64]  # (sequences,) 0 for a sequence that was left out, or has none

    def to_json(self) -> list[Any]:
        """As JSON holds it."""
        return [self.sums.tolist(), self.num_targets.tolist()]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> Evaluation:
        """What `to_json` made."""
        sums, counts = told
        return cls(np.array(sums, dtype=np.float64), np.array(counts, dtype=np.int64))

    @property
    def loss(self) -> float:
        """Mean over all targets; NaN where there are none."""
        return float(self.sums.sum() / count) if (count := int(self.num_targets.sum())) else math.nan

    @property
    def perplexity(self) -> float:
        """exp of the loss, where that is a cross entropy."""
        return float(np.exp(self.loss))

    @property
    def sequence_losses(self) -> npt.NDArray[np.float64]:
        """(sequences,) mean over each one's targets; NaN where it has none."""
        return np.divide(self.sums, self.num_targets, out=np.full(len(self.sums), np.nan), where=self.num_targets > 0)


def evaluate(crew: Crew, data: SequenceData, tokens_at_once: int) -> Evaluation:
    """Evaluate all sequences, about `tokens_at_once` tokens at a time. Every rank must call it, with the same data."""
    sums, counts = np.zeros(len(data)), np.zeros(len(data), dtype=np.int64)
    for ids in _parts(data, tokens_at_once):
        plan = crew.plans.plan_once(ids, tuple(int(data.lengths[i]) for i in ids))
        found = crew.stepper.forwards.sequence_losses(plan, data, crew.plans.table)
        sums[list(ids)], counts[list(ids)] = found
    return Evaluation(sums, counts)


def _parts(data: SequenceData, tokens: int) -> Iterator[tuple[int, ...]]:
    """Ids of consecutive sequences that together reach that many tokens."""
    part: list[int] = []
    held = 0
    for index, length in enumerate(data.lengths.tolist()):
        if length:
            part.append(index)
            held += length
        if held >= tokens:
            yield tuple(part)
            part, held = [], 0
    if part:
        yield tuple(part)
