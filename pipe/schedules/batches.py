"""Which micro-batches a pipeline runs, as its schedule has to know them. Pure: no torch.

[Note: chains]
A sequence that is cut runs slice by slice, each slice in a micro-batch of its own. A slice attends to the keys and
values of all slices before it, and its backward adds to their gradients. So on every stage the forwards of a chain run
from its first slice to its last, and its backwards from the last to the first. A micro-batch has at most one other that
it follows, and at most one that follows it. Five micro-batches, of which 1, 2 and 3 hold a sequence in three slices:

  micro-batch   0    1    2    3    4        forwards   F0 F1 F2 F3 F4
  before       -1   -1    1    2   -1        backwards  B0 B3 B2 B1 B4
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ds_hydra.zero_hetero.errors import PlanError


@dataclass(frozen=True, slots=True)
class Batches:
    """The micro-batches of a pipeline, in the order of their forwards [Note: chains].

    `before[m]` is the micro-batch that holds the slice before the one in micro-batch m; -1 if m needs none.
    """

    before: tuple[int, ...]

    def __post_init__(self) -> None:
        seen: dict[int, int] = {}
        for microbatch, earlier in enumerate(self.before):
            if not -1 <= earlier < microbatch:
                raise PlanError(
                    f"micro-batch {microbatch} follows micro-batch {earlier}, but the slice before its own must be in "
                    f"an earlier one, 0..{microbatch - 1}; list the slices of a sequence from first to last"
                )
            if earlier in seen:
                raise PlanError(
                    f"micro-batches {seen[earlier]} and {microbatch} both follow micro-batch {earlier}, which holds "
                    "slices of two sequences then; put these slices into two micro-batches"
                )
            if earlier >= 0:
                seen[earlier] = microbatch

    @staticmethod
    def whole(count: int) -> Batches:
        """That many micro-batches of whole sequences."""
        return _whole(count)

    @staticmethod
    def in_slices(chains: Iterable[int]) -> Batches:
        """One sequence after the other, each cut into this many slices; 1 is a micro-batch of whole sequences."""
        before: list[int] = []
        for count in chains:
            before += [-1, *range(len(before), len(before) + count - 1)]
        return Batches(tuple(before))

    def __len__(self) -> int:
        return len(self.before)

    @property
    def after(self) -> tuple[int, ...]:
        """The inverse of `before`: for each micro-batch the one that holds the next slice, -1 for none."""
        after = [-1] * len(self.before)
        for microbatch, earlier in enumerate(self.before):
            if earlier >= 0:
                after[earlier] = microbatch
        return tuple(after)

    @property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """The micro-batches of each chain, first slice first; a chain whose last slice comes earlier stands earlier."""
        found = []
        for microbatch, later in enumerate(self.after):
            if later < 0:
                chain = [microbatch]
                while (earlier := self.before[chain[-1]]) >= 0:
                    chain.append(earlier)
                found.append(tuple(reversed(chain)))
        return tuple(found)


@lru_cache(maxsize=4096)
def _whole(count: int) -> Batches:
    return Batches((-1,) * count)
