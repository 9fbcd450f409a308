"""Clusters that are not uniform: nodes of seven, numbers of ranks that nothing divides, devices of two classes.

  python -m tools.bench_hetero [--quick] [--json FILE] [--only PART ...]

nodes      a 7B model on 7, 15, 31 and 63 ranks of nodes that have lost one, on pretraining lengths up to 16K, 3,125
           tokens a rank: tokens per second and rank by the step simulator over those of the full machine
formula    the planner's time of 1,000 drawn pipelines whose stages differ, against a simulation of every action
published  Hetu v2's twelve clusters: a step of 64 sequences of 4K in s by our plan, proposed for the cluster, and by
           Hetu's own layout; Megatron's and DeepSpeed's over ours; where copies of masters have room
skewed     pretraining lengths up to 16K on four of them, 6,250 tokens a rank: mean step in s, and over it those of the
           best layout of one scheme, of equal shares of tokens for all ranks, and of each class alone
slow       one rank of 16, on an emulated cluster, at 1/1.2 and then at half speed, until it recovers: tokens per second
           and rank before, while nobody knows, and when plans give it less
sliced     pretraining lengths up to 8K on three of Hetu's clusters, 3,125 tokens a rank: mean step in s by strategies
           that were proposed without slices and V's, and with

Costs of `nodes` follow from FLOPs (`costs/analytic.py`: 0.15 PFLOP/s a device, 150 GB/s inside a node, 25 GB/s between
two), and MaxLen from the memory model with 80 GB and the activations that Hydraulis published. What the others assume
of H800 and H20 is printed. `--quick` takes fewer rows of each. Exits non-zero if an
aim is missed.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from ds_hydra.commands.figures import guarded, run_parts, shipped
from ds_hydra.costs.analytic import ModelShape, analytic_cost_table
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.memory import Activations, JobMemory
from ds_hydra.costs.shape_costs import class_rows, of_class, priced, with_shapes
from ds_hydra.costs.shares import Shares
from ds_hydra.data.lengths import read_lengths, sample_batches
from ds_hydra.emulate.cluster import EmulatedJob, EmulatedStep, emulate
from ds_hydra.engine.costs import within_memory
from ds_hydra.mixed.classes import propose_mixed, split_by_speed
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import placed
from ds_hydra.pipe.schedules.simulate import simulate_loads
from ds_hydra.pipe.shape import LayerRange, ParallelScheme, PipelineShape, StageShape, StrategyShape
from ds_hydra.plan.layouts import crossings, feasible_schemes
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.propose import propose_strategies
from ds_hydra.planner.recipe import warm_up
from ds_hydra.rivals.preview import Messages
from ds_hydra.simulate.job import SHIPPED, SimulatedJob, llama_plan
from ds_hydra.simulate.links import LinkModel
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import Cluster, NodeSize
from tools import aims, machine

ASSUMED = """
What is assumed, as nobody has published times of layers: a device computes at a share of its peak that large products
reach (H800 0.50, H20 0.88), links inside a node carry 0.75 of their rate, a layer costs 0.25 ms to launch for each
micro-batch, tensor parallelism loses what `costs/analytic.py` says, and half of what a rank pulls and pushes in a step
at 40 GB/s is waited for. Megatron splits layers evenly, so its slowest stage paces it; DeepSpeed gives each rank the
same work and computes all layers again. With this Hetu's own layouts come within 6 % of the two times that it prints.
"""

CONTEXT, SEQUENCES = 4096, 64  # of Hetu's steps
FLOPS = {"h800": 0.50 * 990e12, "h20": 0.88 * 148e12}
LINKS = {"h800": 0.75 * 400e9, "h20": 0.75 * 900e9}  # bytes/s inside a node
BYTES = {"h800": 80e9, "h20": 96e9}
LAUNCH_MS, BETWEEN, EXPOSED = 0.25, 40e9, 0.5
MODELS = {
    "32B": SHIPPED["a800-32b"].shape,
    "70B": ModelShape(8192, 80, 64, 8, 28672, 30592, 68_946_493_440),
}
_, _KEPT = SHIPPED["a800-32b"]  # bytes of activations a token, hidden unit and layer, by TP


@dataclass(frozen=True)
class Case:
    """A cluster of so many ranks of each class on nodes of eight, and what was trained on it."""

    name: str
    model: str
    h800: int
    h20: int
    hetu: str  # its own plan
    megatron: tuple[int, int, int, int]  # DP, TP, PP, sequences of a micro-batch
    deepspeed: tuple[int, int]  # DP with SP 2 and recomputation, sequences of a micro-batch
    printed_s: float | None = None

    @property
    def cluster(self) -> Cluster:
        """H800 first, as Hetu counts them; of each class the last node may have fewer than eight."""
        sizes: list[int] = []
        for count in (self.h800, self.h20):
            sizes += [8] * (count // 8) + [count % 8] * (count % 8 > 0)
        return Cluster(tuple(sizes), ("h800",) * self.h800 + ("h20",) * self.h20)


CASES = (
    Case("32B 16+16", "32B", 16, 16, "2*(tp4[0:7]@h20 > tp4[7:14]@h20 > tp4[14:37]@h800 > tp4[37:60]@h800)",
         (2, 4, 4, 2), (16, 2)),
    Case("32B 16+24", "32B", 16, 24, "2*(tp4[0:6]@h20 > tp4[6:12]@h20 > tp4[12:18]@h20 > tp4[18:39]@h800 > "
         "tp4[39:60]@h800)", (2, 4, 5, 2), (20, 4)),
    Case("32B 16+32", "32B", 16, 32, "4*(tp4[0:11]@h20 > tp4[11:22]@h20 > tp4[22:60]@h800)", (4, 4, 3, 2), (24, 1),
         6.05),
    Case("70B 16+16", "70B", 16, 16, "(tp8[0:11]@h20 > tp8[11:22]@h20 > tp8[22:51]@h800 > tp8[51:80]@h800)",
         (1, 8, 4, 1), (16, 1)),
    Case("70B 16+24", "70B", 16, 24, "(tp8[0:10]@h20 > tp8[10:20]@h20 > tp8[20:30]@h20 > tp8[30:55]@h800 > "
         "tp8[55:80]@h800)", (1, 8, 5, 1), (20, 2)),
    Case("70B 16+32", "70B", 16, 32, "2*(tp8[0:17]@h20 > tp8[17:34]@h20 > tp8[34:80]@h800)", (1, 8, 6, 1), (24, 1)),
    Case("C1", "32B", 0, 32, "2*tp4pp4@h20", (2, 4, 4, 2), (16, 2)),
    Case("C2", "32B", 0, 31, "tp4pp4@h20 + (tp4[0:16]@h20 > tp4[16:32]@h20 > tp4[32:48]@h20 > tp2[48:56]@h20 > "
         "tp1[56:60]@h20)", (1, 4, 6, 1), (12, 2)),
    Case("C3", "32B", 0, 24, "2*tp4pp3@h20", (1, 4, 6, 1), (12, 2)),
    Case("C4", "32B", 16, 32, "2*(tp4[0:5]@h20 > tp4[5:11]@h20 > tp4[11:17]@h20 > tp4[17:23]@h20 > tp4[23:41]@h800 > "
         "tp4[41:60]@h800)", (4, 4, 3, 2), (24, 1), 6.91),
    Case("C6", "32B", 15, 24, "(tp4[0:6]@h20 > tp4[6:12]@h20 > tp4[12:18]@h20 > tp4[18:39]@h800 > tp4[39:60]@h800) + "
         "(tp4[0:6]@h20 > tp4[6:12]@h20 > tp4[12:18]@h20 > tp4[18:40]@h800 > tp2[40:53]@h800 > tp1[53:60]@h800)",
         (2, 4, 4, 2), (16, 2)),
    Case("C7", "32B", 8, 24, "2*(tp4[0:9]@h20 > tp4[9:19]@h20 > tp4[19:29]@h20 > tp4[29:60]@h800)", (2, 4, 4, 2),
         (16, 2)),
)  # fmt: skip
"""C5 is "32B 16+24"."""


def rows_of(model: str, device: str, schemes: tuple[ParallelScheme, ...] = ()) -> CostTable:
    """Costs of a class: of one stage of each TP that holds the whole model, or of these schemes."""
    return analytic_cost_table(
        MODELS[model], schemes or tuple(ParallelScheme(tp) for tp in (1, 2, 4, 8)), 64 * CONTEXT,
        device_flops=FLOPS[device], link_bytes_per_second=LINKS[device], layer_overhead_ms=LAUNCH_MS,
    )  # fmt: skip


def table_of(case: Case) -> CostTable:
    """Rows of both classes that the cluster has."""
    tables = [of_class(rows_of(case.model, device), device) for device in case.cluster.classes]
    return CostTable(tuple(cost for table in tables for cost in table.costs), "FLOPs")


def memory_of(case: Case) -> JobMemory:
    """With masters sharded over all ranks and nothing computed again."""
    shape, cluster = MODELS[case.model], case.cluster
    figures = {(tp, 1): Activations(kept * shape.hidden / tp, 0.0, 0.0) for tp, kept in _KEPT.items()}
    return JobMemory(
        llama_plan(shape), cluster.num_ranks, figures, param_bytes=2, vocab=shape.vocab, node_size=cluster.node_size,
        device_bytes=min(BYTES[device] for device in cluster.classes), cluster=cluster, class_bytes=BYTES,
    )  # fmt: skip


def exchanged_ms(case: Case, strategy: StrategyShape) -> float:
    """What of pulls and pushes is waited for: by the rank that holds most, of 2 bytes each way."""
    plan = llama_plan(MODELS[case.model])
    most = 0.0
    for pipeline in dict.fromkeys(strategy.pipelines):
        for stage in place_pipeline(pipeline, 0, plan.num_layers).stages:
            most = max(most, stage.num_layers / plan.num_layers / stage.tp)
    return 1e3 * EXPOSED * 4.0 * MODELS[case.model].params * most / BETWEEN


_FORMULA_CONTEXT = 8192
_FORMULA_LAYERS = 60
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
    sample = read_lengths(shipped("pretraining"), _FORMULA_CONTEXT, count=20_000).lengths.tolist()
    rows = {stage: min(found.items())[1] for stage, found in class_rows(table).items()}
    for number in range(count):
        stages = [rng.choice(list(rows)) for _ in range(rng.randint(2, 8))]
        per_layer = [rows[stage].load_ms([_FORMULA_CONTEXT // 2]) for stage in stages]
        kind = _KINDS[number % 2]
        shape = _shape(stages, _by_speed(per_layer) if kind == _KINDS[0] else _random_split(rng, len(stages)))
        limit = rng.choice([_FORMULA_CONTEXT, 2 * _FORMULA_CONTEXT, 4 * _FORMULA_CONTEXT])
        cost = replace(priced(shape, table, _FORMULA_LAYERS, limit), max_length=limit)
        tokens = limit * rng.randint(len(stages), 32) // 2
        batch = sample_batches(sample, tokens, 1, number, _FORMULA_CONTEXT)[0].tolist()
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
    for stage, at in zip(shape.stages, place_pipeline(shape, 0, _FORMULA_LAYERS).stages, strict=True):
        row = rows[replace(stage, layers=())]
        share = at.num_layers / _FORMULA_LAYERS
        yield replace(row, a=share * row.a, b=share * row.b, c=share * row.c)


def _shape(stages: list[StageShape], layers: list[int]) -> PipelineShape:
    ends = pairwise(accumulate(layers, initial=0))
    return PipelineShape(
        tuple(replace(one, layers=(LayerRange(*held),)) for one, held in zip(stages, ends, strict=True))
    )


def _by_speed(layer_ms: list[float]) -> list[int]:
    found = split_by_speed(_FORMULA_LAYERS, layer_ms, [_FORMULA_LAYERS] * len(layer_ms))
    assert found is not None, "all layers find a place"
    return list(found)


def _random_split(rng: random.Random, stages: int) -> list[int]:
    cuts = sorted(rng.sample(range(1, _FORMULA_LAYERS), stages - 1))
    return [last - first for first, last in pairwise([0, *cuts, _FORMULA_LAYERS])]


_PUBLISHED_QUICK = ("32B 16+16", "32B 16+32", "70B 16+16", "C2", "C6")
_AGAIN = 4 / 3  # of the time, where all layers are computed again
LENGTHS = (CONTEXT,) * SEQUENCES


def published(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Seconds of a step and their ratios; CPU seconds of planning."""
    warm_up()
    rows = []
    for case in CASES:
        if quick and case.name not in _PUBLISHED_QUICK:
            continue
        hetu_s = step_s(case, (StrategyShape.parse(case.hetu),))[0]
        began = time.process_time()
        found = propose_mixed(case.cluster, table_of(case), memory_of(case), LENGTHS, sum(LENGTHS), CONTEXT, count=1,
                              exposed=lambda one, case=case: exchanged_ms(case, one))  # type: ignore[misc]  # fmt: skip
        ours_s, best = step_s(case, found)
        planned_s = time.process_time() - began
        if ours_s > aims.HETU_PLAN * hetu_s:
            missed.append(
                f"{case.name}: our plan takes {ours_s / hetu_s:.3f} of Hetu's own, more than {aims.HETU_PLAN}"
            )
        if planned_s > (most := machine.limit(aims.MIXED_PLANNING_S)).here:
            missed.append(f"{case.name}: planned in {planned_s:.2f} s of CPU, more than {most}")
        rows.append({
            "cluster": case.name, "ours s": ours_s, "Hetu's plan s": hetu_s, "of it": ours_s / hetu_s,
            "Hetu prints s": case.printed_s or "", "Megatron": _megatron_s(case) / ours_s,
            "DeepSpeed": _deepspeed_s(case) / ours_s, "planned CPU s": planned_s, "copies": _copies(case, best),
            "our plan": str(best),
        })  # fmt: skip
    return rows


