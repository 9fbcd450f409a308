"""The simulation of a step, its traces, what messages add to it, and steps of several phases."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.commands import preview
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile
from ds_hydra.costs.memory import Activations, JobMemory
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.model_plan import Bucket, ModelPlan, ParamSpec
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.schedules.actions import Action, Order, Slot, slots_from_text
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import SCHEDULES, Schedule, placed, training_slots
from ds_hydra.pipe.schedules.simulate import TimedAction, simulate_loads, simulate_slots
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan
from ds_hydra.plan.step_plan import Span as Slice
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner import PhasedPlanner, Planner, PlannerOptions, parse_phases, save_plans
from ds_hydra.planner.propose import ProposalEffort, propose_strategies
from ds_hydra.report.calibration import LEAST, Calibration
from ds_hydra.report.plots import draw_gantt, pipeline_schemes
from ds_hydra.report.record import format_line, is_heterogeneous, monitor_events
from ds_hydra.report.trace import Span, trace_faults, trace_record
from ds_hydra.simulate import job as job_module
from ds_hydra.simulate.job import SHIPPED, SimulatedJob, llama_plan
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.pipeline import StageTimes, memory_over_time
from ds_hydra.simulate.step import Simulator, exposed_ms, step_spans
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.pure.test_composing import CHUNKED, CUT_TABLE, WHOLE
from tests.pure.test_report import RECORD
from tests.support.planner_cases import TABLES, random_job, random_plan, room_for_pushes

# --- The simulation of a step: ports, waits, phases and memory as the notes tell them, and the rules of a
# trace.
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


def test_states_on_the_host_come_before_pulls_and_around_the_update() -> None:
    """32 elements over 2 ranks at 1000 bytes/s: masters take 64 ms before each phase's pulls, all states 192 ms each
    way beside the update, and the last of two runs 96 ms more."""
    kept, step = {(1, 1): Activations(1.0, 0.0, 0.0, 10.0)}, {"update_ms_per_element": 1.0}
    one, other = ("pp2", [[3, 4]]), ("2*tp1", [[5], [2]])
    base = dataclasses.replace(job(FREE, 2, numel=16, step=step), host_link=1e3)
    here, there = (
        dataclasses.replace(base, memory=JobMemory(base.plan, 2, kept, param_bytes=2, run=run)) for run in (0, 8)
    )
    steps = [Simulator(one_job).step(plan_of(*one, other)) for one_job in (here, there)]
    assert 1e3 * (steps[1].step_s - steps[0].step_s) == pytest.approx(2 * 64 + (192 + 96) - 16)
    assert there.update_s(1.0) == pytest.approx(1.0 + 0.096), "copies that are hidden"
    pulls = [span for span in step_spans(steps[1], ranks={0}) if span.name.startswith("start pulls")]
    assert [1e3 * (span.stop_s - span.start_s) for span in pulls] == pytest.approx([64.0, 64.0])


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
    example of `memory_over_time`, with 40 bytes of a whole sequence that runs between their backwards."""
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

    monkeypatch.setattr(job_module, "training_slots", too_late)
    for name, words in (("crossed", "waits for ever"), ("sound", "")):
        pipeline = PipelinePlan(PipelineShape.parse(f"pp2/{name}"), (MicroBatchPlan.of_whole([0], [3]),), 1.0)
        plan = StepPlan(0, (0,), (3,), (Phase((pipeline,)),), 1.0)
        if words:
            with pytest.raises(PlanError, match=words):
                job_module.check_order(plan, job(FREE, 2).table)
        else:
            job_module.check_order(plan, job(FREE, 2).table)
    # A stage that may push in a backward has no message after it, or its neighbour would wait for that one for ever.
    monkeypatch.setattr(job_module, "backward_of_first_push", lambda slots: Action("backward", 0))
    with pytest.raises(PlanError, match="stage 1 pushes in B0, but <-0 follow"):
        job_module.check_order(dataclasses.replace(plan, phases=(Phase((dataclasses.replace(
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


# --- What a simulated step's trace must hold, and the picture of it.
SPANS = [Span(0, "compute", "forward", "F0", 0.0, 3.0), Span(0, "compute", "pull", "wait", 1.0, 2.0)]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda events: events[4].update(dur=0), "lasts 0 microseconds"),
        (lambda events: events[5].update(dur=3e6), "'wait' .* overlaps 'F0'"),
        (lambda events: events[4].update(ts="0"), "begins at '0'"),
        (lambda events: events[4].update(ts=float("nan")), "begins at nan"),
        (lambda events: events[4].update(ph="B"), "phase 'B'"),
        (lambda events: events[0].update(name="process"), "is no metadata of process_name, "),
        (lambda events: events[1].update(args={"sort_index": "0"}), "is no metadata"),
        (lambda events: events[4].pop("name"), "lacks a name"),
        (lambda events: events[4].update(pid="0"), "pid or tid"),
        (lambda events: events.pop(0), "no name"),
    ],
)
def test_what_breaks_the_rules_of_a_trace_is_found(spoil: object, words: str) -> None:
    record = trace_record({"predicted": SPANS})
    assert not trace_faults(record)
    assert [(e["ts"], e["dur"]) for e in record["traceEvents"] if e["ph"] == "X"] == [(0.0, 3e6), (1e6, 1e6)]
    spoil(record["traceEvents"])  # type: ignore[operator]
    assert re.search(words, trace_faults(record)[0]), trace_faults(record)
    assert trace_faults({**record, "displayTimeUnit": "s"}), "viewers know ms and ns"
    assert trace_faults({"events": record["traceEvents"]}), "events have a name of their own"


def test_a_picture_shows_every_rank_and_refuses_too_many(tmp_path: Path) -> None:
    again = [span._replace(rank=1) for span in SPANS]
    words = draw_gantt(tmp_path / "a.png", {"predicted": SPANS + again, "measured": SPANS}, "two ranks")
    assert words == "3 rows over 3000.0 ms"
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match="97 rows"):
        draw_gantt(tmp_path / "b.png", {"": [SPANS[0]._replace(rank=rank) for rank in range(97)]}, "many")


# --- What messages add to a step: where it comes from, and that plans are chosen by it.
EXPOSED = st.lists(st.floats(0.0, 300.0), min_size=len(WHOLE), max_size=len(WHOLE))


def at(rate: float) -> LinkModel:
    return LinkModel(8, Speed(0.0, rate), Speed(0.0, rate))


@pytest.mark.parametrize("lengths", [[300, 300], [100] * 6, [600] * 4])
def test_one_stage_hides_transfers_behind_as_few_micro_batches_as_a_plan_has(lengths: list[int]) -> None:
    cluster, strategy = replace(job(at(1e3), 2, numel=400), element_bytes=1), StrategyShape.parse("2*tp1")
    plan = Planner(cluster.table, [strategy], PlannerOptions(kernels="compiled")).plan(0, range(len(lengths)), lengths)
    with_links = 1e3 * Simulator(cluster).step(plan).norm_s
    assert exposed_ms(cluster, strategy, sum(lengths)) == pytest.approx(with_links - plan.predicted_ms, rel=0.02)
    # One rank alone owns all that it needs, and so it is with its share of a larger job.
    assert exposed_ms(cluster, StrategyShape.parse("tp1"), sum(lengths)) < 1e-6


@settings(max_examples=30)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), EXPOSED)
def test_the_shortest_step_is_planned_and_bounded(lengths: list[int], exposed: list[float]) -> None:
    """Few sequences, for which the plans of a strategy are optimal."""
    strategies, options = [StrategyShape.parse(text) for text in WHOLE], PlannerOptions(kernels="compiled")
    found = Planner(CUT_TABLE, strategies, options, exposed_ms=exposed).plan(0, range(len(lengths)), lengths)
    validate_plan(found, CUT_TABLE, 8)
    alone = [Planner(CUT_TABLE, [one], options).plan(0, range(len(lengths)), lengths) for one in strategies]
    steps = [plan.searched_ms + ms for plan, ms in zip(alone, exposed, strict=True)]
    own = exposed[strategies.index(found.phases[0].shape)]
    assert found.searched_ms + own == pytest.approx(min(steps), rel=0.0011)
    assert found.lower_bound_ms + own <= min(steps) * (1 + 1e-9) or found.lower_bound_ms == 0.0


