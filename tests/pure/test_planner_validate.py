"""The validator: over 1,000 plans broken in every way a plan can be broken, each refused for its reason."""

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.plan.simulate import has_formula, simulate_pipeline, simulated_ms
from ds_hydra.planner import MicroBatchPlan, Phase, PipelinePlan, Span, StepPlan, validate_plan
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.planner_cases import a800_batch, a800_planner

NUM_RANKS = 64
Mutation = Callable[[StepPlan, random.Random], StepPlan]


def busy(plan: StepPlan, draw: random.Random) -> int:
    """A pipeline that runs something."""
    return draw.choice([p for p, pipeline in enumerate(pipelines_of(plan)) if pipeline.microbatches])


def pipelines_of(plan: StepPlan) -> list[PipelinePlan]:
    return list(plan.pipelines)


def with_pipelines(plan: StepPlan, pipelines: list[PipelinePlan]) -> StepPlan:
    return dataclasses.replace(plan, phases=(Phase(tuple(pipelines)),))


def change(plan: StepPlan, p: int, **fields: object) -> StepPlan:
    pipelines = pipelines_of(plan)
    pipelines[p] = dataclasses.replace(pipelines[p], **fields)  # type: ignore[arg-type]
    return with_pipelines(plan, pipelines)


def edit(plan: StepPlan, draw: random.Random, how: Callable[[list[list[Span]]], object]) -> StepPlan:
    """Change one pipeline's micro-batches in place."""
    p = busy(plan, draw)
    batches = [list(batch.spans) for batch in pipelines_of(plan)[p].microbatches]
    how(batches)
    return change(plan, p, microbatches=tuple(MicroBatchPlan(tuple(spans)) for spans in batches))


def overfill(plan: StepPlan, draw: random.Random) -> StepPlan:
    """All sequences into one micro-batch of one pipeline."""
    p = busy(plan, draw)
    everything = (MicroBatchPlan.of_whole(range(len(plan.lengths)), plan.lengths),)
    pipelines = [dataclasses.replace(x, microbatches=(), predicted_ms=0.0) for x in pipelines_of(plan)]
    pipelines[p] = dataclasses.replace(pipelines_of(plan)[p], microbatches=everything)
    return with_pipelines(plan, pipelines)


def cut(plan: StepPlan, draw: random.Random, how: Callable[[Span, int], list[Span]]) -> StepPlan:
    """Put slices of a sequence in its place, each in a micro-batch; `how` gets the whole and a place to cut it."""
    for p, pipeline in enumerate(pipelines_of(plan)):
        for number, batch in enumerate(pipeline.microbatches):
            longest = max(batch.spans, key=lambda span: span.stop)
            if longest.stop > 3:
                rest = tuple(span for span in batch.spans if span != longest)
                first, *others = how(longest, draw.randrange(2, longest.stop - 1))
                batches = list(pipeline.microbatches)
                batches[number] = MicroBatchPlan((*rest, first))
                batches[number + 1 : number + 1] = [MicroBatchPlan((span,)) for span in others]
                return change(plan, p, microbatches=tuple(batches))
    raise AssertionError("some sequence has more than 3 tokens")


def halved(plan: StepPlan, draw: random.Random) -> StepPlan:
    """A sequence in two slices."""
    return cut(plan, draw, lambda s, at: [s._replace(stop=at), s._replace(start=at)])


def joined(plan: StepPlan, draw: random.Random) -> StepPlan:
    """Two slices of a sequence in one micro-batch."""
    for p, pipeline in enumerate(pipelines_of(halves := halved(plan, draw))):
        for number, before in enumerate(pipeline.chain):
            if before >= 0:
                batches = list(pipeline.microbatches)
                batches[before] = MicroBatchPlan(batches[before].spans + batches.pop(number).spans)
                return change(halves, p, microbatches=tuple(batches))
    raise AssertionError("some micro-batch follows another")


def move_a_slice(plan: StepPlan, draw: random.Random) -> StepPlan:
    """The end of a sequence runs in another pipeline than its beginning."""
    whole = cut(plan, draw, lambda s, at: [s._replace(stop=at)])
    lost = next(
        span._replace(start=span.stop, stop=plan.lengths[span.sequence])
        for pipeline in pipelines_of(whole) for batch in pipeline.microbatches for span in batch.spans
        if span.stop != plan.lengths[span.sequence]
    )  # fmt: skip
    last = pipelines_of(whole)[-1]
    return change(whole, -1, microbatches=(*last.microbatches, MicroBatchPlan((lost,))))


