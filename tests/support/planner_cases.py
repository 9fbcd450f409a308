"""Small planning instances with an optimum; random plans, cut plans, memory and plans of small Llamas."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ds_hydra.costs import memory
from ds_hydra.costs.analytic import ModelShape, analytic_cost_table, estimate_activations
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.memory import JobMemory
from ds_hydra.pipe.model_plan import ModelPlan, ParamSpec, ShardRule, make_buckets
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.schedules.registry import weighs
from ds_hydra.pipe.shape import (
    DEFAULT_SCHEDULE,
    V_SCHEDULE,
    LayerRange,
    ParallelScheme,
    PipelineShape,
    StageShape,
    StrategyShape,
)
from ds_hydra.plan.simulate import simulate_pipeline, simulated_ms
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, Span, StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner import Planner, PlannerOptions, PlanRecipe
from ds_hydra.simulate.job import SimulatedJob, llama_plan
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.owners import owned_by_stages
from ds_hydra.zero_hetero.errors import PlanError

# --- Small planning instances, and an optimum by plain enumeration that shares no code with the planner.
TABLES = Path(__file__).parents[2] / "examples" / "cost_tables"
POOL = ("4*tp16", "tp16 + 6*tp8", "tp16 + 2*tp8 + 8*tp4", "2*tp8 + 12*tp4", "8*tp4pp2", "tp16 + tp8 + 8*tp4 + tp2pp4")


@dataclass(frozen=True)
class Instance:
    """A table, strategies over it, and lengths."""

    table: CostTable
    strategies: tuple[StrategyShape, ...]
    lengths: tuple[int, ...]

    def planner(self, **options: object) -> Planner:
        return Planner(
            self.table,
            self.strategies,
            PlannerOptions(kernels="compiled", **options),  # type: ignore[arg-type]
        )


def random_instance(rng: np.random.Generator, most_sequences: int = 5, *, floors: bool = False) -> Instance:
    """Five schemes with random costs, one or two strategies of 4 ranks, few sequences, some near MaxLen."""
    shapes = [
        ParallelScheme(4, 1),
        ParallelScheme(2, 1),
        ParallelScheme(1, 2),
        ParallelScheme(1, 1),
        ParallelScheme(1, 4),
    ]
    limits = np.sort(rng.integers(20, 400, size=len(shapes)))[::-1]
    costs = tuple(
        SchemeCost(
            scheme,
            a=float(rng.choice([0.0, 1e-3, 1e-2])),
            b=float(rng.uniform(0.05, 1.0)),
            c=float(rng.choice([0.0, 1.0, 20.0, 60.0])),
            max_length=int(limit),
            util_length=int(rng.integers(1, min(limit, 60) + 1)),
            floor=float(rng.choice([0.0, 30.0, 90.0])) if floors else 0.0,
        )
        for scheme, limit in zip(shapes, limits, strict=True)
    )
    texts = rng.choice(["tp4", "2*tp2", "tp2 + 2*tp1", "4*tp1", "2*pp2", "pp2 + tp2", "pp2 + 2*tp1", "pp4"], size=2)
    strategies = tuple(StrategyShape.parse(str(text)) for text in dict.fromkeys(texts))
    table = CostTable(costs)
    longest = max(table[s].max_length for strategy in strategies for s in strategy.pipelines)
    count = int(rng.integers(1, most_sequences + 1))
    lengths = np.minimum(longest, 1 + (longest * rng.random(count) ** rng.choice([1.0, 3.0])).astype(int))
    return Instance(table, strategies, tuple(lengths.tolist()))


def partitions(items: tuple[int, ...]) -> Iterator[list[list[int]]]:
    """All set partitions."""
    if not items:
        yield []
        return
    for smaller in partitions(items[1:]):
        yield [[items[0]], *smaller]
        for index, block in enumerate(smaller):
            yield [*smaller[:index], [items[0], *block], *smaller[index + 1 :]]


def pipeline_optimum(cost: SchemeCost, lengths: tuple[int, ...]) -> float:
    """Least time of one pipeline over all packings that MaxLen and appendix D's range of V allow."""
    if not lengths:
        return 0.0
    feasible: list[tuple[int, float]] = []
    for blocks in partitions(lengths):
        if all(sum(block) <= cost.max_length for block in blocks):
            loads = [max(cost.floor, sum(cost.a * x * x + cost.b * x for x in block) + cost.c) for block in blocks]
            feasible.append((len(blocks), sum(loads) + (cost.scheme.pp - 1) * max(loads)))
    if not feasible:
        return math.inf
    most = max(min(v for v, _ in feasible), sum(lengths) // cost.util_length)
    return min(ms for v, ms in feasible if v <= most)


def strategy_optimum(instance: Instance, strategy: StrategyShape) -> float:
    """Least slowest pipeline over all ways to deal the sequences out."""
    known: dict[tuple[PipelineShape, tuple[int, ...]], float] = {}
    best = math.inf
    for owners in itertools.product(range(len(strategy.pipelines)), repeat=len(instance.lengths)):
        slowest = 0.0
        for p, shape in enumerate(strategy.pipelines):
            own = tuple(sorted(x for x, owner in zip(instance.lengths, owners, strict=True) if owner == p))
            if (shape, own) not in known:
                known[shape, own] = pipeline_optimum(instance.table[shape], own)
            slowest = max(slowest, known[shape, own])
        best = min(best, slowest)
    return best


def a800_batch(seed: int, sequences: int = 190) -> list[int]:
    """CommonCrawl-like lengths."""
    drawn = np.random.default_rng(seed).lognormal(6.22, 1.233, size=sequences)
    return np.clip(drawn.astype(int), 1, 32768).tolist()


def planner_of(table: CostTable, texts: Iterable[str], **options: Any) -> Planner:
    """A planner of these strategies, by compiled kernels unless the options say otherwise."""
    return Planner(
        table, [StrategyShape.parse(text) for text in texts], PlannerOptions(**{"kernels": "compiled", **options})
    )


def a800_planner(**options: Any) -> Planner:
    """The 32B table with a pool for 64 GPUs."""
    return planner_of(CostTable.load(TABLES / "llama_32b_a800.json"), POOL, **options)


# --- A seed in, a random step plan on some ranks out: pipelines of any shape and depth, one phase or two.
MODEL = ModelShape(256, 12, 8, 8, 704, 2048, 11_000_000)
SCHEMES = tuple(ParallelScheme(tp, pp, sp) for tp in (1, 2, 4) for pp in (1, 2, 3, 4) for sp in (1, 2))


def random_table(rng: random.Random) -> CostTable:
    """Costs of all schemes, for devices from slow to fast."""
    return analytic_cost_table(MODEL, SCHEMES, 1 << 20, device_flops=10.0 ** rng.uniform(9, 12), layer_overhead_ms=0.02)


def random_job(rng: random.Random, num_ranks: int) -> SimulatedJob:
    """A small model on nodes of 4 ranks or on one, with links from fast to slow; of some jobs all layers are owned by
    the ranks of a stage of two."""
    node = rng.choice([4, num_ranks])
    inside = Speed(10.0 ** rng.uniform(-7, -4), 10.0 ** rng.uniform(8, 11))
    between = Speed(2 * inside.latency_s, inside.bytes_per_s / rng.choice([1, 4, 12]))
    found = TableFile(random_table(rng), step={"update_ms_per_element": 1e-7, "fixed_ms": 0.1})
    halves, plan = StrategyShape.of([ParallelScheme(pp=2)] * (num_ranks // 2)), llama_plan(MODEL)
    if num_ranks % 2 == 0 and random.Random(found.table.costs[0].b).random() < 1 / 3:
        plan = owned_by_stages(plan, place_strategy(halves, num_ranks, MODEL.layers))
    return SimulatedJob(plan, MODEL.hidden, found, LinkModel(node, inside, between), num_ranks)


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


# --- A plan in; one that runs slices of the longer sequences, or computes layers again, out.
_LONG = 10  # tokens of a sequence that may be cut


def replaying(engine: Any, file: str) -> Any:
    """The plans of a file, for an engine to go on with."""
    from ds_hydra.engine.plans import PlanSource

    plans, config = engine.crew.plans, engine.job.config
    uncut = engine.crew.prepared.no_slices
    options = replace(config.planner_options(), choose="replay", replay_file=file, no_slices=uncut)
    recipe = PlanRecipe(plans.table, plans.strategies, options)
    return PlanSource(recipe, config, engine.job.sampler, engine.crew.world.channel, engine.crew.activity)


def in_slices(plan: StepPlan, table: CostTable, seed: int = 0) -> StepPlan:
    """The same sequences on the same pipelines, most of the long ones cut at random places into two to four slices.

    Slices of several sequences run in turns, as many as a stage has room for; short sequences stand beside them or
    between them.
    """
    draw = random.Random(f"{seed} {plan.step}")
    for most in (3, 2, 1):
        with suppress(PlanError):
            phases = tuple(
                replace(phase, pipelines=tuple(_cut(pipeline, table, most, draw) for pipeline in phase.pipelines))
                for phase in plan.phases
            )
            cut = replace(plan, phases=phases, predicted_ms=simulated_ms(phases, table), lower_bound_ms=0.0)
            validate_plan(cut, table, phases[0].shape.num_ranks)
            return cut
    return plan


def recomputing(plan: StepPlan, table: CostTable, seed: int = 0) -> StepPlan:
    """The same plan, most micro-batches of which compute a share of their layers again: few of them, or all."""
    draw = random.Random(f"{seed} {plan.step} again")

    def again(pipeline: PipelinePlan) -> PipelinePlan:
        batches = [replace(batch, recompute=draw.choice([0.0, 0.2, 0.5, 0.7, 1.0])) for batch in pipeline.microbatches]
        some = replace(pipeline, microbatches=tuple(batches))
        return replace(some, predicted_ms=simulate_pipeline(some, table)) if some.recomputes else pipeline

    phases = tuple(replace(phase, pipelines=tuple(map(again, phase.pipelines))) for phase in plan.phases)
    made = replace(plan, phases=phases, predicted_ms=simulated_ms(phases, table), lower_bound_ms=0.0)
    validate_plan(made, table, phases[0].shape.num_ranks)
    return made


def num_slices(plan: StepPlan) -> int:
    """Spans of a plan that are not whole sequences."""
    batches = [batch for _, pipeline in plan.named_pipelines() for batch in pipeline.microbatches]
    return sum((start, stop) != (0, plan.lengths[i]) for batch in batches for i, start, stop in batch.spans)


def _cut(pipeline: PipelinePlan, table: CostTable, most: int, draw: random.Random) -> PipelinePlan:
    spans = [span for batch in pipeline.microbatches for span in batch.spans]
    cut = [span for span in spans if span.stop >= _LONG and draw.random() < 0.8][:most]
    if not cut:
        return pipeline
    chains = [_slices(span, draw) for span in cut]
    rows: list[list[Span]] = []
    while chains:  # each turn takes the next slice of one of them
        chain = draw.choice(chains)
        rows.append([chain.pop(0)])
        chains = [left for left in chains if left]
    for span in spans:
        if span in cut:
            continue
        if not rows or draw.random() < 0.3:
            rows.insert(draw.randint(0, len(rows)), [span])
        else:
            beside = draw.choice(rows)
            beside.insert(draw.randint(0, len(beside)), span)
    sliced = replace(pipeline, microbatches=tuple(MicroBatchPlan(tuple(row)) for row in rows))
    return replace(sliced, predicted_ms=simulate_pipeline(sliced, table))


def _slices(span: Span, draw: random.Random) -> list[Span]:
    inner = sorted(draw.sample(range(1, span.stop), draw.randint(1, 3)))
    return [Span(span.sequence, *ends) for ends in pairwise([0, *inner, span.stop])]


# --- A small Llama's parameters, and the memory of a job that trains it.
GIB = 2**30


def small_llama_plan(layers: int = 8, hidden: int = 64, vocab: int = 1000) -> ModelPlan:
    specs = {
        "embed": ParamSpec("embed", (vocab, hidden), ShardRule(0)),
        "head": ParamSpec("head", (vocab, hidden), ShardRule(0)),
    }
    for i in range(layers):
        specs[f"l{i}"] = ParamSpec(f"l{i}", (12 * hidden, hidden), ShardRule(0))
    names = [frozenset({f"l{i}"}) for i in range(layers)]
    groups = [
        ("embeddings", frozenset({"embed"})),
        *((f"layers.{i}", n) for i, n in enumerate(names)),
        ("head", frozenset({"head"})),
    ]
    return ModelPlan(make_buckets(groups, specs), frozenset({"embed"}), tuple(names), frozenset({"head"}), 8, 8, True)


def small_llama_job(num_ranks: int = 8, device: float = GIB, **changes: object) -> JobMemory:
    figures = {(tp, sp): estimate_activations(64, 256, 8, 8, 2, tp, sp) for tp in (1, 2, 4) for sp in (1, 2, 4)}
    return JobMemory(small_llama_plan(), num_ranks, figures, 2, device_bytes=device, vocab=1000, **changes)  # type: ignore[arg-type]


# --- Sizes in, the model plan of a Llama with fused weights out: parts of one weight are cut one by one.
def fused_llama_plan(num_layers: int, hidden: int = 512, vocab: int = 8192) -> ModelPlan:
    """Shapes and shard rules of a Llama."""
    ffn = hidden * 11 // 4
    column, row, whole = ShardRule(dim=0), ShardRule(dim=1), ShardRule()
    specs = [ParamSpec("embed.weight", (vocab, hidden), column)]
    for layer in range(num_layers):
        shapes = {"qkv": (3 * hidden, hidden), "gate_up": (2 * ffn, hidden)}
        specs += [
            ParamSpec(f"{layer}.norm1", (hidden,), whole),
            ParamSpec(f"{layer}.qkv", shapes["qkv"], ShardRule(dim=0, parts=3)),
            ParamSpec(f"{layer}.o", (hidden, hidden), row),
            ParamSpec(f"{layer}.norm2", (hidden,), whole),
            ParamSpec(f"{layer}.gate_up", shapes["gate_up"], ShardRule(dim=0, parts=2)),
            ParamSpec(f"{layer}.down", (hidden, ffn), row),
        ]
    specs += [ParamSpec("norm", (hidden,), whole), ParamSpec("head.weight", (vocab, hidden), column)]
    by_name = {spec.name: spec for spec in specs}
    layers = tuple(frozenset(n for n in by_name if n.startswith(f"{layer}.")) for layer in range(num_layers))
    first, last = frozenset({"embed.weight"}), frozenset({"norm", "head.weight"})
    groups = [("embed", first), *((f"layer.{i}", names) for i, names in enumerate(layers)), ("head", last)]
    return ModelPlan(make_buckets(groups, by_name), first, layers, last)


# --- Another amount of memory for pushes than the one of the job.
@contextmanager
def room_for_pushes(room: int) -> Iterator[None]:
    """Within it pushes have so many bytes; what was counted with others is counted anew, before and after."""
    with mock.patch.object(memory, "room_for_pushes", return_value=room):
        memory._ranks.cache_clear()
        try:
            yield
        finally:
            memory._ranks.cache_clear()
