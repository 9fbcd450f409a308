"""What a Trainer divides the loss of its batches by, and what its own code hands on: as here, or refused.

[Note: counted targets]
`Trainer` counts the targets of an update's batches on all ranks and gives their number to its loss, which the model
divides by: that is the mean over all targets, as here. A subclass that calls `model(**inputs)` without it gets the mean
over each batch, and a plain Trainer trains on the sum of these over an update; one that changes labels after they were
counted divides by the former number. Of 2 batches with 10 and 30 targets whose losses add up to 40 and 60:

    num_items_in_batch handed on   (40 + 60) / 40            = 2.5
    not handed on                  40 / 10 + 60 / 30         = 6
    half of the labels masked      (20 + 30) / 40            = 1.25, where the mean over the targets left is 2.5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_hydra.host.pending import Collected, PendingLoss
from ds_hydra.zero_hetero.errors import ConfigError


class Counted:
    """What Trainer has counted of the update that begins, on this rank and on all."""

    def __init__(self) -> None:
        self.of_all: Any = None
        self._here = self._seen = 0

    def count(self, batches: Sequence[Any], of_all: Any) -> None:
        """An update begins, of these batches of this rank; `of_all` is what Trainer makes of them."""
        self.of_all, self._here, self._seen = of_all, sum(map(_targets, batches)), 0

    def check(self, loss: Any, given: Any, *, owner: str, norm: str, batches: int, last: bool) -> None:
        """ConfigError where a plain Trainer would divide a batch's loss by another number than the engine does.

        `given` is what its training_step got, `owner` the class of the trainer, `norm` hydra.loss_norm, `batches` how
        many of all ranks make an update; `last`: whether this one is the update's last on this rank.
        """
        entries = [term.entry for term in loss.terms] if isinstance(loss, PendingLoss) else []
        if not all(isinstance(entry.batch, Mapping) and "labels" in entry.batch for entry in entries):
            return
        if given is None:
            if norm != "batch" and batches > 1:
                raise ConfigError(
                    f"{owner} has no num_items_in_batch (model_accepts_loss_kwargs is False), so a plain Trainer "
                    'trains on the mean over the means of batches: set "loss_norm": "batch" in the block "hydra", or '
                    "let the trainer count"
                )
            return
        if norm == "batch":
            return
        if not _same(given, self.of_all):
            raise ConfigError(
                f"num_items_in_batch of {owner} is {float(given):g}, but the targets of the update's batches are "
                f"{'not counted' if self.of_all is None else f'{float(self.of_all):g}'}, by which a planned step "
                "divides: leave get_batch_samples as it is, and scale the loss in compute_loss"
            )
        self._check_entries(entries, given, owner, alone=batches == 1)
        if last and self._seen != self._here:
            raise ConfigError(
                f"the labels that {owner} gave the model have {int(self._seen)} targets on this rank in an update, but "
                f"Trainer counted {int(self._here)} in its batches, by which a plain one divides the loss: change "
                "labels in the data or in the data_collator"
            )

    def _check_entries(self, entries: Sequence[Collected], given: Any, owner: str, *, alone: bool) -> None:
        for entry in entries:
            if entry.num_items is None and alone:  # the mean over this batch is that over all targets
                self._here = self._seen = 0
                return
            if entry.num_items is None:
                raise ConfigError(
                    f"compute_loss of {owner} calls the model without num_items_in_batch, so a plain Trainer trains on "
                    "the sum of the means of an update's batches in place of the mean over all targets: call "
                    "model(**inputs, num_items_in_batch=num_items_in_batch), or super().compute_loss() with it"
                )
            if not _same(entry.num_items, given):
                raise ConfigError(
                    f"compute_loss of {owner} gives the model num_items_in_batch {float(entry.num_items):g}, where the "
                    f"update has {float(given):g} targets: hand that on, and scale the loss instead"
                )
            self._seen += _targets(entry.batch)


def _same(one: Any, other: Any) -> bool:
    return one is other or (one is not None and other is not None and float(one) == float(other))


def _targets(batch: Any) -> Any:
    """Labels of a batch that are learnt, as Trainer counts them; 0 where it has none."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return 0 if labels is None else (labels[..., 1:] != -100).sum()