def test_chunked_strategies_are_compared_by_steps_too() -> None:
    texts, lengths = (*WHOLE, *CHUNKED), [390, 200, 120, 80, 60, 50, 30, 30, 20, 20, 10]
    strategies, options = [StrategyShape.parse(text) for text in texts], PlannerOptions(kernels="compiled")
    free = Planner(CUT_TABLE, strategies, options).plan(0, range(len(lengths)), lengths)
    best = strategies.index(free.phases[0].shape)
    exposed = [1000.0 if index == best else 0.0 for index in range(len(texts))]
    other = Planner(CUT_TABLE, strategies, options, exposed_ms=exposed).plan(0, range(len(lengths)), lengths)
    assert other.phases[0].shape != free.phases[0].shape
    assert free.predicted_ms <= other.predicted_ms < free.predicted_ms + 1000.0
    # What adds to all alike changes nothing.
    same = Planner(CUT_TABLE, strategies, options, exposed_ms=[70.0] * len(texts)).plan(0, range(len(lengths)), lengths)
    assert same.phases == free.phases


def test_strategies_are_proposed_by_steps() -> None:
    lengths = [5, 10, 20, 30, 40, 60, 90, 200, 390] * 8
    effort = ProposalEffort(4, 2, 5, 1, 20)

    def proposed(added: dict[str, float]) -> str:
        found = propose_strategies(
            CUT_TABLE, 8, lengths, 1000, 100, count=1, effort=effort,
            exposed=lambda strategy: added.get(str(strategy.pipelines[0]), 0.0),
        )  # fmt: skip
        return str(found[0])

    free = proposed({})
    dear = dict.fromkeys((str(shape) for shape in StrategyShape.parse(free).pipelines), 1e5)
    assert not set(dear) & {str(shape) for shape in StrategyShape.parse(proposed(dear)).pipelines}


