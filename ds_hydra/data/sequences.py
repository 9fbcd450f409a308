"""Training data as sequences: of a dataset, or as a script hands them in for one step.

Planning with it is pure: `TokenBudgetSampler` knows lengths only. Contents are read through
`SequenceData.load_sequence`, by the ranks that need them.

[Note: what can be handed in]
A share of a step is a list of items, and an item is a sequence: token ids as a list, array or tensor, or a mapping with
`input_ids` [Note: columns]. So are the batches that collators make: a mapping or tensor with a row for each sequence,
padded or ragged; the padding that `attention_mask` names is taken out. Lists may hold batches, as a script collects
them. All of these are the sequences (5 6 7) and (8 9):

    [[5, 6, 7], [8, 9]]
    [{"input_ids": tensor([5, 6, 7])}, {"input_ids": tensor([8, 9])}]
    {"input_ids": [[5, 6, 7], [8, 9, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]}
    [{"input_ids": [[5, 6, 7]]}, [8, 9]]
    {"input_ids": [[5, 6, 7, 8, 9]], "cu_seq_lens_q": [0, 3, 5], "max_length_q": 3}
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.data.columns import (
    IGNORE_INDEX,
    LONGEST,
    STARTS,
    TOKENS_ONLY,
    Int64Array,
    Item,
    ItemCheck,
    ModelInput,
    as_array,
    is_packed,
    read_item,
)
from ds_hydra.data.lengths import ItemLengths, given_lengths, kept, read_part
from ds_hydra.data.tokens import FieldItem, LeftOut, Limits, Reads, TokenSequence, layout_of, read_fields, with_fields
from ds_hydra.pipe.rows import FieldLayout
from ds_hydra.zero_hetero.errors import ConfigError


class Tally:
    """Counts what is left out from step to step."""

    def __init__(self) -> None:
        self.total = LeftOut()
        self._told = 0

    def add(self, left_out: LeftOut) -> bool:
        """Whether it is time for a line in the log: the first time, and when the sequences have doubled since."""
        self.total += left_out
        count = self.total.truncated + self.total.skipped + self.total.short
        if count < max(1, 2 * self._told):
            return False
        self._told = count
        return True


class Share(NamedTuple):
    """The sequences that one rank hands in for a step."""

    sequences: tuple[TokenSequence, ...]
    left_out: LeftOut
    num_items: int
    notes: tuple[str, ...] = ()  # lines for the log
    layout: FieldLayout | None = None  # of the sequences' fields, if they were read and there are sequences

    @property
    def num_targets(self) -> int:
        return sum(int((sequence.labels != IGNORE_INDEX).sum()) for sequence in self.sequences)

    @property
    def num_learnt(self) -> int:
        """Sequences that have a target."""
        return sum(bool((sequence.labels != IGNORE_INDEX).any()) for sequence in self.sequences)


def read_share(
    handed: Any,
    limits: Limits,
    *,
    first: int = 0,
    check: ItemCheck | None = None,
    fields: Reads | None = None,
) -> Share:
    """Read all items of a share [Note: what can be handed in]; they are counted from `first` on in errors.

    `check` has looked at the items of the shares before this one. With `fields` the other columns of the items are
    fields [Note: fields].

    Raises ConfigError, naming the item, for what is no sequence, does not fit the model, or is too long where
    `limits.too_long` is "error".
    """
    found: list[tuple[Item, int, str]] = []  # each sequence: its item, its part of it, its name
    check, notes = check or ItemCheck(limits.inputs), list[str]()
    items, told = list(items_of(handed)), list[FieldItem]()
    for index, item in enumerate(items, start=first):
        read = read_item(item, index)
        notes += check.check(item, read, index, reads_fields=fields is not None)
        if fields is not None:
            told += [read_fields(item, index, fields)] * len(read.lengths)
        for part in range(len(read.lengths)):
            among = f" (sequence {part} in it)" if len(read.lengths) > 1 else ""
            found.append((read, part, f"item {index} of the data{among}"))
    full = np.array([item.lengths[part] for item, part, _ in found], dtype=np.int64)
    kept, left_out = limits.usable(full, lambda number: found[number][2])
    used = [number for number, length in enumerate(kept.tolist()) if length]
    sequences = tuple(
        limits.sequence(*item.sequence(part), int(kept[number]), place, weight=item.weight)
        for number in used
        for item, part, place in (found[number],)
    )
    if fields is None:
        return Share(sequences, left_out, len(items), tuple(notes))
    layout = layout_of(told)
    sequences = tuple(
        with_fields(sequence, told[number].values, layout, found[number][0].tokens(found[number][1]))
        for sequence, number in zip(sequences, used, strict=True)
    )
    return Share(sequences, left_out, len(items), tuple(notes), layout if told else None)


def items_of(handed: Any) -> Iterator[Any]:
    """The items of a share, one by one; rows of batches are items."""
    if isinstance(handed, Mapping):
        if "input_ids" in handed and _has_rows(handed["input_ids"]):
            yield from _rows(handed)
        else:
            yield handed
    elif _has_rows(handed):
        for part in handed:
            yield from items_of(part)
    elif not _is_empty_list(handed):
        yield handed


def _has_rows(values: Any) -> bool:
    """Whether this holds several items, and not the numbers of one."""
    dimensions = getattr(values, "ndim", None)
    if dimensions is not None:
        return int(dimensions) > 1
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        return False
    one = next(iter(values), None)
    return one is not None and not isinstance(one, Number) and np.ndim(one) + isinstance(one, Mapping) > 0


def _is_empty_list(handed: Any) -> bool:
    """A rank without a sequence hands in [] or (); a sequence of no tokens stands in a list of its own."""
    return isinstance(handed, (list, tuple)) and not handed


def _rows(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a collated batch as mappings."""
    columns = {str(name): values for name, values in batch.items() if values is not None}
    count = len(columns["input_ids"])
    # What collators write for kernels of variable length counts the tokens of all rows, one row behind the other.
    for name in [name for name in STARTS if name in columns and not _has_rows(columns[name])]:
        columns[name] = _starts_of_rows(columns, name)
    for name in [name for name in LONGEST if name in columns and np.ndim(columns[name]) == 0]:
        columns[name] = [columns[name]] * count
    for name, values in columns.items():
        scalar = not hasattr(values, "__len__") or getattr(values, "ndim", None) == 0
        rows = None if scalar else len(values)
        if rows != count:
            raise ConfigError(
                f"a batch of the data has {count} rows of input_ids but {'no' if rows is None else rows} rows of "
                f"{name!r}: give one of each for every sequence, or take the column out"
            )
    for row in range(count):
        yield {name: values[row] for name, values in columns.items()}


def _starts_of_rows(columns: Mapping[str, Any], name: str) -> list[Int64Array]:
    """For each row where the sequences in it begin, and its end, of a column that counts through all rows."""
    starts, rows, mask = as_array(columns[name]), columns["input_ids"], columns.get("attention_mask")
    sizes = [len(row) for row in rows]
    if mask is not None and len(starts) and starts[-1] != sum(sizes):  # padding is not counted
        sizes = [int((as_array(row) != 0).sum()) for row in mask]
    ends = np.concatenate(([0], np.cumsum(sizes)))
    if not np.isin(ends, starts).all():
        raise ConfigError(
            f"a batch of the data has rows of {', '.join(map(str, sizes[:8]))} tokens, but {name} "
            f"{', '.join(map(str, starts[:9].tolist()))}: a sequence must end where a row ends; correct or remove the "
            "column"
        )
    return [starts[(starts >= begin) & (starts <= end)] - begin for begin, end in itertools.pairwise(ends)]


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
