"""Broadcasts a text from rank 0, in messages that cannot be mistaken for others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

# A text travels with its length in one message of this size; only a longer one takes a second message. A plan of a few
# hundred sequences fits.
_INLINE = 1 << 15
LENGTH_BYTES = 8


class Telling:
    """Texts from rank 0 to the ranks 0..num_ranks-1 of the process group `group`, which carries CPU tensors.

    `group` is None for a process alone. What is told under another `tag` does not meet it: a thread may wait for a text
    while training uses the same group.
    """

    # Collectives of one process group are matched by their order alone, messages between two ranks by their tag. So a
    # text goes from rank to rank, along a tree: of 8 ranks, 0 sends to 4, 2 and 1, then 4 to 6 and 5, 2 to 3, 6 to 7.
    # Of 4 ranks on a node, only one gets it from another node.

    def __init__(self, group: dist.ProcessGroup | None, rank: int, num_ranks: int, *, tag: int):
        self.rank, self.num_ranks, self._group, self._tag = rank, num_ranks, group, tag

    def tell(self, text: str | None) -> str:
        """Rank 0's text, on every rank. The argument of the other ranks is ignored."""
        if self.num_ranks == 1:
            assert text is not None, "the only rank is rank 0"
            return text
        data = encoded(text) if self.rank == 0 and text else b""
        told = self._passed_on(framed(data, _INLINE))
        size = int.from_bytes(told[:LENGTH_BYTES], "little")
        inline, beyond = told[LENGTH_BYTES:][:size], size - _INLINE
        if beyond > 0:
            inline += self._passed_on(data[_INLINE:] or bytes(beyond))
        return decoded(inline)

    def _passed_on(self, data: bytes) -> bytes:
        """Rank 0's bytes; those of the others only say how many they are."""
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if self.rank != 0:
            sender = self.rank & (self.rank - 1)
            _wait(dist.irecv(message, group=self._group, group_src=sender, tag=self._tag))
        sent = [self._send(message, receiver) for receiver in told_by(self.rank, self.num_ranks)]
        for work in sent:
            _wait(work)
        return bytes(message.numpy())

    def _send(self, message: Tensor, receiver: int) -> dist.Work | None:
        return dist.isend(message, group=self._group, group_dst=receiver, tag=self._tag)


def told_by(rank: int, num_ranks: int) -> list[int]:
    """The ranks to which a rank passes a text on, in order: rank 12, in bits 1100, to 14 and 13, those to whose number
    it is without the lowest bit.
    """
    steps = (1 << bit for bit in reversed(range(((rank & -rank or num_ranks) - 1).bit_length())))
    return [rank + step for step in steps if rank + step < num_ranks]


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "this rank is in the group"
    work.wait()


def framed(data: bytes, inline: int) -> bytes:
    """The first `inline` bytes, filled up with zeros, behind the length of the whole."""
    return len(data).to_bytes(LENGTH_BYTES, "little") + data[:inline].ljust(inline, b"\0")


def encoded(text: str) -> bytes:
    """As bytes; also names of files that are in no valid encoding, which Python keeps as lone surrogates."""
    return text.encode(errors="surrogatepass")


def decoded(data: bytes) -> str:
    """The text of `encoded`."""
    return data.decode(errors="surrogatepass")
