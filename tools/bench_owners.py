"""Slow links between nodes: steps with masters cut over all ranks, and owned by the stages that compute them.

  python -m tools.bench_owners [--quick] [--json FILE]

Models on two to four nodes whose cards for 25 to 200 Gb/s a GPU, or for a whole node, are slow beside their GPUs. A job
proposes its strategies by other data, chooses the owners of its masters as jobs do, and plans steps that are simulated
with pulls and pushes [Note: owners]. Beside it stand the same job with masters cut evenly over all ranks; the best
layout that Megatron-LM can be set to, with sequences balanced, whose optimizer is sharded among the replicas of a
stage, as its distributed optimizer does it; and the bound, the least time of fractions of pipelines without any
message. Some cells run on the emulated cluster, where the engine itself pulls and pushes.

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ds_hydra.commands.figures import figures_parser, finish, print_table
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.sampler import TokenBudgetSampler
from ds_hydra.emulate.cluster import emulate_plans
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.propose import Wider, propose_strategies, wider_shapes
from ds_hydra.rivals.costs import cluster_of
from ds_hydra.rivals.systems import RowSimulator, balanced
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.owners import best_owners, nearest_exposed_ms, owned_by_stages
from ds_hydra.simulate.step import exposed_ms
from ds_hydra.zero_hetero.errors import PlanError
from tools import aims
from tools.systems.cells import NODE, SEEN_BEFORE, Cell
from tools.systems.measure import all_schemes, chunked_bound_ms

STEPS, TRIED = 5, 3
_EIGHT = Cell("8b H100", 16, 32_768, 200_000, "pretraining", 1 / 4)
_THIRTY_TWO = Cell("32b H100", 32, 32_768, 400_000, "pretraining")
MIXTURE = Cell("a3b H200", 16, 32_768, 96_000, "tail", 1 / 8, node=4)
CELLS = (
    *(replace(_EIGHT, between=rate) for rate in (25.0, 12.5, 3.1, 1.5)),
    *(replace(_THIRTY_TWO, between=rate) for rate in (25.0, 3.1)),
    MIXTURE,
    replace(MIXTURE, between=12.5),
    replace(MIXTURE, node=NODE),
)
EMULATED = (replace(_EIGHT, between=3.1), MIXTURE)
Batches = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Planned:
    """A job's steps: its cluster, whose plan of the model says who owns what, and the plans."""

    cluster: SimulatedJob
    plans: tuple[StepPlan, ...]
    by: str = ""  # whose stages own the masters

    @property
    def ms(self) -> float:
        """The mean of the simulated steps."""
        simulator = RowSimulator(self.cluster)
        return fmean(simulator.step_ms(plan) for plan in self.plans)


def table_of(cell: Cell) -> CostTable:
    """The schemes that a job chooses from: TP inside a node, SP inside or over whole nodes."""
    table = all_schemes(cell)
    kept = tuple(
        cost for cost in table.costs
        if cost.uniform.tp <= cell.node
        and (cost.uniform.tp * cost.uniform.sp <= cell.node or cost.uniform.tp * cost.uniform.sp % cell.node == 0)
    )  # fmt: skip
    return replace(table, costs=kept)


def ours(cell: Cell, batches: Batches, *, owned: bool) -> Planned:
    """The job, whose masters may have owners of their own or not."""
    table = table_of(cell)
    cluster = cluster_of(cell, table)
    layers, options = cluster.plan.num_layers, PlannerOptions(layers=cluster.plan.num_layers, kernels="compiled")
    exposed = nearest_exposed_ms if owned else exposed_ms
    strategies = propose_strategies(
        table, cell.gpus, cell.lengths(SEEN_BEFORE), cell.tokens, cell.context, node_size=cell.node,
        wider=Wider(wider_shapes(table, num_layers=layers), layers=layers),
        exposed=lambda strategy: exposed(cluster, strategy, cell.tokens),
    )  # fmt: skip
    seen = cell.batches(TRIED, SEEN_BEFORE)
    chosen = best_owners(cluster, strategies, seen, cell.tokens, options) if owned else None
    if chosen is not None:
        placed = place_strategy(chosen.by, cell.gpus, layers)
        cluster = replace(cluster, plan=owned_by_stages(cluster.plan, placed))
    added = [exposed_ms(cluster, one, cell.tokens) for one in strategies]
    planner = Planner(table, strategies, options, exposed_ms=added)
    plans = tuple(planner.plan(step, range(len(batch)), batch) for step, batch in enumerate(batches))
    return Planned(cluster, plans, "" if chosen is None else str(chosen.by))


