"""Devices of several classes: what such jobs must say, their cost tables, and strategies proposed for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.config.hydra_block import parse_config
from ds_hydra.costs.cost_table import CostTable, TableFile
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.costs.memory import Activations
from ds_hydra.costs.shape_costs import price, with_shapes
from ds_hydra.costs.shares import Shares
from ds_hydra.mixed.classes import check_classes, check_rows, class_tables, propose_mixed, split_by_speed
from ds_hydra.pipe.placement import crossing_groups, place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.propose import by_v
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.nodes import Cluster
from tests.pure.test_cluster import HALVES, TABLE, row
from tools import aims
from tools.bench_hetero import CASES, SEQUENCES, drawn_plans, exchanged_ms, memory_of, table_of
from tools.bench_hetero import CONTEXT as LONGEST


def config(**hydra: Any) -> Any:
    parsed = parse_config({"hydra": {"tokens_per_step": 10, **hydra}})
    assert parsed is not None
    return parsed.hydra


@pytest.mark.parametrize(
    ("hydra", "cluster", "words"),
    [
        ({}, HALVES, r"devices of 2 classes: 4 of h20 .*without costs of each.*'hydra.cost_table': {'h20': \.\.\., "
         r"'h800': \.\.\.}.*start ranks of one class only"),
        ({"cost_table": "t.json", "strategies": ["tp4@h20 + tp4@h100"]}, HALVES, r"hydra\.strategies\[0\]: .*'h100', "
         "but the job has"),
        ({"strategies": ["2*tp4", "tp4@h20 + tp4@h20"]}, Cluster.of(8, 8), r"strategies\[1\]: .*all devices of the job "
         "are alike"),
        ({"cost_table": "t.json", "strategies": ["tp4@h20 + tp4@h800"]}, HALVES, ""),
        ({"cost_table": "t.json"}, HALVES, ""),
    ],
)  # fmt: skip
def test_jobs_of_several_classes_must_say_what_each_costs(
    hydra: Mapping[str, Any], cluster: Cluster, words: str
) -> None:
    if not words:
        check_classes(config(**hydra), cluster, 8)
        return
    with pytest.raises(ConfigError, match=words):
        check_classes(config(**hydra), cluster, 8)


def test_a_table_must_have_each_class() -> None:
    check_rows(TABLE, HALVES, "'t.json'")
    with pytest.raises(
        ConfigError, match="no costs of devices of class 'h800', which the job has; it has those of 'h20'"
    ):
        check_rows(CostTable(TABLE.costs[:2]), HALVES, "'t.json'")
    with pytest.raises(ConfigError, match="class 'h20', 'h800', which the job has; it has rows without a class"):
        check_rows(CostTable((row("tp4"),)), HALVES, "'t.json'")


LINKS = {"links": [{"operation": "p2p", "ranks": 2, "latency_us": 3.0, "bytes_per_second": 1e9}]}


def test_a_table_of_each_class_makes_one_whose_rows_name_it(tmp_path: Path) -> None:
    plain, job = (
        CostTable((row("tp4"), row("tp2pp4", 0.5))),
        JobFingerprint("m", "NVIDIA H20", "bfloat16", "x", num_ranks=2),
    )
    few, many = Activations(8.0, 1.0, 1.0), Activations(9.0, 0.0, 0.0)
    files = {"h20": tmp_path / "h20.json", "h800": tmp_path / "h800.json"}
    TableFile(plain, job, activations={(4, 1): few, (2, 1): many}, step={"fixed_ms": 1.0},
              links=LINKS).save(files["h20"])  # fmt: skip
    other = replace(job, device="NVIDIA H800")
    TableFile(plain, other, activations={(4, 1): many}, step={"fixed_ms": 2.0}).save(files["h800"])
    named = {name: str(file) for name, file in files.items()}
    assert config(cost_table=named).cost_table == named
    found = class_tables(named, job, "h20", HALVES)
    assert [str(cost.scheme) for cost in found.table.costs] == ["tp4@h20", "tp2pp4@h20", "tp4@h800", "tp2pp4@h800"]
    assert found.links == {"classes": {"h20": LINKS}}
    assert (found.activations, found.step) == ({(4, 1): many, (2, 1): many}, {"fixed_ms": 2.0})
    assert class_tables(named, other, "h800", HALVES).table == found.table, "all ranks have the same"
    with pytest.raises(ConfigError, match="was not measured for this job:\n  device: the table has 'NVIDIA H800'"):
        class_tables(named, job, "h800", HALVES)
    with pytest.raises(ConfigError, match="names the class 'h100', but the job has 4 of h20"):
        class_tables({"h100": named["h20"]}, job, "h20", HALVES)
    with pytest.raises(ConfigError, match="devices of one class: name its one file"):
        class_tables(named, job, "", Cluster.of(8, 8))
    TableFile(CostTable((row("tp4@h800"),))).save(files["h20"])
    with pytest.raises(ConfigError, match="tp4@h800 is of the class 'h800' and not of 'h20'"):
        class_tables({"h20": named["h20"]}, job, "h20", HALVES)
    for wrong, words in (({}, "name one of each class"), ({"h20": 3}, "cost_table.h20 must be a non-empty string")):
        with pytest.raises(ConfigError, match=words):
            config(cost_table=wrong)


# --- Strategies proposed for devices of several classes, and the planner's time of pipelines whose stages
# differ.
BY_NAME = {case.name: case for case in CASES}
MIXED = (LONGEST,) * SEQUENCES


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
    found = propose_mixed(case.cluster, table, memory, MIXED, sum(MIXED), LONGEST, count=2,
                          exposed=lambda one: exchanged_ms(case, one))  # fmt: skip
    assert any(price(shape, table, memory).max_length >= LONGEST for one in found for shape in one.pipelines)
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
        steps.append(planner.plan(0, range(SEQUENCES), MIXED).step_ms)
    assert steps[0] <= aims.HETU_PLAN * steps[1]


def test_where_shares_are_measured_strategies_with_slices_are_proposed_if_they_pay() -> None:
    case = BY_NAME["70B 16+16"]
    plain = table_of(case)
    table = CostTable(tuple(replace(cost, shares=Shares.usual()) for cost in plain.costs))
    lengths = (4000, 2500, 1000, 700, 300, 4096) * 8

    def proposed(table: CostTable, *, slices: bool) -> tuple[str, ...]:
        return tuple(map(str, propose_mixed(case.cluster, table, memory_of(case), lengths, sum(lengths), LONGEST,
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
        propose_mixed(case.cluster, only, memory_of(case), MIXED, sum(MIXED), LONGEST)
    small = replace(memory_of(case), class_bytes={"h20": 20e9, "h800": 20e9}, _cache={})
    with pytest.raises(PlanError, match="no strategy was found that holds a sequence of 4096 tokens in the devices'"):
        propose_mixed(case.cluster, table, small, MIXED, sum(MIXED), LONGEST)


def test_the_planners_time_of_unequal_pipelines_is_near_the_simulations() -> None:
    """A share of the plans that bench_hetero draws."""
    errors = np.array([abs(planned / simulated - 1.0) for _, planned, simulated in drawn_plans(60)])
    assert float(np.median(errors)) < aims.UNEQUAL_MEDIAN
    assert float(np.quantile(errors, 0.95)) < aims.UNEQUAL_P95
