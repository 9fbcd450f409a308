"""Streams of sequences for tests: with a state of their own, with an epoch, with neither, and read once only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


class Plain:
    """A stream that says nothing of its place."""

    def __init__(self, items: Sequence[Any]):
        self.items, self.reads = items, 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.reads += 1
            yield item


class Stateful(torch.utils.data.IterableDataset):
    """Has the state_dict() of a loader; what it gives depends on the passes that it counts itself."""

    def __init__(self, items: Sequence[Any]):
        self.items, self.reads = items, 0
        self._at, self._passes, self._begin = 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        begin, self._begin = self._begin, 0
        for number in range(begin, len(self.items)):
            self._at = number + 1
            self.reads += 1
            yield self.items[(number * 7 + self._passes) % len(self.items)]
        self._passes, self._at = self._passes + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "passes": torch.tensor(self._passes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = self._begin = state["at"]
        self._passes = int(state["passes"])


class WithEpoch:
    """A stream as `datasets` has it: another order in each epoch, and a state that is of the last pass until the first
    item of the next was taken."""

    def __init__(self, items: Sequence[Any]):
        self.items, self.reads, self.epoch = items, 0, 0
        self._state: dict[str, int] | None = None
        self._from: dict[str, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        begin = self._from["at"] if self._from and self._from["epoch"] == self.epoch else 0
        for number in range(begin, len(self.items)):
            self._state = {"at": number + 1, "epoch": self.epoch}
            self.reads += 1
            yield self.items[(number * 5 + 3 * self.epoch) % len(self.items)]

    def state_dict(self) -> dict[str, int] | None:
        return self._state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._from = state


STREAMS = (Plain, Stateful, WithEpoch)
