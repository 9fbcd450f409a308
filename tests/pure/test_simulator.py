"""The simulation of a step: ports, waits, phases and memory as the notes tell them, and the rules of a trace."""

from __future__ import annotations

import dataclasses
import random
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.costs.activations import Activations
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.memory import JobMemory
from ds_hydra.costs.table_file import TableFile
from ds_hydra.pipe.model_plan import Bucket, ModelPlan, ParamSpec
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.schedules.actions import Action, Order, Slot, slots_from_text
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import SCHEDULES, Schedule, placed, training_slots
from ds_hydra.pipe.schedules.simulate import TimedAction, simulate_loads, simulate_slots
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.phase import MicroBatchPlan, Phase, PipelinePlan
from ds_hydra.plan.phase import Span as Slice
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.report.trace import trace_faults, trace_record
from ds_hydra.simulate import order
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.llama import SHIPPED, llama_plan
from ds_hydra.simulate.memory import memory_over_time
from ds_hydra.simulate.pipeline import StageTimes
from ds_hydra.simulate.spans import step_spans
from ds_hydra.simulate.step import Simulator
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.random_plans import random_job, random_plan
from tests.support.room import room_for_pushes

FREE = LinkModel(8, Speed(0.0, 1e18), Speed(0.0, 1e18))


def layers(count: int, numel: int) -> ModelPlan:
    """A model of `count` layers with one weight of `numel` elements each, and nothing else."""
    names = [f"w{index}" for index in range(count)]
    buckets = tuple(Bucket(name, (ParamSpec(name, (numel,)),)) for name in names)
    return ModelPlan(buckets, frozenset(), tuple(frozenset({name}) for name in names), frozenset(), alignment=1)


def job(links: LinkModel, num_ranks: int, *, count: int = 2, numel: int = 8, step: dict | None = None) -> SimulatedJob:
    """Sequences of l tokens take 3 l ms on a stage of any scheme; an element and a token's features take one byte."""
    schemes = [ParallelScheme(tp, pp) for tp in (1, 2) for pp in (1, 2)]
    table = CostTable(tuple(SchemeCost(scheme, 0.0, 3.0, 0.0, 1000) for scheme in schemes))
    return SimulatedJob(layers(count, numel), 1, TableFile(table, step=step), links, num_ranks, 1)


def plan_of(text: str, batches: list[list[int]], *more: tuple[str, list[list[int]]]) -> StepPlan:
    """Each pipeline of a strategy with the lengths of its micro-batches; further phases likewise."""
    lengths: list[int] = []
    phases = []
    for strategy, dealt in ((text, batches), *more):
        pipelines = []
        for shape, own in zip(StrategyShape.parse(strategy).pipelines, dealt, strict=True):
            positions = range(len(lengths), len(lengths) + len(own))
            lengths += own
            held = tuple(MicroBatchPlan.of_whole([position], lengths) for position in positions)
            pipelines.append(PipelinePlan(shape, held, 3.0 * sum(own)))
        phases.append(Phase(tuple(pipelines)))
    return StepPlan(0, tuple(range(len(lengths))), tuple(lengths), tuple(phases), sum(p.predicted_ms for p in phases))


def test_with_links_that_take_no_time_a_step_is_its_slowest_pipeline_and_the_update() -> None:
    found = Simulator(job(FREE, 4, step={"fixed_ms": 5.0, "update_ms_per_element": 2.0})).step(
        plan_of("pp2 + 2*tp1", [[3, 5, 4], [9], []])
    )
    three = Batches.whole(3)
    slowest = max(27.0, simulate_loads(placed("1f1b", three, 2), [[9.0, 15.0, 12.0]] * 2))
    # 16 elements on 4 ranks are 4 of each
    assert 1e3 * found.step_s == pytest.approx(5.0 + slowest + 8.0)
    assert found.ranks.compute * 1e3 == pytest.approx([36.0, 36.0, 27.0, 0.0])
    assert found.gap == 1.0  # the last rank has nothing to run
    # Stage 1 is done when stage 0 begins its last backward, of 8 ms.
    assert 1e3 * found.ranks.bubble == pytest.approx([slowest - 36.0, slowest - 8.0 - 36.0, 0.0, 0.0])


