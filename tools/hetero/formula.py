"""The planner's time of a pipeline whose stages differ, against a simulation by each stage's own costs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shape_costs import class_rows, priced
from ds_hydra.data.lengths import read_lengths, sample_batches
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import placed
from ds_hydra.pipe.schedules.simulate import simulate_loads
from ds_hydra.pipe.shape import LayerRange, PipelineShape, StageShape, StrategyShape
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.proposal.mixed import split_by_speed
from tools import aims
from tools.hetero.clusters import CASES, table_of

_CONTEXT = 8192
_LAYERS = 60
_KINDS = ("layers by speed", "layers drawn")


def formula(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Relative differences over so many plans, of which half have layers by speed, as proposals do."""
    errors: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for kind, planned, simulated in drawn_plans(aims.UNEQUAL_PLANS // (10 if quick else 1)):
        errors[kind].append(planned / simulated - 1.0)
    every = np.abs(np.concatenate(list(errors.values())))
    median, most = float(np.median(every)), float(np.quantile(every, 0.95))
    for what, found, aim in (("median", median, aims.UNEQUAL_MEDIAN), ("95th percentile", most, aims.UNEQUAL_P95)):
        if found >= aim:
            missed.append(
                f"the planner's time of unequal pipelines differs by {found:.1%} ({what}), not below {aim:.0%}"
            )
    rows = {kind: np.array(found) for kind, found in errors.items()} | {"all": np.concatenate(list(errors.values()))}
    return [
        {"plans": kind, "number": len(found), "median of |error|": float(np.median(np.abs(found))),
         "95th percentile": float(np.quantile(np.abs(found), 0.95)), "mean": float(found.mean())}
        for kind, found in rows.items()
    ]  # fmt: skip


def drawn_plans(count: int, seed: int = 0) -> Iterator[tuple[str, float, float]]:
    """Pipelines of two classes with 2 to 8 stages of TP 1 to 8, and micro-batches planned from pretraining lengths: how
    the layers were split, the planner's ms, and the simulated ms."""
    rng, table = random.Random(seed), table_of(CASES[0])
    sample = read_lengths(shipped("pretraining"), _CONTEXT, count=20_000).lengths.tolist()
    rows = {stage: min(found.items())[1] for stage, found in class_rows(table).items()}
    for number in range(count):
        stages = [rng.choice(list(rows)) for _ in range(rng.randint(2, 8))]
        per_layer = [rows[stage].load_ms([_CONTEXT // 2]) for stage in stages]
        kind = _KINDS[number % 2]
        shape = _shape(stages, _by_speed(per_layer) if kind == _KINDS[0] else _random_split(rng, len(stages)))
        limit = rng.choice([_CONTEXT, 2 * _CONTEXT, 4 * _CONTEXT])
        cost = replace(priced(shape, table, _LAYERS, limit), max_length=limit)
        tokens = limit * rng.randint(len(stages), 32) // 2
        batch = sample_batches(sample, tokens, 1, number, _CONTEXT)[0].tolist()
        plan = Planner(CostTable((cost,)), [StrategyShape((shape,))], PlannerOptions(highs="off", effort=0)).plan(
            0, range(len(batch)), batch
        )
        (pipeline,) = plan.phases[0].pipelines
        lengths = [[batch[span.sequence] for span in one.spans] for one in pipeline.microbatches]
        loads = [[one.load_ms(held) for held in lengths] for one in _of_stages(shape, rows)]
        simulated = simulate_loads(placed("1f1b", Batches.whole(len(lengths)), shape.pp), loads)
        yield kind, plan.searched_ms, simulated


def _of_stages(shape: PipelineShape, rows: dict[StageShape, SchemeCost]) -> Iterator[SchemeCost]:
    """Each stage's own costs."""
    for stage, at in zip(shape.stages, place_pipeline(shape, 0, _LAYERS).stages, strict=True):
        row = rows[replace(stage, layers=())]
        share = at.num_layers / _LAYERS
        yield replace(row, a=share * row.a, b=share * row.b, c=share * row.c)


def _shape(stages: list[StageShape], layers: list[int]) -> PipelineShape:
    ends = pairwise(accumulate(layers, initial=0))
    return PipelineShape(
        tuple(replace(one, layers=(LayerRange(*held),)) for one, held in zip(stages, ends, strict=True))
    )


def _by_speed(layer_ms: list[float]) -> list[int]:
    found = split_by_speed(_LAYERS, layer_ms, [_LAYERS] * len(layer_ms))
    assert found is not None, "all layers find a place"
    return list(found)


def _random_split(rng: random.Random, stages: int) -> list[int]:
    cuts = sorted(rng.sample(range(1, _LAYERS), stages - 1))
    return [last - first for first, last in pairwise([0, *cuts, _LAYERS])]
