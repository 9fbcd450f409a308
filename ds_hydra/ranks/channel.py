"""Texts, rows of numbers and errors between all ranks of a world: small messages that steer a job.

A channel moves nothing of the model and decides nothing. Every rank must make the same calls in the same order. A
`Telling` broadcasts texts from rank 0 alone. A block within `together` fails on all ranks where it fails on one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.ranks.calling import NAME_BYTES, Calling, check_calls
from ds_hydra.ranks.groups import pairs_connect_when_used
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError, PlanError
from ds_hydra.zero_hetero.told import Told, mark_told, message_of, told_of

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


_MAX_BYTES = 256 * 2**20
# A text travels with its length and the name of the call in one message of 4,096 bytes, which the short reports of all
# ranks fit; only a longer one takes a second message.
_INLINE_GATHERED = 4096 - NAME_BYTES - LENGTH_BYTES
_RING = 32  # ranks up to which a ring is as fast as fewer steps with messages of their own
_TAG = 1 << 24  # of those messages, which may share a group with pulls and pushes
_PARCEL_TAG, _TOLD_TAG = _TAG + 1, _TAG + 2
AHEAD_TAG = _TAG + 3  # of what is told ahead of its step, by a thread (`engine.next_step`)


class Channel(Telling):
    """Small messages over the process group `group`, which has the ranks 0..num_ranks-1 and carries CPU tensors.

    `group` is None for a process alone.
    """

    # Messages of one process group are matched by their order alone. If a thread that saves in the background used
    # training's channel, one rank might start "figures, save" and another "save, figures", and each would read the
    # other's message as its own. So whatever talks beside training has a channel over a group of its own.

    def __init__(self, group: dist.ProcessGroup | None, rank: int, num_ranks: int):
        super().__init__(group, rank, num_ranks, tag=_TOLD_TAG)
        self.calling = Calling()  # the script's, where these are messages of its calls

    def close(self) -> None:
        """Destroy the group, which then lets go of its sockets; the channel cannot be used afterwards."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def rows(self, row: Tensor) -> Tensor:
        """Everybody's `row`, a CPU tensor of one shape and type on all ranks: (num_ranks, *row.shape)."""
        table = self._gathered(row)
        self.calling.passed()
        return table

    def first_rows(self, row: Tensor) -> Tensor:
        """As `rows`, of short rows that may be the first message of all ranks in a call [Note: one call on all ranks].

        ConfigError on all ranks where they are in different calls.
        """
        # gloo ends a process that gets more bytes than it expects, so the first messages of all calls have one size.
        data = row.contiguous().view(-1).view(torch.uint8)
        heads, _ = self._heads(bytes(data.numpy()))
        texts = [head[: data.numel()] for head in heads]
        return torch.frombuffer(bytearray(b"".join(texts)), dtype=row.dtype).view(self.num_ranks, *row.shape)

    def _gathered(self, row: Tensor) -> Tensor:
        if self.num_ranks == 1:
            return row.unsqueeze(0)
        if self.num_ranks > _RING:
            return self._doubled(row)
        table = torch.empty(self.num_ranks, *row.shape, dtype=row.dtype)
        dist.all_gather(list(table.unbind()), row, group=self._group)
        return table

    def _doubled(self, row: Tensor) -> Tensor:
        """`rows` in few steps: in each a rank gets as many rows as it has (Bruck and others, IEEE TPDS 8(11), 1997)."""
        # gloo's own all-gather is a ring: among 1024 ranks each message follows 1022 others. Here rank 3 has its own
        # row, gets that of rank 4, then those of ranks 5 and 6 from rank 5, then four from rank 7: 10 steps in all.
        held = torch.empty(self.num_ranks, *row.shape, dtype=row.dtype)  # held[i] is the row of rank + i
        held[0] = row
        count = 1
        while count < self.num_ranks:
            more = min(count, self.num_ranks - count)
            before, after = (self.rank - count) % self.num_ranks, (self.rank + count) % self.num_ranks
            sent = dist.isend(held[:more], group=self._group, group_dst=before, tag=_TAG)
            came = dist.irecv(held[count : count + more], group=self._group, group_src=after, tag=_TAG)
            for work in (came, sent):
                assert work is not None, "this rank is in the group"
                work.wait()
            count += more
        return held.roll(self.rank, 0)

    def exchange(self, parcels: Mapping[int, Tensor], sizes: Mapping[int, int]) -> dict[int, Tensor]:
        """Send each rank its parcel, a 1-D CPU tensor of int64, and return what came, by sender.

        `sizes` are the elements that this rank gets from each sender: both ends know the sizes of all parcels. None
        has a size of 0, and none is for the rank itself.
        """
        # The first message of two ranks may connect them, for which each waits for the other. All ranks come to their
        # pairs in one order, 0-1, 0-2, 1-2, so none waits in a circle as with 0 for 1, 1 for 2 and 2 for 0.
        peers = sorted({*parcels, *sizes}, key=lambda peer: (min(peer, self.rank), max(peer, self.rank)))
        came: dict[int, Tensor] = {}
        works: list[dist.Work | None] = []
        for peer in peers:
            if peer in sizes:
                came[peer] = torch.empty(sizes[peer], dtype=torch.int64)
                works.append(dist.irecv(came[peer], group=self._group, group_src=peer, tag=_PARCEL_TAG))
            if peer in parcels:
                works.append(dist.isend(parcels[peer], group=self._group, group_dst=peer, tag=_PARCEL_TAG))
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()
        return came

    def texts(self, text: str) -> list[str]:
        """Everybody's text, by rank. Raises CheckpointError when all together pass 256 MiB; ConfigError on all ranks
        where they are in different calls [Note: one call on all ranks]."""
        # All rows of a gather have one size, so texts of 10 and of 5,000 bytes first travel as 4,024 bytes and a length
        # each. Then every rank knows the longest, and all agree without a word whether the rest needs a second message.
        data = encoded(text)
        heads, sizes = self._heads(data)
        longest = max(sizes)
        if longest * self.num_ranks > _MAX_BYTES:
            raise CheckpointError(
                f"{self.num_ranks} ranks have texts of up to {longest} bytes for each other: too long"
            )
        rest = longest - _INLINE_GATHERED
        tails = [b""] * self.num_ranks
        if rest > 0:
            tails = self._bytes(data[_INLINE_GATHERED:].ljust(rest, b"\0"))
        whole = zip(heads, tails, sizes, strict=True)
        return [decoded((head + tail)[:size]) for head, tail, size in whole]

    def _heads(self, data: bytes) -> tuple[list[bytes], list[int]]:
        """The first `_INLINE_GATHERED` bytes of everybody's data, filled up, and how many there are; of one call."""
        name = encoded(self.calling.waiting)[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        came = self._bytes(name + framed(data, _INLINE_GATHERED))
        check_calls([decoded(one[:NAME_BYTES].rstrip(b"\0")) for one in came])
        begins = NAME_BYTES + LENGTH_BYTES
        return [one[begins:] for one in came], [int.from_bytes(one[NAME_BYTES:begins], "little") for one in came]

    def _bytes(self, data: bytes) -> list[bytes]:
        table = self.rows(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [bytes(row.numpy()) for row in table]

    def settle(self, error: BaseException | None, what: str, told: str = "") -> list[str]:
        """Each rank's `told`; or, if any rank brings an `error`, a CheckpointError on all ranks.

        It names the ranks and the first one's text; `what` says what was tried.
        """
        # A rank that raises by itself leaves the others waiting in the next collective, until that times out after
        # minutes. One message more, and all of them raise in the same place.
        texts = self.texts(f"+{told}" if error is None else f"-{message_of(error)}")
        failed = [(rank, text[1:]) for rank, text in enumerate(texts) if text[0] == "-"]
        if failed:
            ranks = ", ".join(str(rank) for rank, _ in failed[:8])
            raised = CheckpointError(f"{what} failed on rank {ranks}: {failed[0][1]}")
            raise mark_told(raised, Told(failed[0][0], f"CheckpointError: {raised}", here=True)) from error
        return [text[1:] for text in texts]


def peers_of(rank: int, num_ranks: int) -> frozenset[int]:
    """The ranks with which `rows` and `tell` connect a rank: its neighbours in a ring, or those of each doubling.

    A text is told along a tree whose ranks are powers of two apart, too.
    """
    steps = [1] if num_ranks <= _RING else []
    steps += [1 << step for step in range((num_ranks - 1).bit_length())]
    return frozenset((rank + sign * step) % num_ranks for step in steps for sign in (1, -1)) - {rank}


class Texts(Protocol):
    """Exchanges short texts between all ranks (`ranks.channel.Channel`)."""

    rank: int
    num_ranks: int

    def texts(self, text: str) -> list[str]: ...


_OURS: tuple[type[Exception], ...] = (ConfigError, PlanError, CheckpointError)


@contextmanager
def together(channel: Texts, what: str) -> Iterator[None]:
    """A block that every rank of the channel enters; where it fails on some, all others raise the first one's error.

    Without this they would wait for the failed rank in their next collective, and see no more than a connection that it
    closed. `what` says what was tried. The block must not use groups itself: a rank that fails would leave the others
    waiting in it. Raises as `agree`.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    agree(channel, mine, what)


def agree(channel: Texts, mine: BaseException | None, what: str, told: str = "", *, alike: bool = False) -> list[str]:
    """Every rank's `told`, by rank; or, where any rank brings an error `mine`, an error on all ranks.

    A rank that failed raises its own error, as it is. The others raise ConfigError, PlanError or CheckpointError if
    that is what happened, else RuntimeError. If `alike`, all ranks raise the same text of such a refusal. All errors
    are marked as known to all ranks.
    """
    texts = channel.texts(f"+{told}" if mine is None else f"-{as_text(mine)}")
    failed = [(rank, text[1:]) for rank, text in enumerate(texts) if text[0] == "-"]
    if not failed:
        return [text[1:] for text in texts]
    rank, cause = failed[0]
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    there = error_from(cause, f"{what} failed on rank {rank}{others}")
    kind, message = cause.split("\n", 1)
    where = "" if len(failed) == len(texts) else f" (on rank {rank}{others})"
    known = Told(rank, f"{kind}: {there if alike else message + where}", here=mine is not None)
    if mine is not None and not (alike and isinstance(mine, _OURS)):
        raise mine if told_of(mine) else mark_told(mine, known)
    raise mark_told(there, known) from mine


def as_text(error: BaseException) -> str:
    """An error as one rank tells it to the others."""
    kind = next((ours for ours in _OURS if isinstance(error, ours)), type(error))
    return f"{kind.__name__}\n{message_of(error)}"


def error_from(text: str, what: str) -> Exception:
    """What `as_text` told, as an error of another rank: one of ours by its type, a RuntimeError for any other."""
    kind, cause = text.split("\n", 1)
    known = next((ours for ours in _OURS if ours.__name__ == kind), None)
    return (known or RuntimeError)(f"{what}: {cause if known else f'{kind}: {cause}'}")


@contextmanager
def first_channel() -> Iterator[Channel]:
    """A channel between the processes of torch's default group, before there is a world; every one must enter it.

    On devices it has a group of its own, which ends with it unless there is an error: then the process is about to end.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if dist.get_backend() == "gloo":
        yield Channel(dist.group.WORLD, rank, num_ranks)
        return
    with pairs_connect_when_used():
        channel = Channel(dist.new_group(backend="gloo"), rank, num_ranks)
    yield channel
    channel.close()
