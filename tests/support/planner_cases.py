"""Small planning instances, and an optimum by plain enumeration that shares no code with the planner."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.planner import Planner, PlannerOptions

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


def a800_planner(**options: object) -> Planner:
    """The 32B table with a pool for 64 GPUs."""
    options = {"kernels": "compiled", **options}
    table = CostTable.load(TABLES / "llama_32b_a800.json")
    return Planner(table, [StrategyShape.parse(text) for text in POOL], PlannerOptions(**options))  # type: ignore[arg-type]
