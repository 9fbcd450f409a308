"""Predicted times corrected by what earlier steps have shown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.table_file import TableFile
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.plan.phase import MicroBatchPlan, Phase, PipelinePlan
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.report.calibration import LEAST, Calibration

TABLE = CostTable(
    (SchemeCost(ParallelScheme(1, 2), 0.0, 1.0, 0.0, 1000), SchemeCost(ParallelScheme(2), 0.0, 1.0, 5.0, 1000))
)

BATCHES = tuple(MicroBatchPlan.of_whole((position,), (10, 20)) for position in (0, 1))
PLAN = StepPlan(0, (0, 1), (10, 20), (Phase((PipelinePlan(PipelineShape.parse("pp2"), BATCHES, 50.0),)),), 50.0)


def stage_table() -> TableFile:
    stages = [
        {"index": 0, "num_layers": 2, "fit": {"a": 0.0, "b": 0.5, "c": 0.0}},
        {"index": 1, "num_layers": 2, "fit": {"a": 0.0, "b": 1.0, "c": 0.0}},
    ]
    return TableFile(TABLE, None, {"pp2": {"stages": stages}}, None, {"fixed_ms": 2.0, "update_ms_per_element": 0.1})


def test_stages_of_their_own_predict_less_than_the_slowest_for_all() -> None:
    plain = Calibration(TABLE, 4).predict(PLAN)
    finer = Calibration(TABLE, 4, stage_table()).predict(PLAN, num_elements=10)
    assert plain.stage_ms == ((30.0, 30.0),)
    assert finer.stage_ms == ((15.0, 30.0),)
    assert finer.pipeline_ms[0] < plain.pipeline_ms[0]
    (pipeline,) = PLAN.pipelines
    in_v = replace(PLAN, phases=(Phase((replace(pipeline, shape=PipelineShape.parse("pp2/v")),)),))
    # The first stage of a V computes the loss, too.
    assert Calibration(TABLE, 4, stage_table()).predict(in_v).stage_ms == ((30.0, 15.0),)
    assert finer.overhead_ms == pytest.approx(3.0)
    assert finer.step_ms == pytest.approx(finer.pipeline_ms[0] + 3.0)
    launched = CostTable(tuple(replace(cost, floor=25.0) for cost in TABLE.costs))
    assert Calibration(launched, 4).predict(PLAN).stage_ms == ((50.0, 50.0),)
    # A plan that was chosen with its messages knows better.
    chosen = Calibration(TABLE, 4, stage_table()).predict(replace(PLAN, messages_ms=9.0), num_elements=10)
    assert chosen.step_ms == PLAN.predicted_ms + 9.0
    assert chosen.overhead_ms == pytest.approx(chosen.step_ms - chosen.pipeline_ms[0])


def test_factors_follow_what_was_measured() -> None:
    calibration = Calibration(TABLE, 4)
    for step in range(LEAST):
        prediction = calibration.predict(PLAN)
        assert calibration.factors == {}, step
        assert calibration.correct(PLAN, prediction) == pytest.approx(prediction.step_ms), "nothing is known yet"
        calibration.observe(PLAN, prediction, [1.5 * prediction.pipeline_ms[0]], 1.5 * prediction.pipeline_ms[0] + 7.0)
    prediction = calibration.predict(PLAN)
    assert calibration.factors == {ParallelScheme(1, 2): pytest.approx(1.5)}
    assert calibration.correct(PLAN, prediction) == pytest.approx(1.5 * prediction.pipeline_ms[0] + 7.0)
    # A scheme that was never seen has the factor of those that were, and a new strategy their overhead.
    other = replace(PLAN, phases=(Phase((replace(PLAN.pipelines[0], shape=PipelineShape.parse("tp2")),)),))
    unseen = calibration.predict(other)
    assert calibration.correct(other, unseen) == pytest.approx(1.5 * unseen.pipeline_ms[0] + 7.0)
    assert calibration.corrected_table(5) is None
    corrected = calibration.corrected_table(16)
    assert corrected is not None
    assert corrected[ParallelScheme(1, 2)].b == pytest.approx(1.5)
    assert corrected[ParallelScheme(2)] == TABLE[ParallelScheme(2)]
    assert calibration.corrected_table(32) is None  # nothing has moved since


def test_what_was_learnt_goes_on_from_a_checkpoint() -> None:
    """The next correction is that of the job that was stopped: same times, same factors that count as applied."""
    one, ratio = Calibration(TABLE, 4), 1.5
    for _ in range(2):
        for _ in range(LEAST):
            one.observe(PLAN, (now := one.predict(PLAN)), [ratio * now.pipeline_ms[0]], 2 * now.pipeline_ms[0])
            ratio += 0.125
        assert one.corrected_table(16) is not None
        other = Calibration(TABLE, 4, state=json.loads(json.dumps(one.state())))
        assert other.state() == one.state()
        assert other.corrected_table(16) is None
    for calibration in (one, other):
        for _ in range(LEAST):
            calibration.observe(PLAN, now, [3 * now.pipeline_ms[0]], 4 * now.pipeline_ms[0])
    found = one.corrected_table(32)
    assert found is not None
    assert found == other.corrected_table(32)
    for wrong in ({}, {**one.state(), "applied": {"tp7": 1.0}}, {**one.state(), "ratios": {"pp2": ["1"]}},
                  {**one.state(), "overheads": {"pp2": [float("inf")]}}):  # fmt: skip
        with pytest.raises((ValueError, TypeError, KeyError)):
            Calibration(TABLE, 4, state=wrong)
