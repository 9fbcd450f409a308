"""How much scratch memory a rank's transfers need, and which of them share it. Pure.

[Note: runs]
A message of several slices is several intervals of the sender's buffer, or of the receiver's. So that not all of it has
to be gathered before it leaves and scattered when it has come, it travels in runs: each large slice by itself, straight
from its place to its place, and the small ones between two large ones together. With slices of 9, 1, 2 and 8 elements,
of which 5 or more were large, the runs are 9, 1 + 2 and 8. Both ends cut the same runs from the same plan.

[Note: scratch memory]
A run that is not one interval of its sender's buffer is gathered before it leaves, one that is cast is copied too; what
is pushed is received apart from the sum that it is added to. All of that lies in one block of bytes, of which every
transfer has a window. Which bytes those are follows from the plans alone, so that nobody searches for a free
buffer within a step, and the block has the size that was counted before the job began.

Pulls all start at once, so their windows lie side by side. Of pushes only some are open at a time, since each needs as
much as everybody contributes to a shard: together that would be as much as all gradients. They take their windows in
turn, round and round. Example: room for 10, pushes of 4, 4, 4 and 2:

    push 0   [0, 4)     at once
    push 1   [4, 8)     at once
    push 2   [0, 4)     when push 0 is over: 8 + 4 is more than 10
    push 3   [4, 6)     when push 1 is over

A push larger than the room gets all the room that it needs, and is open alone.

The ranks need not agree on when a push starts. Each starts its pushes in the one order of all ranks and waits for them
in that order. Take the earliest push that is not over on all ranks. Every rank comes to it, for those before it are
over everywhere; so all start it, and it ends. So it goes on, whoever has room for how many.

[Note: pieces]
A trade takes as much memory as all contributions to a rank's part, which is a whole bucket: 0.4 GB for a layer of a 7B
model in 16 bit, and as much again where it is cast. So twins trade a bucket in pieces, the same interval of every part,
one after the other in the same memory. A piece is begun when the one before is over and added up, while the network
stands still.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hydra.zero_hetero.layout import Column, padded, sorted_by, sum_by
from ds_hydra.zero_hetero.transfer_plan import Slice, TransferPlan
from ds_hydra.zero_hetero.twin_plan import TwinPush

LARGE = 1 << 18
"""Elements of a slice that travels by itself, without a copy; it is worth more than one operation less."""
AT_ONCE = 1 << 24
"""Elements that twins trade at once [Note: pieces]."""


def runs_of(slices: Sequence[Slice]) -> tuple[tuple[Slice, ...], ...]:
    """The slices of a message as they travel [Note: runs]."""
    runs: list[list[Slice]] = []
    for piece in slices:
        if not runs or piece.length >= LARGE or runs[-1][-1].length >= LARGE:
            runs.append([])
        runs[-1].append(piece)
    return tuple(map(tuple, runs))


class Window(NamedTuple):
    """Bytes [start, stop) of the scratch memory, free for a transfer when the first `after` transfers are over."""

    start: int
    stop: int
    after: int


Flags = npt.NDArray[np.bool_]


def side_by_side(sizes: Sequence[int]) -> tuple[Window, ...]:
    """Windows of these sizes for transfers that are all under way together."""
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(Window(start, start + size, 0) for start, size in zip(ends, sizes, strict=False))


@lru_cache(maxsize=4096)
def in_turn(sizes: tuple[int, ...], room: int) -> tuple[Window, ...]:
    """Windows of these sizes for transfers that start, and end, in this order; see [Note: scratch memory]."""
    room = max([room, *sizes])
    windows: list[Window] = []
    start, round_begin = 0, 0
    for size in sizes:
        if start + size > room:
            start, round_begin = 0, len(windows)
        # Those of this round lie before it. Of earlier ones the last that it meets is sought, mostly the round before.
        last = round_begin - 1
        while last >= 0 and not (windows[last].start < start + size and start < windows[last].stop):
            last -= 1
        windows.append(Window(start, start + size, 1 + last))
        start += size
    return tuple(windows)


def end_of(windows: Sequence[Window]) -> int:
    """Bytes that hold all of the windows."""
    return max((window.stop for window in windows), default=0)


def pull_scratch(plan: TransferPlan) -> Column:
    """Elements of scratch memory that each rank takes to pull: shape (num_ranks,).

    A run in several intervals takes its size: at the receiver, and at the sender once for all who get the same.
    """
    sent, received = _runs(plan, plan.slices.src_offset, plan.slices.dst_offset)
    landing = sum_by(received.dst[received.split], plan.num_ranks, padded(received.numel[received.split]))
    rows = np.flatnonzero(sent.split)
    first = {(int(sent.src[row]), sent.parts(row)): row for row in rows[::-1].tolist()}
    gathered = np.array(sorted(first.values()), dtype=np.int64)
    return landing + sum_by(sent.src[gathered], plan.num_ranks, padded(sent.numel[gathered]))


def push_scratch(plan: TransferPlan, *, cast: bool) -> Column:
    """Elements of scratch memory that each rank takes to push, by the transposed plan: shape (num_ranks,).

    Every message that is received takes its size, and so does every run that is sent, if it is `cast` or lies in
    several intervals.
    """
    return _push_scratch(plan, cast)[0]


def _push_scratch(plan: TransferPlan, *casts: bool) -> list[Column]:
    (sent,) = _runs(plan, plan.slices.src_offset)
    begin = np.flatnonzero(sent.first)
    numels = padded(np.add.reduceat(sent.numel, begin)) if len(begin) else sent.numel
    received = sum_by(sent.dst[begin], plan.num_ranks, numels)
    copied = [sent.split | cast for cast in casts]
    return [received + sum_by(sent.src[one], plan.num_ranks, padded(sent.numel[one])) for one in copied]


def piece_of(count: int, part: int) -> int:
    """Elements of each of `count` parts that twins trade at once, except for the last time [Note: pieces]."""
    return min(part, padded(-(-AT_ONCE // count)))


def twin_push_windows(
    count: int, part: int, leave: int, element_bytes: tuple[int, int], *, cast: bool
) -> tuple[Window, ...]:
    """Windows of what one of `count` twins takes to push parts of `part` elements [Note: twins].

    Its own contributions to a piece if they are `cast` or lie apart, everybody's to its part of it, the sum of all
    pieces, and `leave` elements with which the sums leave. `element_bytes` are those on the wire of a trade, and of a
    sum.
    """
    (wire, total), piece = element_bytes, piece_of(count, part)
    traded = padded(count * piece) * wire
    return side_by_side([traded if cast or piece < part else 0, traded, padded(part) * total, leave * total])


def twin_push_bytes(plan: TwinPush, element_bytes: tuple[int, int], grad_bytes: int) -> Column:
    """Bytes of scratch memory that each rank takes to push: shape (num_ranks,); `element_bytes` as above."""
    cast, total = grad_bytes != element_bytes[0], element_bytes[1]
    leave, of_alone = _push_scratch(plan.leave, False, grad_bytes != total)
    found = of_alone * total
    for members, part in plan.teams:
        ranks = np.array(members)
        besides = end_of(twin_push_windows(len(ranks), part, 0, element_bytes, cast=cast))
        found[ranks] = besides + leave[ranks] * total
    return found


class _Runs(NamedTuple):
    """The runs of all messages between two ranks, as columns, seen from one end: the sender's or the receiver's."""

    src: Column
    dst: Column
    numel: Column
    first: Flags  # whether it is the first run of its message
    split: Flags  # whether it is more than one interval of the buffer at this end
    begin: Column  # its slices are rows [begin, end) of the columns below
    end: Column
    offset: Column
    length: Column

    def parts(self, row: int) -> bytes:
        """The intervals of one run: equal for runs that hold the same."""
        at = slice(self.begin[row], self.end[row])
        offset, length = self.offset[at], self.length[at]
        cuts = np.flatnonzero(np.r_[True, offset[1:] != (offset + length)[:-1]])
        return offset[cuts].tobytes() + np.add.reduceat(length, cuts).tobytes()


def _runs(plan: TransferPlan, *offsets: Column) -> list[_Runs]:
    """The runs as seen from the ends where slices begin at `offsets`."""
    slices = plan.slices
    rows = np.flatnonzero(slices.src != slices.dst)
    rows = rows[sorted_by(slices.src[rows], slices.dst[rows], plan.num_ranks)]  # within a message in flat order
    src, dst, src_offset, dst_offset, length = (column[rows] for column in slices)
    if not len(rows):
        none = np.zeros(0, dtype=np.int64)
        return [_Runs(none, none, none, none > 0, none > 0, none, none, none, none)] * len(offsets)
    new = np.r_[True, (src[1:] != src[:-1]) | (dst[1:] != dst[:-1])]  # a message begins
    # Slices that follow each other at both ends are one; a run is a large one, or small ones between two large ones.
    apart = _breaks(src_offset, length) | _breaks(dst_offset, length) | new
    joined = np.flatnonzero(apart)
    large = np.add.reduceat(length, joined) >= LARGE
    begin = joined[new[joined] | large | np.r_[False, large[:-1]]]
    end = np.r_[begin[1:], len(rows)]
    src, dst, numel, first = src[begin], dst[begin], np.add.reduceat(length, begin), new[begin]
    seen = []
    for offset in (column[rows] for column in offsets):
        gaps = np.cumsum(_breaks(offset, length) & ~new)
        seen.append(_Runs(src, dst, numel, first, gaps[end - 1] > gaps[begin], begin, end, offset, length))
    return seen


def _breaks(offset: Column, length: Column) -> Flags:
    """Whether each interval does not begin where the one before it ends."""
    return np.r_[False, offset[1:] != (offset + length)[:-1]]
