"""Contexts that no scheme holds whole: what is proposed and planned for them, and how long that takes.

32B LLaMA on 64 A800 with 200K tokens a step of CommonCrawl-like lengths. Every batch has one sequence as long as the
context, which is the longest that must be held.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from ds_hydra.commands.figures import shipped
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.data.lengths import read_lengths, sample_batches
from ds_hydra.planner import Planner, PlannerOptions, StepPlan, validate_plan
from ds_hydra.planner.proposal.propose import QUICK, ProposalEffort, Wider, propose_strategies, wider_shapes
from ds_hydra.planner.selection import warm_up
from ds_hydra.zero_hetero.errors import PlanError
from tools import aims, machine

CONTEXTS = (65_536, 131_072)
GPUS, TOKENS, LAYERS = 64, 200_000, 60
_LENGTHS, _SEED = "lognormal:6.22,1.233", 77


def long_contexts(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each context: what was planned, and the CPU time of proposal and plans."""
    table = CostTable.load(shipped("a800-32b"))
    warm_up()
    effort, count = (ProposalEffort(4, 2, 10, 1, 30), 2) if quick else (QUICK, 6)
    return [_row(table, context, effort, count, missed) for context in CONTEXTS]


def _row(table: CostTable, context: int, effort: ProposalEffort, count: int, missed: list[str]) -> dict[str, Any]:
    sample = read_lengths(_LENGTHS, context, 60_000, 1).lengths.tolist()
    began = time.thread_time()
    wider = Wider(wider_shapes(table, num_layers=LAYERS), layers=LAYERS)
    strategies = propose_strategies(
        table, GPUS, sample, TOKENS, context, tp_across_nodes=True, effort=effort, wider=wider
    )
    proposed = time.thread_time()
    planner = Planner(table, strategies, PlannerOptions(kernels="compiled", layers=LAYERS))
    plans = []
    for step, batch in enumerate(sample_batches(sample, TOKENS - context, count, _SEED, context)):
        lengths = [context, *batch.tolist()]
        try:
            plans.append(planner.plan(step, range(len(lengths)), lengths))
            validate_plan(plans[-1], table, GPUS)
        except PlanError as error:
            missed.append(f"context {context}: {error}")
    planned = time.thread_time()
    if proposed - began > (most := machine.limit(aims.PROPOSAL_CHUNKED_S)).here:
        missed.append(f"context {context}: proposed in {proposed - began:.0f} s of CPU time, not <= {most}")
    return {"context": context, "whole": table.max_length, **_figures(plans), "strategies": len(strategies),
            "proposed s": proposed - began, "plan s": (planned - proposed) / count}  # fmt: skip


def _figures(plans: Sequence[StepPlan]) -> dict[str, Any]:
    """Means over the plans, and the strategy of the first."""
    if not plans:
        return {"step ms": float("nan"), "recomputed": float("nan"), "gap": float("nan"), "strategy": "-"}
    return {
        "step ms": statistics.fmean(plan.predicted_ms for plan in plans),
        "recomputed": statistics.fmean(plan.recomputed for plan in plans),
        "gap": statistics.fmean(plan.gap for plan in plans),
        "strategy": plans[0].strategy,
    }