def test_a_layer_waits_for_its_own_pull_and_a_last_backward_pushes_layer_by_layer() -> None:
    """Two ranks, two layers of 8 bytes, 1000 bytes/s: each rank pulls 4 bytes of each layer in 4 ms.

    Layer 0 is there at 4 ms, layer 1 at 8 ms. Of a forward of 2 ms, layer 0 runs from 4 to 5 and layer 1 from 8 to 9.
    The backward takes 4 ms: layer 1 leaves at 11 and is over at 15, layer 0 is ready at 13 and over at 19.
    """
    links = LinkModel(2, Speed(0.0, 1e3))
    found = Simulator(job(links, 2)).step(plan_of("2*tp1", [[2], [2]]))
    times = found.phases[0].pipelines[0][0]
    assert [(a, pytest.approx(1e3 * b), pytest.approx(1e3 * c)) for (a, _, _), b, c in times.actions] == [
        ("forward", 0.0, 9.0), ("backward", 9.0, 13.0)
    ]  # fmt: skip
    assert [(pytest.approx(1e3 * a), pytest.approx(1e3 * b)) for a, b in times.waits] == [(0.0, 4.0), (5.0, 8.0)]
    assert 1e3 * found.phases[0].stop == pytest.approx([19.0, 19.0])
    norm = 1e3 * links.collective_s("all_gather", range(2), 16)
    assert 1e3 * found.step_s == pytest.approx(19.0 + norm)
    assert 1e3 * found.ranks.pull == pytest.approx([7.0, 7.0])
    assert 1e3 * found.ranks.push == pytest.approx([6.0, 6.0])
    assert 1e3 * found.exposed_s == pytest.approx(13.0 + norm)


@pytest.mark.parametrize(
    ("lanes", "room", "stop"),
    [
        # The trade of layer 1 takes from 11 to 15, and has come at 17. The next one has the port at 15,
        (False, 1 << 20, 21.0),
        # but not the memory before 17;
        (False, 1, 23.0),
        # in a lane it stands behind the second step of the first one's push, whatever the room.
        (True, 1 << 20, 23.0),
        (True, 1, 23.0),
    ],
)
def test_a_push_waits_for_memory_and_for_the_lane(lanes: bool, room: int, stop: float) -> None:
    """The step of the test before, with a latency of 2 ms that pulls have beside their 4 and 8."""
    slow = dataclasses.replace(job(LinkModel(2, Speed(2e-3, 1e3)), 2), lanes=lanes, element_bytes=1, sum_bytes=1)
    with room_for_pushes(room):
        found = Simulator(slow).step(plan_of("2*tp1", [[2], [2]]))
    last = found.phases[0].pipelines[0][0].actions[-1]
    assert 1e3 * last.stop == pytest.approx(15.0)  # two later than without the latency
    assert 1e3 * found.phases[0].stop == pytest.approx([stop + 2.0] * 2)


@pytest.mark.parametrize("lanes", [True, False])
def test_on_a_host_second_steps_begin_before_and_after_all_computing(lanes: bool) -> None:
    """Each node of three ranks gathers what has entered it, and adds up before it sends."""
    given = job(LinkModel(3, Speed(0.0, 1e5), Speed(0.0, 1e3)), 6, count=3, numel=48)
    phase = Simulator(dataclasses.replace(given, lanes=lanes)).step(plan_of("6*tp1", [[2]] * 6)).phases[0]
    computing = [phase.pipelines[rank][0] for rank in range(6)]
    entered = np.max([enter.came for enter, _ in phase.pulls], axis=0)
    begun = [times.waits[0][1] for times in computing]
    assert all(begin > came - 1e-9 for begin, came in zip(begun, entered, strict=True)) != lanes
    first = phase.pushes[2]
    left = [first[1].left_from[rank] >= computing[rank].stop for rank in range(6)]
    assert left == [not lanes] * 6
    over = [np.maximum(trade.came, np.maximum(leave.came, leave.left)) for trade, leave in phase.pushes.values()]
    for (_, leave), before in zip(list(phase.pushes.values())[1:], over, strict=False):
        assert lanes or (leave.left_from >= before).all(), "push by push"


