"""Short texts between ranks, for what they must agree on while they save and load."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_hydra.zero_hetero.errors import CheckpointError

_MAX_BYTES = 256 * 2**20


class Meeting:
    """A group of its own over all ranks, for CPU tensors, so that a saving thread cannot meet training's messages.

    `group` None with `num_ranks` 1 is a process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, num_ranks: int):
        self.rank, self.num_ranks, self._group = rank, num_ranks, group

    def gather(self, text: str) -> list[str]:
        """Everybody's text, by rank. Every rank must call it."""
        if self.num_ranks == 1:
            return [text]
        mine = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
        sizes = torch.empty(self.num_ranks, 1, dtype=torch.int64)
        dist.all_gather(list(sizes.unbind()), torch.tensor([len(text.encode())]), group=self._group)
        longest = max(1, int(sizes.max()))
        if longest * self.num_ranks > _MAX_BYTES:
            raise CheckpointError(
                f"{self.num_ranks} ranks have texts of up to {longest} bytes for each other: too long"
            )
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        rows = torch.empty(self.num_ranks, longest, dtype=torch.uint8)
        dist.all_gather(list(rows.unbind()), padded, group=self._group)
        return [bytes(row[: int(size)].numpy()).decode() for row, size in zip(rows, sizes, strict=True)]

    def tell(self, text: str) -> str:
        """Rank 0's text. Every rank must call it."""
        return self.gather(text if self.rank == 0 else "")[0]

    def settle(self, error: BaseException | None, what: str) -> None:
        """Return on all ranks, or raise CheckpointError on all: what went wrong on which rank."""
        texts = self.gather("" if error is None else f"{error}")
        failed = [(rank, text) for rank, text in enumerate(texts) if text]
        if failed:
            ranks = ", ".join(str(rank) for rank, _ in failed[:8])
            raise CheckpointError(f"{what} failed on rank {ranks}: {failed[0][1]}") from error
