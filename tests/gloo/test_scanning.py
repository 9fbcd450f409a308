"""Lengths of data that do not tell them: read by all ranks together, kept for the next start, refused on all alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_hydra.data.lengths import ItemLengths, keep, kept, read_part
from ds_hydra.data.sequences import SequenceData
from ds_hydra.engine.data import read_twice, scan_together
from ds_hydra.ranks.together import first_channel
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError


class Counted:
    """Items whose reads are counted; with a fingerprint, as `datasets` has one."""

    def __init__(self, items: list[Any], fingerprint: str | None = None):
        self.items, self.reads, self._fingerprint = items, 0, fingerprint

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.items[index]


ITEMS = [
    [1] * 5,
    {"input_ids": [2] * 9, "seq_lengths": [4, 5]},
    [3] * 7,
    {"input_ids": [4] * 3},
    {"input_ids": [5] * 6, "seq_lengths": [1, 2, 3]},
    [6] * 8,
    [7] * 2,
]
LENGTHS, COUNTS = [5, 4, 5, 7, 3, 1, 2, 3, 8, 2], [1, 2, 1, 1, 3, 1, 1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ds_hydra" / "lengths"


def test_parts_are_joined_in_order() -> None:
    for num_parts in (1, 2, 3, 7, 9):
        found = ItemLengths.joined(read_part(ITEMS, part, num_parts) for part in range(num_parts))
        assert (found.lengths.tolist(), found.counts.tolist()) == (LENGTHS, COUNTS)


def together(rank: int, items: list[Any], fingerprint: str | None) -> list[Any]:
    data = Counted(items, fingerprint)
    try:
        with first_channel() as channel:
            found = scan_together(data, channel)
    except ConfigError as error:
        return [str(error)]
    assert found is not None
    lengths = SequenceData(data, scanned=found)._full_lengths
    return [lengths.tolist(), data.reads]


@pytest.mark.parametrize("fingerprint", [None, "a1b2"])
def test_each_rank_reads_its_part_once_and_none_the_second_time(cache: Path, fingerprint: str | None) -> None:
    looks = 1 + len(ITEMS)  # at the first item, and at all to compare them
    found = run_ranks(together, 3, ITEMS, fingerprint)
    assert [lengths for lengths, _ in found] == [LENGTHS] * 3
    assert [reads - looks for _, reads in found] == [2, 2, 3]
    again = run_ranks(together, 2, ITEMS, fingerprint)
    assert [lengths for lengths, _ in again] == [LENGTHS] * 2
    assert [reads - looks for _, reads in again] == ([3, 4] if fingerprint is None else [-7, -7])
    assert cache.exists() == (fingerprint is not None)


def test_a_bad_item_is_an_error_on_all_ranks() -> None:
    first, second = run_ranks(together, 2, [*ITEMS, {"text": "x"}], "a1b2")
    assert "failed on rank 1: item 7 of the data has the columns ['text']" in first[0]
    assert "item 7 of the data has the columns ['text']" in second[0]


def test_what_is_kept_belongs_to_one_fingerprint_and_is_whole(cache: Path) -> None:
    data = Counted(ITEMS, "a1b2")
    assert kept(data) is None
    keep(data, read_part(data))
    again = kept(data)
    assert again is not None
    assert np.array_equal(again.lengths, LENGTHS)
    assert kept(Counted(ITEMS, "other")) is None
    assert kept(Counted(ITEMS[:-1], "a1b2")) is None
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:40])
    assert kept(data) is None
    for lengths, counts in (
        ([-1, *LENGTHS[1:]], COUNTS), ([2**61, *LENGTHS[1:]], COUNTS), ([LENGTHS], COUNTS), (np.ones(10), COUNTS),
        (LENGTHS, [2, 0, 1, 1, 3, 2**63 - 1, -(2**63)]), (["x"] * 10, COUNTS),
    ):  # fmt: skip
        np.savez(file, lengths=lengths, counts=counts)
        assert kept(data) is None
    keep(ITEMS, read_part(ITEMS))
    assert len(list(cache.iterdir())) == 1, "a list has no fingerprint"


class Drawn(Counted):
    """Items of which one token is drawn anew each time, or by the rank."""

    def __init__(self, rank: int | None):
        super().__init__([])
        self.items, self._rank = [[9] * 5] * 20, rank

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return [*super().__getitem__(index)[1:], self.reads if self._rank is None else self._rank]


@pytest.mark.parametrize(("by_rank", "words"), [(False, "when it is read again"), (True, "on rank 1 than on rank 0")])
def test_items_that_are_not_the_same_each_time_and_everywhere_are_refused(by_rank: bool, words: str) -> None:
    def told(rank: int) -> str:
        with first_channel() as channel:
            read_twice(SequenceData([[1, 2], [3, 4, 5]]), channel)
            with pytest.raises(ConfigError) as error:
                read_twice(SequenceData(Drawn(rank if by_rank else None)), channel)
        return str(error.value)

    assert all(words in text for text in run_ranks(told, 2))
