"""Training data in; the lengths of all their items, read by all ranks together, out [Note: lengths of items]."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ds_hydra.data.columns import is_packed, read_item
from ds_hydra.data.item_lengths import ItemLengths, given_lengths, keep, kept, read_part
from ds_hydra.data.stream import is_stream
from ds_hydra.data.tokens import Limits
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