def test_the_last_weight_gradients_push_layer_by_layer() -> None:
    """As above, with two micro-batches whose backwards are split: F0 until 9, then 2 ms for each of the others.

    The weight gradients begin at 15 and run layer by layer: layer 1 leaves at 17 and is over at 21, layer 0 is ready at
    19 and over at 25.
    """

    def all_at_the_end(batches: Batches, num_stages: int) -> tuple[Order, ...]:
        return (slots_from_text("F0 I0 F1 I1 W0 W1")[0],)

    with mock.patch.dict(SCHEDULES, {"ends-with-weights": Schedule("ends-with-weights", all_at_the_end)}):
        found = Simulator(job(LinkModel(2, Speed(0.0, 1e3)), 2)).step(
            plan_of("2*tp1/ends-with-weights", [[2, 2], [2, 2]])
        )
    times = found.phases[0].pipelines[0][0]
    assert [(str(a), pytest.approx(1e3 * stop)) for a, _, stop in times.actions] == [
        ("F0", 9.0), ("I0", 11.0), ("F1", 13.0), ("I1", 15.0), ("W0", 17.0), ("W1", 19.0)
    ]  # fmt: skip
    assert times.armed is not None
    assert 1e3 * times.armed == pytest.approx(15.0)
    assert 1e3 * found.phases[0].stop == pytest.approx([25.0, 25.0])


def test_twins_of_a_node_bring_in_its_parts_and_gather_them() -> None:
    """Nodes of 2 ranks, all want all 8 bytes, and each owns 2. A byte takes 1 ms inside a node and 10 between.

    The first half enters at ranks 0 and 2, the second at ranks 1 and 3. Ranks 0 and 3 have half of theirs and get the
    rest from their neighbours: rank 3 at 2, rank 0 when rank 1 has sent to the other node before, at 22. Ranks 1 and 2
    get two messages of 2 bytes from the other node, at 20 and 40. Then neighbours exchange their halves of 4 bytes, as
    soon as each has its own.
    """
    links = LinkModel(2, Speed(0.0, 1e3), Speed(0.0, 1e2))
    found = Simulator(job(links, 4, count=1)).step(plan_of("4*tp1", [[1], [1], [1], [1]]))
    ((enter, gather),) = found.phases[0].pulls
    assert 1e3 * enter.came == pytest.approx([22.0, 40.0, 40.0, 2.0])
    assert 1e3 * gather.came == pytest.approx([44.0, 26.0, 6.0, 44.0])
    starts = [stage.actions[0].stop for (stage,) in found.phases[0].pipelines]
    assert 1e3 * np.array(starts) - 1.0 == pytest.approx([44.0, 40.0, 40.0, 44.0]), "when a rank has both"
    assert found.phases[0].started.tolist() == [0.0] * 4


def test_phases_follow_each_other_on_every_rank() -> None:
    one, other = ("pp2", [[3, 4]]), ("2*tp1", [[5], [2]])
    simulator = Simulator(job(FREE, 2))
    alone = [simulator.step(plan_of(*phase)).step_s for phase in (one, other)]
    both = simulator.step(plan_of(*one, other))
    assert both.step_s == pytest.approx(sum(alone))
    names = [span.name for span in step_spans(both, ranks={0}) if span.stream == "compute"]
    assert "F0 of phase 0" in names
    assert "F0 of phase 1" in names


def test_messages_between_stages_take_their_links_time() -> None:
    """2 tokens of one byte at 1000 bytes/s and 5 ms of latency: 7 ms there and 7 ms back around 3 * 2 ms of work."""
    links = LinkModel(2, Speed(5e-3, 1e3))
    simulator = Simulator(job(links, 2, count=2, numel=1))
    stages = simulator.step(plan_of("pp2", [[2]])).phases[0].pipelines[0]
    began = stages[0].actions[0].stop
    assert [1e3 * (timed.start - began) for timed in stages[1].actions] == pytest.approx([7.0, 9.0])
    assert 1e3 * (stages[0].actions[1].start - began) == pytest.approx(7.0 + 6.0 + 7.0)


