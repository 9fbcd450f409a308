"""A plan of chunked pipelines in, a better one out, by simulation. Pure: no torch.

Only the slowest pipeline counts. Its micro-batches are changed a little while that helps; then it gives a sequence to
another pipeline, or changes one with it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ds_hydra.planner.chunked_times import AGAIN, PipelineTimes, Timed
from ds_hydra.planner.kernels.arrays import Ints
from ds_hydra.planner.kernels.problem import PipelineKinds

_UNEVEN = 0.3  # of what the slowest pipeline takes more than the mean stays when a plan is refined
_EARLIER = 2  # plans before the best one that are told
_EXCHANGES = 6  # that are simulated for the slowest pipeline at a time


class Chunked(NamedTuple):
    """Sequences of a batch (longest first) on a strategy's pipelines (kind by kind), with what each takes."""

    kinds: PipelineKinds
    owner: Ints
    timed: tuple[Timed, ...]

    @property
    def ms(self) -> float:
        """Of the step: its slowest pipeline, and what the strategy's messages add."""
        return max(one.ms for one in self.timed) + self.kinds.exposed_ms

    @property
    def promise(self) -> float:
        """What it may come near to when sequences change places: between the mean and the slowest pipeline (ms)."""
        mean = sum(one.ms for one in self.timed) / len(self.timed) + self.kinds.exposed_ms
        return _UNEVEN * self.ms + (1.0 - _UNEVEN) * mean

    @property
    def alone(self) -> float:
        """What the slowest pipeline takes that has but one sequence and so can give none away, and messages (ms)."""
        ms = np.array([one.ms for one in self.timed])
        return float(ms[np.bincount(self.owner, minlength=len(ms)) == 1].max(initial=0.0)) + self.kinds.exposed_ms


def refined(found: Chunked, times: PipelineTimes, spare: int = 0, turn: int = 0) -> list[Chunked]:
    """Better micro-batches for the slowest pipeline, or an exchange of sequences, while more than `spare` tries are
    left: the last few plans on the way, the best one last. What is drawn at random is another from another `turn` on.
    """
    owner, timed, rows = found.owner.copy(), list(found.timed), found.kinds.shape.pipeline_scheme
    stuck, latest = False, [found]
    while times.left > spare and not stuck:
        turn += 1
        slow = max(range(len(timed)), key=lambda p: timed[p].ms)
        better = times.recut(int(rows[slow]), timed[slow], times.seed + turn)
        if better is not None:
            timed[slow] = better
        elif not _exchange(times, rows, slow, owner, timed, spare):
            # Where no other pipeline has room, better micro-batches of theirs make some.
            stuck = not _recut_others(times, rows, slow, timed)
        if not stuck:
            latest = [*latest[-_EARLIER:], Chunked(found.kinds, owner.copy(), tuple(timed))]
    return latest


def _recut_others(times: PipelineTimes, rows: Ints, slow: int, timed: list[Timed]) -> bool:
    """Better micro-batches for pipelines that are not the slowest; whether any were found."""
    found = False
    for p in range(len(timed)):
        better = None if p == slow else times.recut(int(rows[p]), timed[p], times.seed + times.left)
        if better is not None:
            timed[p], found = better, True
    return found


def _exchange(times: PipelineTimes, rows: Ints, slow: int, owner: Ints, timed: list[Timed], spare: int) -> bool:
    """Move or swap a sequence of the slowest pipeline, if that makes a plan sooner done; whether it did."""
    for i, q, j in _promising(times, rows, slow, owner, timed):
        after = owner.copy()
        after[i] = q
        if j >= 0:
            after[j] = slow
        both = [times.timed(int(rows[p]), np.flatnonzero(after == p), AGAIN) for p in (slow, q)]
        if max(one.ms for one in both) < timed[slow].ms * (1.0 - 1e-6):
            owner[:] = after
            timed[slow], timed[q] = both
            return True
        if times.left <= spare:
            break
    return False


def _promising(
    times: PipelineTimes, rows: Ints, slow: int, owner: Ints, timed: list[Timed]
) -> list[tuple[int, int, int]]:
    """Moves of i from the slowest pipeline to q (j = -1), and swaps with j of q, the most promising first.

    A pipeline's overhead is taken to stay as it is.
    """
    items, ms = times.batch.items, np.array([one.ms for one in timed])
    longest = np.array([row.longest for row in times.space.rows])
    own, others = np.flatnonzero(owner == slow), np.flatnonzero(owner != slow)
    here = items.work[rows[slow]]
    found: list[tuple[float, int, int, int]] = []
    for i in own.tolist():
        fits = items.tokens[i] <= longest[rows]
        after = np.maximum(ms[slow] - here[i], ms + items.work[rows, i])
        after[~fits] = math.inf
        after[slow] = math.inf
        q = int(after.argmin())
        found.append((float(after[q]), i, q, -1))
        if not len(others):
            continue
        there = owner[others]
        swapped = np.maximum(
            ms[slow] - here[i] + here[others],
            ms[there] + items.work[rows[there], i] - items.work[rows[there], others],
        )
        swapped[~fits[there] | (items.tokens[others] > longest[rows[slow]])] = math.inf
        at = int(swapped.argmin())
        found.append((float(swapped[at]), i, int(there[at]), int(others[at])))
    promising = sorted(row for row in found if row[0] < ms[slow])
    return [(i, q, j) for _, i, q, j in promising[:_EXCHANGES]]
