"""The planner's kernels compiled before they are needed. Pure: no torch."""

from __future__ import annotations

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.planner.selection import Planner


def warm_up() -> None:
    """Compile every kernel that plans need, or load it from numba's cache, by planning a few made-up steps."""
    costs = tuple(
        SchemeCost(ParallelScheme(tp, pp), 1e-6, 0.1, 10.0, 400, 8, Shares.usual())
        for tp, pp in ((1, 1), (2, 1), (1, 2))
    )
    table, options = CostTable(costs, "made up to warm the cache"), PlannerOptions(kernels="compiled")
    # Few sequences and many go different ways, and so do strategies with chunked pipelines where others may win too.
    for texts in (("tp2 + 2*tp1", "2*pp2", "2*pp2/list"), ("tp2 + pp2/list",)):
        planner = Planner(table, [StrategyShape.parse(text) for text in texts], options)
        for size in (3, 20):
            planner.plan(0, range(size), [(37 * i) % 300 + 1 for i in range(size)])
