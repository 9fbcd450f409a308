"""ds-hydra as a comparison runs it: set up with other data than the batches that are reported."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.proposal.propose import Wider, propose_strategies, wider_shapes
from ds_hydra.rivals.costs import NODE, cluster_of, with_ulysses
from ds_hydra.rivals.static import Configuration, StepMs, hindsight, planned_by
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.step import exposed_ms
from ds_hydra.zero_hetero.errors import PlanError
from tools.systems.cells import SEEN_BEFORE, Cell

_TRIED = 3  # batches by which ours is set up
_CLOSE, _MIXES = 1.08, 3  # layouts of one shape that are looked at: so many times the best on one batch; and mixes
_MOST = 60  # of whole sequences, which are quick to plan


class Ours(NamedTuple):
    """A way to set our planner up: its candidates, and layers of the model where it may cut sequences and compute
    layers again (0: it may not)."""

    configuration: Configuration
    strategies: tuple[StrategyShape, ...]
    layers: int


def ds_hydra(cell: Cell, ms: StepMs) -> Ours:
    """The best of what `"strategies": "auto"` can be asked for, by steps of other data, simulated with their transfers.

    Whole sequences under 1F1B, or with slices, split backwards and V's besides; on the measured schemes of TP and PP,
    and with Ulysses on them: of up to two nodes where there are several stages. One stage may be three nodes that share
    queries.
    """
    tried = list(settings(cell, all_schemes(cell), ms))
    best = hindsight((one.configuration for one in tried), cell.batches(_TRIED, SEEN_BEFORE), ms).configuration
    return next(one for one in tried if one.configuration is best)


def settings(cell: Cell, table: CostTable, ms: StepMs) -> Iterator[Ours]:
    """What a job may choose from: plans of whole sequences only, or chunked pipelines besides."""
    layers = layers_of(cell)
    whole: tuple[StrategyShape, ...] = ()
    if max(cost.max_length for cost in table.costs) >= cell.context:
        whole = _proposed(cell, table, count=_MOST)
        yield Ours(_configured(cell, table, whole, ms, layers=0), whole, 0)
    wider = Wider(wider_shapes(table, num_layers=layers), layers=layers, plain=False)
    more = tuple(dict.fromkeys((*whole, *_proposed(cell, table, wider=wider))))
    yield Ours(_configured(cell, table, more, ms, layers=layers), more, layers)


def composed(cell: Cell, ours: Ours, ms: StepMs) -> Configuration:
    """The same with HiGHS, which composes strategies for the very batch, as a job has it."""
    table = ours.configuration.table
    return _configured(cell, table, ours.strategies, ms, layers=ours.layers, highs="composes")


def one_mix(cell: Cell, ours: Ours, plans: Sequence[StepPlan], ms: StepMs) -> Iterator[Configuration]:
    """The same with one and the same mix of pipelines in every step: those that it chose most often."""
    chosen = Counter(plan.phases[0].shape for plan in plans)
    for strategy, _ in chosen.most_common(_MIXES):
        one = _configured(cell, ours.configuration.table, (strategy,), ms, layers=ours.layers)
        yield one._replace(text=str(strategy))


def layers_of(cell: Cell) -> int:
    """Of the cell's model."""
    return cell.of_model.shape.layers


