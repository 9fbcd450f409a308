"""ds-hydra as a comparison runs it: set up with other data than the batches that are reported."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.proposal.propose import QUICK, Wider, propose_strategies
from ds_hydra.planner.proposal.spaces import wider_shapes
from ds_hydra.simulate.exposed import exposed_ms
from ds_hydra.simulate.job import SimulatedJob
from tools.systems.cells import SEEN_BEFORE, Cell
from tools.systems.costs import Way, cluster_of, measured, table_of
from tools.systems.hindsight import Configuration, StepMs, hindsight, planned_by

LAYERS = {"7b": 32, "32b": 60}
_TRIED = 3  # batches by which ours is set up
_ULYSSES = (1, 2, 4, 8, 16)


def ds_hydra(cell: Cell, ms: StepMs) -> Configuration:
    """The best of what `"strategies": "auto"` can be asked for, by steps of other data, simulated with their transfers.

    Whole sequences under 1F1B, or with slices, split backwards and V's; on the measured schemes of TP and PP, or with
    Ulysses on those of one stage besides.
    """
    return hindsight(settings(cell), cell.batches(_TRIED, SEEN_BEFORE), ms).configuration


def settings(cell: Cell) -> Iterator[Configuration]:
    """What a job may choose from."""
    shared = all_schemes(cell)
    yield proposed(cell, measured(cell.model, cell.gpus), elastic=False)
    yield proposed(cell, shared, elastic=False)
    yield proposed(cell, shared, elastic=True)


def all_schemes(cell: Cell) -> CostTable:
    """The measured schemes, and Ulysses on those of one stage."""
    plain, more = measured(cell.model, cell.gpus), table_of(cell, Way(_ULYSSES, ulysses=True, overlapped=True))
    return CostTable((*plain.costs, *(cost for cost in more.costs if cost.scheme.pp == 1 and cost not in plain.costs)))


def proposed(cell: Cell, table: CostTable, *, elastic: bool) -> Configuration:
    """Our planner over the strategies that it proposes for other lengths of the same data."""
    layers, exposed = LAYERS[cell.model] if elastic else 0, partial(_exposed_ms, cell)
    strategies = propose_strategies(
        table, cell.gpus, cell.lengths(SEEN_BEFORE), cell.tokens, cell.context, tp_across_nodes=True, effort=QUICK,
        wider=Wider(wider_shapes(table, num_layers=layers), layers=layers) if elastic else None,
        exposed=exposed,
    )  # fmt: skip
    kinds = "slices and V's" if elastic else "whole sequences"
    degrees = "TP, PP and SP" if len(table.costs) > len(measured(cell.model, cell.gpus).costs) else "TP and PP"
    options = PlannerOptions(kernels="compiled", layers=layers)
    planner = Planner(table, strategies, options, exposed_ms=[exposed(one) for one in strategies])
    return planned_by(f"{len(strategies)} strategies of {degrees}, {kinds}", table, planner)


@lru_cache(maxsize=1024)  # the ways to set ours up ask for many of the same strategies
def _exposed_ms(cell: Cell, strategy: StrategyShape) -> float:
    return exposed_ms(_cluster(cell), strategy, cell.tokens)


@lru_cache(maxsize=1)
def _cluster(cell: Cell) -> SimulatedJob:
    return cluster_of(cell, all_schemes(cell))
