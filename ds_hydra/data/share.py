"""What a script hands in for one step in; its sequences, ready to be trained on, out. Pure: no torch.

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
from collections.abc import Iterable, Iterator, Mapping
from numbers import Number
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.data.columns import IGNORE_INDEX, LONGEST, STARTS, Int64Array, Item, as_array, read_item
from ds_hydra.data.fields import FieldItem, Reads, layout_of, read_fields, with_fields
from ds_hydra.data.item_check import ItemCheck
from ds_hydra.data.tokens import LeftOut, Limits, TokenSequence
from ds_hydra.pipe.fields import FieldLayout
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
