"""The record of a plan: its JSON and that of earlier releases, and what this release refuses to run, in one place."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.config.hydra_block import parse_config
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.runnable import check_runnable, check_shape
from ds_hydra.plan.simulate import simulate_pipeline
from ds_hydra.planner import (
    MicroBatchPlan,
    Phase,
    PipelinePlan,
    Planner,
    PlannerOptions,
    Span,
    StepPlan,
    load_plans,
    save_plans,
    validate_plan,
)
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.planner_cases import TABLES, a800_batch, a800_planner

VERSION_1 = Path(__file__).parents[1] / "support" / "plans_version_1.jsonl"  # as the release before wrote them
SHAPES = ("tp4", "pp2", "tp2pp4sp2", "(sp2[0:1] > tp2[1:4])", "(tp2[0:2,6:8] > tp2[2:6])/zero-bubble", "tp8@h100")


@st.composite
def any_plans(draw: st.DrawFn) -> StepPlan:
    """All that the record can say, valid or not: several phases, slices, shares of recomputed layers."""
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=4))
    whole = st.integers(0, len(lengths) - 1).map(lambda position: Span(position, 0, lengths[position]))
    slices = st.builds(Span, st.integers(0, 9), st.integers(0, 60), st.integers(0, 60))
    spans = st.lists(whole | slices, max_size=3).map(tuple)
    batches = st.lists(st.builds(MicroBatchPlan, spans, st.sampled_from([0.0, 0.25, 1.0])), max_size=3).map(tuple)
    times = st.floats(0, 1e6)
    pipelines = st.builds(PipelinePlan, st.sampled_from(SHAPES).map(PipelineShape.parse), batches, times)
    phases = st.lists(st.lists(pipelines, max_size=3).map(lambda found: Phase(tuple(found))), max_size=3)
    ids = tuple(range(7, 7 + len(lengths)))
    return StepPlan(draw(st.integers(0, 9)), ids, tuple(lengths), tuple(draw(phases)), draw(times), draw(times), "fast")


@given(any_plans())
def test_plans_read_back_what_they_print(plan: StepPlan) -> None:
    text = plan.to_json()
    assert StepPlan.from_json(text) == plan
    assert StepPlan.from_json(text).to_json() == text


def test_the_json_is_compact() -> None:
    batches = (MicroBatchPlan.of_whole((1,), (9, 5)), MicroBatchPlan((Span(0, 0, 4), Span(1, 0, 5)), 0.5))
    plan = StepPlan(3, (10, 20), (9, 5), (Phase((PipelinePlan(PipelineShape.parse("tp2"), batches, 4.5),)),), 4.5)
    assert json.loads(plan.to_json())["phases"] == [
        [{"shape": "tp2", "microbatches": [[1], {"spans": [[0, 0, 4], 1], "recompute": 0.5}], "predicted_ms": 4.5}]
    ]
    assert plan.recomputed == 0.5 * 9 / 14
    assert plan.table().endswith("5 9r")


def test_whole_sequences_are_written_one_way_only() -> None:
    plan = a800_planner().plan(0, range(30), a800_batch(0, 30))
    record = json.loads(plan.to_json())
    for pipeline in record["phases"][0]:
        pipeline["microbatches"] = [[[i, 0, plan.lengths[i]] for i in batch] for batch in pipeline["microbatches"]]
    spelled_out = StepPlan.from_json(json.dumps(record))
    assert (spelled_out, spelled_out.digest()) == (plan, plan.digest())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 3}, "its version is 3 but this release reads 1 and 2"),
        ({"phases": 5}, "phases must be a list"),
        ({"phases": [{}]}, "a phase must be a list"),
        ({"lengths": [5, 5.5]}, "5.5 is not a whole number"),
        ({"microbatches": [[2]]}, "names position 2 of 2 sequences"),
        ({"microbatches": [[-1]]}, "names position -1 of 2 sequences"),
        ({"microbatches": [[[0, 1]]]}, "missing 1 required"),
        ({"microbatches": [[[0, 1, True]]]}, "True is not a whole number"),
        ({"microbatches": [{"spans": [0]}]}, "'recompute'"),
        ({"microbatches": [0]}, "spans must be a list"),
        ({"shape": "2*tp1"}, "names 2 pipelines where one is due"),
        ({"shape": "tp"}, "cannot read the term"),
    ],
)
def test_json_that_is_no_plan_is_refused(change: dict, reason: str) -> None:
    pipeline = {"shape": "tp2", "microbatches": [[0, 1]], "predicted_ms": 1.0}
    record = {"version": 2, "step": 0, "sequence_ids": [0, 1], "lengths": [5, 6], "predicted_ms": 1.0,
              "phases": [[pipeline | change]], "lower_bound_ms": 0.0, "source": "fast"}  # fmt: skip
    with pytest.raises(PlanError, match=rf"plan: not a step plan .*{reason}"):
        StepPlan.from_json(json.dumps(record | change if change.keys() & record.keys() else record))


# Files of the release before.


def test_plans_of_version_1_load_as_one_phase_of_whole_sequences(tmp_path: Path) -> None:
    plans = load_plans(VERSION_1)
    table = CostTable.load(TABLES / "llama_32b_a800.json")
    for line, plan in zip(VERSION_1.read_text().splitlines(), plans.values(), strict=True):
        record = json.loads(line)
        validate_plan(plan, table, 64)
        check_runnable(plan)
        assert (plan.step, list(plan.sequence_ids), list(plan.lengths)) == (
            record["step"], record["sequence_ids"], record["lengths"]
        )  # fmt: skip
        assert [str(pipeline.shape) for pipeline in plan.pipelines] == [row["scheme"] for row in record["pipelines"]]
        assert [[[s.sequence for s in b.spans] for b in p.microbatches] for p in plan.pipelines] == [
            row["microbatches"] for row in record["pipelines"]
        ]
        assert (plan.predicted_ms, plan.lower_bound_ms) == (record["predicted_ms"], record["lower_bound_ms"])
    save_plans(plans.values(), tmp_path / "plans.jsonl")
    assert load_plans(tmp_path / "plans.jsonl") == plans
    assert plans[0].strategy == "tp16 + 8*tp4 + 2*tp4pp2"


def test_plans_of_version_1_replay() -> None:
    texts = ("tp16 + 8*tp4 + 2*tp4pp2", "4*tp8 + tp16 + 2*tp4pp2")
    strategies = [StrategyShape.parse(text) for text in texts]
    table = CostTable.load(TABLES / "llama_32b_a800.json")
    replay = Planner(table, strategies, PlannerOptions(choose="replay", replay_file=str(VERSION_1), kernels="pure"))
    for step, recorded in load_plans(VERSION_1).items():
        again = replay.plan(step, recorded.sequence_ids, recorded.lengths)
        assert again == dataclasses.replace(recorded, source="replay")
        assert again.strategy == texts[step]


# What cannot be run is refused in one place.


def tiny_plan(shape: str = "tp2", batch: MicroBatchPlan | None = None) -> StepPlan:
    batches = (batch or MicroBatchPlan.of_whole((0,), (8,)),)
    phase = Phase((PipelinePlan(PipelineShape.parse(shape), batches, 1.0),))
    return StepPlan(4, (0,), (8,), (phase,), 1.0)


REFUSED = {
    "slices in one micro-batch": (
        tiny_plan(batch=MicroBatchPlan((Span(0, 0, 5), Span(0, 5, 8)))),
        r"micro-batch 0 of pipeline 0 holds 2 slices of sequences \(tokens 0 to 5 .*, tokens 5 to 8 .*at most one may",
    ),
    "a schedule": (
        tiny_plan("pp2/zero-bubble"),
        "asks for the schedule 'zero-bubble' but this release runs 1f1b, list, v, zb-h1; name one",
    ),
    "no V": (tiny_plan("(tp1[0:1,3:4] > tp1[1:3])"), "all must hold two and make a V"),
    "a V by 1F1B": (
        tiny_plan("(tp1[0:1,3:4] > tp1[1:2,2:3])"),
        "do not run by the schedule '1f1b'; name one of list, v",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    plan, reason = REFUSED[name]
    with pytest.raises(PlanError, match=rf"(?s)plan of step 4: .*{reason}"):
        check_runnable(plan)
    save_plans([plan], tmp_path / "plans.jsonl")
    table = CostTable((SchemeCost(ParallelScheme(2), 0.0, 1.0, 0.0, 100),))
    options = PlannerOptions(choose="replay", replay_file=str(tmp_path / "plans.jsonl"))
    with pytest.raises(PlanError, match=reason):  # before step 0
        Planner(table, [StrategyShape.parse("tp2")], options)


def test_slices_run_unless_the_job_cannot_cut_sequences(tmp_path: Path) -> None:
    """With a reason why it cannot, a plan is refused before step 0."""
    table = CostTable((SchemeCost(ParallelScheme(2, 2), 0.0, 1.0, 0.0, 5),))
    strategies = [StrategyShape.parse("tp2pp2")]
    batches = tuple(MicroBatchPlan((span,)) for span in (Span(0, 0, 5), Span(0, 5, 8)))
    pipeline = PipelinePlan(strategies[0].pipelines[0], batches, 1.0)
    phase = Phase((dataclasses.replace(pipeline, predicted_ms=simulate_pipeline(pipeline, table)),))
    plan = StepPlan(4, (0,), (8,), (phase,), phase.predicted_ms)
    save_plans([plan], tmp_path / "plans.jsonl")
    options = PlannerOptions(choose="replay", replay_file=str(tmp_path / "plans.jsonl"))
    replayed = Planner(table, strategies, options).plan(4, (0,), (8,))
    check_runnable(replayed)
    validate_plan(replayed, table, 4)  # the sequence has 8 tokens, but no slice more than MaxLen 5
    reason = "micro-batch 0 of pipeline 0 holds tokens 0 to 5 of the 8 .*whole sequences only: layer 3 forgets. Plan"
    with pytest.raises(PlanError, match=reason):
        Planner(table, strategies, dataclasses.replace(options, no_slices="layer 3 forgets"))


@pytest.mark.parametrize("name", ["a schedule", "no V", "a V by 1F1B"])
def test_strategies_that_cannot_run_are_refused_in_the_config(name: str) -> None:
    plan, reason = REFUSED[name]
    with pytest.raises(PlanError, match=reason):
        check_shape(StrategyShape.parse(plan.strategy))
    with pytest.raises(ConfigError, match=rf"hydra\.strategies\[1\]: pipeline .*{reason}"):
        parse_config({"hydra": {"tokens_per_step": 10, "strategies": ["2*tp1", plan.strategy]}})


@pytest.mark.parametrize("text", ["tp4 + 2*pp2", "(sp2[0:1] > tp2[1:4])", "(tp2 > pp2)", "tp2[0:4]"])
def test_what_can_run_is_not_refused(text: str) -> None:
    check_shape(StrategyShape.parse(text))
    check_runnable(a800_planner().plan(0, range(20), a800_batch(0, 20)))


def test_nothing_else_reaches_into_the_first_of_several_phases() -> None:
    """`plan.phases[0]` anywhere would accept plans of several phases by half."""
    for path in (Path(__file__).parents[2] / "ds_hydra").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "phases":
                assert ast.unparse(node.slice) != "0", f"{path}: {ast.unparse(node)}"
