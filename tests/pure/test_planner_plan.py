"""Planner, options, plans as files; and what a reference planner gets wrong, each a test."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.planner import PipelinePlan, Planner, PlannerOptions, StepPlan, load_plans, save_plans, validate_plan
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.planner_cases import TABLES, a800_batch, a800_planner

TABLE = CostTable.load(TABLES / "llama_32b_a800.json")


def planner(*strategies: str, **options: object) -> Planner:
    options = {"kernels": "compiled", **options}
    return Planner(TABLE, [StrategyShape.parse(s) for s in strategies], PlannerOptions(**options))  # type: ignore[arg-type]


def pipelines(plan: StepPlan) -> tuple[PipelinePlan, ...]:
    """Of the one phase of a plan."""
    (phase,) = plan.phases
    return phase.pipelines


# What a reference planner gets wrong.


def test_the_strategy_with_the_fastest_slowest_pipeline_wins_not_the_one_with_fewest_pipelines() -> None:
    batch = [500] * 300
    plan = planner("4*tp16", "16*tp4").plan(0, range(300), batch)
    assert plan.strategy == "16*tp4"
    alone = [planner(text).plan(0, range(300), batch).predicted_ms for text in ("4*tp16", "16*tp4")]
    assert plan.predicted_ms == pytest.approx(min(alone), rel=0.01)


@pytest.mark.parametrize("text", ["8*tp4 + tp16 + 2*tp8", "2*tp8 + 4*tp4 + tp16 + 4*tp4"])
def test_pipelines_not_sorted_by_limit_get_sequences_they_can_hold(text: str) -> None:
    batch = [30000, 15000, 14000, *a800_batch(1, 100)]
    batch = [min(x, 30000) for x in batch]
    plan = planner(text).plan(0, range(len(batch)), batch)
    assert plan.strategy == text
    validate_plan(plan, TABLE, 64)
    (holder,) = (p for p in pipelines(plan) if any(s.sequence == 0 for b in p.microbatches for s in b.spans))
    assert holder.shape.scheme == ParallelScheme(16)


def test_pipelines_may_get_no_sequence() -> None:
    for lengths in ([30000], [30000, 5, 7], a800_batch(0, 9)):
        plan = planner("tp16 + 12*tp4").plan(0, range(len(lengths)), lengths)
        validate_plan(plan, TABLE, 64)
        assert len(pipelines(plan)) == 13
    assert [len(p.microbatches) for p in pipelines(planner("4*tp16").plan(0, [9], [100]))].count(0) == 3


def test_plans_depend_on_the_step_s_batch_alone() -> None:
    one, other = a800_planner(), a800_planner()
    for step in (5, 1, 3):
        one.plan(step, range(50), a800_batch(step, 50))
    assert one.plan(4, range(50), a800_batch(4, 50)) == other.plan(4, range(50), a800_batch(4, 50))


def test_every_token_of_every_sequence_is_planned_once() -> None:
    for seed in range(10):
        lengths = a800_batch(seed)
        plan = a800_planner().plan(0, range(1000, 1000 + len(lengths)), lengths)
        positions = sorted(span for p in pipelines(plan) for batch in p.microbatches for span in batch.spans)
        assert positions == [(i, 0, length) for i, length in enumerate(lengths)]
        assert plan.lengths == tuple(lengths)
        assert plan.sequence_ids == tuple(range(1000, 1000 + len(lengths)))


# Choice, input, options.


def test_a_candidate_more_never_makes_a_plan_much_worse_and_bounds_certify() -> None:
    for seed in range(5):
        lengths = a800_batch(seed)
        few = planner("4*tp16", "2*tp8 + 12*tp4", "tp16 + 6*tp8").plan(0, range(190), lengths)
        many = a800_planner().plan(0, range(190), lengths)
        assert many.lower_bound_ms <= few.searched_ms
        assert few.lower_bound_ms <= few.searched_ms
        assert few.gap < 0.2


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


@pytest.mark.drawn
def test_plan_bytes_do_not_depend_on_the_process() -> None:
    code = (
        "from tests.support.planner_cases import a800_planner, a800_batch\n"
        "print(a800_planner().plan(0, range(190), a800_batch(4)).digest().hex())"
    )
    root = Path(__file__).parents[2]
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
        ).stdout
        for seed in ("0", "1")
    }  # fmt: skip
    assert runs == {a800_planner().plan(0, range(190), a800_batch(4)).digest().hex() + "\n"}


def test_numpy_input_gives_plain_plans() -> None:
    ids: Any = np.arange(30)
    lengths: Any = np.array(a800_batch(0, 30))
    plan = a800_planner().plan(0, ids, lengths)
    assert StepPlan.from_json(plan.to_json()) == plan
    assert all(type(x) is int for x in plan.lengths + plan.sequence_ids)
    json.loads(plan.to_json())


def test_large_micro_batch_overhead_leads_to_fewer_micro_batches() -> None:
    counts = []
    for overhead in (0.0, 50.0):
        table = CostTable((SchemeCost(ParallelScheme(1, 4), 0.0, 1.0, overhead, 10_000, 10),))
        plan = Planner(table, [StrategyShape.parse("pp4")], PlannerOptions(kernels="compiled")).plan(
            0, range(40), [100] * 40
        )
        counts.append(len(pipelines(plan)[0].microbatches))
    assert counts[0] == 40
    assert counts[1] < 20
