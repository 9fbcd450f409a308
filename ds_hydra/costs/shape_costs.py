"""Costs of pipelines whose stages differ, by those of uniform schemes. Pure: no torch.

[Note: costs of stages that differ]
The table's costs of <TP, PP, SP> are those of a stage with 1/PP of the layers. So stage s of a shape with S stages
costs as a stage of <TP_s, S, SP_s>, times its layers over an even share of them. The costs of the pipeline are those of
the slowest stage: each coefficient is the largest of the stages'. What the others take of its time for a micro-batch of
half MaxLen are their shares, from which the drain follows [Note: cost model]. An example with 4 layers: in
`(sp2[0:1] > tp2[1:4])` stage 0 has 1/2 of an even share and costs half of a stage of sp2pp2, stage 1 has 3/2 of one and
costs 1.5 times a stage of tp2pp2; if these two cost the same, the shares are 1/3 and 1, and the pipeline drains over a
third of its largest micro-batch.

A stage on devices of a class costs as the table's row of that class, whose text names it, such as `tp4pp2@h20`. Of a
class one row for each <TP, SP> is enough: that with as many stages, or else the one nearest to it, as what a layer
takes does not depend on how many stages there are. So any split of the layers has a price, also one that was never
measured. A row's MaxLen was found for an even share of the layers on a first stage, which keeps PP micro-batches of
them; a stage that keeps more layers at once holds as much less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.memory import JobMemory
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StageShape, StrategyShape
from ds_hydra.zero_hetero.errors import PlanError

RECOMPUTED_WORK = 4 / 3  # of forward and backward, where the forward runs twice


def least_work(table: CostTable, lengths: Sequence[int], *, but_attention: float = 1.0) -> float:
    """Rank-milliseconds of sequences, each under the scheme that takes least of them; infinite where none holds one.
    What does not grow with the square of a length takes `but_attention` times as much as the table says."""
    tokens, count = np.unique(np.asarray(lengths, dtype=np.float64), return_counts=True)
    linear = but_attention * tokens
    work = [
        np.where(tokens <= one.max_length, (one.a * tokens**2 + one.b * linear) * one.scheme.num_ranks, np.inf)
        for one in table.costs
    ]
    return float((np.min(work, axis=0) * count).sum())


def less_work_recomputed(kept: float, again: float) -> bool:
    """Whether layers that are computed again save more by narrower layouts than their second forward costs.

    Both are the `least_work` of tables of layers that are kept: of the layouts that hold each sequence if layers are
    kept, and if they are computed again; infinite where none does.
    """
    return kept > RECOMPUTED_WORK * again


def stage_schemes(pipeline: PipelineShape) -> Iterator[ParallelScheme]:
    """For each stage the scheme whose costs price it: its degrees, in a pipeline of as many stages."""
    return (ParallelScheme(stage.tp, pipeline.pp, stage.sp, stage.ep) for stage in pipeline.stages)


def used_schemes(strategies: Iterable[StrategyShape]) -> tuple[ParallelScheme, ...]:
    """The schemes whose costs these strategies need, in rising order; those of device classes are not among them."""
    pipelines = {pipeline for strategy in strategies for pipeline in strategy.pipelines}
    return tuple(sorted({
        scheme
        for pipeline in pipelines
        for stage, scheme in zip(pipeline.stages, stage_schemes(pipeline), strict=True)
        if not stage.device
    }))  # fmt: skip


def spreading_rows(table: CostTable, schemes: Iterable[ParallelScheme]) -> CostTable:
    """The table with rows for those of `schemes` that spread whole experts and have none: those of the same degrees
    with experts cut by width, which are as many numbers on each rank, and as many products in the mean."""
    known = {cost.scheme: cost for cost in table.costs}
    missing = [scheme for scheme in dict.fromkeys(schemes) if scheme.ep > 1 and scheme not in known]
    found = [(scheme, known.get(replace(scheme, ep=1))) for scheme in missing]
    added = [replace(row, scheme=scheme, derived=f"that of {row.scheme}") for scheme, row in found if row is not None]
    return replace(table, costs=(*table.costs, *added)) if added else table


def of_one_kind(table: CostTable, schemes: Iterable[ParallelScheme]) -> CostTable:
    """The rows of a table for proposed strategies of a model that may run these `schemes`: whole experts over tensor
    parallel ranks where it spreads them, priced as `spreading_rows`, and else none that spread any."""
    spreads = [scheme for scheme in schemes if scheme.ep > 1]
    # Over sequence parallel ranks whole experts have collectives that those without have not: only what is measured.
    table = spreading_rows(table, (scheme for scheme in spreads if scheme.ep == scheme.tp))
    kept = tuple(
        cost
        for cost in table.costs
        if not isinstance(cost.scheme, ParallelScheme)
        or (cost.scheme.tp == 1 or cost.scheme.ep > 1 if spreads else cost.scheme.ep == 1)
    )
    return table if len(kept) == len(table.costs) else replace(table, costs=kept)


def whole_are_cheaper(table: CostTable) -> bool:
    """Whether experts that tensor parallel ranks hold as whole ones take no longer than such as are cut by width, in
    the mean of the schemes that were measured with both. Not of a table without any: what is derived knows nothing of
    experts that are chosen more often than others."""
    known = {cost.scheme: cost for cost in table.costs}
    ratios = [
        whole.load_ms([row.util_length]) / row.load_ms([row.util_length])
        for scheme, row in known.items()
        if isinstance(scheme, ParallelScheme) and scheme.tp > 1 and scheme.ep == 1
        and (whole := known.get(replace(scheme, ep=scheme.tp))) is not None
    ]  # fmt: skip
    return 0 < sum(ratios) <= len(ratios)


def of_class(table: CostTable, device: str) -> CostTable:
    """The rows of a table as those of devices of one class: `tp4pp2` becomes `tp4pp2@h20`. PlanError for rows that name
    another one."""
    return CostTable(tuple(replace(cost, scheme=_named(cost.scheme, device)) for cost in table.costs), table.source)


def _named(scheme: ParallelScheme | PipelineShape, device: str) -> PipelineShape:
    shape = PipelineShape.of(scheme) if isinstance(scheme, ParallelScheme) else scheme
    if others := {stage.device for stage in shape.stages} - {"", device}:
        raise PlanError(f"{shape} is of the class {min(others)!r} and not of {device!r}")
    return replace(shape, stages=tuple(replace(stage, device=device) for stage in shape.stages))


def class_rows(table: CostTable) -> Mapping[StageShape, Mapping[int, SchemeCost]]:
    """A table's rows of device classes whose stages are all alike: by stage, and by their number."""
    found: dict[StageShape, dict[int, SchemeCost]] = {}
    for cost in table.costs:
        if isinstance(cost.scheme, PipelineShape):
            first = cost.scheme.stages[0]
            if first.device and not first.layers and cost.scheme.stages.count(first) == cost.scheme.pp:
                found.setdefault(first, {})[cost.scheme.pp] = cost
    return found


