"""Training data as sequences: a dataset in; lengths, and single sequences by their ids, out.

Planning with it is pure: `TokenBudgetSampler` knows lengths only. Contents are read through
`SequenceData.load_sequence`, by the ranks that need them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ds_hydra.data.columns import Int64Array, Item, check_other_columns, is_packed, read_item
from ds_hydra.data.tokens import Limits, TokenSequence
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataCounts:
    """How many sequences of a dataset are used, truncated or left out. None is left out without being counted here."""

    num_sequences: int
    num_used: int
    num_truncated: int  # longer than the context length and cut
    num_skipped: int  # longer than the context length and left out
    num_without_target: int  # of zero or one token: there is nothing to predict
    num_tokens: int  # tokens of the used sequences
    num_tokens_cut: int  # tokens that truncating and skipping took away
    num_items: int = 0  # of the dataset, where they hold several sequences each; else 0

    def __str__(self) -> str:
        parts = [f"{self.num_used:,} of {self.num_sequences:,} sequences used, {self.num_tokens:,} tokens"]
        if self.num_items:
            parts.append(f"packed in {self.num_items:,} items of the data")
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} truncated")
        if self.num_skipped:
            parts.append(f"{self.num_skipped:,} skipped as too long")
        if self.num_tokens_cut:
            parts.append(f"{self.num_tokens_cut:,} tokens left out")
        if self.num_without_target:
            parts.append(f"{self.num_without_target:,} of fewer than two tokens left out")
        return ", ".join(parts)


class SequenceData:
    """A map-style dataset as token sequences whose lengths are known, the too long ones truncated or skipped.

    An item is a 1-D tensor, array or list of token ids, or a mapping with `input_ids` and, if need be, labels, masks
    and the boundaries of the sequences packed in it [Note: columns]. A packed item is cut into its sequences, which
    are numbered through. Lengths come from `dataset.lengths` or a column `length`, or else from reading every item
    once; packed items are always read.

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
    ) -> None:
        self._dataset = dataset
        self._columns: set[tuple[str, ...]] = set()  # sets of columns that were looked at
        self._limits = Limits(context_length, too_long, vocab_size, max_positions)
        _check_dataset(dataset)
        # The first sequence of each item and, at last, their number; None where an item is a sequence.
        self._first: Int64Array | None = None
        self._full_lengths = self._read_lengths()
        self.lengths, self.counts = _usable_lengths(self._full_lengths, context_length, too_long)
        if self._first is not None:
            self.counts = replace(self.counts, num_items=len(dataset))
        longest = int(self.lengths.argmax())
        self._limits.check_positions(int(self.lengths[longest]), self._place(longest))

    def __len__(self) -> int:
        return len(self.lengths)

    def load_sequence(self, sequence_id: int) -> TokenSequence:
        """One sequence of lengths[sequence_id] tokens.

        Labels are shifted within the sequence: labels[t] is the token to predict at position t, which is
        input_ids[t + 1] unless the dataset says otherwise; the last one is IGNORE_INDEX.
        """
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

    def _read_lengths(self) -> Int64Array:
        """Tokens of every sequence, (sequences,); finds out which item holds which."""
        num_items = len(self._dataset)
        given = _given_lengths(self._dataset)
        if given is not None and not is_packed(self._dataset[0]):
            # A fault that all items have in common is found now, and not hours later.
            _check_length(0, self._read(0).lengths, int(given[0]))
            return given
        items = [self._read(index).lengths for index in range(num_items)]
        for index, (lengths, length) in enumerate(zip(items, [] if given is None else given.tolist(), strict=False)):
            _check_length(index, lengths, length)
        if any(len(lengths) != 1 for lengths in items):
            self._first = np.cumsum([0, *map(len, items)])
        return np.array([length for lengths in items for length in lengths], dtype=np.int64)

    def _read(self, index: int) -> Item:
        item = self._dataset[index]
        read = read_item(item, index)
        self._look_at_columns(item, index)
        return read

    def _look_at_columns(self, item: Any, index: int) -> None:
        """Refuse an item's columns that look like masks and log the others that are not read, once for each set."""
        # Looking at values costs time for every item, and items of one dataset have the same columns.
        names = tuple(map(str, item)) if isinstance(item, Mapping) else ()
        if names in self._columns:
            return
        unread = check_other_columns(item, index)
        self._columns.add(names)
        if unread:
            logger.warning("items of the data also hold %s, which training does not read", ", ".join(unread))

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


def _given_lengths(dataset: Any) -> Int64Array | None:
    """`dataset.lengths` or a column `length`: tokens of every item, (len(dataset),); None where there is neither."""
    given = getattr(dataset, "lengths", None)
    if given is None and "length" in (getattr(dataset, "column_names", None) or ()):
        given = dataset["length"]
    if given is None:
        return None
    lengths = np.asarray(given)
    if lengths.shape != (len(dataset),) or lengths.dtype.kind not in "iu" or lengths.min() < 0:
        raise ConfigError(
            f"dataset.lengths must hold {len(dataset)} token counts, one for each item, but has shape "
            f"{lengths.shape}, type {lengths.dtype}"
            + (f", minimum {lengths.min()}" if lengths.size and lengths.dtype.kind == "i" else "")
            + ": correct it, or leave it out, and every item is read once"
        )
    return lengths.astype(np.int64)


def _usable_lengths(full: Int64Array, context_length: int | None, too_long: str) -> tuple[Int64Array, DataCounts]:
    limit = int(full.max()) if context_length is None else context_length
    over = full > limit
    if too_long == "error" and over.any():
        worst = np.argsort(full, kind="stable")[::-1][:3]
        shown = ", ".join(f"sequence {i} has {full[i]} tokens" for i in worst if over[i])
        raise ConfigError(
            f"{int(over.sum())} of {len(full)} sequences are longer than context_length {limit} ({shown}): "
            'set hydra.too_long to "truncate" or "skip", or raise hydra.context_length'
        )
    lengths = np.minimum(full, limit)
    if too_long == "skip":
        lengths[over] = 0
    without_target = full < 2
    lengths[without_target] = 0
    used = lengths > 0
    counts = DataCounts(
        num_sequences=len(full),
        num_used=int(used.sum()),
        num_truncated=int((over & used).sum()),
        num_skipped=int((over & ~used).sum()),
        num_without_target=int(without_target.sum()),
        num_tokens=int(lengths.sum()),
        num_tokens_cut=int((full - lengths)[over].sum()),
    )
    if not counts.num_used:
        raise ConfigError(
            f"no sequence is left to train on: {counts}. Give sequences of at least two tokens, or raise "
            "hydra.context_length"
        )
    return lengths, counts