def step_s(case: Case, strategies: tuple[StrategyShape, ...]) -> tuple[float, StrategyShape]:
    """Seconds of a step of 64 sequences of 4K under the best of these, and that; each simulated micro-batch by
    micro-batch with its stages' own times, and what is waited for of its exchange."""
    table = with_shapes(table_of(case), strategies, memory_of(case))
    found = []
    for one in strategies:
        plan = Planner(table, [one], PlannerOptions(highs="off")).plan(0, range(SEQUENCES), LENGTHS)
        found.append(((plan.predicted_ms + exchanged_ms(case, one)) / 1e3, str(one), one))
    least, _, best = min(found)
    return least, best


def _copies(case: Case, strategy: StrategyShape) -> str:
    """Where a copy of another rank's masters and moments has room: 12 bytes a parameter over all ranks."""
    memory = memory_of(case)
    extra = 12 * MODELS[case.model].params / case.cluster.num_ranks
    fits = all(
        memory.over(needs, CONTEXT) + extra <= 0
        for shape in dict.fromkeys(strategy.pipelines)
        for needs in memory.stages(shape)
    )
    return "device" if fits else "host"


def _slowest_class(case: Case) -> str:
    return "h20" if case.h20 else "h800"


def _megatron_s(case: Case) -> float:
    """Layers split evenly and the same work for all pipelines: H20 stages pace them."""
    dp, tp, pp, together = case.megatron
    scheme = ParallelScheme(tp, pp)
    cost = rows_of(case.model, _slowest_class(case), (scheme,))[scheme]
    load = cost.load_ms((CONTEXT,) * together)
    strategy = StrategyShape((PipelineShape.of(scheme),) * dp)
    return (cost.pipeline_ms([load] * (SEQUENCES // (dp * together))) + exchanged_ms(case, strategy)) / 1e3


def _deepspeed_s(case: Case) -> float:
    """Two ranks share a sequence, all layers are computed again, and each rank has the same work: H20 pace them. The
    whole model is exchanged once, though no device holds it."""
    dp, together = case.deepspeed
    scheme = ParallelScheme(sp=2)
    cost = rows_of(case.model, _slowest_class(case), (scheme,))[scheme]
    turns = -(-SEQUENCES // (dp * together))
    return (turns * _AGAIN * cost.load_ms((CONTEXT,) * together) + exchanged_ms(case, StrategyShape.of([scheme]))) / 1e3


_SKEWED = ("32B 16+16", "32B 16+24", "32B 16+32", "C7")
_SKEWED_CONTEXT, _SKEWED_TOKENS, _SKEWED_STEPS = 16384, 6250, 8
_OPTIONS = PlannerOptions(highs="off")


def skewed(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Mean steps of ours in seconds, and those of the others over it."""
    warm_up()
    lengths = read_lengths(shipped("pretraining"), _SKEWED_CONTEXT, count=20_000).lengths.tolist()
    rows = []
    for case in CASES:
        if case.name in _SKEWED[: 1 if quick else len(_SKEWED)]:
            rows.append(_row(case, lengths, missed))
    return rows


def _row(case: Case, lengths: Sequence[int], missed: list[str]) -> dict[str, Any]:
    tokens = _SKEWED_TOKENS * case.cluster.num_ranks
    batches = [batch.tolist() for batch in sample_batches(lengths, tokens, _SKEWED_STEPS, 1, _SKEWED_CONTEXT)]
    began = time.process_time()
    found = propose_mixed(case.cluster, table_of(case), memory_of(case), lengths, tokens, _SKEWED_CONTEXT,
                          exposed=lambda one: exchanged_ms(case, one))  # fmt: skip
    proposed_s = time.process_time() - began
    ours, gap, best = _planned(case, with_shapes(table_of(case), found, memory_of(case)), found, batches)
    uniform, equal = _uniform_s(case, batches), _equal_shares_s(case, lengths, batches)
    alone = {device: _alone_s(case, device, lengths, batches) for device in case.cluster.classes}
    if gap > aims.MIXED_GAP:
        missed.append(f"{case.name}: a certified gap of {gap:.1%}, more than {aims.MIXED_GAP:.0%}")
    if case.h800 == case.h20 and uniform < aims.UNIFORM_LAYOUT * ours:
        missed.append(
            f"{case.name}: the best uniform layout takes {uniform / ours:.2f} times our step, less than "
            f"{aims.UNIFORM_LAYOUT}"
        )
    by_itself = {f"{device} alone": s / ours if s else "no room" for device, s in alone.items()}
    return {
        "cluster": case.name, "ours s": ours, "gap": gap, "best uniform": uniform / ours, "equal shares": equal / ours,
        **by_itself, "proposed CPU s": proposed_s,
        "most often": best,
    }  # fmt: skip


def _planned(
    case: Case, table: CostTable, strategies: Sequence[StrategyShape], batches: Sequence[Sequence[int]]
) -> tuple[float, float, str]:
    """The mean step in seconds, with what is waited for of exchanges; the mean certified gap; the strategy that won
    most."""
    planner = Planner(table, strategies, _OPTIONS, exposed_ms=[exchanged_ms(case, one) for one in strategies])
    plans = [planner.plan(step, range(len(batch)), batch) for step, batch in enumerate(batches)]
    won = [plan.strategy for plan in plans]
    return (
        float(np.mean([plan.step_ms for plan in plans])) / 1e3,
        float(np.mean([plan.gap for plan in plans])),
        max(dict.fromkeys(won), key=won.count),
    )


def _uniform_s(case: Case, batches: Sequence[Sequence[int]]) -> float:
    """The best layout of one scheme that holds the context, with sequences dealt out by our own planner: all stages are
    as slow as those of the slower class, and all devices hold as much as the smaller ones."""
    num_ranks, memory = case.cluster.num_ranks, memory_of(case)
    blind: JobMemory = replace(memory, cluster=None, class_bytes={}, device_bytes=min(BYTES.values()), _cache={})
    layers = memory.plan.num_layers
    schemes = tuple(ParallelScheme(tp, pp) for tp in (1, 2, 4, 8) for pp in range(1, 13)
                    if num_ranks % (tp * pp) == 0 and pp <= layers)  # fmt: skip
    table = within_memory(rows_of(case.model, "h20", schemes), blind)
    flat = [StrategyShape.of([one] * (num_ranks // one.num_ranks)) for one in table.schemes
            if table[one].max_length >= _SKEWED_CONTEXT]  # fmt: skip
    return min(_planned(case, table, [one], batches)[0] for one in flat)


def _alone_s(case: Case, device: str, lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float | None:
    """One class alone; None where the model and the longest sequence do not fit it."""
    try:
        return _by_itself_s(case, device, lengths, batches, masters_on=len(case.cluster.classes[device]))
    except PlanError:
        return None


def _by_itself_s(
    case: Case, device: str, lengths: Sequence[int], batches: Sequence[Sequence[int]], *, masters_on: int
) -> float:
    """One class with these batches, under strategies proposed for it, where so many ranks share the masters."""
    own = replace(case, h20=0) if device == "h800" else replace(case, h800=0)
    memory = replace(memory_of(own), num_ranks=masters_on, node_size=8, _cache={})
    tokens = int(np.mean([sum(batch) for batch in batches]))
    found = propose_mixed(own.cluster, table_of(own), memory, lengths, tokens, _SKEWED_CONTEXT,
                          exposed=lambda one: exchanged_ms(own, one))  # fmt: skip
    return _planned(own, with_shapes(table_of(own), found, memory), found, batches)[0]


def _equal_shares_s(case: Case, lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Each class has as many tokens of a step as it has ranks, and plans them by itself."""
    ranks = {device: len(of_it) for device, of_it in case.cluster.classes.items()}
    shares: dict[str, list[list[int]]] = {device: [[] for _ in batches] for device in ranks}
    for at, batch in enumerate(batches):
        for length in sorted(batch, reverse=True):
            least = min(ranks, key=lambda device: (sum(shares[device][at]) + length) / ranks[device])
            shares[least][at].append(length)
    ranks_of_all = case.cluster.num_ranks
    return max(_by_itself_s(case, device, lengths, own, masters_on=ranks_of_all) for device, own in shares.items())


_SLOW_TOKENS = {
    "16*tp1": 6250,
    "8*tp2": 6250,
    "4*pp4": 25000,
}  # of a rank: four pipelines of few would not be even anyway
_SLOW_QUICK = {"8*tp1": 6250}
_SLOW_LAYERS, _LONGEST = 4, 4096
_NEAR = 0.02  # a pace that is that of the rank
_SLOW = 5  # the rank
_PACES = (1.2, 2.0, 1.0)
# Steps from which the rank has these paces: each time it takes up to a window of steps until plans follow.
_FROM = (2, 18, 32)
_SLOW_STEPS = 46


class Course(NamedTuple):
    """A job's steps, and which pace its plans counted with in each."""

    steps: list[EmulatedStep]
    known: list[float]

    def rate(self, step: int) -> float:
        """Tokens per second of one rank."""
        done = self.steps[step]
        return done.plan.num_tokens / done.step_s / len(done.ended_s)


def slow(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Tokens per second and rank before, while nobody knows, and after; steps until plans follow; what is won back."""
    return [
        row for text, tokens in (_SLOW_QUICK if quick else _SLOW_TOKENS).items() for row in _rows(text, tokens, missed)
    ]


def _rows(text: str, tokens: int, missed: list[str]) -> Iterator[dict[str, Any]]:
    course, pipelines = _course(text, tokens), len(StrategyShape.parse(text).pipelines)
    before = course.rate(_FROM[0] - 1)
    for pace, first, last in zip(_PACES, _FROM, (*_FROM[1:], _SLOW_STEPS), strict=True):
        unknown, after = course.rate(first), course.rate(last - 1)
        follows = next((at - first for at in range(first, last) if abs(course.known[at] - pace) < _NEAR), _SLOW_STEPS)
        if follows > aims.FOLLOWS_SLOW:
            missed.append(f"{text}: plans do not count with a pace of {pace} within {aims.FOLLOWS_SLOW} steps")
        row: dict[str, Any] = {
            "strategy": text, "a rank at": f"1/{pace:g}", "before": f"{before:.0f}", "unknown": f"{unknown:.0f}",
            "after": f"{after:.0f}", "plans follow after": follows, "won back": "", "aim": "",
        }  # fmt: skip
        if pace > 1.0:
            won, aim = (after - unknown) / (before - unknown), aims.WON_BACK * (1.0 - 1.0 / pipelines)
            row |= {"won back": won, "aim": aim}
            if won < aim:
                missed.append(f"{text}, one rank at 1/{pace:g}: {won:.3f} of the loss is won back, less than {aim:.3f}")
        elif after < aims.RECOVERED_RATE * before:
            missed.append(f"{text}: {after / before:.3f} of the throughput before when the rank has recovered")
        yield row


def job(strategy: StrategyShape) -> SimulatedJob:
    """A model of few layers, whose steps are emulated sooner, on nodes of eight; costs follow from FLOPs."""
    shape = replace(SHIPPED["a800-7b"].shape, layers=_SLOW_LAYERS)
    schemes = sorted({one.scheme for one in strategy.pipelines if one.scheme})
    table = analytic_cost_table(shape, schemes, 4 * _LONGEST)
    return SimulatedJob(llama_plan(shape), shape.hidden, TableFile(table), LinkModel(8), strategy.num_ranks)


def _course(text: str, tokens: int) -> Course:
    """Each step has the same sequences in another order, so that its time tells of nothing but plan and rank."""
    cluster = job(StrategyShape.parse(text))
    lengths = read_lengths(shipped("pretraining"), _LONGEST, count=20_000).lengths.tolist()
    batch = tuple(sample_batches(lengths, tokens * cluster.num_ranks, 1, 0, _LONGEST)[0].tolist())
    slowed = tuple((first, _SLOW, pace) for first, pace in zip(_FROM, _PACES, strict=True))
    steps = emulate(EmulatedJob(cluster, (text,), batch, sum(batch), slow=slowed), _SLOW_STEPS)[0]
    faults = [step.fault for step in steps if step.fault]
    assert not faults, faults[0]
    known = [max(max(one.paces, default=1.0) for one in step.plan.pipelines) for step in steps]
    return Course(steps, known)


_SLICED = ("70B 16+16", "32B 16+16", "70B 16+32")
_SLICED_CONTEXT, _SLICED_TOKENS, _SLICED_STEPS, _SLICED_COUNT = 8192, 3125, 4, 2


def sliced(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Mean steps in seconds by strategies that were proposed without slices, and over them those with."""
    warm_up()
    lengths = read_lengths(shipped("pretraining"), _SLICED_CONTEXT, count=20_000).lengths.tolist()
    rows = []
    for name in _SLICED[: 1 if quick else len(_SLICED)]:
        case = next(one for one in CASES if one.name == name)
        table = CostTable(tuple(replace(cost, shares=Shares.usual()) for cost in table_of(case).costs))
        tokens, memory = _SLICED_TOKENS * case.cluster.num_ranks, memory_of(case)
        batches = [batch.tolist() for batch in sample_batches(lengths, tokens, _SLICED_STEPS, 1, _SLICED_CONTEXT)]
        steps, taken, best = [], 0.0, ""
        for slices in (False, True):
            began = time.process_time()
            found = propose_mixed(case.cluster, table, memory, lengths, tokens, _SLICED_CONTEXT, count=_SLICED_COUNT,
                                  slices=slices, exposed=lambda one, case=case: exchanged_ms(case, one))  # type: ignore[misc]  # fmt: skip
            taken, best = time.process_time() - began, str(found[0])
            planner = Planner(with_shapes(table, found, memory), found, PlannerOptions(highs="off"),
                              exposed_ms=[exchanged_ms(case, one) for one in found])  # fmt: skip
            plans = [planner.plan(step, range(len(batch)), batch) for step, batch in enumerate(batches)]
            steps.append(float(np.mean([plan.step_ms for plan in plans])) / 1e3)
        if steps[0] < aims.SLICED_GAIN * steps[1]:
            missed.append(f"{name}: without slices a step takes {steps[0] / steps[1]:.3f} times as long as with, less "
                          f"than {aims.SLICED_GAIN}")  # fmt: skip
        rows.append({"cluster": name, "without s": steps[0], "with s": steps[1], "over it": steps[0] / steps[1],
                     "proposed CPU s": taken, "first": best})  # fmt: skip
    return rows


NODES_CONTEXT, TOKENS_OF_A_RANK, NODES_STEPS, COUNT = 16384, 3125, 12, 10
DEVICE_BYTES = 80e9
DEEPEST = 4
SMALLER: tuple[tuple[int, NodeSize, int], ...] = ((7, 7, 8), (15, (8, 7), 16), (15, (7, 8), 16), (31, (8, 8, 7, 8), 32),
                                                  (63, (*(8,) * 3, 7, *(8,) * 4), 64))  # fmt: skip

NODES_QUICK: tuple[tuple[int, NodeSize], ...] = ((7, 7), (15, (8, 7)), (31, (8, 8, 7, 8)))


def cluster(num_ranks: int, node_size: NodeSize) -> SimulatedJob:
    """The 7B model on such nodes, with every scheme of few stages that its memory allows."""
    sizes, kept = SHIPPED["a800-7b"]
    plan, links = llama_plan(sizes), LinkModel(node_size)
    schemes = [
        scheme
        for scheme in feasible_schemes(plan, num_ranks, node_size)
        if scheme.pp <= DEEPEST and scheme.tp & (scheme.tp - 1) == 0 and scheme.sp == 1
    ]
    activations = {(one.tp, 1): Activations(kept[one.tp] * sizes.hidden / one.tp, 0.0, 0.0) for one in schemes}
    memory = JobMemory(plan, num_ranks, activations, param_bytes=2, device_bytes=DEVICE_BYTES, vocab=sizes.vocab,
                       node_size=node_size)  # fmt: skip
    table = within_memory(analytic_cost_table(sizes, schemes, NODES_CONTEXT), memory)
    return SimulatedJob(plan, sizes.hidden, TableFile(table), links, num_ranks)


class _Planned(NamedTuple):
    """A cluster with a planner of strategies that were proposed for it, and what it is to plan."""

    job: SimulatedJob
    planner: Planner
    messages: Messages
    sample: list[int]  # lengths
    tokens: int  # of a step
    proposed_s: float  # of CPU


def _proposed(num_ranks: int, node_size: NodeSize) -> _Planned:
    job = cluster(num_ranks, node_size)
    sample = read_lengths(shipped("pretraining"), NODES_CONTEXT, count=50_000).lengths.tolist()
    tokens, messages = TOKENS_OF_A_RANK * num_ranks, Messages(job, TOKENS_OF_A_RANK * num_ranks)
    began = time.process_time()
    strategies = propose_strategies(job.table, num_ranks, sample, tokens, NODES_CONTEXT, node_size=node_size,
                                    count=COUNT, exposed=messages.exposed_ms)  # fmt: skip
    proposed_s = time.process_time() - began
    assert not any(list(crossings(strategy, node_size)) for strategy in strategies), "no TP group lies on two nodes"
    planner = Planner(job.table, strategies, PlannerOptions(kernels="compiled"),
                      exposed_ms=[messages.exposed_ms(one) for one in strategies])  # fmt: skip
    return _Planned(job, planner, messages, sample, tokens, proposed_s)


def tokens_per_second(num_ranks: int, node_size: NodeSize) -> tuple[float, StrategyShape, float]:
    """Of one rank, in steps of other data than the strategies were chosen for; the strategy that won most of them, and
    the CPU time of the proposal."""
    found = _proposed(num_ranks, node_size)
    rates, won = [], dict.fromkeys(found.planner.strategies, 0)
    for step, batch in enumerate(sample_batches(found.sample, found.tokens, NODES_STEPS, 1, NODES_CONTEXT)):
        plan = found.planner.plan(step, range(len(batch)), batch.tolist())
        rates.append(plan.num_tokens / found.messages.ms(plan, found.job.table) * 1e3 / num_ranks)
        won[plan.phases[0].shape] += 1
    return float(np.mean(rates)), max(won, key=lambda strategy: won[strategy]), found.proposed_s


def nodes(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Tokens per second and rank on machines that have lost a rank, over the full ones'."""
    full: dict[int, float] = {}
    rows = []
    for num_ranks, node_size, whole in SMALLER:
        if quick and (num_ranks, node_size) not in NODES_QUICK:
            continue
        if whole not in full:
            full[whole] = tokens_per_second(whole, 8)[0]
        rate, best, proposed_s = tokens_per_second(num_ranks, node_size)
        share, aim = rate / full[whole], aims.ODD_NODES[num_ranks]
        if share < aim:
            missed.append(f"{num_ranks} ranks: {share:.3f} of the full machine's throughput a rank, less than {aim}")
        on = node_size if isinstance(node_size, int) else "+".join(map(str, node_size))
        rows.append({"ranks": num_ranks, "nodes": str(on), "of": whole, "tokens/s a rank": f"{rate:.0f}",
                     "share": share, "aim": aim, "proposed s": proposed_s, "most often": str(best)})  # fmt: skip
    return rows


def main() -> int:
    """The exit code: 0, or 1 if an aim was missed."""
    print(ASSUMED)
    parts = {
        "nodes": nodes,
        "formula": formula,
        "published": published,
        "skewed": skewed,
        "slow": slow,
        "sliced": sliced,
    }
    return run_parts("bench_hetero", __doc__, parts)


if __name__ == "__main__":
    sys.exit(guarded("bench_hetero", main))