def test_memory_follows_the_micro_batches_that_are_alive() -> None:
    plan, kept = layers(2, 8), {(1, 1): Activations(1.0, 0.0, 0.0, 10.0)}
    memory = JobMemory(plan, 2, kept, param_bytes=2)
    base = dataclasses.replace(job(FREE, 2), memory=memory)
    simulator = Simulator(base)

    def peaks(lengths: list[int]) -> list[float]:
        found = simulator.step(plan_of("pp2", [lengths])).peak_bytes
        assert found is not None
        return [float(peak - memory.needs(ParallelScheme(1, 2), stage).states) for stage, peak in enumerate(found)]

    # Stage 0 keeps both micro-batches of 100 and 50 tokens, one byte a token, and 10 a token of the one it computes.
    assert peaks([100, 50]) == [100 + 50 + 10 * 100, 100 + 10 * 100]
    assert peaks([100]) == [100 + 10 * 100, 100 + 10 * 100]
    for stage, needs in enumerate(memory.stages(ParallelScheme(1, 2))):
        assert peaks([64] * 5)[stage] == needs.total(64) - needs.states, "what MaxLen was made for"


@pytest.mark.parametrize(
    ("state", "held"),
    [
        (0.0, [13, 22, 31, 40, 39, 30, 21, 61, 21, 0]),
        (4.0, [15, 26, 37, 46, 47, 36, 25, 65, 25, 0]),  # 2 bytes handed on by three slices, and their gradients
    ],
)
def test_contexts_of_slices_are_there_from_the_first_forward_to_the_first_slices_backward(
    state: float, held: list[int]
) -> None:
    """Four slices of one token keep 10 bytes each, 1 of them keys and values, and sums of their gradients take 2; the
    example of `simulate.memory`, with 40 bytes of a whole sequence that runs between their backwards."""
    kept = Activations(10.0, 0.0, 0.0, 0.0, context=0.2, state=state)
    memory = JobMemory(layers(1, 8), 1, {(1, 1): kept}, param_bytes=2)
    whole = plan_of("tp1", [[4, 4]])
    (pipeline,) = whole.pipelines
    slices = tuple(MicroBatchPlan((Slice(0, start, start + 1),)) for start in range(4))
    pipeline = dataclasses.replace(pipeline, microbatches=(*slices, pipeline.microbatches[1]))
    forwards = [Action("forward", number) for number in range(5)]
    backwards = [Action("backward", number) for number in range(5)]
    done = [*forwards[:4], *backwards[3:0:-1], forwards[4], backwards[4], backwards[0]]
    actions = tuple(TimedAction(action, 0.0, 0.0) for action in done)
    stage = place_strategy(StrategyShape.parse("tp1"), 1, 1).pipelines[0].stages[0]
    curve = memory_over_time(memory, pipeline, StageTimes(stage, 0, (), 0.0, (), 0.0, actions=actions))
    states = curve[0][1]
    assert [bytes_held - states for _, bytes_held in curve[2::2]] == held


@pytest.mark.parametrize(("share", "held"), [(0.5, 50 + 50 / 4), (0.3, 50 + 50 / 4), (1.0, 100 / 4 + 25 * 3 / 4)])
def test_layers_computed_again_take_a_forward_more_and_keep_less(share: float, held: float) -> None:
    """Of four layers of a stage with 25 bytes each, and seven a token while one computes. Of two of them a quarter
    stays, and when these are computed again the others are gone; of all four, three quarters of one are there then."""
    plan, kept = layers(4, 8), {(1, 1): Activations(0.25, 0.0, 0.0, 7.0, recomputed=0.25)}
    memory = JobMemory(plan, 1, kept, param_bytes=2)
    simulator = Simulator(dataclasses.replace(job(FREE, 1, count=4), memory=memory))
    whole = plan_of("tp1", [[100]])
    (pipeline,) = whole.pipelines
    batches = (dataclasses.replace(pipeline.microbatches[0], recompute=share),)
    again = dataclasses.replace(whole, phases=(Phase((dataclasses.replace(pipeline, microbatches=batches),)),))
    found, before = simulator.step(again), simulator.step(whole)
    assert found.peak_bytes is not None
    states = memory.needs(ParallelScheme(), 0).states
    assert float(found.peak_bytes[0] - states) == held + 7 * 100
    assert "B0 recomputed" in [span.name for span in step_spans(found)]
    took, took_before = ([t.stop - t.start for t in step.phases[0].pipelines[0][0].actions] for step in (found, before))
    assert sum(took) == pytest.approx(sum(took_before) * (1 + share * 0.35), rel=1e-3)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9))
