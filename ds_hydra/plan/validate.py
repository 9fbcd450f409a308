"""A plan in; nothing out if the job can run it as it says, else a PlanError with the reason. Pure: no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.zero_hetero.errors import PlanError

_RELATIVE = 1e-6  # how far a stated time may be from the cost model's


def validate_plan(
    plan: StepPlan,
    limits: CostTable | Mapping[ParallelScheme, int],
    num_ranks: int,
    objective: str = "flow_shop",
) -> None:
    """Check that ranks are tiled, every sequence runs exactly once, memory holds and times are those of the model.

    `limits` is the cost table, or just MaxLen (tokens) by scheme, in which case times are only checked for
    being possible. Raises PlanError with step, pipeline, micro-batch, and the numbers that disagree.
    """
    where = f"plan of step {plan.step}"
    _check_ranks(plan, num_ranks, where)
    _check_sequences(plan, where)
    _check_memory(plan, limits, where)
    _check_times(plan, limits if isinstance(limits, CostTable) else None, objective, where)


def _check_ranks(plan: StepPlan, num_ranks: int, where: str) -> None:
    if plan.step < 0:
        raise PlanError(f"{where}: the step must not be negative")
    needed = sum(pipeline.scheme.num_ranks for pipeline in plan.pipelines)
    if needed != num_ranks:
        raise PlanError(
            f"{where}: its {len(plan.pipelines)} pipelines use {needed} ranks but the job has {num_ranks}; every "
            "rank must be in exactly one"
        )


def _check_sequences(plan: StepPlan, where: str) -> None:
    size = len(plan.lengths)
    if len(plan.sequence_ids) != size or size == 0:
        raise PlanError(
            f"{where}: {len(plan.sequence_ids)} sequence ids and {size} lengths; needs one each, at least 1"
        )
    short = [i for i, length in enumerate(plan.lengths) if length < 1]
    if short:
        raise PlanError(f"{where}: sequence at position {short[0]} has length {plan.lengths[short[0]]}, not at least 1")
    seen: Counter[int] = Counter()
    for index, pipeline in enumerate(plan.pipelines):
        for number, batch in enumerate(pipeline.microbatches):
            if not batch:
                raise PlanError(f"{where}: micro-batch {number} of pipeline {index} is empty; leave it out")
            wrong = [i for i in batch if not 0 <= i < size]
            if wrong:
                raise PlanError(
                    f"{where}: micro-batch {number} of pipeline {index} names position {wrong[0]} but the step has "
                    f"positions 0..{size - 1}"
                )
            seen.update(batch)
    twice = [i for i, count in seen.items() if count > 1]
    if twice:
        raise PlanError(f"{where}: the sequence at position {min(twice)} runs {seen[min(twice)]} times, not once")
    missing = [i for i in range(size) if i not in seen]
    if missing:
        raise PlanError(f"{where}: {len(missing)} sequences run nowhere, the first at position {missing[0]}")


def _check_memory(plan: StepPlan, limits: CostTable | Mapping[ParallelScheme, int], where: str) -> None:
    for index, pipeline in enumerate(plan.pipelines):
        try:
            limit = limits[pipeline.scheme]
        except (KeyError, PlanError):
            raise PlanError(
                f"{where}: pipeline {index} has scheme {pipeline.scheme}, for which MaxLen is unknown"
            ) from None
        most = limit if isinstance(limit, int) else limit.max_length
        for number, batch in enumerate(pipeline.microbatches):
            tokens = sum(plan.lengths[i] for i in batch)
            if tokens > most:
                raise PlanError(
                    f"{where}: micro-batch {number} of pipeline {index} ({pipeline.scheme}) holds {tokens} tokens but "
                    f"MaxLen is {most}"
                )


def _check_times(plan: StepPlan, table: CostTable | None, objective: str, where: str) -> None:
    slowest = 0.0
    for index, pipeline in enumerate(plan.pipelines):
        ms = pipeline.predicted_ms
        if not math.isfinite(ms) or ms < 0 or (ms > 0) != bool(pipeline.microbatches):
            raise PlanError(
                f"{where}: pipeline {index} runs {len(pipeline.microbatches)} micro-batches in a predicted {ms} ms"
            )
        slowest = max(slowest, ms)
        if table is None:
            continue
        cost = table[pipeline.scheme]
        loads = [cost.load_ms([plan.lengths[i] for i in batch]) for batch in pipeline.microbatches]
        expected = cost.paper_ms(loads) if objective == "paper" else cost.pipeline_ms(loads)
        if abs(ms - expected) > _RELATIVE * expected:
            raise PlanError(
                f"{where}: pipeline {index} states {ms:.3f} ms but the cost table gives {expected:.3f} ms; plan and "
                "job use different cost tables or objectives"
            )
    if not math.isfinite(plan.predicted_ms) or abs(plan.predicted_ms - slowest) > _RELATIVE * slowest:
        raise PlanError(
            f"{where}: predicted {plan.predicted_ms} ms for the step but its slowest pipeline takes {slowest:.3f} ms"
        )
    if not 0 <= plan.lower_bound_ms <= plan.predicted_ms * (1 + _RELATIVE):
        raise PlanError(
            f"{where}: the lower bound {plan.lower_bound_ms} ms is not within 0..{plan.predicted_ms} ms, the prediction"
        )
