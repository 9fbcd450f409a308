"""Costs of uniform schemes in, costs of pipelines whose stages differ out. Pure: no torch.

[Note: costs of stages that differ]
The table's costs of <TP, PP, SP> are those of a stage with 1/PP of the layers. So stage s of a shape with S stages
costs as a stage of <TP_s, S, SP_s>, times its layers over an even share of them; and as the planner takes all stages
of a pipeline to be as slow as the slowest, each coefficient is the largest of the stages'. An example with 4 layers:
in `(sp2[0:1] > tp2[1:4])` stage 0 has 1/2 of an even share and costs half of a stage of sp2pp2, stage 1 has 3/2 of one
and costs 1.5 times a stage of tp2pp2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.memory import JobMemory
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape


def stage_schemes(pipeline: PipelineShape) -> Iterator[ParallelScheme]:
    """For each stage the scheme whose costs price it: its degrees, in a pipeline of as many stages."""
    return (ParallelScheme(stage.tp, pipeline.pp, stage.sp) for stage in pipeline.stages)


def used_schemes(strategies: Iterable[StrategyShape]) -> tuple[ParallelScheme, ...]:
    """The schemes whose costs these strategies need, in rising order."""
    pipelines = {pipeline for strategy in strategies for pipeline in strategy.pipelines}
    return tuple(sorted({scheme for pipeline in pipelines for scheme in stage_schemes(pipeline)}))


def with_shapes(table: CostTable, strategies: Iterable[StrategyShape], memory: JobMemory) -> CostTable:
    """The table, with a further entry for each pipeline of the strategies that is not uniform.

    Raises PlanError when it lacks a scheme of `used_schemes`, or a shape does not fit the model's number of layers.
    """
    known = {cost.scheme for cost in table.costs}
    keys = dict.fromkeys(pipeline.cost_key for strategy in strategies for pipeline in strategy.pipelines)
    added = [price(key, table, memory) for key in keys if isinstance(key, PipelineShape) and key not in known]
    return CostTable((*table.costs, *added), table.source) if added else table


def price(pipeline: PipelineShape, table: CostTable, memory: JobMemory) -> SchemeCost:
    """Costs of a pipeline from those of its stages' schemes [Note: costs of stages that differ].

    MaxLen is the least of the schemes' and of what the memory model counts for the pipeline itself; at least 1, so
    that what does not fit at all can be refused with its bytes.
    """
    num_layers = memory.plan.num_layers
    stages = place_pipeline(pipeline, 0, num_layers).stages
    shares = [len(stages) * stage.num_layers / num_layers for stage in stages]
    rows = [table[scheme] for scheme in stage_schemes(pipeline)]
    a, b, c = (
        max(getattr(row, name) * share for row, share in zip(rows, shares, strict=True)) for name in ("a", "b", "c")
    )
    max_length = max(1, min(memory.max_length(pipeline), *(row.max_length for row in rows)))
    # Stages that differ wait for the slowest, whose shares decide when others can go on.
    slowest = max(range(len(rows)), key=lambda stage: rows[stage].b * shares[stage])
    util_length = min(max_length, max(row.util_length for row in rows))
    derived = "the slowest of its stages: " + ", ".join(dict.fromkeys(str(row.scheme) for row in rows))
    return SchemeCost(pipeline, a, b, c, max_length, util_length, rows[slowest].shares, derived)
