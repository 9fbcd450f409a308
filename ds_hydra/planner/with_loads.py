"""What the search of whole sequences works with, where these have loads and where they have none. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.loads import Counted, loads_of
from ds_hydra.planner.kernels.problem import Batch, Floats, PipelineKinds, Problem, Schemes

StrategyBound = Callable[[Problem, int, int, Floats], float]


class Whole(NamedTuple):
    """A step's sequences with their loads [Note: loads], and costs of pipelines that drain without these."""

    batch: Batch
    schemes: Schemes
    least: Batch | None = None  # with the least that each sequence takes besides; None: there are no loads
    draining: Schemes | None = None  # over the least share that text has of any sequence

    @classmethod
    def of(cls, lengths: Sequence[int], table: CostTable, schemes: Schemes, num_ranks: int) -> Whole:
        """Of a step's sequences and the costs of a table."""
        text = Batch.of(lengths, table)
        if not (loads := loads_of(lengths)):
            return cls(text, schemes)
        counted = Counted.of(loads, lengths, table.costs, num_ranks)
        batch, least = text.with_more(counted.usual), text.with_more(counted.least)
        # Pipelines drain over their largest micro-batch as it is of text: over a share of all its work, in the mean.
        shares = text.items.work.sum(axis=1) / batch.items.work.sum(axis=1)
        no_more = (text.items.work / least.items.work).min(axis=1)
        return cls(batch, _draining(schemes, shares), least, _draining(schemes, no_more))

    def bound(self, kinds: Sequence[PipelineKinds], strategy_bound: StrategyBound, searched: float) -> float:
        """No step under these strategies is sooner done (ms): with loads, which are dealt out evenly for it, and
        without any what the search has found."""
        if self.least is None or self.draining is None:
            return searched
        return min(
            strategy_bound(Problem(self.draining, self.least.merged, one.shape), 4, 8, one.num_ranks.copy())
            + one.exposed_ms
            for one in kinds
        )


def _draining(schemes: Schemes, shares: Floats) -> Schemes:
    """Costs of pipelines that drain over these shares of their largest micro-batch, (schemes,)."""
    return schemes._replace(pp=1.0 + (schemes.pp - 1.0) * shares)