def test_simulated_steps_decide_among_the_best_plans() -> None:
    """Finalists are of several strategies; whichever is said to be soonest done wins, and its bound still holds."""
    texts, lengths = (*WHOLE, *CHUNKED), [390, 200, 120, 80, 60, 50, 30, 30, 20, 20, 10]
    strategies, options = [StrategyShape.parse(text) for text in texts], PlannerOptions(kernels="compiled")
    estimated = Planner(CUT_TABLE, strategies, options).plan(0, range(len(lengths)), lengths)
    asked: dict[str, float] = {}

    def other_than(wanted: str, plan: StepPlan) -> float:
        return float(plan.strategy != wanted)

    def as_estimated(plan: StepPlan) -> float:
        asked[plan.strategy] = plan.predicted_ms
        return plan.predicted_ms

    planner = Planner(CUT_TABLE, strategies, options, step_ms=as_estimated)
    assert planner.plan(0, range(len(lengths)), lengths).predicted_ms <= estimated.predicted_ms
    assert 1 < len(asked) <= 4
    for wanted in asked:
        chosen = Planner(CUT_TABLE, strategies, options, step_ms=partial(other_than, wanted))
        found = chosen.plan(0, range(len(lengths)), lengths)
        assert found.strategy == wanted
        assert found.step_ms == pytest.approx(0.0), "it states what it was chosen by"
        validate_plan(found, CUT_TABLE, 8)
        assert found.lower_bound_ms <= min(asked.values())


def test_several_plans_of_the_best_chunked_strategy_are_simulated() -> None:
    """What its messages add differs from plan to plan: here it is by far the least for the plan that computes most."""
    lengths, asked = [390, 200, 120, 80, 60, 50, 30, 30, 20, 20, 10] * 2, list[float]()

    def step_ms(plan: StepPlan) -> float:
        asked.append(plan.predicted_ms)
        return 1e6 - plan.predicted_ms

    planner = Planner(CUT_TABLE, [StrategyShape.parse(CHUNKED[0])], PlannerOptions(kernels="compiled"), step_ms=step_ms)
    found = planner.plan(0, range(len(lengths)), lengths)
    validate_plan(found, CUT_TABLE, 8)
    assert len(set(asked)) > 1
    assert found.predicted_ms == max(asked)


def test_a_simulation_is_asked_only_where_there_is_a_choice() -> None:
    def never(plan: StepPlan) -> float:
        raise AssertionError("one plan needs no comparison")

    lengths, options = [100, 50, 20], PlannerOptions(kernels="compiled")
    assert Planner(CUT_TABLE, [StrategyShape.parse(WHOLE[0])], options, step_ms=never).plan(0, range(3), lengths)


