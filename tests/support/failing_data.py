"""Data that fail while they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def failing(raised: BaseException) -> Callable[[int], Iterator[list[list[int]]]]:
    """Shares for `train_batch`; in step 3 the iterator of rank 1 fails."""

    def my_tokenizer(rank: int) -> Iterator[list[list[int]]]:
        for step in range(5):
            if step == 2 and rank == 1:
                raise raised
            yield [[3, 4, 5 + step, 6]] * 3

    return my_tokenizer


class Blinks(list[Any]):
    """A dataset whose storage fails on rank 1."""

    rank = 0
    error: BaseException = OSError(5, "Input/output error", "/data/tokens.bin")

    def __getitem__(self, index: Any) -> Any:
        if self.rank == 1 and index == 5:
            raise self.error
        return super().__getitem__(index)
