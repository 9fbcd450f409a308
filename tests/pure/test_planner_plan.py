"""The planner: plans as files and records, the same from the same input, and against plain enumeration."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_hydra.planner.kernels as kernels
from ds_hydra.config.hydra_block import parse_config
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.simulate import simulate_pipeline
from ds_hydra.plan.validate import check_runnable, check_shape
from ds_hydra.planner import (
    MicroBatchPlan,
    Phase,
    PipelinePlan,
    Planner,
    PlannerOptions,
    PlanRecipe,
    Span,
    StepPlan,
    load_plans,
    recipe,
    save_plans,
    validate_plan,
)
from ds_hydra.planner.kernels.packing import ideal_ms
from ds_hydra.planner.kernels.problem import Batch, PipelineKinds, Prospect, scheme_arrays, scheme_row
from ds_hydra.planner.recipe import Generations, InvalidAnswerError
from ds_hydra.planner.selection import StrategySearch
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.planner_cases import (
    TABLES,
    Instance,
    a800_batch,
    a800_planner,
    pipeline_optimum,
    planner_of,
    random_instance,
    strategy_optimum,
)

# --- Planner, options, plans as files.
TABLE = CostTable.load(TABLES / "llama_32b_a800.json")


def planner(*strategies: str, **options: Any) -> Planner:
    return planner_of(TABLE, strategies, **options)


def pipelines(plan: StepPlan) -> tuple[PipelinePlan, ...]:
    """Of the one phase of a plan."""
    (phase,) = plan.phases
    return phase.pipelines


def test_plans_depend_on_the_step_s_batch_alone() -> None:
    one, other = a800_planner(), a800_planner()
    for step in (5, 1, 3):
        one.plan(step, range(50), a800_batch(step, 50))
    assert one.plan(4, range(50), a800_batch(4, 50)) == other.plan(4, range(50), a800_batch(4, 50))


# Choice, input, options.


def test_cycle_takes_turns_and_skips_what_cannot_hold_the_batch() -> None:
    cycle = planner("4*tp16", "16*tp4", "8*tp8", choose="cycle")
    assert [cycle.plan(s, [0], [100]).strategy for s in range(4)] == ["4*tp16", "16*tp4", "8*tp8", "4*tp16"]
    assert [cycle.plan(s, [0], [15000]).strategy for s in range(4)] == ["4*tp16", "8*tp8", "8*tp8", "4*tp16"]


def test_highs_gives_valid_plans_that_are_no_worse() -> None:
    lengths = a800_batch(2, 40)
    plan = planner("tp16 + 2*tp8 + 8*tp4", method="highs", node_limit=3).plan(0, range(40), lengths)
    validate_plan(plan, TABLE, 64)
    fast = planner("tp16 + 2*tp8 + 8*tp4").plan(0, range(40), lengths)
    assert fast.lower_bound_ms <= plan.searched_ms <= fast.searched_ms * 1.005


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ([5, 0], r"sequence 11 \(position 1\) has length 0"),
        ([5, -3], "has length -3"),
        ([5, 2.5], "2.5 is not a whole number"),
        ([5, True], "True is not a whole number"),
        ([5, "7"], "'7' is not a whole number"),
        ([5, 50000], "no strategy can hold sequence 11 of 50000 tokens: the largest MaxLen is 43614"),
        ([5], "2 sequence ids but 1 lengths"),
    ],
)
def test_bad_sequences_are_refused(lengths: list, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        a800_planner().plan(0, [10, 11], lengths)


def test_empty_steps_and_bad_strategies_are_refused() -> None:
    with pytest.raises(PlanError, match="no sequence"):
        a800_planner().plan(0, [], [])
    with pytest.raises(PlanError, match=r"same number of ranks but use \[60, 64\]"):
        planner("4*tp16", "15*tp4")
    with pytest.raises(PlanError, match=r"2\*tp32.*no entry for scheme tp32"):
        planner("2*tp32")
    with pytest.raises(PlanError, match="at least one strategy"):
        planner()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "paper"}, "method must be one of search, highs"),
        ({"choose": "worst"}, "choose must be one of"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"effort": 1.5}, "effort must be a whole number"),
        ({"seconds": float("nan")}, "seconds must be a finite number"),
        ({"tolerance": -0.1}, "tolerance must be a finite number"),
        ({"choose": "replay"}, "'replay' needs a file"),
        ({"replay_file": "plans"}, "only read with choose='replay'"),
    ],
)
def test_bad_options_are_refused(options: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        PlannerOptions(**options)


# Plans as values and files.


def test_plans_survive_json_and_print(tmp_path: Path) -> None:
    plans = [a800_planner().plan(step, range(60), a800_batch(step, 60)) for step in range(3)]
    save_plans(plans, tmp_path / "plans.jsonl")
    assert list(load_plans(tmp_path / "plans.jsonl").values()) == plans
    table = plans[0].table()
    assert len(table.splitlines()) == 2 + len(pipelines(plans[0]))
    assert "within" in table
    assert plans[0].balance >= 1.0


def test_replay_repeats_plans_and_refuses_other_data(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    plans = [a800_planner().plan(step, range(60), a800_batch(step, 60)) for step in range(2)]
    save_plans(plans, path)
    replay = a800_planner(choose="replay", replay_file=str(path))
    again = replay.plan(1, range(60), a800_batch(1, 60))
    assert again == dataclasses.replace(plans[1], source="replay")
    with pytest.raises(PlanError, match="no plan for step 2"):
        replay.plan(2, range(60), a800_batch(2, 60))
    with pytest.raises(PlanError, match="replay with the same data"):
        replay.plan(1, range(60), a800_batch(0, 60))


@pytest.mark.parametrize("line", ["", "{}", "[1]", '{"step": 1.5}', "null", "{"])
def test_files_that_hold_no_plans_name_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "plans.jsonl"
    good = a800_planner().plan(0, range(5), [5, 6, 7, 8, 9])
    path.write_text(good.to_json() + "\n" + line + "\n")
    with pytest.raises(PlanError, match="line 2: not a step plan"):
        load_plans(path)
    path.write_text(good.to_json() + "\n" + good.to_json() + "\n")
    with pytest.raises(PlanError, match="line 2: a second plan for step 0"):
        load_plans(path)
    with pytest.raises(PlanError, match="cannot read the plans"):
        load_plans(tmp_path / "none")


def test_numpy_input_gives_plain_plans() -> None:
    ids: Any = np.arange(30)
    lengths: Any = np.array(a800_batch(0, 30))
    plan = a800_planner().plan(0, ids, lengths)
    assert StepPlan.from_json(plan.to_json()) == plan
    assert all(type(x) is int for x in plan.lengths + plan.sequence_ids)
    json.loads(plan.to_json())


# --- The record of a plan: its JSON and that of earlier releases, and what this release refuses to run, in one
# place.
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
    replay = planner(*texts, choose="replay", replay_file=str(VERSION_1), kernels="pure")
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


# --- Plans follow from what is planned alone: no clock, no disk, no other program decides any of them.
ROOT = Path(__file__).parents[2]
# What answers requests and what waits for answers; plans are made by none of them.
WITH_A_CLOCK = {"service.py", "producer.py"}


def test_no_part_of_the_planner_looks_at_a_clock() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "ds_hydra" / "planner").rglob("*.py"))
        if path.name not in WITH_A_CLOCK
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and any(one.name in ("time", "datetime") for one in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"))
    ]
    assert not found, "\n".join(found)


def test_which_kernels_plan_does_not_depend_on_a_cache() -> None:
    """Plain Python searches less: a job that begins before its kernels are compiled must not plan by it."""
    assert kernels.select("auto").is_compiled
    assert not kernels.select("pure").is_compiled


def test_where_numba_cannot_compile_the_whole_job_is_planned_in_plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is decided once, is part of the digest, and is what a producer that is started again is told."""
    generations = Generations(PlanRecipe(a800_planner().cost_table, a800_planner().strategies))
    recipes = {which: replace(generations[0], options=PlannerOptions(kernels=which)) for which in ("pure", "compiled")}
    assert recipes["pure"].digest != recipes["compiled"].digest
    generations.use_table(generations[0].table, 4)
    assert generations.of(4) == 1
    with pytest.raises(InvalidAnswerError, match="not this job's"):
        generations.agree(1, {"ready": recipes["compiled"].digest, "kernels": "pure"})
    assert generations.kernels == "auto"
    generations.agree(1, {"ready": recipes["pure"].digest, "kernels": "pure"})
    assert [generations[number].options.kernels for number in generations] == ["pure", "pure"]
    with pytest.raises(InvalidAnswerError, match="not this job's"):
        generations.agree(1, {"ready": recipes["compiled"].digest, "kernels": "compiled"})

    def fails() -> None:
        raise OSError("the cache cannot be written")

    monkeypatch.setattr(recipe, "warm_up", fails)
    assert recipe.settled_kernels.__wrapped__("auto") == "pure"
    with pytest.raises(OSError, match="cannot be written"):
        recipe.settled_kernels.__wrapped__("compiled")