def with_shapes(table: CostTable, strategies: Iterable[StrategyShape], memory: JobMemory) -> CostTable:
    """The table, with a further entry for each pipeline of the strategies that is not uniform.

    Raises PlanError when it lacks a scheme of `used_schemes` or a row of a class, or a shape does not fit the model's
    number of layers.
    """
    known = {cost.scheme for cost in table.costs}
    keys = dict.fromkeys(pipeline.cost_key for strategy in strategies for pipeline in strategy.pipelines)
    added = [price(key, table, memory) for key in keys if isinstance(key, PipelineShape) and key not in known]
    return replace(table, costs=(*table.costs, *added)) if added else table


def price(pipeline: PipelineShape, table: CostTable, memory: JobMemory) -> SchemeCost:
    """Costs of a pipeline from those of its stages' schemes [Note: costs of stages that differ].

    MaxLen is the least of the schemes' and of what the memory model counts for the pipeline itself; at least 1, so
    that what does not fit at all can be refused with its bytes.
    """
    list(_rows(pipeline, table))  # what has no costs is refused as that, before its memory is counted
    return priced(pipeline, table, memory.plan.num_layers, memory.max_length(pipeline))


def priced(pipeline: PipelineShape, table: CostTable, num_layers: int, most: int) -> SchemeCost:
    """The same where stages have memory for micro-batches of so many tokens."""
    stages = place_pipeline(pipeline, 0, num_layers).stages
    rows = list(_rows(pipeline, table))
    shares = [row.scheme.pp * stage.num_layers / num_layers for row, stage in zip(rows, stages, strict=True)]
    figures = ((row.a, row.b, row.c, row.floor) for row in rows)
    scaled = [tuple(one * share for one in row) for row, share in zip(figures, shares, strict=True)]
    a, b, c, floor = map(max, zip(*scaled, strict=True))
    limits = [
        row.max_length
        if not shape.device
        else int(row.max_length * min(1.0, num_layers / ((pipeline.pp - at) * stage.num_layers)))
        for at, (row, stage, shape) in enumerate(zip(rows, stages, pipeline.stages, strict=True))
    ]
    max_length = max(1, min(most, *limits))
    # Stages that differ wait for the slowest, whose shares decide when others can go on.
    slowest = max(range(len(rows)), key=lambda stage: rows[stage].b * shares[stage])
    util_length = min(max_length, max(row.util_length for row in rows))
    derived = "the slowest of its stages: " + ", ".join(dict.fromkeys(str(row.scheme) for row in rows))
    tokens = max(1, max_length // 2)
    most = max(floor, (a * tokens + b) * tokens + c)
    takes = tuple(min(1.0, max(w, (x * tokens + y) * tokens + z) / most) for x, y, z, w in scaled)
    return SchemeCost(
        pipeline,
        a,
        b,
        c,
        max_length,
        util_length,
        rows[slowest].shares,
        derived,
        takes if min(takes) < 1.0 else (),
        floor,
    )


def _rows(pipeline: PipelineShape, table: CostTable) -> Iterator[SchemeCost]:
    """For each stage the costs that price it, times what its layers are of an even share of that row's stages."""
    known = class_rows(table) if any(stage.device for stage in pipeline.stages) else {}
    for stage, scheme in zip(pipeline.stages, stage_schemes(pipeline), strict=True):
        if not stage.device:
            yield table[scheme]
            continue
        by_width = StageShape(stage.tp, stage.sp, (), stage.device)
        rows = known.get(replace(by_width, ep=stage.ep)) or known.get(by_width)
        if rows is None:
            of_it = [str(cost.scheme) for one, found in known.items() if one.device == stage.device
                     for cost in found.values()]  # fmt: skip
            raise PlanError(
                f"the cost table has no row of tp{stage.tp} sp{stage.sp} on devices of class {stage.device!r}, which "
                f"{pipeline} needs: "
                + (f"of that class it has {', '.join(of_it)}" if of_it else "it has none of that class")
                + "; measure it with `ds-hydra profile` on such a device"
            )
        # The nearest number of stages by ratio; of two that are as near, the smaller one.
        yield rows[min(rows, key=lambda pp: (max(pp / pipeline.pp, pipeline.pp / pp), pp))]
