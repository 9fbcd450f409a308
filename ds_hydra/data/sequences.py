"""Training data as sequences: a dataset in; lengths, and single sequences by their ids, out.

Planning with it is pure: `TokenBudgetSampler` knows lengths only. Contents are read through
`SequenceData.load_sequence`, by the ranks that need them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ds_hydra.data.columns import Int64Array, Item, is_packed, read_item
from ds_hydra.data.item_check import TOKENS_ONLY, ItemCheck, ModelInput
from ds_hydra.data.item_lengths import ItemLengths, given_lengths, kept, read_part
from ds_hydra.data.tokens import LeftOut, Limits, TokenSequence
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class DataCounts:
    """How many sequences of a dataset are used, truncated or left out. None is left out without being counted here."""

    num_sequences: int
    num_used: int
    num_tokens: int  # tokens of the used sequences
    left_out: LeftOut
    num_items: int = 0  # of the dataset, where they hold several sequences each; else 0

    def __str__(self) -> str:
        parts = [f"{self.num_used:,} of {self.num_sequences:,} sequences used, {self.num_tokens:,} tokens"]
        if self.num_items:
            parts.append(f"packed in {self.num_items:,} items of the data")
        return ", ".join([*parts, *([str(self.left_out)] if any(self.left_out) else [])])


class Unchanged:
    """Whether a script has changed its data since sequences of the coming step were read, one step ahead.

    A curriculum sets `dataset.stage = n` before step n, whose sequences were read while the step before it ran: they
    would be those of the stage before. So one of them, the shortest, is read again when the step begins, and all of
    this rank's where the dataset has another plain attribute by then; what reads otherwise is refused.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._read: dict[int, TokenSequence] | None = None  # of the coming step; None: nothing is read ahead
        self._settings: dict[str, Any] | None = None

    def begin(self) -> None:
        """A step begins to be read."""
        self._read, self._settings = {}, None

    def saw(self, sequence_id: int, sequence: TokenSequence) -> None:
        """This one was read: it is kept until the coming step begins, if there is one."""
        if self._read is not None:
            self._read[sequence_id] = sequence

    def keep(self) -> None:
        """All is read, and the script runs from here on."""
        self._settings = self._plain()

    def check(self, step: int, read: Callable[[int], TokenSequence]) -> None:
        """ConfigError if `read` gives another sequence than was seen; `step`, counted from 0, is about to begin."""
        seen, before, now = self._read, self._settings, self._plain()
        self._read = self._settings = None
        if before is None or not seen:
            return
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        shortest = min(seen, key=lambda one: len(seen[one].input_ids))
        for sequence_id in seen if changed else (shortest,):
            if not _same(seen[sequence_id], read(sequence_id)):
                how = f"its attribute {changed[0]} is {now.get(changed[0])!r} now, and " if changed else ""
                raise ConfigError(
                    f"the training data were changed before step {step + 1}, whose sequences are read while the step "
                    f"before it runs: {how}sequence {sequence_id} reads otherwise than then. Set "
                    '"planner": {"ahead": 0} in the block "hydra", with which each step reads its sequences when it '
                    "begins; or hand them in, by train_batch(sequences)"
                )

    def _plain(self) -> dict[str, Any]:
        return {key: value for key, value in getattr(self._dataset, "__dict__", {}).items() if type(value) in _PLAIN}