# --- Steps of several phases: their text, their plans, and their figures in predictions, records and previews.
HOT_SWITCHING = "4*tp1 then 2*tp2 then tp4"
# MaxLen grows with the ranks of a scheme; a token is dearer the more ranks share it.
PHASED_TABLE = CostTable(
    tuple(SchemeCost(ParallelScheme(tp), 0.0, b, 2.0, 100 * tp, 10) for tp, b in ((1, 1.0), (2, 0.6), (4, 0.4)))
)
PURE = PlannerOptions(kernels="pure")
LENGTHS = (50, 390, 70, 150, 100, 30, 200, 101)


def planned(text: str = HOT_SWITCHING, lengths: tuple[int, ...] = LENGTHS) -> StepPlan:
    return PhasedPlanner(PHASED_TABLE, parse_phases(text), PURE).plan(3, range(10, 10 + len(lengths)), lengths)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("4*tp1 then 2*tp1", r"must all use the same number of ranks but use 4\*tp1 \(4\), 2\*tp1 \(2\)"),
        ("4*tp1 then ", "cannot read the term ''"),
        ("4*tp1 than tp4", "cannot read the term"),
    ],
)
def test_texts_that_name_no_phases_are_refused(text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        parse_phases(text)


def test_each_sequence_runs_in_the_first_phase_that_holds_it() -> None:
    plan = planned()
    validate_plan(plan, PHASED_TABLE, 4)
    assert plan.strategy == HOT_SWITCHING
    held = [
        sorted(n for pipeline in phase.pipelines for batch in pipeline.microbatches for n in batch.lengths)
        for phase in plan.phases
    ]
    assert held == [[30, 50, 70, 100], [101, 150, 200], [390]]
    assert plan.predicted_ms == sum(phase.predicted_ms for phase in plan.phases) > plan.phases[0].predicted_ms
    assert StepPlan.from_json(plan.to_json()) == plan


def test_a_phase_that_gets_no_sequence_is_left_out() -> None:
    plan = planned(lengths=(50, 390))
    validate_plan(plan, PHASED_TABLE, 4)
    assert plan.strategy == "4*tp1 then tp4"
    assert [len(pipeline.microbatches) for pipeline in plan.pipelines] == [1, 0, 0, 0, 1]


def test_slices_and_layers_computed_again_stay_as_their_phase_was_planned() -> None:
    """Positions are those of the whole step; what a micro-batch runs of them is the phase's own plan."""
    limits = ((ParallelScheme(1), 60), (ParallelScheme(pp=2), 100))
    table = CostTable(tuple(SchemeCost(one, 0.0, 1.0, 2.0, most, 10, Shares.usual()) for one, most in limits))
    options, shapes = PlannerOptions(kernels="compiled", layers=8), parse_phases("2*tp1 then pp2/list")
    lengths = (440, 30, 20, 90, 59)
    plan = PhasedPlanner(table, shapes, options).plan(3, range(5), lengths)
    alone = Planner(table, [shapes[1]], options).plan(3, range(2), (440, 90))
    validate_plan(plan, table, 2)
    batches = plan.phases[1].pipelines[0].microbatches
    expected = alone.phases[0].pipelines[0].microbatches
    assert [batch.starts for batch in batches] == [batch.starts for batch in expected]
    assert [batch.recompute for batch in batches] == [batch.recompute for batch in expected]
    assert any(batch.recompute for batch in batches)
    assert any(start for batch in batches for start in batch.starts)
    assert {span.sequence for batch in batches for span in batch.spans} == {0, 3}


def test_longest_lengths_are_the_users_but_never_more_than_fits() -> None:
    phases = parse_phases(HOT_SWITCHING)
    assert PhasedPlanner(PHASED_TABLE, phases, PURE, longest=(40, 10**6, 10**6)).longest == (40, 200, 400)
    with pytest.raises(PlanError, match="2 longest lengths were given for 3 phases"):
        PhasedPlanner(PHASED_TABLE, phases, PURE, longest=(40, 50))
    with pytest.raises(PlanError, match=r"step 0: sequence 7 has 401 tokens but the phases take up to 100, 200, 400"):
        PhasedPlanner(PHASED_TABLE, phases, PURE).plan(0, (7,), (401,))


def test_a_plan_to_replay_is_looked_through_before_step_0(tmp_path: Path) -> None:
    plan, file = planned(), tmp_path / "plans.jsonl"
    save_plans([plan], file)
    options = PlannerOptions(choose="replay", replay_file=str(file), kernels="pure")
    again = Planner(PHASED_TABLE, [StrategyShape.parse("tp4")], options).plan(3, plan.sequence_ids, plan.lengths)
    assert again == replace(plan, source="replay")
    idle = tuple(replace(pipeline, microbatches=(), predicted_ms=0.0) for pipeline in plan.phases[-1].pipelines)
    save_plans([replace(plan, phases=(*plan.phases, replace(plan.phases[-1], pipelines=idle)))], file)
    with pytest.raises(PlanError, match=r"plan of step 3: phase 3 \(tp4\) of its 4 runs no sequence; leave it out"):
        Planner(PHASED_TABLE, [StrategyShape.parse("tp4")], options)


def test_calibration_learns_from_every_phase() -> None:
    plan, calibration = (planned(), Calibration(PHASED_TABLE, 4, TableFile(CUT_TABLE, step={"fixed_ms": 3.0})))
    for _ in range(LEAST + 1):  # the first run of a shape does not count
        prediction = calibration.predict(plan)
        assert prediction.step_ms == pytest.approx(plan.predicted_ms + 3.0)
        measured = [1.5 * ms for ms in prediction.pipeline_ms]
        calibration.observe(plan, prediction, measured, 1.5 * plan.predicted_ms + 7.0)
    assert {str(scheme): factor for scheme, factor in calibration.factors.items()} == pytest.approx(
        {"tp1": 1.5, "tp2": 1.5, "tp4": 1.5}
    )
    assert calibration.correct(plan, calibration.predict(plan)) == pytest.approx(1.5 * plan.predicted_ms + 7.0)


def test_the_record_and_the_line_show_phases() -> None:
    record = replace(
        RECORD, strategy="2*tp2 then tp4", pipeline_ms=(300.0, 100.0, 350.0), num_pipelines=(2, 1), step_ms=700.0
    )
    assert record.phase_ms == (300.0, 350.0)
    assert record.balance == pytest.approx((300 + 350) / (200 + 350))
    assert "| 2*tp2 then tp4 | 700 ms (pred +9%) |" in format_line(record)
    assert json.loads(json.dumps(record.to_dict()))["phase_ms"] == [300.0, 350.0]
    assert ("Train/Hydra/num_phases", 2.0, 10) in monitor_events(record, 10)
    assert pipeline_schemes(record.strategy) == ["tp2", "tp2", "tp4"]
    assert not is_heterogeneous(record.strategy)
    assert is_heterogeneous("4*tp1 then tp2 + 2*tp1")


def test_the_plan_as_text_shows_phases() -> None:
    lines = planned().table().splitlines()
    assert f"step 3: {HOT_SWITCHING}" in lines[0]
    assert [line.split(",")[0] for line in lines if line.startswith("phase")] == [
        "phase 0: 4*tp1", "phase 1: 2*tp2", "phase 2: tp4"
    ]  # fmt: skip


def test_preview_compares_with_rivals_of_several_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cost-table", str(TABLES / "llama_7b_a800.json"), "--lengths", "lognormal:6.22,1.233", "--gpus", "8",
                 "--tokens", "25000", "--context", "16384", "--steps", "3", "--json", str(tmp_path / "figures.json"),
                 "--strategies", "tp8", "tp4 + 2*tp2", "4*tp2 then tp8"]  # fmt: skip
    assert preview.main(arguments) == 0
    assert " s  4*tp2 then tp8, each sequence in the first phase that holds it" in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert np.mean(figures["phased_ms"]["4*tp2 then tp8"]) > 0
    assert set(figures["wins"]) <= {"tp8", "tp4 + 2*tp2"}
    assert preview.main([*arguments[:-1], "2*tp2 then tp4"]) == 2
    assert "use 4 ranks but the strategies 8" in capsys.readouterr().err