def idle(phase: Phase) -> Phase:
    """The phase with the same pipelines, none of which runs anything."""
    return Phase(tuple(dataclasses.replace(p, microbatches=(), predicted_ms=0.0) for p in phase.pipelines))


def with_second_phase(plan: StepPlan, draw: random.Random, spans: tuple[Span, ...]) -> StepPlan:
    pipelines = list(idle(plan.phases[-1]).pipelines)
    p = draw.randrange(len(pipelines))
    pipelines[p] = dataclasses.replace(pipelines[p], microbatches=(MicroBatchPlan(spans),))
    return dataclasses.replace(plan, phases=(*plan.phases, Phase(tuple(pipelines))))


def in_two_phases(plan: StepPlan, draw: random.Random) -> StepPlan:
    position = draw.randrange(len(plan.lengths))
    return with_second_phase(plan, draw, (Span(position, 0, plan.lengths[position]),))


def cut_over_two_phases(plan: StepPlan, draw: random.Random) -> StepPlan:
    """The end of a sequence runs in a later phase than its beginning."""
    begun = cut(plan, draw, lambda s, at: [s._replace(stop=at)])
    position, stop = next(
        (span.sequence, span.stop)
        for pipeline in begun.pipelines for batch in pipeline.microbatches for span in batch.spans
        if span.stop != plan.lengths[span.sequence]
    )  # fmt: skip
    return with_second_phase(begun, draw, (Span(position, stop, plan.lengths[position]),))


def edit_batch(plan: StepPlan, draw: random.Random, **fields: object) -> StepPlan:
    p = busy(plan, draw)
    first, *others = pipelines_of(plan)[p].microbatches
    changed = dataclasses.replace(first, **fields)  # type: ignore[arg-type]
    return change(plan, p, microbatches=(changed, *others))


def other_lengths(plan: StepPlan, draw: random.Random) -> StepPlan:
    lengths = list(plan.lengths)
    lengths[draw.randrange(len(lengths))] = -draw.randrange(5)
    return dataclasses.replace(plan, lengths=tuple(lengths))