def test_random_plans_run_to_their_end_within_bounds(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 4, 8, 13])
    drawn = random_job(rng, size)
    plan = random_plan(rng, drawn.table, size)
    validate_plan(plan, drawn.table, size)
    drawn.check(plan)
    found = Simulator(drawn).step(plan)
    slower = dataclasses.replace(drawn.links, inside=Speed(2 * drawn.links.inside[0], drawn.links.inside[1] / 3))
    free = Simulator(dataclasses.replace(drawn, links=dataclasses.replace(FREE, node_size=slower.node_size))).step(plan)
    assert free.step_s <= found.step_s <= Simulator(dataclasses.replace(drawn, links=slower)).step(plan).step_s + 1e-9
    figures = found.ranks
    assert figures.compute == pytest.approx(free.ranks.compute)
    for part in dataclasses.fields(figures):
        assert (getattr(figures, part.name) >= -1e-12).all()
    assert (figures.compute + figures.bubble + figures.pull + figures.push <= found.step_s + 1e-9).all()
    assert not trace_faults(trace_record({"predicted": step_spans(found), "again": step_spans(found)}))


def test_a_schedule_that_would_stand_still_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(name: str, batches: Batches, stages: int, stage: int) -> tuple[Slot, ...]:
        texts = ("F0 | >0 | <0 B0", "->0 F0 B0") if name == "crossed" else ("F0 | >0 | <0 B0", "->0 F0 B0 | <-0")
        return slots_from_text(texts[stage])

    monkeypatch.setattr(order, "training_slots", too_late)
    for name, words in (("crossed", "waits for ever"), ("sound", "")):
        pipeline = PipelinePlan(PipelineShape.parse(f"pp2/{name}"), (MicroBatchPlan.of_whole([0], [3]),), 1.0)
        plan = StepPlan(0, (0,), (3,), (Phase((pipeline,)),), 1.0)
        if words:
            with pytest.raises(PlanError, match=words):
                order.check_order(plan, job(FREE, 2).table)
        else:
            order.check_order(plan, job(FREE, 2).table)
    # A stage that may push in a backward has no message after it, or its neighbour would wait for that one for ever.
    monkeypatch.setattr(order, "backward_of_first_push", lambda slots: Action("backward", 0))
    with pytest.raises(PlanError, match="stage 1 pushes in B0, but <-0 follow"):
        order.check_order(dataclasses.replace(plan, phases=(Phase((dataclasses.replace(
            pipeline, shape=PipelineShape.parse("pp2/again")),)),)), job(FREE, 2).table)  # fmt: skip


class _Instant:
    def compute(self, stage: int, action: object, ready: float) -> tuple[float, float]:
        return ready, ready

    def send(self, stage: int, message: object, ready: float) -> tuple[float, float]:
        return ready, ready

    def receive(self, stage: int, message: object, head: float) -> float:
        return head


def test_bad_plans_are_refused() -> None:
    with pytest.raises(PlanError, match="2 ranks but the job has 4"):
        Simulator(job(FREE, 4)).step(plan_of("2*tp1", [[1], [1]]))
    with pytest.raises(PlanError, match="no entry for scheme sp2"):
        Simulator(job(FREE, 2)).step(plan_of("sp2", [[1]]))
    with pytest.raises(PlanError, match="messages that nobody sends"):
        simulate_slots([training_slots("1f1b", Batches.whole(1), 2, 0), ()], _Instant())


@pytest.mark.parametrize("name", SHIPPED)
def test_plans_of_shipped_models_hold_their_parameters(name: str) -> None:
    shape = SHIPPED[name].shape
    assert sum(bucket.numel for bucket in llama_plan(shape).buckets) == shape.params
