"""The job that a simulation is of: its model, costs, links and ranks, and which plans suit it. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.memory import JobMemory
from ds_hydra.costs.rank_bytes import ElementBytes
from ds_hydra.costs.shape_costs import with_shapes
from ds_hydra.costs.table_file import TableFile
from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.order import check_order
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import Cluster

NO_LIMIT = 2.0**62  # bytes of a device, for memory models: what limits a simulated plan is the table's MaxLen


@dataclass(frozen=True)
class SimulatedJob:
    """What stays the same from step to step."""

    plan: ModelPlan
    hidden: int  # features of what stages send to each other
    found: TableFile  # costs; a measured table's evidence gives each stage its own, and the update's
    links: LinkModel
    num_ranks: int
    element_bytes: int = 2  # of parameters and hidden states on their way
    memory: JobMemory | None = None
    gradient_bytes: int | None = None  # of gradients on their way; None: as many
    sum_bytes: int = 4  # of gradients where those of micro-batches add up
    cluster: Cluster | None = None  # which rank has a device of which class, where they are of several
    # Each rank's sums go to the rank so far behind it, which keeps a copy [Note: buddies]; 0: to none, as for plans.
    shift: int = 0
    lanes: bool = True  # whether pushes wait for memory beside computing, as on devices [Note: lanes]

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ConfigError(f"a job of {self.num_ranks} GPUs cannot be simulated; give at least 1")

    @property
    def elements(self) -> ElementBytes:
        """Bytes of elements of what a rank holds."""
        return ElementBytes(self.element_bytes, self.sum_bytes, wire=self.gradient_bytes)

    @property
    def table(self) -> CostTable:
        """The costs that plans are simulated with."""
        return self.found.table

    def placed(self, shape: StrategyShape) -> Strategy:
        """A strategy's stages on the job's ranks; PlanError for other ranks."""
        return place_strategy(shape, self.num_ranks, self.plan.num_layers, self.cluster)

    def check(self, plan: StepPlan) -> None:
        """PlanError for a plan that is not right in itself, of other ranks, above MaxLen, or that would stand still.

        The plan's own times are not compared: it may have been made with another table.
        """
        limits: dict[Any, int] = {cost.scheme: cost.max_length for cost in self.table.costs}
        validate_plan(plan, limits, self.num_ranks)
        check_order(plan, self.table)

    def with_costs_of(self, strategies: Sequence[StrategyShape]) -> SimulatedJob:
        """The same job with these candidates: with costs of their pipelines, whose stages may differ, and memory.

        PlanError if there are no costs, or for other ranks. Without a memory model only uniform pipelines have costs.
        """
        if self.memory is None:
            return self
        placed = {one: self.placed(one) for one in strategies}
        memory = self.memory.together(placed)
        table = with_shapes(self.table, strategies, memory)
        return replace(self, found=replace(self.found, table=table), memory=memory)