MUTATIONS: dict[str, tuple[Mutation, str]] = {
    "drop a sequence": (lambda p, d: edit(p, d, lambda b: b[0].pop() if len(b[0]) > 1 else b.pop(0)), "run nowhere"),
    "run one twice": (lambda p, d: edit(p, d, lambda b: b[0].append(b[-1][0])), r"runs \d+ times"),
    "unknown position": (
        lambda p, d: edit(p, d, lambda b: b[0].append(Span(len(p.lengths) + d.randrange(9), 0, 5))),
        "names position",
    ),
    "negative position": (lambda p, d: edit(p, d, lambda b: b[0].append(Span(-1, 0, 5))), "names position"),
    "empty micro-batch": (lambda p, d: edit(p, d, lambda b: b.insert(d.randrange(len(b) + 1), [])), "is empty"),
    "no memory": (overfill, "MaxLen is"),
    "a rank too many": (
        lambda p, d: with_pipelines(p, [*pipelines_of(p), PipelinePlan(PipelineShape.parse("tp4"), (), 0.0)]),
        "use 68 ranks but the job has 64",
    ),
    "a pipeline less": (lambda p, d: with_pipelines(p, pipelines_of(p)[:-1]), "ranks but the job has 64"),
    "unknown scheme": (
        lambda p, d: change(p, 0, shape=PipelineShape.parse(f"sp{pipelines_of(p)[0].shape.num_ranks}")),
        "MaxLen is unknown",
    ),
    "another schedule": (
        lambda p, d: change(p, 0, shape=dataclasses.replace(pipelines_of(p)[0].shape, schedule="zb")),
        "has the schedule 'zb'; the known ones are 1f1b, list",
    ),
    "no phase": (lambda p, d: dataclasses.replace(p, phases=()), "it has no phase"),
    "a phase twice": (lambda p, d: dataclasses.replace(p, phases=p.phases * 2), r"runs 2 times"),
    "a phase without sequences": (
        lambda p, d: dataclasses.replace(p, phases=(*p.phases, idle(p.phases[0]))),
        r"phase 1 \(.*\) of its 2 runs no sequence; leave it out",
    ),
    "a sequence in two phases": (in_two_phases, r"runs 2 times, not once"),
    "a sequence cut over two phases": (cut_over_two_phases, "slices of the sequence at position"),
    "a phase of fewer ranks": (
        lambda p, d: dataclasses.replace(p, phases=(*p.phases, Phase(p.phases[0].pipelines[1:]))),
        r"in phase 1 use \d+ ranks",
    ),
    "half a sequence": (lambda p, d: cut(p, d, lambda s, at: [s._replace(stop=at)]), r"but its slices, .* hold 0\.\."),
    "slices that overlap": (
        lambda p, d: cut(p, d, lambda s, at: [s._replace(stop=at), s._replace(start=at - 1)]),
        "but its slices",
    ),
    "slices the wrong way round": (
        lambda p, d: cut(p, d, lambda s, at: [s._replace(start=at), s._replace(stop=at)]),
        "but its slices",
    ),
    "an empty slice": (
        lambda p, d: cut(p, d, lambda s, at: [s._replace(stop=at), Span(s[0], at, at), s._replace(start=at)]),
        "but its slices",
    ),
    "a slice beside the whole": (
        lambda p, d: cut(p, d, lambda s, at: [s, s._replace(stop=at), s._replace(start=at)]),
        "runs 2 times",
    ),
    "slices in one micro-batch": (joined, r"micro-batch \d+ goes on at token \d+ of .* but no earlier micro-batch"),
    "slices in two pipelines": (move_a_slice, "one pipeline must run them all"),
    "too much recomputed": (
        lambda p, d: edit_batch(p, d, recompute=d.choice([-0.1, 1.5, float("nan")])),
        r"must be within 0\.\.1",
    ),
    "wrong pipeline time": (
        lambda p, d: change(p, (i := busy(p, d)), predicted_ms=pipelines_of(p)[i].predicted_ms * d.choice([0.5, 1.01])),
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
    "bound above the plan": (lambda p, d: dataclasses.replace(p, lower_bound_ms=p.searched_ms * 1.01), "lower bound"),
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


@pytest.mark.drawn
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_is_refused_for_its_reason(name: str, plans: list[StepPlan]) -> None:
    mutate, reason = MUTATIONS[name]
    table, draw = a800_planner().cost_table, random.Random(name)
    for turn in range(56):  # 30 kinds: 1,680 plans
        plan = plans[turn % len(plans)]
        validate_plan(plan, table, NUM_RANKS)
        with pytest.raises(PlanError, match=reason) as error:
            validate_plan(mutate(plan, draw), table, NUM_RANKS)
        assert "plan of step" in str(error.value)


def test_limits_alone_check_everything_but_the_model_s_times(plans: list[StepPlan]) -> None:
    table = a800_planner().cost_table
    limits = {cost.uniform: cost.max_length for cost in table.costs}
    validate_plan(plans[0], limits, NUM_RANKS)
    with pytest.raises(PlanError, match="MaxLen is"):
        validate_plan(overfill(plans[0], random.Random(0)), limits, NUM_RANKS)


def timed(plan: StepPlan) -> StepPlan:
    """The plan with the times that the cost model gives its pipelines, by simulation where there is no formula."""
    table = a800_planner().cost_table
    pipelines = [
        pipeline
        if has_formula(pipeline)
        else dataclasses.replace(pipeline, predicted_ms=simulate_pipeline(pipeline, table))
        for pipeline in plan.pipelines
    ]
    changed = with_pipelines(plan, pipelines)
    return dataclasses.replace(changed, predicted_ms=simulated_ms(changed.phases, table), lower_bound_ms=0.0)


def by_list(plan: StepPlan) -> StepPlan:
    """The plan with pipelines that run by the list order."""
    return with_pipelines(
        plan, [dataclasses.replace(p, shape=dataclasses.replace(p.shape, schedule="list")) for p in plan.pipelines]
    )


def test_slices_and_the_list_order_are_valid_with_their_simulated_times(plans: list[StepPlan]) -> None:
    table, draw = a800_planner().cost_table, random.Random(1)
    limits = {cost.uniform: cost.max_length for cost in table.costs}
    for plan in plans:
        for changed in (halved(plan, draw), by_list(halved(plan, draw)), by_list(plan)):
            found = timed(changed)
            validate_plan(found, table, NUM_RANKS)
            validate_plan(found, limits, NUM_RANKS)
            with pytest.raises(PlanError, match=r"cost table gives|slowest pipeline|predicted 0\.0"):
                validate_plan(dataclasses.replace(changed, lower_bound_ms=0.0, predicted_ms=0.0), table, NUM_RANKS)
        again = edit_batch(plan, draw, recompute=0.5)
        validate_plan(timed(again), table, NUM_RANKS)
        with pytest.raises(PlanError, match=r"cost table gives"):
            validate_plan(again, table, NUM_RANKS)


def test_slices_that_live_together_must_fit_a_stage() -> None:
    """MaxLen 100 on two stages is room for 200 tokens, which three slices of 70 do not leave each other."""
    shape = PipelineShape.parse("pp2")
    table = CostTable((SchemeCost(ParallelScheme(pp=2), 0.0, 1.0, 1.0, 100),))
    for slices, schedule in itertools.product((2, 3), ("1f1b", "list")):
        batches = tuple(MicroBatchPlan((Span(0, 70 * i, 70 * (i + 1)),)) for i in range(slices))
        pipeline = PipelinePlan(dataclasses.replace(shape, schedule=schedule), batches, 1.0)
        ms = simulate_pipeline(pipeline, table) if slices == 2 else 1.0
        phase = Phase((dataclasses.replace(pipeline, predicted_ms=ms),))
        plan = StepPlan(0, (0,), (70 * slices,), (phase,), ms)
        if slices == 2:
            validate_plan(plan, table, 2)
        else:
            with pytest.raises(PlanError, match=r"keeps up to 240 tokens .* room for 200|need 240800 units .* 200000"):
                validate_plan(plan, table, 2)


def test_phases_share_the_sequences_and_add_up_their_times(plans: list[StepPlan]) -> None:
    """The pipelines' work dealt out to two phases of the same strategy: half of the pipelines idle in each."""
    table, plan = a800_planner().cost_table, plans[0]
    phases = []
    for turn in (0, 1):
        idle = [dataclasses.replace(x, microbatches=(), predicted_ms=0.0) for x in pipelines_of(plan)]
        idle[turn::2] = pipelines_of(plan)[turn::2]
        phases.append(Phase(tuple(idle)))
    both = dataclasses.replace(plan, phases=tuple(phases), predicted_ms=sum(phase.predicted_ms for phase in phases))
    validate_plan(both, table, NUM_RANKS)
    assert both.strategy == f"{plan.strategy} then {plan.strategy}"
    assert both.balance > plan.balance
    assert "phase 1: " in both.table()
    with pytest.raises(PlanError, match="summed over its phases"):
        validate_plan(dataclasses.replace(both, predicted_ms=phases[0].predicted_ms), table, NUM_RANKS)


def test_the_chain_of_a_pipeline_follows_its_slices() -> None:
    def chain(*batches: tuple[Span, ...]) -> tuple[int, ...]:
        return PipelinePlan(PipelineShape.parse("pp2"), tuple(map(MicroBatchPlan, batches)), 1.0).chain

    first, second, third = Span(0, 0, 4), Span(0, 4, 6), Span(0, 6, 9)
    other, rest = Span(1, 0, 4), Span(1, 4, 5)
    assert chain() == ()
    assert chain((first,), (other,)) == (-1, -1)
    assert chain((first,), (second,), (third, other)) == (-1, 0, 1)
    assert chain((first,), (other,), (second,), (rest,), (third,)) == (-1, -1, 0, 1, 2)
    with pytest.raises(PlanError, match="micro-batch 2 goes on with 2 sequences, at positions 0 and 1"):
        chain((first,), (other,), (second, rest))
    with pytest.raises(PlanError, match="micro-batch 0 goes on at token 4 of the sequence at position 0"):
        chain((second,), (first,))
