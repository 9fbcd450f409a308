"""A plan in; one that runs slices of the longer sequences, or computes layers again, out."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.plan.simulate import simulate_pipeline, simulated_ms
from ds_hydra.plan.step_plan import MicroBatchPlan, PipelinePlan, Span, StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner import PlanRecipe
from ds_hydra.zero_hetero.errors import PlanError

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
