"""Eq. 3 of Hydraulis for one batch and one strategy, solved by HiGHS. Pure: no torch.

T(l) carries c for every sequence here, as printed. Planning itself charges c once per micro-batch. With c = 1 ms and
two sequences of 3 ms in one micro-batch, Eq. 3 counts 8 ms and planning 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ds_hydra.planner.exact.programs import ExactResult, dispatch_exactly
from ds_hydra.planner.kernels.arrays import Floats, Ints, Items, Schemes
from ds_hydra.planner.kernels.problem import Batch, PipelineKinds

Made = TypeVar("Made", bound="DispatchProblem")


@dataclass(frozen=True)
class DispatchProblem:
    """Pipelines kind by kind, largest MaxLen first, and sequences with c in each."""

    kinds: PipelineKinds
    items: Items  # work is T(l) with c
    schemes: Schemes  # c is 0

    @classmethod
    def of_batch(cls: type[Made], batch: Batch, kinds: PipelineKinds, schemes: Schemes) -> Made:
        """From what a step's search already has."""
        # c moves from the micro-batch into each sequence. UtilLen is 1, so that it limits no number of micro-batches:
        # Eq. 3 knows none.
        work = batch.items.work + schemes.c[:, None]
        items = Items(work, batch.items.tokens, batch.items.copies, (work / batch.items.tokens).min(axis=1))
        free = schemes._replace(c=np.zeros_like(schemes.c), util_length=np.ones_like(schemes.util_length))
        return cls(kinds, items, free)

    @property
    def times(self) -> Floats:
        """T(l_i, P_j) in ms: (pipelines, n)."""
        return np.ascontiguousarray(self.items.work[self.kinds.shape.pipeline_scheme])

    @property
    def pp(self) -> Floats:
        return self.schemes.pp[self.kinds.shape.pipeline_scheme]

    @property
    def max_length(self) -> Ints:
        return self.schemes.max_length[self.kinds.shape.pipeline_scheme]

    def by_highs(
        self, start: Ints, bound_ms: float, *, node_limit: int | None = None, seconds: float | None = None
    ) -> ExactResult | None:
        """HiGHS from `start` on; see `dispatch_exactly`."""
        return dispatch_exactly(
            self.times, self.items.tokens, self.max_length, self.pp, self.kinds.shape.pipelines, start, bound_ms,
            node_limit=node_limit, seconds=seconds,
        )  # fmt: skip
