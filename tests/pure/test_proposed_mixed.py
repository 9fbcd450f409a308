"""Strategies proposed for devices of several classes, and the planner's time of pipelines whose stages differ."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.costs.shape_costs import price, with_shapes
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.on_devices import crossing_groups
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.proposal.mixed import propose_mixed, split_by_speed
from ds_hydra.planner.proposal.sliced_forms import by_v
from ds_hydra.zero_hetero.errors import PlanError
from tools import aims
from tools.hetero.clusters import CASES, CONTEXT, SEQUENCES, exchanged_ms, memory_of, table_of
from tools.hetero.formula import drawn_plans

BY_NAME = {case.name: case for case in CASES}
LENGTHS = (CONTEXT,) * SEQUENCES


@given(st.integers(3, 9), st.lists(st.floats(0.1, 9.0), min_size=1, max_size=3), st.data())
def test_layers_are_split_so_that_the_slowest_stage_takes_least(
    layers: int, layer_ms: list[float], data: st.DataObject
) -> None:
    most = data.draw(st.lists(st.integers(0, 9), min_size=len(layer_ms), max_size=len(layer_ms)))
    found = split_by_speed(layers, layer_ms, most)
    ways = [way for way in product(*(range(1, limit + 1) for limit in most)) if sum(way) == layers]
    if found is None:
        assert not ways
        return
    assert found in ways
    slowest = [max(n * ms for n, ms in zip(way, layer_ms, strict=True)) for way in (found, *ways)]
    assert slowest[0] <= min(slowest) * (1 + 1e-12)


@pytest.mark.parametrize("name", ["C2", "C7"])
def test_proposed_strategies_use_every_rank_fit_and_are_as_good_as_published_ones(name: str) -> None:
    case = BY_NAME[name]
    memory, table = memory_of(case), table_of(case)
    found = propose_mixed(case.cluster, table, memory, LENGTHS, sum(LENGTHS), CONTEXT, count=2,
                          exposed=lambda one: exchanged_ms(case, one))  # fmt: skip
    assert any(price(shape, table, memory).max_length >= CONTEXT for one in found for shape in one.pipelines)
    for strategy in found:
        assert StrategyShape.parse(str(strategy)) == strategy
        assert min(memory.max_length(shape) for shape in dict.fromkeys(strategy.pipelines)) > 1
        if case.cluster.mixed:
            placed = place_strategy(strategy, case.cluster.num_ranks, memory.plan.num_layers, case.cluster)
            assert not list(crossing_groups(placed, case.cluster.node_size))
    hetu = StrategyShape.parse(case.hetu)
    steps = []
    for strategies in (found, (hetu,)):
        added = [exchanged_ms(case, one) for one in strategies]
        planner = Planner(with_shapes(table, strategies, memory), strategies, PlannerOptions(highs="off"),
                          exposed_ms=added)  # fmt: skip
        steps.append(planner.plan(0, range(SEQUENCES), LENGTHS).step_ms)
    assert steps[0] <= aims.HETU_PLAN * steps[1]


def test_where_shares_are_measured_strategies_with_slices_are_proposed_if_they_pay() -> None:
    case = BY_NAME["70B 16+16"]
    plain = table_of(case)
    table = CostTable(tuple(replace(cost, shares=Shares.usual()) for cost in plain.costs))
    lengths = (4000, 2500, 1000, 700, 300, 4096) * 8

    def proposed(table: CostTable, *, slices: bool) -> tuple[str, ...]:
        return tuple(map(str, propose_mixed(case.cluster, table, memory_of(case), lengths, sum(lengths), CONTEXT,
                                            count=2, slices=slices)))  # fmt: skip

    without = proposed(table, slices=False)
    assert without == proposed(plain, slices=True)
    assert not any("/list" in one for one in without)
    found = proposed(table, slices=True)
    assert "/list" in found[0]
    for text in found:
        place_strategy(StrategyShape.parse(text), case.cluster.num_ranks, 80, case.cluster)


def test_a_v_has_as_many_layers_in_each_stage() -> None:
    (shape,) = StrategyShape.parse("(tp2[0:3]@a > tp4[3:10]@b > tp1[10:12]@b)").pipelines
    assert str(by_v(shape)) == "(tp2[0:1,10:12]@a > tp4[1:4,6:10]@b > tp1[4:5,5:6]@b)/list"
    (thin,) = StrategyShape.parse("(tp2[0:1]@a > tp4[1:4]@b)").pipelines
    assert str(by_v(thin)) == "(tp2[0:1]@a > tp4[1:4]@b)/list"


def test_what_nothing_can_hold_is_refused() -> None:
    case = BY_NAME["32B 16+16"]
    table = table_of(case)
    only = CostTable(tuple(cost for cost in table.costs if str(cost.scheme).endswith("@h20")))
    with pytest.raises(PlanError, match="no row of class 'h800' with sp1"):
        propose_mixed(case.cluster, only, memory_of(case), LENGTHS, sum(LENGTHS), CONTEXT)
    small = replace(memory_of(case), class_bytes={"h20": 20e9, "h800": 20e9}, _cache={})
    with pytest.raises(PlanError, match="no strategy was found that holds a sequence of 4096 tokens in the devices'"):
        propose_mixed(case.cluster, table, small, LENGTHS, sum(LENGTHS), CONTEXT)


def test_the_planners_time_of_unequal_pipelines_is_near_the_simulations() -> None:
    """A share of the plans that bench_hetero draws."""
    errors = np.array([abs(planned / simulated - 1.0) for _, planned, simulated in drawn_plans(60)])
    assert float(np.median(errors)) < aims.UNEQUAL_MEDIAN
    assert float(np.quantile(errors, 0.95)) < aims.UNEQUAL_P95