class SequenceData:
    """A map-style dataset as token sequences whose lengths are known, the too long ones truncated or skipped.

    An item is a 1-D tensor, array or list of token ids, or a mapping with `input_ids` and, if need be, labels, masks
    and the boundaries of the sequences packed in it [Note: columns]. A packed item is cut into its sequences, which
    are numbered through. Lengths come from `dataset.lengths` or a column `length`, or else from what was `scanned`, or
    from reading every item once; those of packed items are always read [Note: lengths of items].

    `lengths[i]` is the number of tokens that sequence i is trained with; it is 0 if the sequence is left out.
    `max_positions` is the number of positions of the model. Raises ConfigError for empty data, for items that are no
    token sequences, for columns that look like a mask but are unknown, for sequences that are longer than the model has
    positions, and, when `too_long` is "error", for sequences longer than `context_length`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        context_length: int | None = None,
        too_long: str = "error",
        vocab_size: int | None = None,
        max_positions: int | None = None,
        inputs: ModelInput = TOKENS_ONLY,
        scanned: ItemLengths | None = None,
    ) -> None:
        self._dataset = dataset
        self.unchanged = Unchanged(dataset)
        self._check = ItemCheck(inputs)
        self._limits = Limits(context_length, too_long, vocab_size, max_positions, inputs)
        _check_dataset(dataset)
        # The first sequence of each item and, at last, their number; None where an item is a sequence.
        self._first: Int64Array | None = None
        self._full_lengths = self._read_lengths(scanned)
        self.lengths, left_out = self._limits.usable(self._full_lengths, self._place)
        self.counts = DataCounts(
            num_sequences=len(self.lengths),
            num_used=int(np.count_nonzero(self.lengths)),
            num_tokens=int(self.lengths.sum()),
            left_out=left_out,
            num_items=0 if self._first is None else len(dataset),
        )
        if not self.counts.num_used:
            raise ConfigError(
                f"no sequence is left to train on: {self.counts}. Give sequences of at least two tokens, or raise "
                "hydra.context_length"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def use_inputs(self, inputs: ModelInput) -> None:
        """Read items for a model that takes them so from now on. ConfigError where the first one does not fit it."""
        self._check, self._limits = ItemCheck(inputs), replace(self._limits, inputs=inputs)
        self._limits.check(self._read(0), self._place(0))

    def load_sequence(self, sequence_id: int) -> TokenSequence:
        """One sequence of lengths[sequence_id] tokens.

        Labels are shifted within the sequence: labels[t] is the token to predict at position t, which is
        input_ids[t + 1] unless the dataset says otherwise; the last one is IGNORE_INDEX.
        """
        sequence = self._load(sequence_id)
        self.unchanged.saw(sequence_id, sequence)
        return sequence

    def check_unchanged(self, step: int) -> None:
        """ConfigError where what was read ahead for `step`, counted from 0, reads otherwise now."""
        self.unchanged.check(step, self._load)

    def _load(self, sequence_id: int) -> TokenSequence:
        index, part = self._locate(sequence_id)
        item = self._read(index)
        expected = int(self._full_lengths[sequence_id])
        if len(item.lengths) != self._num_parts(index):
            raise ConfigError(
                f"item {index} of the data holds {len(item.lengths)} packed sequences, but {self._num_parts(index)} by "
                "its length or when first read: give the first item the same columns, and keep the data as they are"
            )
        if item.lengths[part] != expected:
            raise ConfigError(
                f"{self._place(sequence_id)} has {item.lengths[part]} tokens but the dataset gave its length as "
                f"{expected}: correct dataset.lengths, or give data that stay the same"
            )
        length, place = int(self.lengths[sequence_id]), self._place(sequence_id)
        return self._limits.sequence(*item.sequence(part), length, place, weight=item.weight)

    def _read_lengths(self, scanned: ItemLengths | None) -> Int64Array:
        """Tokens of every sequence, (sequences,); finds out which item holds which."""
        given = given_lengths(self._dataset)
        if given is not None and not is_packed(self._dataset[0]):
            # A fault that all items have in common is found now, and not hours later.
            _check_length(0, self._read(0).lengths, int(given[0]))
            return given
        found = scanned or kept(self._dataset) or read_part(self._dataset)
        first = np.concatenate(([0], np.cumsum(found.counts)))
        if given is not None:
            for index, length in enumerate(given.tolist()):
                _check_length(index, tuple(found.lengths[first[index] : first[index + 1]].tolist()), length)
        if (found.counts != 1).any():
            self._first = first
        self._read(0)  # names its columns, and finds a fault of all items where the lengths were known
        return found.lengths

    def _read(self, index: int) -> Item:
        item = self._dataset[index]
        read = read_item(item, index)
        for line in self._check.check(item, read, index):
            logger.warning("%s", line)
        return read

    def _num_parts(self, index: int) -> int:
        return 1 if self._first is None else int(self._first[index + 1] - self._first[index])

    def _locate(self, sequence_id: int) -> tuple[int, int]:
        """(item, part of it) of a sequence."""
        if self._first is None:
            return sequence_id, 0
        index = int(np.searchsorted(self._first, sequence_id, side="right")) - 1
        return index, sequence_id - int(self._first[index])

    def _place(self, sequence_id: int) -> str:
        """A sequence's name, for errors."""
        if self._first is None:
            return f"sequence {sequence_id}"
        return f"sequence {sequence_id} (number {self._locate(sequence_id)[1]} in item {self._locate(sequence_id)[0]})"


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"the data are one mapping with {', '.join(map(repr, list(dataset)[:5]))}: give a list of sequences or a "
            "map-style dataset, not a collated batch; of a DatasetDict give one split, such as data['train']"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"training data of type {type(dataset).__name__} has no length or cannot be indexed: give a "
            "map-style dataset, with __len__ and __getitem__"
        )
    if len(dataset) == 0:
        raise ConfigError("the training data are empty: give at least one sequence of two tokens to train on")


def _check_length(index: int, lengths: tuple[int, ...], given: int) -> None:
    if sum(lengths) != given:
        raise ConfigError(
            f"item {index} of the data has {sum(lengths)} tokens but the dataset gave its length as {given}: correct "
            "dataset.lengths, or the column 'length', or take it out"
        )


def _same(one: TokenSequence, other: TokenSequence) -> bool:
    return (
        np.array_equal(one.input_ids, other.input_ids)
        and np.array_equal(one.labels, other.labels)
        and one.weight == other.weight
        and (one.fields is None or other.fields is None or np.array_equal(one.fields, other.fields))
    )
