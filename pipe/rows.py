"""A packed micro-batch on one rank: which tokens it holds of which sequences, known on the host.

[Note: packs]
Whole sequences stand one after the other in one row of T tokens. Sequence parallel ranks hold consecutive intervals of
the row, which need not be equal. Sequences A (3 tokens), B (5) and C (2) over sp = 3:

  token        0  1  2  3  4  5  6  7  8  9
  sequence     A  A  A  B  B  B  B  B  C  C
  position     0  1  2  0  1  2  3  4  0  1
  sp rank      0  0  0  1  1  1  2  2  2  2

The record travels to the attention as one opaque keyword argument. So no layer derives boundaries from tensors, which
would make the host wait for the device, and a recomputed forward finds the same pack as the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


def split_tokens(num_tokens: int, num_ranks: int) -> tuple[int, ...]:
    """Tokens of each sequence parallel rank: the row is cut at floor(T * rank / sp), so shares differ by at most 1."""
    cuts = [num_tokens * rank // num_ranks for rank in range(num_ranks + 1)]
    return tuple(stop - start for start, stop in pairwise(cuts))


@dataclass(frozen=True)
class Pack:
    """Boundaries of the packed sequences and the sequence parallel group that shares the row."""

    lengths: tuple[int, ...]  # tokens of each sequence of the whole row
    sp_rank: int = 0
    sp: int = 1
    sp_group: dist.ProcessGroup | None = None
    # what the random numbers of each sequence follow from [Note: draws by place]; none: they are 0, 1, ...
    keys: tuple[int, ...] = ()
    tokens: tuple[int, ...] = field(init=False)  # tokens per sequence parallel rank

    def __post_init__(self) -> None:
        # Derived once: every layer of every micro-batch asks for it.
        object.__setattr__(self, "tokens", split_tokens(sum(self.lengths), self.sp))

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole row."""
        return sum(self.lengths)

    @property
    def offsets(self) -> list[int]:
        """Start of each sequence in the row, and the end of the last: len(lengths) + 1 entries."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def local(self) -> tuple[int, int]:
        """Interval [start, stop) of the row that this rank holds."""
        start = sum(self.tokens[: self.sp_rank])
        return start, start + self.tokens[self.sp_rank]


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch as a stage's rank sees it. Tensors cover its own T_local tokens only."""

    pack: Pack
    position_ids: Tensor  # (1, T_local), restarting at each sequence
    input_ids: Tensor | None = None  # (1, T_local)
    labels: Tensor | None = None  # (T_local,) next tokens, -100 where there is none; last stage only
    weights: Tensor | None = None  # (T_local,) what each token's loss counts in the step's loss; last stage only


def position_ids(lengths: Sequence[int], start: int, stop: int) -> list[int]:
    """Positions of tokens [start, stop) of a packed row; they restart at each sequence."""
    positions: list[int] = []
    begin = 0
    for length in lengths:
        lo, hi = max(start, begin), min(stop, begin + length)
        positions += range(lo - begin, hi - begin)
        begin += length
    return positions
