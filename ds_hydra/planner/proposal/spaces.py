"""Costs and kinds of pipelines in, what a proposal searches over out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.runnable import check_shape
from ds_hydra.plan.schemes import SCHEDULE_CHOICES
from ds_hydra.planner.elastic import ElasticSearch, Overheads
from ds_hydra.planner.elastic_space import ElasticSpace
from ds_hydra.planner.kernels.arrays import Schemes
from ds_hydra.planner.kernels.problem import Batch, scheme_arrays
from ds_hydra.zero_hetero.errors import PlanError

_PROBED = 6  # batches from which overheads are estimated
_CORRECTIONS = 3  # rounds of search and simulation
_NO_LIMIT = 1 << 40  # tries


class Space(Protocol):
    """Shapes of pipelines with their costs, and the arrays of what dispatch counts for them."""

    shapes: tuple[PipelineShape, ...]
    costs: tuple[SchemeCost, ...]
    limits: tuple[int, ...]  # tokens of the longest sequence that each holds

    def batch(self, lengths: Sequence[int]) -> Batch:
        """Sequences with the work of each shape."""

    def arrays(self, sampled: Sequence[np.ndarray], num_ranks: int, search: Choice) -> Schemes:
        """For these batches; `search` finds strategies for some of them by other arrays."""


Choice = Callable[[Sequence[np.ndarray], Schemes], Sequence[StrategyShape]]
"""(batches, arrays) in, a good strategy for each batch out."""


class WholeSpace:
    """Whole sequences under 1F1B."""

    def __init__(self, table: CostTable, shapes: Sequence[PipelineShape]) -> None:
        self.shapes = tuple(shapes)
        self.costs = tuple(table[shape] for shape in shapes)
        self.limits = tuple(int(cost.max_length) for cost in self.costs)

    def batch(self, lengths: Sequence[int]) -> Batch:
        """See `Space`."""
        return Batch.by_rows(lengths, self.costs)

    def arrays(self, sampled: Sequence[np.ndarray], num_ranks: int, search: Choice) -> Schemes:
        """What the cost table says."""
        return scheme_arrays(CostTable(self.costs))


class ElasticShapes:
    """Shapes of which some are elastic [Note: elastic pipelines]; schemes of one stage may be among them.

    Their overheads are means over sampled batches. The first ones are those of typical pipelines. In a strategy that
    looks good by them pipelines take longer, some more than others: sequences do not divide evenly, and the slowest
    counts. So good strategies are searched and simulated, and what is seen there corrects the means.
    """

    def __init__(self, table: CostTable, shapes: Sequence[PipelineShape], *, slices: bool, layers: int = 0) -> None:
        self._space = ElasticSpace(table, [StrategyShape((shape,)) for shape in shapes], slices=slices, layers=layers)
        self.shapes, self.costs = tuple(shapes), self._space.costs
        self.limits = tuple(row.longest for row in self._space.rows)

    def batch(self, lengths: Sequence[int]) -> Batch:
        """See `Space`."""
        return self._space.batch(lengths)

    def arrays(self, sampled: Sequence[np.ndarray], num_ranks: int, search: Choice) -> Schemes:
        space, count = self._space, min(_PROBED, len(sampled))
        chosen = [sampled[round(at)] for at in np.linspace(0, len(sampled) - 1, count)]
        batches = [self.batch(lengths.tolist()) for lengths in chosen]
        searches = [ElasticSearch(space, kernels.compiled(), batch, tries=_NO_LIMIT) for batch in batches]
        known = Overheads.none(len(space.rows))
        for one in searches:
            known.add(one.probes(space.kinds, num_ranks))
        known = known.once()
        for _ in range(_CORRECTIONS):
            strategies = search(chosen, space.by_overhead(known.ms))
            overhead = known.ms
            for one, strategy in zip(searches, strategies, strict=True):
                known.add(one.observe(space.kinds_of(strategy), overhead))
        return space.by_overhead(known.ms)


def wider_shapes(
    table: CostTable, schedules: Sequence[str] = SCHEDULE_CHOICES, num_layers: int | None = None
) -> tuple[PipelineShape, ...]:
    """The elastic pipelines that a proposal may use: of each scheme with measured shares and more than one stage the V
    if `schedules` names "v" and the model has layers for it, else the plain one if they name "list".

    The V has half of the fill of the plain one and the same work, so it is never worse.
    """
    found = []
    for scheme in table.schemes:
        if scheme.pp == 1 or table[scheme].shares is None:
            continue
        has_v = "v" in schedules and (num_layers is None or 2 * scheme.pp <= num_layers)
        if has_v or "list" in schedules:
            found.append(PipelineShape(PipelineShape.of(scheme).stages, "v" if has_v else "list"))
    return tuple(found)


def runnable_of(shapes: Sequence[PipelineShape]) -> tuple[PipelineShape, ...]:
    """Those that the runtime can run."""
    return tuple(shape for shape in shapes if _is_runnable(shape))


def _is_runnable(shape: PipelineShape) -> bool:
    try:
        check_shape(StrategyShape((shape,)))
    except PlanError:
        return False
    return True
