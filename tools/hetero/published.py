"""Hetu's twelve clusters in one model of costs: our plans, its own, Megatron's and DeepSpeed's."""

from __future__ import annotations

import time
from typing import Any

from ds_hydra.costs.shape_costs import with_shapes
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.proposal.mixed import propose_mixed
from ds_hydra.planner.selection import warm_up
from tools import aims, machine
from tools.hetero.clusters import CASES, CONTEXT, MODELS, SEQUENCES, Case, exchanged_ms, memory_of, rows_of, table_of

_QUICK = ("32B 16+16", "32B 16+32", "70B 16+16", "C2", "C6")
_AGAIN = 4 / 3  # of the time, where all layers are computed again
LENGTHS = (CONTEXT,) * SEQUENCES


def published(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """Seconds of a step and their ratios; CPU seconds of planning."""
    warm_up()
    rows = []
    for case in CASES:
        if quick and case.name not in _QUICK:
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
