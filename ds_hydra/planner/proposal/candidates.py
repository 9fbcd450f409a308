"""Which schemes of a cost table a job can use, and strategies as counts of each. Pure: no torch.

Which schemes a model can be cut by at all, `plan.schemes.feasible_schemes` says: those get into a cost table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.zero_hetero.errors import PlanError


def usable_schemes(
    cost_table: CostTable, num_ranks: int, node_size: int = 8, tp_across_nodes: bool = False
) -> tuple[ParallelScheme, ...]:
    """The cost table's schemes that fit the ranks and the placement rule, in the table's order."""
    usable = tuple(
        scheme
        for scheme in cost_table.schemes
        if scheme.num_ranks <= num_ranks and (tp_across_nodes or scheme.tp <= node_size)
    )
    if not usable:
        raise PlanError(
            f"no scheme of the cost table fits {num_ranks} ranks in nodes of {node_size}: it has "
            f"{', '.join(map(str, cost_table.schemes))}; measure smaller schemes, or allow tp across nodes"
        )
    return usable


def scheme_of(shape: PipelineShape) -> ParallelScheme:
    """The degrees of a pipeline whose stages are alike but for their layers."""
    first = shape.stages[0]
    return ParallelScheme(first.tp, shape.pp, first.sp)


def _place_order(shape: PipelineShape) -> tuple[int, int, int, int]:
    """Sort key of pipelines in rank order: widest TP first keeps every TP group inside a node.

    With nodes of 8, tp4 + tp8 + tp4 would lay the tp8 over ranks 4 to 11, on two nodes. In the order tp8 + 2*tp4 every
    group begins at a multiple of its own width, as with powers of two all wider ones before it are multiples of that.
    """
    scheme = scheme_of(shape)
    return (-scheme.tp, -scheme.sp * scheme.tp, -scheme.pp, scheme.sp)


def counts_to_strategy(counts: Sequence[int], shapes: Sequence[ParallelScheme | PipelineShape]) -> StrategyShape:
    """Pipelines in rank order, from the number of pipelines of each scheme or shape, whose stages are alike."""
    each = [PipelineShape.of(shape) if isinstance(shape, ParallelScheme) else shape for shape in shapes]
    kinds = sorted(zip(each, counts, strict=True), key=lambda kind: _place_order(kind[0]))
    runs = [(shape,) * count for shape, count in kinds]
    return StrategyShape(tuple(itertools.chain.from_iterable(runs)))
