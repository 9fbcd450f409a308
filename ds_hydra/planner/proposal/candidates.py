"""Which schemes of a cost table a job can use, and strategies as counts of each. Pure: no torch.

Which schemes a model can be cut by at all, `plan.schemes.feasible_schemes` says: those get into a cost table.
"""

from __future__ import annotations

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import NodeSize, largest_node


def usable_schemes(
    cost_table: CostTable, num_ranks: int, node_size: NodeSize = 8, tp_across_nodes: bool = False
) -> tuple[ParallelScheme, ...]:
    """The cost table's schemes that fit the ranks and the placement rule, in the table's order."""
    usable = tuple(
        scheme
        for scheme in cost_table.schemes
        if scheme.num_ranks <= num_ranks and (tp_across_nodes or scheme.tp <= largest_node(node_size))
    )
    if not usable:
        raise PlanError(
            f"no scheme of the cost table fits {num_ranks} ranks in nodes of {node_size}: it has "
            f"{', '.join(map(str, cost_table.schemes))}; measure smaller schemes, or allow tp across nodes"
        )
    return usable
