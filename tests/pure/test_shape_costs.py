"""Costs and memory of pipelines whose stages differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shape_costs import price, used_schemes, with_shapes
from ds_hydra.costs.table_file import read_table, table_record
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.simulate import simulate_plan
from ds_hydra.planner import Planner, PlannerOptions, validate_plan
from ds_hydra.report.calibration import Calibration
from ds_hydra.zero_hetero.errors import PlanError
from tests.support.llama_memory import job


def test_a_uniform_pipeline_that_spells_out_its_layers_needs_what_its_scheme_needs() -> None:
    spelled = PipelineShape.parse("(tp2[0:4] > tp2[4:8])")
    for scheme, shape in zip(job().stages(ParallelScheme(2, 2)), job().stages(spelled), strict=True):
        assert replace(shape, scheme=scheme.scheme) == scheme
    table = CostTable((SchemeCost(ParallelScheme(2, 2), 1e-6, 0.1, 2.0, 5000, 30),))
    priced = price(spelled, table, job())
    assert replace(priced, scheme=ParallelScheme(2, 2), derived="") == table.costs[0]
    assert priced.derived == "the slowest of its stages: tp2pp2"


def test_a_pipeline_costs_what_its_slowest_stage_costs() -> None:
    """Of 8 layers stage 0 holds 2, half of an even share, and stage 1 holds 6, 1.5 times one."""
    shape = PipelineShape.parse("(sp2[0:2] > tp2[2:8])")
    table = CostTable(
        (
            SchemeCost(ParallelScheme(1, 2, 2), 4.0, 1.0, 9.0, 900, 7),
            SchemeCost(ParallelScheme(2, 2), 1.0, 2.0, 2.0, 800),
        )
    )
    cost = price(shape, table, job())
    assert (cost.a, cost.b, cost.c) == (0.5 * 4.0, 1.5 * 2.0, 0.5 * 9.0)
    assert (cost.scheme, cost.max_length, cost.util_length) == (shape, 800, 7)
    roomy = CostTable(tuple(replace(row, max_length=10**6) for row in table.costs))
    tight = job(device=20 * 2**20)
    assert price(shape, roomy, tight).max_length == tight.max_length(shape)


def test_memory_of_a_stage_grows_with_its_layers() -> None:
    few, many = job().stages(PipelineShape.parse("(tp2[0:2] > tp2[2:8])"))
    even = job().stages(ParallelScheme(2, 2))
    assert few.params < even[0].params
    assert many.params > even[1].params
    assert many.per_token > even[1].per_token
    assert few.per_token < even[0].per_token


def test_tables_get_an_entry_for_each_shape_once_and_keep_it_in_their_json() -> None:
    table = CostTable(
        tuple(SchemeCost(s, 1e-6, 0.1, 2.0, 5000, 30) for s in (ParallelScheme(1, 2), ParallelScheme(2, 2)))
    )
    uniform = [StrategyShape.parse("2*tp2pp2")]
    assert with_shapes(table, uniform, job()) is table
    assert used_schemes(uniform) == (ParallelScheme(2, 2),)
    mixed = [StrategyShape.parse("2*(tp2 > tp1) + pp2"), StrategyShape.parse("tp2pp2 + (tp2 > tp1) + tp1")]
    assert used_schemes(mixed) == (ParallelScheme(1), ParallelScheme(1, 2), ParallelScheme(2, 2))
    priced = with_shapes(table, mixed, job())
    assert [str(cost.scheme) for cost in priced.costs] == ["pp2", "tp2pp2", "(tp2 > tp1)"]
    assert priced.schemes == table.schemes
    assert with_shapes(priced, mixed, job()) is priced
    assert read_table(table_record(priced), "the table") == priced
    with pytest.raises(PlanError, match="no entry for scheme tp4pp2"):
        with_shapes(table, [StrategyShape.parse("(tp4 > tp1)")], job())


def test_pipelines_whose_stages_differ_are_planned() -> None:
    table = CostTable(
        tuple(SchemeCost(s, 1e-6, 0.1, 2.0, 5000, 30) for s in (ParallelScheme(1, 2), ParallelScheme(2, 2)))
    )
    strategy = StrategyShape.parse("(tp2[0:6] > tp1[6:8]) + 2*pp2")
    priced = with_shapes(table, [strategy], job())
    plan = Planner(priced, [strategy], PlannerOptions(kernels="pure")).plan(0, range(40), range(10, 50))
    assert plan.strategy == str(strategy)
    validate_plan(plan, priced, 7)
    assert simulate_plan(plan, priced)[0] > 0
    assert Calibration(priced, 8).predict(plan).pipeline_ms[0] > 0
