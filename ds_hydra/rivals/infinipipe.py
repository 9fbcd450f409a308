"""InfiniPipe, which ours builds on, as published: equal pipelines of many stages that run chunks. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.plan.phase import MicroBatchPlan, Phase, PipelinePlan
from ds_hydra.plan.simulate import simulated_ms
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import check_room, modelled_ms
from ds_hydra.plan.works import has_formula
from ds_hydra.rivals.chunking import chunks, mesh_of
from ds_hydra.rivals.costs import NODE, Way, powers_of_two, table_of
from ds_hydra.rivals.hindsight import Configuration, Lengths, PlanStep
from ds_hydra.rivals.setting import Setting
from ds_hydra.rivals.static import by_load
from ds_hydra.zero_hetero.errors import PlanError

_STAGES = (8, 16)
_SLICES = (1, 2, 4, 8)
_RECOMPUTED = (0.0, 0.25, 0.5, 0.75, 1.0)


def infinipipe(setting: Setting) -> Iterator[Configuration]:
    """InfiniPipe: chunks of equal time through equal pipelines, TP or Ulysses inside nodes and stages between.

    Chunks by its Algorithm 1 with the number of slices that suits each step best, in 1F1B with the last slice's
    backward first; data parallel pipelines get equal work. Where a stage has not room for its chunks, all of them
    compute a share of their layers again, the least of a few that fits; its program chooses it for each chunk.
    Parameters are gathered inside nodes only, which counts as hidden.
    """
    way = Way(powers_of_two(NODE), ulysses=True, zero_3=True, hidden_gathers=True, stages=_STAGES)
    table = table_of(setting, way)
    for cost in table.costs:
        scheme = cost.uniform
        if setting.gpus % scheme.num_ranks or scheme.tp * scheme.sp > NODE or cost.room < setting.context:
            continue
        strategy = StrategyShape.of([scheme] * (setting.gpus // scheme.num_ranks))
        yield Configuration(str(strategy), table, _in_chunks(strategy, cost, table))


def _in_chunks(strategy: StrategyShape, cost: SchemeCost, table: CostTable) -> PlanStep:
    def plan(step: int, lengths: Lengths) -> StepPlan:
        dealt = by_load(lengths, cost, len(strategy.pipelines))
        found = []
        for slices in _SLICES:
            mesh = mesh_of(max(lengths), slices, cost)
            if mesh[0] > cost.max_length:
                continue
            made = [_pipeline(strategy.pipelines[0], chunks(own, lengths, mesh, cost), table) for own in dealt]
            pipelines = [one for one in made if one is not None]
            if len(pipelines) == len(made):
                phase = Phase(tuple(pipelines))
                ms, ids = simulated_ms((phase,), table), tuple(range(len(lengths)))
                found.append(StepPlan(step, ids, tuple(lengths), (phase,), ms))
        if not found:
            raise PlanError(f"{strategy} has no room for a sequence of {max(lengths)} tokens in chunks")
        return min(found, key=lambda one: one.predicted_ms)

    return plan


def _pipeline(shape: PipelineShape, batches: Sequence[MicroBatchPlan], table: CostTable) -> PipelinePlan | None:
    """A pipeline of these chunks with no more layers computed again than memory asks for; None where it has no room."""
    for share in _RECOMPUTED:
        tried = PipelinePlan(shape, tuple(replace(batch, recompute=share) for batch in batches), 0.0)
        if has_room(tried, table):
            return replace(tried, predicted_ms=modelled_ms(tried, table))
    return None


def has_room(pipeline: PipelinePlan, table: CostTable) -> bool:
    """Whether each stage holds all that its schedule keeps at once; whole sequences under 1F1B always fit."""
    if has_formula(pipeline):
        return True
    try:
        check_room(pipeline, table, str(pipeline.shape))
    except PlanError:
        return False
    return True
