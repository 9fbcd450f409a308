"""Sequences of one pipeline in, what it takes with them out; every simulation is counted. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.planner.chunked_space import ChunkedSpace
from ds_hydra.planner.cutting import Cutting, Effort, cut_best, improved, profiles_of
from ds_hydra.planner.kernels.arrays import Floats, Ints, Profile
from ds_hydra.planner.kernels.problem import Batch, scheme_row
from ds_hydra.planner.kernels.protocol import Kernels

FIRST = Effort(variations=3, moves=0)  # of a pipeline in a strategy that may be no good
AGAIN = Effort(variations=6, moves=24)  # of one in the best plan
_PROBE = Effort(variations=6, moves=0)
_NEAR_PROFILES = 5  # that are tried for a row after its probe
_MOST = 0.5  # of a pipeline's work
_LEVEL_ROUNDS = 40
_MOVES = 60  # small changes of a pipeline's micro-batches at a time


class Timed(NamedTuple):
    """What a pipeline takes with some sequences, and how: its cutting, or the micro-batch of each whole sequence."""

    ms: float
    cutting: Cutting | None = None
    bins: Ints | None = None


class PipelineTimes:
    """What pipelines of a space's rows take with sequences of one batch, which are longest first.

    `left` is how many tries are left of those given; nothing here stops at 0.
    """

    def __init__(self, space: ChunkedSpace, kernel: Kernels, batch: Batch, *, tries: int, seed: int) -> None:
        self.space, self.batch, self.left, self.seed = space, batch, tries, seed
        self._kernel = kernel
        self._known: dict[tuple[int, bytes], Timed] = {}
        self._profiles: dict[int, tuple[Profile, ...]] = {}

    def probe(self, k: int, share: float, counted: Floats) -> float:
        """The overhead of a pipeline of row k with `share` ms of work: every so many of the sequences that it holds.

        counted (sequences,) is what dispatch counts for each sequence, in ms.
        """
        row, items = self.space.rows[k], self.batch.items
        if row.pipe is not None and not self._kernel.is_compiled:
            return self._estimate(k, share)
        held = np.flatnonzero(items.tokens <= row.longest)
        stride = max(1.0, float(items.work[k][held].sum()) / share)
        at = ((np.arange(math.ceil(len(held) / stride)) + 0.5) * stride).astype(np.int64)
        own = held[at[at < len(held)]]
        if not len(own):
            own = held[-1:]
        if row.pipe is None:
            return self._search(k, own, _PROBE).ms - float(counted[own].sum())
        profiles = profiles_of(row.pipe, items.tokens[own])
        cutting = self._cut(k, own, profiles, _PROBE) if len(own) else None
        if cutting is None:
            return float(row.cost.c * row.shape.pp)
        by_time = sorted(zip(cutting.profiles_us, range(len(profiles)), strict=True))
        self._profiles[k] = (cutting.profile, *(profiles[index] for _, index in by_time[:_NEAR_PROFILES]))
        return cutting.us / 1e3 - float(counted[own].sum())

    def _estimate(self, k: int, share: float) -> float:
        """An overhead without a simulation: c of some equal micro-batches, and forwards of the first one as fill."""
        row = self.space.rows[k]
        fill = (row.shape.pp - 1) / row.shape.parts / 3
        return min(v * row.cost.c + fill * (share / v + row.cost.c) for v in range(1, 33))

    def _cut(self, k: int, own: Ints, profiles: Sequence[Profile], effort: Effort) -> Cutting | None:
        pipe, items = self.space.rows[k].pipe, self.batch.items
        assert pipe is not None, "only chunked pipelines are cut"
        self.left -= len(profiles) + effort.variations + effort.moves
        work, tokens = items.work[k][own], items.tokens[own]
        kernel = kernels.timing(self._kernel, self.space.rows[k].shape.schedule)
        return cut_best(kernel, pipe, work, tokens, profiles=profiles, effort=effort, seed=self.seed)

    def timed(self, k: int, own: Ints, effort: Effort = FIRST) -> Timed:
        """What a pipeline of row k takes with these sequences; infinite where they do not fit."""
        if not len(own):
            return Timed(0.0)
        key = (k, own.tobytes())
        before = self._known.get(key)
        if before is None or effort is not FIRST:
            found = self._search(k, own, effort)
            self._known[key] = found if before is None or found.ms < before.ms else before
        return self._known[key]

    def _search(self, k: int, own: Ints, effort: Effort) -> Timed:
        if (pipe := self.space.rows[k].pipe) is not None:
            tokens, lean = self.batch.items.tokens[own], not self._kernel.is_compiled
            profiles = profiles_of(pipe, tokens, lean=True) if lean else self._near_profiles(k, own)
            cutting = self._cut(k, own, profiles or profiles_of(pipe, tokens), Effort(0, 0) if lean else effort)
            if cutting is None and lean:
                cutting = self._cut(k, own, profiles_of(pipe, tokens), Effort(0, 0))
            return Timed(math.inf) if cutting is None else Timed(cutting.us / 1e3, cutting)
        items, bins = self.batch.items, np.zeros(len(own), dtype=np.int64)
        scheme = scheme_row(self.space.bounding, k)
        _, ms, _, _ = self._kernel.pack(scheme, items.work[k][own], items.tokens[own], _LEVEL_ROUNDS, bins)
        return Timed(float(ms), None, bins)

    def _near_profiles(self, k: int, own: Ints) -> tuple[Profile, ...] | None:
        """What suited a typical pipeline of row k; None, for all, where it is not known or one sequence is most of the
        work: that takes up to a tenth longer by those that suit many."""
        work = self.batch.items.work[k][own]
        return None if work[0] > _MOST * work.sum() else self._profiles.get(k)

    def recut(self, k: int, timed: Timed, seed: int) -> Timed | None:
        """The same sequences in better micro-batches; None where none were found."""
        shape, pipe = self.space.rows[k].shape, self.space.rows[k].pipe
        if pipe is None or timed.cutting is None:
            return None
        self.left -= _MOVES
        cutting = improved(kernels.timing(self._kernel, shape.schedule), pipe, timed.cutting, moves=_MOVES, seed=seed)
        return Timed(cutting.us / 1e3, cutting) if cutting.us < 0.9995 * timed.cutting.us else None
