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


def of_datasets(items: Sequence[Any]) -> Any:
    """A stream of `datasets` in two shards, another order of them in each epoch."""
    import datasets

    rows = datasets.Dataset.from_dict({"input_ids": [torch.as_tensor(item).tolist() for item in items]})
    return rows.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=1)


def of_torchdata(items: Sequence[Any]) -> Any:
    """torchdata's loader of padded batches of three, in another order each pass, read by a worker process."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(2)
    return StatefulDataLoader(
        list(items), batch_size=3, shuffle=True, generator=generator, num_workers=1, collate_fn=padded
    )


def padded(items: Sequence[Any]) -> dict[str, torch.Tensor]:
    """A batch as collators make it."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.as_tensor(item) for item in items], batch_first=True)
    lengths = torch.tensor([len(item) for item in items])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


STREAMS = (Plain, Stateful, WithEpoch)
REAL_STREAMS = (of_datasets, of_torchdata)