def megatron_ms(cell: Cell, batches: Batches) -> float:
    """The best of its layouts in hindsight, each with the better of both owners."""
    best = float("inf")
    for one in balanced(cell):
        cluster = cluster_of(cell, one.table)
        try:
            plans = [one.plan(step, batch) for step, batch in enumerate(batches)]
        except PlanError:  # it does not hold a batch
            continue
        shape = plans[0].phases[0].shape
        if max(stage.tp for pipeline in shape.pipelines for stage in pipeline.stages) > cell.node:
            continue
        own = owned_by_stages(cluster.plan, place_strategy(shape, cell.gpus, cluster.plan.num_layers))
        for plan in dict.fromkeys((cluster.plan, own)):
            simulator = RowSimulator(replace(cluster, plan=plan))
            best = min(best, fmean(simulator.step_ms(step) for step in plans))
    return best


def emulated_error(cell: Cell) -> float:
    """How far what the engine takes on the emulated cluster is from what is simulated, the most of two steps."""
    lengths = [length for length in cell.lengths(SEEN_BEFORE)[:20_000] if length > 1]
    sampler = TokenBudgetSampler(lengths, cell.tokens)
    made = ours(cell, [sampler.batch_lengths(step) for step in range(2)], owned=True)
    plans = [replace(plan, sequence_ids=tuple(sampler.batch(step))) for step, plan in enumerate(made.plans)]
    simulator = RowSimulator(made.cluster)
    done = emulate_plans(made.cluster, plans, lengths, cell.tokens, timeout_s=1800)
    return max(abs(one.step_s / simulator.step(plan).step_s - 1.0) for one, plan in zip(done, plans, strict=True))


def rows(cells: Sequence[Cell], missed: list[str]) -> Iterator[dict[str, object]]:
    for cell in cells:
        batches = cell.batches(STEPS)
        even, own = (ours(cell, batches, owned=owned) for owned in (False, True))
        even_ms, own_ms, rival, bound = even.ms, own.ms, megatron_ms(cell, batches), chunked_bound_ms(cell, batches)
        if own_ms > (1.0 + aims.OWNERS_LOSE) * even_ms:
            missed.append(f"{cell}: {own_ms:.0f} ms with owners of their own, {even_ms:.0f} without")
        if cell == MIXTURE and own_ms > aims.MIXTURE_BOUND * bound:
            missed.append(f"{cell}: {own_ms / bound:.2f} of the bound, above {aims.MIXTURE_BOUND}")
        error = emulated_error(cell) if cell in EMULATED else None
        if error is not None and error > aims.EMULATED_UNEQUAL:
            missed.append(f"{cell}: the emulated cluster is {error:.1%} off")
        yield {
            "cell": str(cell), "even ms": round(even_ms), "owned ms": round(own_ms),
            "even over owned": f"{even_ms / own_ms:.2f}", "owned by": own.by or "all", "Megatron-LM ms": round(rival),
            "Megatron-LM over owned": f"{rival / own_ms:.2f}", "owned over bound": f"{own_ms / bound:.2f}",
            "emulated is off": "" if error is None else f"{error:.4%}",
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    args = figures_parser(__doc__, "python -m tools.bench_owners").parse_args(arguments)
    missed: list[str] = []
    found = list(rows((EMULATED[0], MIXTURE) if args.quick else CELLS, missed))
    print_table(list(found[0]), [list(row.values()) for row in found])
    gains = [float(str(row["even over owned"])) for row in found]
    summary = (
        f"{len(found)} cells, with masters cut evenly steps take {min(gains):.2f} to {max(gains):.2f} times as long"
    )
    return finish("bench_owners", summary, {"cells": found}, missed, args.json)


if __name__ == "__main__":
    sys.exit(main())
