"""Training data as sequences: lengths and a seed in, each step's sequence ids and single sequences out.

Planning with it is pure: `TokenBudgetSampler` knows lengths only. Contents are read through
`SequenceData.load_sequence`, by the ranks that need them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100
Int64Array = npt.NDArray[np.int64]
_READ_KEYS = frozenset({"input_ids", "labels", "attention_mask"})


@dataclass(frozen=True, slots=True)
class DataCounts:
    """What became of the sequences of a dataset. Nothing is left out without being counted here."""

    num_sequences: int
    num_used: int
    num_truncated: int  # longer than the context length and cut
    num_skipped: int  # longer than the context length and left out
    num_without_target: int  # of zero or one token: there is nothing to predict
    num_tokens: int  # tokens of the used sequences
    num_tokens_cut: int  # tokens that truncating and skipping took away

    def __str__(self) -> str:
        parts = [f"{self.num_used:,} of {self.num_sequences:,} sequences used, {self.num_tokens:,} tokens"]
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
    """A map-style dataset of token sequences, with their lengths known and the too long ones dealt with.

    An item is a 1-D tensor, array or list of token ids, or a mapping with `input_ids` and, if need be,
    `labels` (same length, not shifted, IGNORE_INDEX where nothing is to be learnt) and `attention_mask`
    (positions with 0 are padding and taken out). Lengths come from `dataset.lengths`, or else from reading
    every item once.

    `lengths[i]` is the number of tokens that sequence i is trained with, 0 for those that are left out.
    Raises ConfigError for empty data, for items that are no token sequences, and, when `too_long` is "error",
    for sequences longer than `context_length`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        context_length: int | None = None,
        too_long: str = "error",
        vocab_size: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._full_lengths = _dataset_lengths(dataset)
        self.lengths, self.counts = _usable_lengths(self._full_lengths, context_length, too_long)

    def __len__(self) -> int:
        return len(self.lengths)

    def load_sequence(self, sequence_id: int) -> tuple[Int64Array, Int64Array]:
        """(input_ids, labels) of one sequence, both (lengths[sequence_id],).

        Labels are shifted within the sequence: labels[t] is the token to predict at position t, which is
        input_ids[t + 1] unless the dataset says otherwise; the last one is IGNORE_INDEX.
        """
        input_ids, labels = _read_item(self._dataset[sequence_id], sequence_id)
        expected = int(self._full_lengths[sequence_id])
        if len(input_ids) != expected:
            raise ConfigError(
                f"sequence {sequence_id} has {len(input_ids)} tokens but the dataset gave its length as "
                f"{expected}: correct dataset.lengths"
            )
        length = int(self.lengths[sequence_id])
        input_ids, labels = input_ids[:length], labels[:length]
        self._check_tokens(input_ids, sequence_id)
        shifted = np.full(length, IGNORE_INDEX, dtype=np.int64)
        shifted[:-1] = labels[1:]
        self._check_tokens(shifted[shifted != IGNORE_INDEX], sequence_id, "label")
        return input_ids, shifted

    def _check_tokens(self, tokens: Int64Array, sequence_id: int, what: str = "token") -> None:
        limit = self._vocab_size
        if not len(tokens):
            return
        worst = int(tokens.max()) if limit is not None and tokens.max() >= limit else int(tokens.min())
        if worst < 0 or (limit is not None and worst >= limit):
            size = f" (vocabulary of {limit}: ids 0..{limit - 1})" if limit is not None else ""
            raise ConfigError(
                f"sequence {sequence_id} holds the {what} id {worst}, which the model does not have{size}: "
                "use the tokenizer that belongs to the model, or a model with a larger vocabulary"
            )


def _dataset_lengths(dataset: Any) -> Int64Array:
    """Tokens of every sequence, (len(dataset),)."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"training data of type {type(dataset).__name__} has no length or cannot be indexed: give a "
            "map-style dataset, with __len__ and __getitem__"
        )
    if len(dataset) == 0:
        raise ConfigError("the training data are empty: no sequence to train on")
    given = getattr(dataset, "lengths", None)
    if given is None:
        return np.array([len(_read_item(dataset[i], i)[0]) for i in range(len(dataset))], dtype=np.int64)
    lengths = np.asarray(given)
    if lengths.shape != (len(dataset),) or lengths.dtype.kind not in "iu" or lengths.min() < 0:
        raise ConfigError(
            f"dataset.lengths must hold {len(dataset)} token counts, one per sequence, but has shape "
            f"{lengths.shape}, type {lengths.dtype}"
            + (f", minimum {lengths.min()}" if lengths.size and lengths.dtype.kind == "i" else "")
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
        raise ConfigError(f"no sequence is left to train on: {counts}")
    return lengths, counts


def _read_item(item: Any, sequence_id: int) -> tuple[Int64Array, Int64Array]:
    """(input_ids, unshifted labels) of a dataset item, padding taken out."""
    if not isinstance(item, Mapping):
        tokens = _tokens(item, sequence_id, "item")
        return tokens, tokens
    if "input_ids" not in item:
        raise ConfigError(f"sequence {sequence_id} has the keys {sorted(map(str, item))} but no 'input_ids'")
    _warn_unread(tuple(sorted(str(key) for key in item if key not in _READ_KEYS)))
    input_ids = _tokens(item["input_ids"], sequence_id, "input_ids")
    labels = _tokens(item["labels"], sequence_id, "labels") if item.get("labels") is not None else input_ids
    mask = item.get("attention_mask")
    keep = _tokens(mask, sequence_id, "attention_mask") if mask is not None else np.ones_like(input_ids)
    if not len(input_ids) == len(labels) == len(keep):
        raise ConfigError(
            f"sequence {sequence_id}: {len(input_ids)} input_ids, {len(labels)} labels and {len(keep)} mask "
            "entries; there must be as many of each"
        )
    return (input_ids, labels) if keep.all() else (input_ids[keep != 0], labels[keep != 0])


def _tokens(values: Any, sequence_id: int, what: str) -> Int64Array:
    try:
        tokens = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"sequence {sequence_id}: {what} is no list of token ids: {error}") from None
    if tokens.size == 0:
        return np.zeros(0, dtype=np.int64)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iub":
        raise ConfigError(
            f"sequence {sequence_id}: {what} must be one-dimensional whole numbers, but has shape "
            f"{tokens.shape}, type {tokens.dtype}"
        )
    return tokens.astype(np.int64)


@lru_cache(maxsize=64)
def _warn_unread(keys: tuple[str, ...]) -> None:
    """Say once what of an item is not used."""
    if keys:
        logger.warning("dataset items also hold %s, which training does not read", ", ".join(keys))
