"""Costs and kinds of pipelines in, what a proposal searches over out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.schedules.registry import SCHEDULES, proposed_schedules
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.planner.chunked import ChunkedSearch, Overheads
from ds_hydra.planner.chunked_space import ChunkedSpace
from ds_hydra.planner.kernels.arrays import Schemes
from ds_hydra.planner.kernels.problem import Batch, scheme_arrays

_PROBED = 6  # batches from which overheads are estimated
_NO_LIMIT = 1 << 40  # tries


class Space(Protocol):
    """Shapes of pipelines with their costs, and the arrays of what dispatch counts for them."""

    shapes: tuple[PipelineShape, ...]
    costs: tuple[SchemeCost, ...]
    limits: tuple[int, ...]  # tokens of the longest sequence that each holds

    def batches(self, sampled: Sequence[np.ndarray], num_ranks: int) -> list[Batch]:
        """Batches with what dispatch counts for their sequences."""

    def arrays(self, sampled: Sequence[np.ndarray], num_ranks: int) -> Schemes:
        """For these batches."""


class WholeSpace:
    """Whole sequences under 1F1B."""

    def __init__(self, table: CostTable, shapes: Sequence[PipelineShape]) -> None:
        self.shapes = tuple(shapes)
        self.costs = tuple(table[shape] for shape in shapes)
        self.limits = tuple(int(cost.max_length) for cost in self.costs)

    def batches(self, sampled: Sequence[np.ndarray], num_ranks: int) -> list[Batch]:
        return [Batch.by_rows(lengths.tolist(), self.costs) for lengths in sampled]

    def arrays(self, sampled: Sequence[np.ndarray], num_ranks: int) -> Schemes:
        """What the cost table says."""
        return scheme_arrays(CostTable(self.costs))


class ChunkedShapes:
    """Shapes of which some are chunked [Note: chunked pipelines]; schemes of one stage may be among them.

    Their overheads are means over sampled batches, those of typical pipelines. A strategy takes longer by some percent,
    since its sequences do not divide evenly, and its slowest pipeline counts: the more pipelines, the longer.
    """

    def __init__(self, table: CostTable, shapes: Sequence[PipelineShape], *, slices: bool, layers: int = 0) -> None:
        self._space = ChunkedSpace(table, [StrategyShape((shape,)) for shape in shapes], slices=slices, layers=layers)
        self.shapes, self.costs = tuple(shapes), self._space.costs
        self.limits = tuple(row.longest for row in self._space.rows)

    def batches(self, sampled: Sequence[np.ndarray], num_ranks: int) -> list[Batch]:
        given = [self._space.batch(lengths.tolist()) for lengths in sampled]
        return [self._space.dealt(kernels.compiled(), batch, num_ranks) for batch in given]

    def arrays(self, sampled: Sequence[np.ndarray], num_ranks: int) -> Schemes:
        space, count = self._space, min(_PROBED, len(sampled))
        known = Overheads.none(len(space.rows))
        for at in np.linspace(0, len(sampled) - 1, count):
            known.add(self._search(sampled[round(at)], num_ranks).probes(space.kinds))
        return space.by_overhead(known.ms)

    def corrected(self, arrays: Schemes, sampled: Sequence[np.ndarray], winners: Sequence[StrategyShape]) -> Schemes:
        """Better arrays, by a good strategy for each batch: half of what is known, half of what its pipelines take."""
        seen = Overheads.none(len(self.shapes))
        for lengths, strategy in zip(sampled, winners, strict=True):
            kinds = self._space.kinds_of(strategy)
            seen.add(self._search(lengths, strategy.num_ranks).observe(kinds, arrays.c))
        return self._space.by_overhead(np.where(seen.count > 0.0, 0.5 * (arrays.c + seen.ms), arrays.c))

    def simulated(self, strategy: StrategyShape, lengths: np.ndarray, arrays: Schemes) -> float:
        """What a strategy takes for a batch by a dispatch and simulations, a little refined; ms."""
        return self._search(lengths, strategy.num_ranks).rated(self._space.kinds_of(strategy), arrays.c)

    def _search(self, lengths: np.ndarray, num_ranks: int) -> ChunkedSearch:
        batch = self._space.batch(lengths.tolist())
        return ChunkedSearch(self._space, kernels.compiled(), batch, num_ranks=num_ranks, tries=_NO_LIMIT)


def wider_shapes(
    table: CostTable, schedules: Sequence[str] | None = None, num_layers: int | None = None
) -> tuple[PipelineShape, ...]:
    """The chunked pipelines that a proposal may use: each scheme with measured shares and more than one stage under
    those of the `schedules` (None: all that may be proposed) that weigh times.

    Of two schedules that differ in nothing but the ranges of layers in a stage it is the V where the model has layers
    for it: that has half of the fill of the plain one and the same work, so it is never worse.
    """
    weighing = [one for name in schedules or proposed_schedules() if (one := SCHEDULES[name]).weighs]
    found = []
    for scheme in table.schemes:
        if scheme.pp == 1 or table[scheme].shares is None:
            continue
        held = [one for one in weighing if num_layers is None or one.ranges * scheme.pp <= num_layers]
        best = {one.walk: one.name for one in sorted(held, key=lambda one: one.ranges)}
        found += [PipelineShape(PipelineShape.of(scheme).stages, name) for name in best.values()]
    return tuple(found)