# --- The planner against plain enumeration on random small instances: 1,500 in a test run, 5,000 with the long
# rows.
PER_SEED = 240


@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(21))
def test_bounds_and_plans_against_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(PER_SEED):
        most = int(rng.choice([3, 4, 5], p=[0.4, 0.45, 0.15]))
        check_instance(random_instance(rng, most))


def check_instance(instance: Instance) -> None:
    """Bound <= optimum, nothing reachable is refuted, the plan is optimal, valid, and certified."""
    planner = instance.planner()
    optimum = math.inf
    for strategy in instance.strategies:
        best = strategy_optimum(instance, strategy)
        optimum = min(optimum, best)
        batch = Batch.of(instance.lengths, instance.table)
        search = StrategySearch(planner._schemes, planner.options, batch)
        kinds = PipelineKinds.of(strategy, instance.table)
        bound = search.bound(kinds, kinds.num_ranks.copy(), 10, 12)
        assert bound <= best * (1 + 1e-9), instance
        if math.isfinite(best):
            assert not search.refute(kinds, best * (1 + 1e-9), kinds.num_ranks.copy()), instance
            found = search.assign(kinds, Prospect(bound, kinds.num_ranks.copy(), math.inf))
            assert found is not None, instance
            assert found.ms >= best * (1 - 1e-9), instance
    plan = planner.plan(0, range(len(instance.lengths)), instance.lengths)
    validate_plan(plan, instance.table, 4)
    assert plan.lower_bound_ms <= optimum * (1 + 1e-9), instance
    assert optimum * (1 - 1e-9) <= plan.searched_ms <= optimum * 1.01, instance


