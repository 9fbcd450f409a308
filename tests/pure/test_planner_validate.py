"""The validator: over 1,000 plans broken in every way a plan can be broken, each refused for its reason."""

import dataclasses
import random
from collections.abc import Callable

import pytest

from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.planner import PipelinePlan, StepPlan, validate_plan
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.planner_cases import a800_batch, a800_planner

NUM_RANKS = 64
Mutation = Callable[[StepPlan, random.Random], StepPlan]


def busy(plan: StepPlan, draw: random.Random) -> int:
    """A pipeline that runs something."""
    return draw.choice([p for p, pipeline in enumerate(plan.pipelines) if pipeline.microbatches])


def change(plan: StepPlan, p: int, **fields: object) -> StepPlan:
    pipelines = list(plan.pipelines)
    pipelines[p] = dataclasses.replace(pipelines[p], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(plan, pipelines=tuple(pipelines))


def edit(plan: StepPlan, draw: random.Random, how: Callable[[list[list[int]]], None]) -> StepPlan:
    """Change one pipeline's micro-batches in place."""
    p = busy(plan, draw)
    batches = [list(batch) for batch in plan.pipelines[p].microbatches]
    how(batches)
    return change(plan, p, microbatches=tuple(tuple(batch) for batch in batches))


def overfill(plan: StepPlan, draw: random.Random) -> StepPlan:
    """All sequences into one micro-batch of one pipeline."""
    p = busy(plan, draw)
    everything = (tuple(range(len(plan.lengths))),)
    pipelines = [dataclasses.replace(x, microbatches=(), predicted_ms=0.0) for x in plan.pipelines]
    pipelines[p] = dataclasses.replace(plan.pipelines[p], microbatches=everything)
    return dataclasses.replace(plan, pipelines=tuple(pipelines))


def other_lengths(plan: StepPlan, draw: random.Random) -> StepPlan:
    lengths = list(plan.lengths)
    lengths[draw.randrange(len(lengths))] = -draw.randrange(5)
    return dataclasses.replace(plan, lengths=tuple(lengths))


MUTATIONS: dict[str, tuple[Mutation, str]] = {
    "drop a sequence": (lambda p, d: edit(p, d, lambda b: b[0].pop() if len(b[0]) > 1 else b.pop(0)), "run nowhere"),
    "run one twice": (lambda p, d: edit(p, d, lambda b: b[0].append(b[-1][0])), r"runs \d+ times"),
    "unknown position": (
        lambda p, d: edit(p, d, lambda b: b[0].append(len(p.lengths) + d.randrange(9))),
        "names position",
    ),
    "negative position": (lambda p, d: edit(p, d, lambda b: b[0].append(-1)), "names position"),
    "empty micro-batch": (lambda p, d: edit(p, d, lambda b: b.insert(d.randrange(len(b) + 1), [])), "is empty"),
    "no memory": (overfill, "MaxLen is"),
    "a rank too many": (
        lambda p, d: dataclasses.replace(p, pipelines=(*p.pipelines, PipelinePlan(ParallelScheme(4), (), 0.0))),
        "use 68 ranks but the job has 64",
    ),
    "a pipeline less": (lambda p, d: dataclasses.replace(p, pipelines=p.pipelines[:-1]), "ranks but the job has 64"),
    "unknown scheme": (
        lambda p, d: change(p, 0, scheme=ParallelScheme(1, 1, p.pipelines[0].scheme.num_ranks)),
        "MaxLen is unknown",
    ),
    "wrong pipeline time": (
        lambda p, d: change(p, (at := busy(p, d)), predicted_ms=p.pipelines[at].predicted_ms * d.choice([0.5, 1.01])),
        "cost table gives|slowest pipeline",
    ),
    "time of nothing": (lambda p, d: change(p, busy(p, d), predicted_ms=0.0), "micro-batches in a predicted"),
    "time not a number": (
        lambda p, d: change(p, busy(p, d), predicted_ms=float("nan")),
        "micro-batches in a predicted",
    ),
    "wrong step time": (
        lambda p, d: dataclasses.replace(p, predicted_ms=p.predicted_ms * d.choice([0.9, 1.001])),
        "slowest pipeline takes",
    ),
    "bound above the plan": (lambda p, d: dataclasses.replace(p, lower_bound_ms=p.predicted_ms * 1.01), "lower bound"),
    "negative bound": (lambda p, d: dataclasses.replace(p, lower_bound_ms=-1.0), "lower bound"),
    "negative step": (lambda p, d: dataclasses.replace(p, step=-1 - d.randrange(5)), "must not be negative"),
    "lengths below 1": (other_lengths, "not at least 1"),
    "an id missing": (lambda p, d: dataclasses.replace(p, sequence_ids=p.sequence_ids[1:]), "needs one each"),
    "nothing to do": (lambda p, d: dataclasses.replace(p, sequence_ids=(), lengths=()), "needs one each"),
}  # fmt: skip


@pytest.fixture(scope="module")
def plans() -> list[StepPlan]:
    planner = a800_planner()
    return [planner.plan(i, range(60), a800_batch(i, 60)) for i in range(8)]


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_is_refused_for_its_reason(name: str, plans: list[StepPlan]) -> None:
    mutate, reason = MUTATIONS[name]
    table, draw = a800_planner().cost_table, random.Random(name)
    for turn in range(56):  # 19 kinds: 1,064 plans
        plan = plans[turn % len(plans)]
        validate_plan(plan, table, NUM_RANKS)
        with pytest.raises(PlanError, match=reason) as error:
            validate_plan(mutate(plan, draw), table, NUM_RANKS)
        assert "plan of step" in str(error.value)


def test_limits_alone_check_everything_but_the_model_s_times(plans: list[StepPlan]) -> None:
    table = a800_planner().cost_table
    limits = {cost.scheme: cost.max_length for cost in table.costs}
    validate_plan(plans[0], limits, NUM_RANKS)
    with pytest.raises(PlanError, match="MaxLen is"):
        validate_plan(overfill(plans[0], random.Random(0)), limits, NUM_RANKS)
