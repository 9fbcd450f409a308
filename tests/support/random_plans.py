"""A seed in, a random step plan on some ranks out: pipelines of any shape and depth, one phase or two."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ds_hydra.costs.analytic import ModelShape, analytic_cost_table
from ds_hydra.costs.cost_table import CostTable, TableFile
from ds_hydra.pipe.schedules.registry import weighs
from ds_hydra.pipe.shape import DEFAULT_SCHEDULE, V_SCHEDULE, LayerRange, ParallelScheme, PipelineShape, StageShape
from ds_hydra.plan.simulate import simulate_pipeline
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan
from ds_hydra.simulate.job import SimulatedJob, llama_plan
from ds_hydra.simulate.links import LinkModel, Speed

MODEL = ModelShape(256, 12, 8, 8, 704, 2048, 11_000_000)
SCHEMES = tuple(ParallelScheme(tp, pp, sp) for tp in (1, 2, 4) for pp in (1, 2, 3, 4) for sp in (1, 2))


def random_table(rng: random.Random) -> CostTable:
    """Costs of all schemes, for devices from slow to fast."""
    return analytic_cost_table(MODEL, SCHEMES, 1 << 20, device_flops=10.0 ** rng.uniform(9, 12), layer_overhead_ms=0.02)


def random_job(rng: random.Random, num_ranks: int) -> SimulatedJob:
    """A small model on nodes of 4 ranks or on one, with links from fast to slow."""
    node = rng.choice([4, num_ranks])
    inside = Speed(10.0 ** rng.uniform(-7, -4), 10.0 ** rng.uniform(8, 11))
    between = Speed(2 * inside.latency_s, inside.bytes_per_s / rng.choice([1, 4, 12]))
    found = TableFile(random_table(rng), step={"update_ms_per_element": 1e-7, "fixed_ms": 0.1})
    return SimulatedJob(llama_plan(MODEL), MODEL.hidden, found, LinkModel(node, inside, between), num_ranks)


def random_lengths(rng: random.Random, count: int) -> tuple[int, ...]:
    """Lengths of sequences as of web pages, in tokens."""
    return tuple(min(4096, 1 + int(rng.lognormvariate(5, 1))) for _ in range(count))


def random_plan(
    rng: random.Random, table: CostTable, num_ranks: int, *, step: int = 0, lengths: tuple[int, ...] = ()
) -> StepPlan:
    """Random pipelines that tile the ranks and share sequences; a third of all plans has two phases.

    `lengths` are those of the sequences; none: random ones.
    """
    lengths = lengths or random_lengths(rng, rng.randint(1, 4 * num_ranks))
    positions = list(range(len(lengths)))
    rng.shuffle(positions)
    parts = [positions]
    if rng.random() < 1 / 3 and len(positions) > 1:
        cut = rng.randint(1, len(positions) - 1)
        parts = [positions[:cut], positions[cut:]]
    phases = tuple(_phase(rng, table, num_ranks, part, lengths) for part in parts)
    return StepPlan(step, tuple(range(len(lengths))), lengths, phases, sum(phase.predicted_ms for phase in phases))


def _phase(
    rng: random.Random, table: CostTable, num_ranks: int, positions: Sequence[int], lengths: Sequence[int]
) -> Phase:
    shapes: list[PipelineShape] = []
    left = num_ranks
    while left:
        shapes.append(PipelineShape.of(rng.choice([scheme for scheme in SCHEMES if scheme.num_ranks <= left])))
        left -= shapes[-1].num_ranks
    return dealt_phase(rng, table, shapes, positions, lengths)


def unequal_shapes(rng: random.Random, num_ranks: int) -> list[PipelineShape]:
    """Pipelines that tile the ranks, of two stages or more wherever two ranks are left, which differ in degrees and in
    layers."""
    shapes: list[PipelineShape] = []
    left = num_ranks
    while left > 1:
        stages: list[StageShape] = []
        while left and len(stages) < 4 and (len(stages) < 2 or rng.random() < 0.5):
            degrees = [(tp, sp) for tp in (1, 2, 4) for sp in (1, 2) if tp * sp <= max(1, left - (not stages))]
            stages.append(StageShape(*rng.choice(degrees)))
            left -= stages[-1].num_ranks
        cuts = sorted(rng.sample(range(1, MODEL.layers), len(stages) - 1))
        held = [(LayerRange(*ends),) for ends in pairwise([0, *cuts, MODEL.layers])]
        shapes.append(PipelineShape(tuple(replace(one, layers=own) for one, own in zip(stages, held, strict=True))))
    return shapes + [PipelineShape.of(ParallelScheme())] * left


def dealt_phase(
    rng: random.Random,
    table: CostTable,
    shapes: Sequence[PipelineShape],
    positions: Sequence[int],
    lengths: Sequence[int],
) -> Phase:
    """Sequences dealt out at random to pipelines, whose costs the table has, under random schedules."""
    dealt: list[list[list[int]]] = [[] for _ in shapes]
    for position in positions:
        batches = rng.choice(dealt)
        if not batches or rng.random() < 0.5:
            batches.append([])
        rng.choice(batches).append(position)
    pipelines = []
    for shape, batches in zip(shapes, dealt, strict=True):
        held = tuple(MicroBatchPlan.of_whole(batch, lengths) for batch in batches if batch)
        ms = table[shape].pipeline_ms([table[shape].load_ms(batch.lengths) for batch in held])
        known = (DEFAULT_SCHEDULE, DEFAULT_SCHEDULE, "zb-h1", "list", V_SCHEDULE)
        schedule = rng.choice(known[: 4 if shape.num_layers else 5])  # a V of stages that say what they hold says both
        planned = PipelinePlan(PipelineShape(shape.stages, schedule), held, ms)
        if weighs(schedule):
            again = tuple(replace(batch, recompute=rng.choice((0.0, 0.0, 0.5, 1.0))) for batch in held)
            planned = replace(planned, microbatches=again)
            planned = replace(planned, predicted_ms=simulate_pipeline(planned, table))
        pipelines.append(planned)
    return Phase(tuple(pipelines))