def test_bounds_hold_where_micro_batches_have_a_floor() -> None:
    """The search knows the floor of all micro-batches of a pipeline together, so its plans are not always the best."""
    rng, gaps = np.random.default_rng(4), []
    for _ in range(600):
        instance = random_instance(rng, 4, floors=True)
        optimum = min(strategy_optimum(instance, strategy) for strategy in instance.strategies)
        plan = instance.planner().plan(0, range(len(instance.lengths)), instance.lengths)
        validate_plan(plan, instance.table, 4)
        assert plan.lower_bound_ms <= optimum * (1 + 1e-9), instance
        gaps.append(plan.searched_ms / optimum - 1.0)
    assert min(gaps) >= -1e-9
    assert np.mean(gaps) < 0.01
    assert max(gaps) < 0.25


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_packing_takes_less_than_the_ideal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = random_instance(rng, floors=True).table.costs[int(rng.integers(5))]
    lengths = rng.integers(1, cost.max_length + 1, size=int(rng.integers(1, 6)))
    work = cost.sequence_ms(lengths)
    scheme = scheme_row(scheme_arrays(CostTable((cost,))), 0)
    ideal = ideal_ms(scheme, float(work.sum()), int(lengths.sum()), float(work.max()))
    assert ideal <= pipeline_optimum(cost, tuple(lengths.tolist())) * (1 + 1e-9)


def test_search_without_enumeration_is_close_to_the_optimum() -> None:
    """The heuristic alone, which larger steps rely on: the mean of its gap to the optimum."""
    rng, gaps = np.random.default_rng(3), []
    for _ in range(300):
        instance = random_instance(rng)
        planner = instance.planner()
        for strategy in instance.strategies:
            best = strategy_optimum(instance, strategy)
            kinds = PipelineKinds.of(strategy, instance.table)
            search = StrategySearch(planner._schemes, planner.options, Batch.of(instance.lengths, instance.table))
            price = kinds.num_ranks.copy()
            found = search.assign(kinds, Prospect(search.bound(kinds, price, 10, 12), price, math.inf))
            if found is not None:
                gaps.append(found.ms / best - 1.0)
    assert np.mean(gaps) < 0.01
    assert np.quantile(gaps, 0.9) < 0.02
