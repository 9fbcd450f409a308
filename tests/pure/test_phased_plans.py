"""Steps of several phases: their text, their plans, and their figures in predictions, records and previews."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds_hydra.commands import preview
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.costs.table_file import TableFile
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.plan.simulate import simulate_plan
from ds_hydra.planner import PhasedPlanner, Planner, PlannerOptions, StepPlan, parse_phases, save_plans, validate_plan
from ds_hydra.report.calibration import LEAST, Calibration
from ds_hydra.report.plots import pipeline_schemes
from ds_hydra.report.record import format_line, is_heterogeneous, monitor_events
from ds_hydra.zero_hetero.errors import PlanError
from tests.pure.test_report import RECORD
from tests.support.planner_cases import TABLES

HOT_SWITCHING = "4*tp1 then 2*tp2 then tp4"
# MaxLen grows with the ranks of a scheme; a token is dearer the more ranks share it.
TABLE = CostTable(
    tuple(SchemeCost(ParallelScheme(tp), 0.0, b, 2.0, 100 * tp, 10) for tp, b in ((1, 1.0), (2, 0.6), (4, 0.4)))
)
PURE = PlannerOptions(kernels="pure")
LENGTHS = (50, 390, 70, 150, 100, 30, 200, 101)


def planned(text: str = HOT_SWITCHING, lengths: tuple[int, ...] = LENGTHS) -> StepPlan:
    return PhasedPlanner(TABLE, parse_phases(text), PURE).plan(3, range(10, 10 + len(lengths)), lengths)


@pytest.mark.parametrize("text", [HOT_SWITCHING, "tp4", "(sp2[0:1] > tp2[1:4]) then tp2 + 2*tp1"])
def test_the_text_of_phases_reads_back(text: str) -> None:
    shapes = parse_phases(text)
    assert " then ".join(map(str, shapes)) == text
    assert len(shapes) == text.count("then") + 1


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
    validate_plan(plan, TABLE, 4)
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
    validate_plan(plan, TABLE, 4)
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
    assert PhasedPlanner(TABLE, phases, PURE, longest=(40, 10**6, 10**6)).longest == (40, 200, 400)
    with pytest.raises(PlanError, match="2 longest lengths were given for 3 phases"):
        PhasedPlanner(TABLE, phases, PURE, longest=(40, 50))
    with pytest.raises(PlanError, match=r"step 0: sequence 7 has 401 tokens but the phases take up to 100, 200, 400"):
        PhasedPlanner(TABLE, phases, PURE).plan(0, (7,), (401,))


def test_a_plan_to_replay_is_looked_through_before_step_0(tmp_path: Path) -> None:
    plan, file = planned(), tmp_path / "plans.jsonl"
    save_plans([plan], file)
    options = PlannerOptions(choose="replay", replay_file=str(file), kernels="pure")
    again = Planner(TABLE, [StrategyShape.parse("tp4")], options).plan(3, plan.sequence_ids, plan.lengths)
    assert again == replace(plan, source="replay")
    idle = tuple(replace(pipeline, microbatches=(), predicted_ms=0.0) for pipeline in plan.phases[-1].pipelines)
    save_plans([replace(plan, phases=(*plan.phases, replace(plan.phases[-1], pipelines=idle)))], file)
    with pytest.raises(PlanError, match=r"plan of step 3: phase 3 \(tp4\) of its 4 runs no sequence; leave it out"):
        Planner(TABLE, [StrategyShape.parse("tp4")], options)


def test_times_of_phases_add_up() -> None:
    plan = planned()
    times = [float(n) for n in range(1, 8)]  # of 4, 2 and 1 pipelines
    assert plan.total_ms(times) == 4.0 + 6.0 + 7.0
    assert plan.total_ms(simulate_plan(plan, TABLE)) == pytest.approx(plan.predicted_ms)


def test_calibration_learns_from_every_phase() -> None:
    plan, calibration = planned(), Calibration(TABLE, 4, TableFile(TABLE, step={"fixed_ms": 3.0}))
    for _ in range(LEAST):
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
