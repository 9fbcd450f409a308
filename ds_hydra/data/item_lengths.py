"""A map-style dataset in; how long the sequences of each of its items are, out: given, kept from before, or read.

[Note: lengths of items]
A plan needs all lengths, and a dataset that does not tell them is read once before step 0. The ranks read it together,
each its part of the items. What they find is kept in $XDG_CACHE_HOME/ds_hydra/lengths, under the fingerprint that
`datasets` gives a dataset: it changes with the data and with whatever was done to them. Other datasets have none, so
that nobody could tell whether they are still the same: they are read at each start. Pure: no torch.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from ds_hydra.data.columns import Int64Array, read_item
from ds_hydra.data.item_check import ItemCheck
from ds_hydra.data.tokens import Limits
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.files import open_file
from ds_hydra.zero_hetero.kept_files import keep_file, kept_folder

_LONGEST = 2**40  # tokens, beyond any sequence: their sums must be counts, too
_PATIENCE_S = 3.0  # what takes longer shows how far it is


class ItemLengths(NamedTuple):
    """Lengths of the sequences of consecutive items."""

    lengths: Int64Array  # in tokens, of all sequences, item after item
    counts: Int64Array  # sequences of each item

    @classmethod
    def joined(cls, parts: Iterable[ItemLengths]) -> ItemLengths:
        """Those of the items of all parts, one part after the other."""
        lengths, counts = zip(*parts, strict=True)
        return cls(np.concatenate(lengths), np.concatenate(counts))


def given_lengths(dataset: Any) -> Int64Array | None:
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


def read_part(dataset: Any, part: int = 0, num_parts: int = 1, limits: Limits | None = None) -> ItemLengths:
    """Read the `part`-th of `num_parts` equal parts of the items. The first part shows its progress.

    ConfigError, naming the item, for what is no token sequence, has tokens or columns that do not fit the model, or a
    column that looks like a mask but is unknown.
    """
    lengths: list[int] = []
    counts: list[int] = []
    check = ItemCheck() if limits is None else ItemCheck(limits.inputs)
    items = range(len(dataset) * part // num_parts, len(dataset) * (part + 1) // num_parts)
    for index in tqdm(items, "reading the lengths of the data", disable=part > 0, delay=_PATIENCE_S, unit=" items"):
        item = dataset[index]
        read = read_item(item, index)
        check.check(item, read, index)
        if limits is not None:
            limits.check(read, f"item {index} of the data")
        lengths += read.lengths
        counts.append(len(read.lengths))
    return ItemLengths(np.array(lengths, dtype=np.int64), np.array(counts, dtype=np.int64))


def _file(dataset: Any) -> Path | None:
    fingerprint = getattr(dataset, "_fingerprint", None)
    if not isinstance(fingerprint, str):
        return None
    name = hashlib.sha256(f"{fingerprint} {len(dataset)}".encode()).hexdigest()[:32]
    return kept_folder("lengths") / f"{name}.npz"


def kept(dataset: Any) -> ItemLengths | None:
    """What an earlier start has read; None where nothing is kept, or what is kept cannot be read."""
    file = _file(dataset)
    try:
        if file is None:
            return None
        with open_file(file) as opened, np.load(opened) as arrays:
            found = ItemLengths(arrays["lengths"], arrays["counts"])
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile):
        return None
    plain = all(a.dtype == np.int64 and a.ndim == 1 and ((a >= 0) & (a < _LONGEST)).all() for a in found)
    whole = plain and len(found.counts) == len(dataset) and found.counts.sum() == len(found.lengths)
    return found if whole else None


def keep(dataset: Any, found: ItemLengths) -> None:
    """Keep what was read, for the next start; where nothing can be written nothing is kept."""
    file = _file(dataset)
    if file is not None:
        keep_file(file, lambda partial: np.savez(partial, lengths=found.lengths, counts=found.counts))
