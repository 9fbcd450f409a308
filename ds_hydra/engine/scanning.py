"""Training data in; the lengths of all their items, read by all ranks together, out [Note: lengths of items]; and an
error for items that are not the same on all ranks and each time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ds_hydra.data.columns import is_packed, read_item
from ds_hydra.data.lengths import ItemLengths, given_lengths, keep, kept, read_part
from ds_hydra.data.sequences import SequenceData
from ds_hydra.data.stream import is_stream
from ds_hydra.data.tokens import Limits, TokenSequence
from ds_hydra.ranks.channel import Channel
from ds_hydra.ranks.together import together
from ds_hydra.zero_hetero.errors import ConfigError

_COMPARED = 8  # items that each rank reads to see that it has the same data


def scan_together(dataset: Any, channel: Channel, limits: Callable[[], Limits] = Limits) -> ItemLengths | None:
    """Lengths of map-style data that do not tell theirs; None for other data. Every rank must call it.

    An item that cannot be trained on within the job's limits, which `limits` tells, is an error on all ranks.
    """
    with together(channel, "reading the data"):
        silent = _is_silent(dataset)
        found = kept(dataset) if silent else None
    if not silent:
        return None
    texts = channel.texts("" if found is None else hashlib.sha256(np.concatenate(found).tobytes()).hexdigest())
    if found is not None and len(set(texts)) == 1:
        return found
    with together(channel, "reading the lengths of the data"):
        part = read_part(dataset, channel.rank, channel.num_ranks, limits())
    found = ItemLengths.joined(_gathered(part, channel))
    with together(channel, "comparing the data of all ranks"):
        _compare(dataset, found)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once a node
        keep(dataset, found)
    return found


def read_twice(data: SequenceData, channel: Channel) -> None:
    """ConfigError on all ranks for sequences that are others when they are read again, or on another rank. Every rank
    must call it; some, spread over all, are read.

    Each rank that runs a part of a sequence reads it for itself: of one that is drawn anew, ranks would train on parts
    that do not belong together.
    """
    with together(channel, "reading some of the data twice"):
        used = np.flatnonzero(data.lengths)
        some = used[np.linspace(0, len(used) - 1, num=min(len(used), _COMPARED)).astype(int)].tolist()
        mine, again = ([_digest(data.load_sequence(each)) for each in some] for _ in range(2))
        for sequence, first, second in zip(some, mine, again, strict=True):
            if first != second:
                raise ConfigError(
                    f"sequence {sequence} of the data has other tokens or labels when it is read again, but each rank "
                    "that runs a part of it reads it for itself: draw what is random from the item's index "
                    "(torch.Generator().manual_seed(index)), or before training"
                )
    texts = channel.texts(" ".join(mine))
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        at = next(i for i, (a, b) in enumerate(zip(texts[0].split(), texts[other].split(), strict=False)) if a != b)
        raise ConfigError(
            f"sequence {some[at]} of the data has other tokens or labels on rank {other} than on rank 0: give every "
            "rank the same data, in the same order; which rank trains on what is decided by the plans"
        )


def _digest(sequence: TokenSequence) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in sequence[:2])).hexdigest()[:16]


def _is_silent(dataset: Any) -> bool:
    """Whether this is map-style data whose lengths are found by reading."""
    if is_stream(dataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return False
    if isinstance(dataset, dict) or not len(dataset):
        return False
    return given_lengths(dataset) is None or is_packed(dataset[0])


def _compare(dataset: Any, found: ItemLengths) -> None:
    """ConfigError if this rank's data are not those that the ranks have read: some items, spread over all, must be as
    long."""
    ends = np.cumsum(found.counts)
    for index in np.linspace(0, len(dataset) - 1, num=min(len(dataset), _COMPARED)).astype(int).tolist():
        mine = read_item(dataset[index], index).lengths
        read = tuple(found.lengths[ends[index] - found.counts[index] : ends[index]].tolist())
        if mine != read:
            raise ConfigError(
                f"item {index} of the data holds sequences of {mine} tokens on one rank, but of {read} on the one that "
                "read it for all: give every rank the same data, in the same order"
            )


def _gathered(part: ItemLengths, channel: Channel) -> list[ItemLengths]:
    """The parts of all ranks, in their order."""
    sizes = channel.rows(torch.tensor([len(part.lengths), len(part.counts)]))
    row = torch.zeros(int(sizes.sum(dim=1).max()), dtype=torch.int64)
    mine = torch.from_numpy(np.concatenate(part))
    row[: len(mine)] = mine
    return [
        ItemLengths(*(piece.numpy() for piece in of_rank[: size.sum()].split(size.tolist())))
        for of_rank, size in zip(channel.rows(row), sizes, strict=True)
    ]
