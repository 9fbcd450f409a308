"""Short texts between ranks, for what they must agree on while they save and load."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_hydra.zero_hetero.errors import CheckpointError

_MAX_BYTES = 256 * 2**20
_INLINE_BYTES = 4088  # of a text that travel with its length; the rest takes a second message


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
        data = text.encode()
        heads = self._gather(len(data).to_bytes(8, "little") + data[:_INLINE_BYTES], 8 + _INLINE_BYTES)
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        longest = max(sizes)
        if longest * self.num_ranks > _MAX_BYTES:
            raise CheckpointError(
                f"{self.num_ranks} ranks have texts of up to {longest} bytes for each other: too long"
            )
        rest = longest - _INLINE_BYTES
        tails = self._gather(data[_INLINE_BYTES:], rest) if rest > 0 else [b""] * self.num_ranks
        return [(head[8:] + tail)[:size].decode() for head, tail, size in zip(heads, tails, sizes, strict=True)]

    def _gather(self, data: bytes, size: int) -> list[bytes]:
        """Everybody's bytes, filled up to `size`."""
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        rows = torch.empty(self.num_ranks, size, dtype=torch.uint8)
        dist.all_gather(list(rows.unbind()), mine, group=self._group)
        return [bytes(row.numpy()) for row in rows]

    def tell(self, text: str) -> str:
        """Rank 0's text. Every rank must call it."""
        return self.gather(text if self.rank == 0 else "")[0]

    def settle(self, error: BaseException | None, what: str, told: str = "") -> list[str]:
        """What each rank has `told`, or CheckpointError on all ranks: what went wrong on which of them."""
        texts = self.gather(f"+{told}" if error is None else f"-{error}")
        failed = [(rank, text[1:]) for rank, text in enumerate(texts) if text[0] == "-"]
        if failed:
            ranks = ", ".join(str(rank) for rank, _ in failed[:8])
            raise CheckpointError(f"{what} failed on rank {ranks}: {failed[0][1]}") from error
        return [text[1:] for text in texts]
