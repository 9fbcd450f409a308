"""Eq. 3 as the paper states it: by its Algorithm 1, by our search, by HiGHS. Pure: no torch.

T(l) carries c for every sequence here, as printed. Planning itself charges c once per micro-batch. With c = 1 ms and
two sequences of 3 ms in one micro-batch, Eq. 3 counts 8 ms and planning 7.

The paper's method as a baseline (`by_paper`, behind the option method="paper"), HiGHS for the option
method="highs" (`by_highs`), and our search on the same problem (`by_search`), so that the three can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner.exact.programs import ExactResult, dispatch_exactly, dispatch_ms
from ds_hydra.planner.kernels.arrays import Floats, Ints, Items, Problem, Prospect, Schemes, SearchEffort
from ds_hydra.planner.kernels.placing import empty_placement
from ds_hydra.planner.kernels.problem import Batch, PipelineKinds, scheme_arrays
from ds_hydra.planner.kernels.protocol import Kernels

PAPER_TRIALS = 100


@dataclass(frozen=True)
class DispatchProblem:
    """Eq. 3 for one batch and one strategy; pipelines kind by kind, largest MaxLen first."""

    kinds: PipelineKinds
    items: Items  # work is T(l) with c
    schemes: Schemes  # c is 0
    kernels: Kernels

    @classmethod
    def of(
        cls, lengths: Sequence[int], strategy: StrategyShape, table: CostTable, compiled: bool = True
    ) -> DispatchProblem:
        schemes = scheme_arrays(table)
        batch = Batch.of(lengths, table)
        return cls.of_batch(
            batch, PipelineKinds.of(strategy, table), schemes, kernels.compiled() if compiled else kernels.pure()
        )

    @classmethod
    def of_batch(cls, batch: Batch, kinds: PipelineKinds, schemes: Schemes, kernel: Kernels) -> DispatchProblem:
        """The same from what a step's search already has."""
        # c moves from the micro-batch into each sequence. UtilLen is 1, so that it limits no number of micro-batches:
        # Eq. 3 knows none.
        work = batch.items.work + schemes.c[:, None]
        items = Items(work, batch.items.tokens, batch.items.copies, (work / batch.items.tokens).min(axis=1))
        free = schemes._replace(c=np.zeros_like(schemes.c), util_length=np.ones_like(schemes.util_length), paper=False)
        return cls(kinds, items, free, kernel)

    @property
    def times(self) -> Floats:
        """T(l_i, P_j) in ms: (pipelines, n)."""
        return np.ascontiguousarray(self.items.work[self.kinds.shape.pipeline_scheme])

    @property
    def pp(self) -> Ints:
        return self.schemes.pp[self.kinds.shape.pipeline_scheme]

    @property
    def max_length(self) -> Ints:
        return self.schemes.max_length[self.kinds.shape.pipeline_scheme]

    def ms(self, owner: Ints) -> float:
        """The objective of a placement."""
        return dispatch_ms(self.times, self.pp, owner)

    def by_paper(self, trials: int = PAPER_TRIALS, seed: int = 0) -> Ints | None:
        """Algorithm 1 as printed; None when a sequence fits nowhere."""
        owner = np.zeros(len(self.items.tokens), dtype=np.int64)
        ms = self.kernels.greedy_trials(self.times, self.items.tokens, self.max_length, self.pp, trials, seed, owner)
        return owner if np.isfinite(ms) else None

    def by_search(self, restarts: int = 40, budget: int = 200_000, seed: int = 0) -> tuple[Ints, float] | None:
        """Our search, and the certified bound in ms; None when a sequence fits nowhere."""
        problem = Problem(self.schemes, self.items, self.kinds.shape)
        price = self.kinds.num_ranks.copy()
        bound = self.kernels.strategy_bound(problem, 12, 14, price)
        place = empty_placement(len(self.items.tokens), len(self.kinds.rank_order))
        effort = SearchEffort(restarts, budget, 0, 0, packs=False)
        ms = self.kernels.dispatch(problem, Prospect(bound, price, np.inf), effort, seed, place)
        return (place.owner, bound) if np.isfinite(ms) else None

    def by_highs(
        self, start: Ints, bound_ms: float, *, node_limit: int | None = None, seconds: float | None = None
    ) -> ExactResult | None:
        """HiGHS from `start` on; see `dispatch_exactly`."""
        return dispatch_exactly(
            self.times, self.items.tokens, self.max_length, self.pp, self.kinds.shape.pipelines, start, bound_ms,
            node_limit=node_limit, seconds=seconds,
        )  # fmt: skip
