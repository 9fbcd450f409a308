"""Which schemes may be used, and strategies as counts of each. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.zero_hetero.errors import PlanError


def candidate_schemes(
    num_ranks: int,
    *,
    num_layers: int,
    num_heads: int,
    node_size: int = 8,
    max_pp: int = 8,
    tp_across_nodes: bool = False,
) -> tuple[ParallelScheme, ...]:
    """Schemes <TP, PP, SP> that this job could run: TP*SP divides the heads, stages hold whole layers.

    TP stays inside a node of `node_size` ranks unless `tp_across_nodes`; a job needs no more ranks than it has.
    """
    found = [
        ParallelScheme(tp, pp, sp)
        for tp in range(1, num_heads + 1)
        for sp in range(1, num_heads // tp + 1)
        for pp in range(1, min(max_pp, num_layers) + 1)
        if tp & (tp - 1) == 0 and sp & (sp - 1) == 0
        if num_heads % (tp * sp) == 0 and num_layers % pp == 0 and tp * sp * pp <= num_ranks
        if tp_across_nodes or tp <= node_size
    ]
    return tuple(sorted(found))


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


def place_order(scheme: ParallelScheme) -> tuple[int, int, int, int]:
    """Sort key of pipelines in rank order: widest TP first keeps every TP group inside a node."""
    return (-scheme.tp, -scheme.sp * scheme.tp, -scheme.pp, scheme.sp)


def counts_to_schemes(counts: Sequence[int], schemes: Sequence[ParallelScheme]) -> tuple[ParallelScheme, ...]:
    """One scheme per pipeline in rank order, from the number of pipelines of each scheme."""
    each = [scheme for scheme, count in zip(schemes, counts, strict=True) for _ in range(count)]
    return tuple(sorted(each, key=place_order))


def crosses_nodes(strategy: Sequence[ParallelScheme], node_size: int) -> bool:
    """Whether some tensor parallel group of the strategy would span two nodes (or more than it must)."""
    first = 0
    for scheme in strategy:
        for start in range(first, first + scheme.num_ranks, scheme.tp):
            needed = math.ceil(scheme.tp / node_size)
            if (start + scheme.tp - 1) // node_size - start // node_size + 1 > needed:
                return True
        first += scheme.num_ranks
    return False


def fill_ranks(counts: Sequence[int], sizes: np.ndarray, num_ranks: int) -> tuple[int, ...] | None:
    """The counts with leftover ranks given to more pipelines, of schemes already used first; None if that fails."""
    filled = list(counts)
    left = num_ranks - int(np.dot(filled, sizes))
    order = sorted(range(len(filled)), key=lambda k: (counts[k] == 0, -int(sizes[k])))
    for k in order:
        size = int(sizes[k])
        while left >= size:
            filled[k] += 1
            left -= size
    return tuple(filled) if left == 0 else None
