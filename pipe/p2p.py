"""Edges between the stages of a pipeline: which rows of the hidden states travel from which rank to which.

Shapes, peers and orders follow from the plan, so nothing is asked over the wire. The two stages of an edge may have
different tensor and sequence parallel degrees: a receiver takes its tokens from every sequence parallel rank that holds
some of them, each time from its share of the tensor parallel ranks, which all hold the same: of four that send to two
the first gets half of its rows from each of two. With token sharding no two ranks of a stage hold the same token, so
every rank sends each of its own rows to the one that goes on with it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ds_hydra.pipe.placement import Stage
from ds_hydra.pipe.rows import split_tokens


class Rows(NamedTuple):
    """Rows [start, stop) of a rank's local hidden states, sent to or received from `peer` (a global rank)."""

    peer: int
    start: int
    stop: int


@lru_cache(maxsize=256)  # a step's: lengths of micro-batches hardly come again, and an entry takes kilobytes
def edge(
    src: Stage, dst: Stage, num_tokens: int, *, token_sharding: bool = False
) -> tuple[dict[int, list[Rows]], dict[int, list[Rows]]]:
    """Sends by source rank and receives by destination rank of one micro-batch of `num_tokens` tokens.

    With token sharding (tokens that tp * sp of each stage with a tp divides) the i-th rank of a stage holds the i-th of
    its tp * sp parts.
    """
    # 12 tokens, from a stage with tp 2, sp 2 (ranks 0..3) to one with sp 3 (ranks 4..6):
    #
    #   token          0  1  2  3  4  5  6  7  8  9  10 11
    #   source         |-- ranks 0, 1 -| |-- ranks 2, 3 -|
    #   destination    |- rank 4 | |- rank 5 | |- rank 6 |
    #
    # Rank 5 needs the tokens 4..7: 4 and 5 from ranks 0 and 1, which hold the same, 6 and 7 from ranks 2 and 3. It gets
    # its row 0 from rank 0, which is row 4 there, row 1 from rank 1, row 2 from rank 2, where it is row 0, and row 3
    # from rank 3. On the way back gradients go by edge(destination, source): ranks 0 and 1 both receive them from rank
    # 5, since each tensor parallel rank needs the gradient of the whole hidden state. With equal tp, each tensor
    # parallel rank sends to the one with its own number.
    sends: dict[int, list[Rows]] = {rank: [] for rank in src.ranks}
    receives: dict[int, list[Rows]] = {rank: [] for rank in dst.ranks}
    src_parts, dst_parts = (parts_of(stage, token_sharding=token_sharding) for stage in (src, dst))
    src_rows, dst_rows = _intervals(num_tokens, src_parts), _intervals(num_tokens, dst_parts)
    src_alike, dst_alike = len(src.ranks) // src_parts, len(dst.ranks) // dst_parts  # ranks that hold the same
    for index, receiver in enumerate(dst.ranks):
        part, copy = divmod(index, dst_alike)
        lo, hi = dst_rows[part]
        for src_part, (start, stop) in enumerate(src_rows):
            first, last = max(lo, start), min(hi, stop)
            if first >= last:
                continue
            own = copy * src_alike // dst_alike, (copy + 1) * src_alike // dst_alike
            senders = src.ranks[src_part * src_alike :][own[0] : max(own[0] + 1, own[1])]
            for sender, (begin, end) in zip(senders, _intervals(last - first, len(senders)), strict=True):
                if begin < end:
                    sends[sender].append(Rows(receiver, first + begin - start, first + end - start))
                    receives[receiver].append(Rows(sender, first + begin - lo, first + end - lo))
    return sends, receives


def parts_of(stage: Stage, *, token_sharding: bool) -> int:
    """Into how many parts a stage cuts a row."""
    return stage.sp * stage.tp if token_sharding else stage.sp


def _intervals(num_tokens: int, parts: int) -> list[tuple[int, int]]:
    intervals: list[tuple[int, int]] = []
    start = 0
    for tokens in split_tokens(num_tokens, parts):
        intervals.append((start, start + tokens))
        start += tokens
    return intervals
