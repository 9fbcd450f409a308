"""Plans the messages that bring a flat tensor from one layout to another. Pure.

Every rank computes the same plan from the same layouts, so nobody asks who sends what. This is the only place where
that is decided. See [Note: mutual slices] in `layout.py`.

[Note: a transfer by example] A tensor of 12 elements, 3 ranks. Layout A are the master shards, 4 elements a rank. In
layout B ranks 0 and 1 hold one half each (one replica, TP 2), and rank 2 holds everything (a replica, TP 1).

    element            0 1 2 3 | 4 5 | 6 7 | 8 9 10 11
    A                  rank 0  |  rank 1   |  rank 2
    B, first replica   rank 0        |  rank 1
    B, second replica  rank 2
    mutual slices      [0, 4)   [4,6) [6,8)  [8, 12)

The pull, A to B; each line is one message, `src` says where a slice begins in the sender's local buffer, `dst` where it
begins in the receiver's:

    0 -> 0  4 elements  src 0  dst 0    rank 0 owns these: a local move, nothing is sent
    0 -> 2  4 elements  src 0  dst 0
    1 -> 0  2 elements  src 0  dst 4
    1 -> 1  2 elements  src 2  dst 0    local
    1 -> 2  4 elements  src 0  dst 4    two mutual slices that touch in both buffers travel as one
    2 -> 1  4 elements  src 0  dst 2
    2 -> 2  4 elements  src 0  dst 8    local

The push, B to A, is the same list with senders and receivers exchanged. Where B holds an element twice, both replicas
send their gradient of it and the owner adds them up: rank 1 gets elements 4 and 5 from ranks 0 and 2.

The choice is that of Hetu v2, section 4.3, with all links alike: the receiver itself, else who has sent least.

Example: rank 0 holds elements 0 to 5, rank 1 holds 0 to 3; ranks 0, 2 and 3 want 0 to 5. The holders
change at element 4, so there are two atoms, [0, 4) with holders 0 and 1, and [4, 6) with holder 0.

    atom [0, 4)   rank 0 has it            local
                  rank 2                   both holders have sent nothing; rank 2 is the second to ask, so the second
                                           holder sends: rank 1, which has then sent 4
                  rank 3                   rank 0 has sent least: rank 0, which has then sent 4
    atom [4, 6)   rank 0 has it; ranks 2 and 3 can only ask rank 0, which ends with 8 sent

The choice is greedy and looks no further than the atom at hand, as in the paper. Every rank makes it in the same order
with whole numbers, so that all ranks come to the same plan.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import Column, Layout, Overlaps, PieceColumns, expand, first_conflict, overlaps, sum_by


class _Request(NamedTuple):
    """Receiver `rank` wants [start, stop), a part of one atom, for row `row` of the wanted pieces."""

    rank: int
    row: int
    start: int
    stop: int


def choose_senders(held: PieceColumns, wanted: PieceColumns, num_ranks: int) -> Overlaps:
    """One held piece for each part of each wanted piece, as (wanted row, held row, start, stop).

    `held` is sorted by start. The tensor is cut into atoms, the intervals on which the set of holders is constant;
    atoms are served in order, and within an atom the receivers in order of rank. What nobody holds is left out; the
    caller notices.
    """
    cuts = np.unique(np.concatenate([held.start, held.stop]))
    holders_of = _holders_by_atom(held, cuts)
    sent = np.zeros(num_ranks, dtype=np.int64)
    rows: list[tuple[int, int, int, int]] = []
    for atom, requests in _requests_by_atom(wanted, cuts).items():
        holder_rows = holders_of.get(atom)
        if holder_rows is None:
            continue
        holders = held.rank[holder_rows]
        position = {rank: index for index, rank in enumerate(holders.tolist())}
        # The receivers' places in the order of asking. A rank may ask twice in one atom (two pieces of its buffer want
        # a part of it each); both count as one place.
        turn = {rank: index for index, rank in enumerate(dict.fromkeys(request.rank for request in requests))}
        for rank, row, start, stop in requests:
            own = position.get(rank)
            if own is None:
                own = _least_busy(sent[holders], turn[rank])
                sent[holders[own]] += stop - start  # local moves are free and do not count
            rows.append((row, int(holder_rows[own]), start, stop))
    return Overlaps(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def _least_busy(sent: Column, turn: int) -> int:
    """The holder, as an index, that has sent least; `turn` decides between equals."""
    ties = np.flatnonzero(sent == sent.min())
    # The first candidate from the receiver's own place on, going round: with holders 0 and 1 and receivers 2 and 3,
    # rank 0 sends to 2 and rank 1 to 3, atom after atom, so that each pair exchanges one message.
    preferred = turn % len(sent)
    return int(ties[np.argmin((ties - preferred) % len(sent))])


def _holders_by_atom(held: PieceColumns, cuts: Column) -> dict[int, Column]:
    """For each atom the rows of `held` that cover it, in order of rank."""
    # Pieces begin and end at cuts, so a piece covers the atoms from its start's cut up to its stop's.
    piece, atom = expand(np.searchsorted(cuts, held.start), np.searchsorted(cuts, held.stop))
    order = np.lexsort((held.rank[piece], atom))
    piece, atom = piece[order], atom[order]
    atoms, first = np.unique(atom, return_index=True)
    return dict(zip(atoms.tolist(), np.split(piece, first[1:]), strict=True))


def _requests_by_atom(wanted: PieceColumns, cuts: Column) -> dict[int, list[_Request]]:
    """For each atom what is wanted of it, in order of the receivers' ranks."""
    row, atom, start, stop = overlaps(wanted.start, wanted.stop, cuts[:-1], cuts[1:])
    order = np.lexsort((start, wanted.rank[row], atom))
    columns = (column[order].tolist() for column in (atom, wanted.rank[row], row, start, stop))
    requests: dict[int, list[_Request]] = defaultdict(list)
    for index, *request in zip(*columns, strict=True):
        requests[index].append(_Request(*request))
    return requests


