"""Contexts that hardly any scheme holds whole: the bound on steps there, and aims that they miss. Pure: no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.planner.chunked_space import ChunkedSpace
from ds_hydra.planner.exact.counts import continuous_ms, scheme_of
from ds_hydra.planner.proposal.propose import wider_shapes
from ds_hydra.rivals.costs import NODE
from ds_hydra.rivals.static import Lengths
from tools.systems.cells import Cell
from tools.systems.ours import all_schemes, layers_of


def chunked_bound_ms(cell: Cell, batches: Sequence[Lengths]) -> float:
    """Mean over the batches of the least time in which fractions of pipelines would do all work, with slices and the
    least layers computed again that each length asks for; without bubbles, with c as in full micro-batches.

    Over schemes with SP inside nodes on stages: over two nodes it takes more GPU-seconds than it saves.
    """
    table, layers = all_schemes(cell), layers_of(cell)
    inside = [s for s in wider_shapes(table, num_layers=layers) if scheme_of(s).tp * scheme_of(s).sp <= NODE]
    shapes = [*inside, *(PipelineShape.of(scheme) for scheme in table.schemes if scheme.pp == 1)]
    space = ChunkedSpace(table, [StrategyShape((shape,)) for shape in shapes], slices=True, layers=layers)
    ones = np.ones(len(shapes))
    arrays = space.bounding._replace(pp=ones, c=np.zeros(len(shapes)))
    sizes = np.array([shape.num_ranks for shape in shapes])
    found = []
    for lengths in batches:
        batch = space.batch(lengths)
        full = np.array([cost.c / cost.max_length for cost in space.costs])
        with_c = batch.with_work(batch.items.work + full[:, None] * batch.items.tokens)
        found.append(continuous_ms(with_c, arrays, sizes, cell.gpus))
    return statistics.fmean(found)