def one_layout(cell: Cell, ms: StepMs, *, chunked: bool) -> Iterator[Configuration]:
    """Our engine with pipelines of one shape in every step, sequences dealt out and packed by our planner: of whole
    sequences, or in slices and V's. Those that are close to the best on one batch."""
    table, layers = all_schemes(cell), layers_of(cell) if chunked else 0
    shapes = wider_shapes(table, num_layers=layers) if chunked else map(PipelineShape.of, table.schemes)
    batch = max(cell.batches(_TRIED, SEEN_BEFORE), key=max)
    found: list[tuple[float, Configuration]] = []
    for shape in shapes:
        if cell.gpus % shape.num_ranks:
            continue
        strategy = StrategyShape((shape,) * (cell.gpus // shape.num_ranks))
        configuration = _configured(cell, table, (strategy,), ms, layers=layers)._replace(text=str(strategy))
        with contextlib.suppress(PlanError):  # it does not hold the batch
            found.append((ms(configuration.plan(0, batch), table), configuration))
    best = min((taken for taken, _ in found), default=0.0)
    return (one for taken, one in sorted(found, key=lambda row: row[0]) if taken <= _CLOSE * best)


def spaces(cell: Cell, ms: StepMs) -> Iterator[Configuration]:
    """Our planner in larger and larger spaces; those whose pipelines do not hold the context are left out.

    Each proposes by itself, and the chunked ones have the whole sequences' strategies besides, as a job's candidates
    have.
    """
    table, layers = all_schemes(cell), layers_of(cell)
    whole: tuple[StrategyShape, ...] = ()
    for text, one in (("TP and PP", _some(table, sharing=1)), ("and SP", table)):
        if max(cost.max_length for cost in one.costs) >= cell.context:
            whole = _proposed(cell, one, count=_MOST)
            yield _configured(cell, one, whole, ms, layers=0)._replace(text=text)
    for text, one in (("and slices, V's", _some(table, sharing=NODE)), ("and SP of stages over two nodes", table)):
        wider = Wider(wider_shapes(one, num_layers=layers), layers=layers, plain=False)
        try:
            strategies = tuple(dict.fromkeys((*whole, *_proposed(cell, one, wider=wider))))
        except PlanError:  # none of it holds the context
            continue
        yield _configured(cell, table, strategies, ms, layers=layers)._replace(text=text)


def _some(table: CostTable, *, sharing: int) -> CostTable:
    """Schemes without SP, and those of at most so many ranks in a stage."""
    found = [cost for cost in table.costs if cost.uniform.sp == 1 or cost.uniform.tp * cost.uniform.sp <= sharing]
    return CostTable(tuple(found))


def all_schemes(cell: Cell) -> CostTable:
    """The measured schemes, and Ulysses on them as ours runs it, by lengths of other data."""
    return with_ulysses(cell, cell.lengths(SEEN_BEFORE))


def _proposed(cell: Cell, table: CostTable, **more: Any) -> tuple[StrategyShape, ...]:
    """Strategies that are proposed for other lengths of the same data."""
    return propose_strategies(
        table, cell.gpus, cell.lengths(SEEN_BEFORE), cell.tokens, cell.context, tp_across_nodes=True,
        exposed=partial(_exposed_ms, cell), **more,
    )  # fmt: skip


def _configured(
    cell: Cell, table: CostTable, strategies: tuple[StrategyShape, ...], ms: StepMs, *, layers: int, highs: str = "off"
) -> Configuration:
    """Our planner over these strategies; `layers` of the model where it may cut sequences and compute layers again."""
    planner = Planner(
        table, strategies, PlannerOptions(kernels="compiled", layers=layers, highs=highs),
        exposed_ms=[_exposed_ms(cell, one) for one in strategies], step_ms=partial(ms, table=table),
    )  # fmt: skip
    degrees = "TP, PP and SP" if any(cost.uniform.sp > 1 for cost in table.costs) else "TP and PP"
    kinds = "slices and V's" if layers else "whole sequences"
    return planned_by(f"{len(strategies)} strategies of {degrees}, {kinds}", table, planner)


@lru_cache(maxsize=1024)  # the ways to set ours up ask for many of the same strategies
def _exposed_ms(cell: Cell, strategy: StrategyShape) -> float:
    return exposed_ms(_cluster(cell), strategy, cell.tokens)


@lru_cache(maxsize=1)
def _cluster(cell: Cell) -> SimulatedJob:
    return cluster_of(cell, all_schemes(cell))
