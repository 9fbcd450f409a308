"""Lengths with a long tail on clusters of two classes: what plans by each class's speed gain over others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.memory import JobMemory
from ds_hydra.costs.shape_costs import with_shapes
from ds_hydra.data.lengths import read_lengths, sample_batches
from ds_hydra.engine.costs import within_memory
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.proposal.mixed import propose_mixed
from ds_hydra.planner.selection import warm_up
from ds_hydra.zero_hetero.errors import PlanError
from tools import aims
from tools.hetero.clusters import BYTES, CASES, Case, exchanged_ms, memory_of, rows_of, table_of

_CLUSTERS = ("32B 16+16", "32B 16+24", "32B 16+32", "C7")
_CONTEXT, _TOKENS_OF_A_RANK, _STEPS = 16384, 6250, 8
_OPTIONS = PlannerOptions(highs="off")


def skewed(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Mean steps of ours in seconds, and those of the others over it."""
    warm_up()
    lengths = read_lengths(shipped("pretraining"), _CONTEXT, count=20_000).lengths.tolist()
    rows = []
    for case in CASES:
        if case.name in _CLUSTERS[: 1 if quick else len(_CLUSTERS)]:
            rows.append(_row(case, lengths, missed))
    return rows


def _row(case: Case, lengths: Sequence[int], missed: list[str]) -> dict[str, Any]:
    tokens = _TOKENS_OF_A_RANK * case.cluster.num_ranks
    batches = [batch.tolist() for batch in sample_batches(lengths, tokens, _STEPS, 1, _CONTEXT)]
    began = time.process_time()
    found = propose_mixed(case.cluster, table_of(case), memory_of(case), lengths, tokens, _CONTEXT,
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
            if table[one].max_length >= _CONTEXT]  # fmt: skip
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
    found = propose_mixed(own.cluster, table_of(own), memory, lengths, tokens, _CONTEXT,
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