class Slice(NamedTuple):
    """`length` elements that lie at `src_offset` of the sender's and `dst_offset` of the receiver's buffer."""

    src_offset: int
    dst_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Message:
    """All that rank `src` gives to rank `dst`, in the order of the flat tensor; `src == dst` is a local move."""

    src: int
    dst: int
    slices: tuple[Slice, ...]

    @property
    def numel(self) -> int:
        """Elements in the message."""
        return sum(piece.length for piece in self.slices)


class SliceColumns(NamedTuple):
    """The slices of a plan as int64 columns of shape (num_slices,); within one message in flat order."""

    src: Column
    dst: Column
    src_offset: Column
    dst_offset: Column
    length: Column


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """What every rank sends, receives and moves locally so that data in one layout arrives in another.

    Kept as columns: the messages of one rank are made when asked for, so that a plan between 1024 ranks costs
    what one rank needs of it. Plans compare equal when their messages do.
    """

    num_ranks: int
    slices: SliceColumns

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, one per (src, dst), sorted by it; local moves included."""
        return self._messages(np.arange(len(self.slices.src)))

    def sends(self, rank: int) -> tuple[Message, ...]:
        """What `rank` sends to others, one message per receiver, by receiver."""
        slices = self.slices
        return self._messages(np.flatnonzero((slices.src == rank) & (slices.dst != rank)))

    def recvs(self, rank: int) -> tuple[Message, ...]:
        """What `rank` receives from others, one message per sender, by sender."""
        slices = self.slices
        return self._messages(np.flatnonzero((slices.dst == rank) & (slices.src != rank)))

    def local(self, rank: int) -> tuple[Slice, ...]:
        """What `rank` moves from its own source buffer to its own destination buffer."""
        messages = self._messages(np.flatnonzero((self.slices.src == rank) & (self.slices.dst == rank)))
        return messages[0].slices if messages else ()

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """(sender, receiver) of every message between two ranks."""
        slices = self.slices
        remote = slices.src != slices.dst
        # One number a pair: to find the distinct numbers among many slices is far cheaper than the distinct tuples.
        found = np.unique(slices.src[remote] * self.num_ranks + slices.dst[remote])
        return frozenset(divmod(number, self.num_ranks) for number in found.tolist())

    def transposed(self) -> TransferPlan:
        """The same slices, moved from receiver to sender: a push is the transposed pull."""
        src, dst, src_offset, dst_offset, length = self.slices
        return TransferPlan(self.num_ranks, SliceColumns(dst, src, dst_offset, src_offset, length))

    def sent_numels(self) -> tuple[int, ...]:
        """Elements that each rank sends to others."""
        return self._numels(self.slices.src)

    def received_numels(self) -> tuple[int, ...]:
        """Elements that each rank receives from others."""
        return self._numels(self.slices.dst)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransferPlan):
            return NotImplemented
        return self.num_ranks == other.num_ranks and self.messages == other.messages

    def __hash__(self) -> int:
        return hash((self.num_ranks, self.messages))

    def _numels(self, rank: Column) -> tuple[int, ...]:
        remote = self.slices.src != self.slices.dst
        return tuple(sum_by(rank[remote], self.num_ranks, self.slices.length[remote]).tolist())

    def _messages(self, rows: Column) -> tuple[Message, ...]:
        """The messages that the given slices make up; slices that touch on both sides become one."""
        # Slices were cut where either layout is cut, which is often finer than a message needs: two slices that follow
        # each other in the sender's and in the receiver's buffer can travel as one interval, without a copy.
        slices = self.slices
        order = rows[np.lexsort((slices.dst[rows], slices.src[rows]))]  # stable: keeps the flat order
        messages: list[Message] = []
        pair: tuple[int, int] | None = None
        pieces: list[Slice] = []
        columns = (column[order].tolist() for column in slices)
        for src, dst, src_offset, dst_offset, length in zip(*columns, strict=True):
            if (src, dst) != pair:
                if pair is not None:
                    messages.append(Message(*pair, tuple(pieces)))
                pair, pieces = (src, dst), []
            elif src_offset == pieces[-1].src_offset + pieces[-1].length and dst_offset == (
                pieces[-1].dst_offset + pieces[-1].length
            ):
                pieces[-1] = pieces[-1]._replace(length=pieces[-1].length + length)
                continue
            pieces.append(Slice(src_offset, dst_offset, length))
        if pair is not None:
            messages.append(Message(*pair, tuple(pieces)))
        return tuple(messages)


def plan_transfer(src: Layout, dst: Layout) -> TransferPlan:
    """Deliver every element of every piece of `dst` exactly once, from a rank that holds it in `src`.

    If several ranks hold an element, the receiver takes its own. Else the sender is the holder that has sent least so
    far (Hetu v2, section 4.3); of those the one whose place among the holders is the receiver's place among the
    receivers, so that replicas of equal shape talk in pairs.
    Raises `PlanError` where the layouts do not fit each other or no rank holds what is wanted.
    """
    held, wanted = _checked(src, dst)
    in_tensor_order = np.argsort(held.start, kind="stable")
    held = PieceColumns(*(column[in_tensor_order] for column in held))
    # Master shards have one owner for each element: then there is nothing to choose, and one pass over sorted columns
    # finds every slice. Only a source that holds some element twice needs the slower choice of senders.
    one_group = np.zeros_like(held.start)
    if first_conflict(one_group, held.start, held.stop) is None:
        wanted_row, held_row, start, stop = overlaps(wanted.start, wanted.stop, held.start, held.stop)
    else:
        wanted_row, held_row, start, stop = choose_senders(held, wanted, src.num_ranks)
    _check_coverage(wanted, wanted_row, start, stop)
    return TransferPlan(
        src.num_ranks,
        SliceColumns(
            src=held.rank[held_row],
            dst=wanted.rank[wanted_row],
            # A piece [10, 20) at offset 3 keeps element 14 at 3 - 10 + 14 = 7 of its local buffer.
            src_offset=(held.offset - held.start)[held_row] + start,
            dst_offset=(wanted.offset - wanted.start)[wanted_row] + start,
            length=stop - start,
        ),
    )


def _checked(src: Layout, dst: Layout) -> tuple[PieceColumns, PieceColumns]:
    """The columns of both. `PlanError` unless they are sound and describe the same tensor on the same ranks."""
    if src.numel != dst.numel:
        raise PlanError(
            f"the source layout describes {src.numel} elements, the destination layout {dst.numel}; "
            f"both must describe the same flat tensor"
        )
    if src.num_ranks != dst.num_ranks:
        raise PlanError(
            f"the source layout has {src.num_ranks} ranks, the destination layout {dst.num_ranks}; "
            f"give both the job's ranks, with no pieces where a rank holds nothing"
        )
    return src.validate(), dst.validate()


def _check_coverage(wanted: PieceColumns, wanted_row: Column, start: Column, stop: Column) -> None:
    """Raise `PlanError`, naming the first element that is missing, unless every wanted piece was found whole."""
    # Slices of one piece never overlap, so a piece is covered exactly when their lengths add up to its own.
    found = sum_by(wanted_row, len(wanted.start), stop - start)
    short = np.flatnonzero(found != wanted.stop - wanted.start)
    if not len(short):
        return
    row = int(short[0])
    mine = np.flatnonzero(wanted_row == row)
    mine = mine[np.argsort(start[mine])]
    missing = int(wanted.start[row])  # moves on as long as the next slice begins where the last one ended
    for begin, end in zip(start[mine].tolist(), stop[mine].tolist(), strict=True):
        if begin != missing:
            break
        missing = end
    raise PlanError(
        f"rank {wanted.rank[row]} needs elements [{wanted.start[row]}, {wanted.stop[row]}) but no rank of the "
        f"source layout holds element {missing}; give it to one"
    )
