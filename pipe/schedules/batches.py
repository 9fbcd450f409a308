"""Which micro-batches a pipeline runs, as its schedule has to know them. Pure: no torch.

[Note: chains]
A sequence that is cut runs slice by slice, each slice in a micro-batch of its own. A slice attends to the keys and
values of all slices before it, and its backward adds to their gradients. So on every stage the forwards of a chain run
from its first slice to its last, and its backwards from the last to the first. A micro-batch has at most one other that
it follows, and at most one that follows it. Five micro-batches, of which 1, 2 and 3 hold a sequence in three slices:

  micro-batch   0    1    2    3    4        forwards   F0 F1 F2 F3 F4
  before       -1   -1    1    2   -1        backwards  B0 B3 B2 B1 B4

All slices of a sequence live together, for the first backward comes after the last forward. So do the micro-batches
that stand between two slices of a chain, if a stage runs them in that order: they make a run, 1 to 3 in the example.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ds_hydra.zero_hetero.errors import PlanError


class Work(NamedTuple):
    """What a micro-batch takes on one virtual stage: whole microseconds, and memory in whole units of any size.

    Whole numbers, so that every rank makes the same schedule of them. `weight` 0 says that the backward computes the
    gradients of the weights as well, and `backward` is the time of both.
    """

    forward: int
    backward: int  # of the input's gradient
    weight: int = 0  # of the weights' gradients
    kept: int = 0  # units from its forward to its backward
    until_weight: int = 0  # of these, what the weights' gradients still need

    def takes(self, kind: str) -> int:
        """Microseconds of an action that computes."""
        if kind == "forward":
            return self.forward
        if kind == "weight_gradient":
            return self.weight
        return self.backward + (self.weight if kind == "backward" else 0)


@dataclass(frozen=True, slots=True)
class Batches:
    """The micro-batches of a pipeline, in the order of their forwards, with all that a schedule is made from.

    `before[m]` is the micro-batch that holds the slice before the one in micro-batch m; -1 if m needs none
    [Note: chains]. `parts`: how many ranges of layers each stage holds; 2 is a V [Note: virtual stages]. Schedules that
    weigh times also want each micro-batch's `works`, and `room`: the units of memory that a stage has for them.
    """

    before: tuple[int, ...]
    parts: int = 1
    works: tuple[Work, ...] = ()
    room: int = 0

    def __post_init__(self) -> None:
        self._check_works()
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

    def _check_works(self) -> None:
        if self.parts not in (1, 2):
            raise PlanError(f"stages with {self.parts} ranges of layers: a schedule knows 1, or 2 for a V")
        if len(self.works) not in (0, len(self.before)):
            raise PlanError(f"{len(self.works)} works for {len(self.before)} micro-batches; needs one each, or none")
        for microbatch, work in enumerate(self.works):
            if min(work.forward, work.backward) < 1 or work.weight < 0 or not 0 <= work.until_weight <= work.kept:
                raise PlanError(
                    f"micro-batch {microbatch} has {work}: forward and backward take 1 us or more, and of what is kept "
                    "no more than all is kept until the weights' gradients"
                )

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

    @property
    def runs(self) -> tuple[range, ...]:
        """Micro-batches that live together: chains with what stands between their slices; others are alone."""
        # A run ends where no slice that comes later follows one in it.
        last = list(range(len(self.before)))
        for chain in self.chains:
            for microbatch in chain:
                last[microbatch] = chain[-1]
        found, begin, stop = [], 0, 0
        for microbatch, until in enumerate(last):
            stop = max(stop, until + 1)
            if stop == microbatch + 1:
                found.append(range(begin, stop))
                begin = stop
        return tuple(found)


@lru_cache(maxsize=4096)
def _whole(count: int) -> Batches:
    return Batches((-1,) * count)
