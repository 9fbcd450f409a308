"""Devices of several classes: which ranks stages are put on, what they cost and hold, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.config.hydra_block import parse_config
from ds_hydra.costs.activations import Activations
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.job_fingerprint import JobFingerprint
from ds_hydra.costs.memory import JobMemory
from ds_hydra.costs.shape_costs import price, used_schemes, with_shapes
from ds_hydra.costs.table_file import TableFile, read_table, table_record
from ds_hydra.engine.classes import check_classes, check_rows, class_tables
from ds_hydra.pipe.on_devices import crossing_groups
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.arena_room import ArenaRoom, room_beside
from ds_hydra.report.calibration import stage_loads
from ds_hydra.simulate.job import SimulatedJob
from ds_hydra.simulate.job_record import job_record, read_job
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.step import Simulator
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.nodes import Cluster
from tests.support.llama_memory import GIB, llama_plan

SEVENS = Cluster((7, 7, 2), ("h20",) * 14 + ("h800",) * 2)
HALVES = Cluster((4, 4), ("h20",) * 4 + ("h800",) * 4)
APART = Cluster((2, 4, 2), ("h20",) * 2 + ("h800",) * 4 + ("h20",) * 2)


def ranks_of(text: str, cluster: Cluster) -> list[tuple[int, ...]]:
    placed = place_strategy(StrategyShape.parse(text), cluster.num_ranks, 8, cluster)
    return [stage.ranks for pipeline in placed.pipelines for stage in pipeline.stages]


def test_stages_stand_on_ranks_of_their_class_and_inside_nodes() -> None:
    both = "(tp4@h20 > tp2@h800) + tp4@h20 + (tp2@h20 > tp2@h20) + 2*tp1@h20"
    assert ranks_of(both, SEVENS) == [
        (0, 1, 2, 3), (14, 15), (7, 8, 9, 10), (4, 5), (11, 12), (6,), (13,)
    ]  # fmt: skip
    assert ranks_of("(tp4@h800 > tp2@h20 > tp2@h20)", APART) == [(2, 3, 4, 5), (0, 1), (6, 7)]
    # Groups that no node holds take what is free, and are told.
    assert ranks_of("(tp4@h20 > tp4@h800)", APART) == [(0, 1, 6, 7), (2, 3, 4, 5)]
    across = place_strategy(StrategyShape.parse("tp4@h20 + tp4@h800"), 8, 8, APART)
    assert list(crossing_groups(across, 2)) == [], "on nodes of two it must"
    assert list(crossing_groups(across, APART.node_size)) == [(0, 1, 6, 7)]
    # Sequence parallel ranks of a stage stay together, too: on the node of four, not on that of two and a half of it.
    uneven = Cluster((2, 4, 2), ("h20",) * 6 + ("h800",) * 2)
    assert ranks_of("tp2sp2@h20 + tp2@h20 + tp2@h800", uneven) == [(2, 3, 4, 5), (0, 1), (6, 7)]
    # Of a stage that no node holds each group stays inside one.
    assert ranks_of("tp2sp2@h20 + 4*tp1@h800", APART)[0] == (0, 1, 6, 7)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_rank_runs_one_stage_of_its_class(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=2, max_size=5))
    of_node = [data.draw(st.sampled_from(["a", "b"])) for _ in sizes]
    of_node[:2] = ["a", "b"]
    cluster = Cluster(tuple(sizes), tuple(name for name, size in zip(of_node, sizes, strict=True) for _ in range(size)))
    left = {name: len(ranks) for name, ranks in cluster.classes.items()}
    stages = []
    while any(left.values()):
        name = data.draw(st.sampled_from([name for name, count in left.items() if count]))
        width = data.draw(st.sampled_from([w for w in (1, 2, 4, 8) if w <= left[name]]))
        left[name] -= width
        stages.append(f"tp{width}@{name}")
    placed = place_strategy(StrategyShape.parse(" + ".join(stages)), cluster.num_ranks, 8, cluster)
    for text, pipeline in zip(stages, placed.pipelines, strict=True):
        assert {cluster.devices[rank] for rank in pipeline.ranks} == {text[-1]}
    assert sorted(rank for pipeline in placed.pipelines for rank in pipeline.ranks) == list(range(cluster.num_ranks))


@pytest.mark.parametrize(
    ("text", "cluster", "words"),
    [
        ("(tp4@h20 > tp4@h100)", HALVES, r"stage 1 of pipeline .* asks for devices of class 'h100', but the job has 4 "
         r"of h20 \(ranks 0\.\.3\), 4 of h800"),
        ("(tp4@h20 > tp4)", HALVES, r"stage 1 .* names no class.*such as 'tp4pp2@h20'"),
        ("8*tp1", HALVES, "stage 0 of pipeline tp1 names no class of devices"),
        ("(tp4@h20 > tp2@h20 > tp2@h800)", HALVES, "6 of h20, of which the job has 4; 2 of h800, of which the job has "
         "4.*all ranks of each class, once each"),
        ("(tp4@h20 > tp2@h800)", HALVES, "uses 6 ranks but the job has 8"),
        ("(tp4@h20 > tp4@h20)", Cluster.of(8, 8), "class 'h20', but all devices of the job are alike: leave"),
        ("(tp4@h20 > tp4@h20)", None, "but nothing says which ranks have them"),
    ],
)  # fmt: skip
def test_strategies_that_the_cluster_has_not_the_devices_for_are_refused(
    text: str, cluster: Cluster | None, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        place_strategy(StrategyShape.parse(text), 8, 8, cluster)


def row(text: str, scale: float = 1.0, max_length: int = 6000, **more: Any) -> SchemeCost:
    return SchemeCost(
        PipelineShape.parse(text).cost_key, 1e-5 * scale, 0.1 * scale, 2.0 * scale, max_length, 30, **more
    )


TABLE = CostTable((row("tp4@h20", 6.0), row("tp2pp4@h20", 3.0), row("tp4@h800", 2.0), row("tp4pp8@h800", 0.4)))


def memory(cluster: Cluster = HALVES, **class_bytes: float) -> JobMemory:
    figures = {(tp, sp): Activations(64.0 / tp, 0.0, 0.0) for tp in (1, 2, 4) for sp in (1, 2)}
    return JobMemory(llama_plan(), cluster.num_ranks, figures, 2, device_bytes=GIB, vocab=1000, cluster=cluster,
                     class_bytes=class_bytes)  # fmt: skip


def test_any_split_of_the_layers_has_a_price_by_the_row_of_its_class() -> None:
    """Of 8 layers a stage of tp4@h20 takes 6 times the base for all, so 1.5 for two; tp4@h800 2, so 1.5 for six."""
    cost = price(PipelineShape.parse("(tp4[0:2]@h20 > tp4[2:8]@h800)"), TABLE, memory())
    assert (cost.b, cost.a, cost.c) == pytest.approx((0.15, 1.5e-5, 3.0))
    assert (cost.stages, cost.fills) == ((), 2)
    assert "tp4@h20, tp4@h800" in cost.derived
    # With three of the layers the first stage takes 2.25, and the other one 1.25, 5/9 of that.
    cost = price(PipelineShape.parse("(tp4[0:3]@h20 > tp4[3:8]@h800)"), TABLE, memory())
    assert (cost.b, cost.stages, cost.fills) == (
        pytest.approx(0.225),
        pytest.approx((1.0, 5 / 9)),
        pytest.approx(14 / 9),
    )
    assert cost.pipeline_ms([10.0, 20.0]) == pytest.approx(30.0 + 20.0 * 5 / 9)
    assert [load.b for load in stage_loads(cost, 8, None)] == pytest.approx([0.225, 0.125])
    # Rows of as many stages, or else of the nearest number: 4 of tp2, at 3 times the base for a quarter of the layers.
    cost = price(PipelineShape.parse("(tp2@h20 > tp2@h20 > tp4@h800)"), TABLE, memory())
    assert cost.b == pytest.approx(0.1 * 3.0 * 4 * 3 / 8)
    # A row's MaxLen is for 8 layers kept at once: 2 micro-batches of 6 are half as many again.
    cost = price(PipelineShape.parse("(tp4[0:6]@h20 > tp4[6:8]@h800)"), TABLE, memory())
    assert cost.max_length == 6000 * 8 // 12
    assert used_schemes([StrategyShape.parse("(tp4@h20 > tp4) + tp2")]) == (ParallelScheme(2), ParallelScheme(4, 2))
    for text, words in (("tp8@h20", "no row of tp8 sp1 on devices of class 'h20'.*it has tp4@h20, tp2pp4@h20"),
                        ("tp4@h100", "it has none of that class; measure it")):  # fmt: skip
        with pytest.raises(PlanError, match=words):
            price(PipelineShape.parse(f"({text} > tp4@h800)"), TABLE, memory())


def test_each_stage_has_the_memory_of_its_class() -> None:
    shape = PipelineShape.parse("(tp4[0:4]@h20 > tp4[4:8]@h800)")
    alike, less = memory(), memory(h20=GIB, h800=GIB / 8)
    assert less.max_length(shape) < alike.max_length(shape) == memory(h20=GIB, h800=GIB).max_length(shape)
    first, second = less.stages(shape)
    assert less.max_length(shape) == second.max_length(GIB / 8 * 0.95) < first.max_length(GIB * 0.95)
    assert less.fullest(shape, 1) == second
    assert less.over(second) == second.total(1) - GIB / 8 * 0.95
    # Counted among the candidates of the job, where it stands on ranks of its classes, it needs as much.
    strategy = StrategyShape((shape,))
    joint = alike.together({strategy: place_strategy(strategy, 8, 8, HALVES)})
    assert [one.states for one in joint.stages(shape)] == [one.states for one in alike.stages(shape)]


def test_mixed_strategies_are_planned_and_simulated_in_whatever_process() -> None:
    strategies = [StrategyShape.parse("(tp4[0:2]@h20 > tp4[2:8]@h800)"), StrategyShape.parse("tp4@h20 + tp4@h800")]
    table = with_shapes(TABLE, strategies, memory())
    assert read_table(table_record(table), "the table") == table
    planner = Planner(table, strategies, PlannerOptions(kernels="pure", highs="off"))
    lengths = [50 + 37 * i % 900 for i in range(40)]
    for strategy in strategies:
        plan = Planner(table, [strategy], PlannerOptions(kernels="pure", highs="off")).plan(0, range(40), lengths)
        validate_plan(plan, table, 8)
        assert 0 < plan.lower_bound_ms <= plan.searched_ms
    pipelines = plan.phases[0].pipelines
    tokens = [sum(batch.num_tokens for batch in one.microbatches) for one in pipelines]
    assert tokens[1] > 2 * tokens[0], "the class that is three times as fast has most"
    assert planner.plan(0, range(40), lengths).predicted_ms <= plan.predicted_ms * 1.001
    cluster = SimulatedJob(llama_plan(), 64, TableFile(table), LinkModel(4), 8, cluster=APART)
    again = read_job(json.loads(json.dumps(job_record(cluster))))
    assert again.cluster == APART
    assert Simulator(again).step(plan).step_s == Simulator(cluster).step(plan).step_s
    with pytest.raises(PlanError, match="nothing says which ranks"):
        Simulator(replace(cluster, cluster=None)).step(plan)
    # On ranks of other nodes the same plan sends its messages elsewhere.
    assert Simulator(replace(cluster, cluster=HALVES)).step(plan).step_s != Simulator(cluster).step(plan).step_s


def test_what_fits_beside_the_candidates_is_asked_for_the_ranks_of_each_class() -> None:
    one, other = StrategyShape.parse("(tp4[0:4]@h20 > tp4[4:8]@h800)"), StrategyShape.parse("8*tp1@h20")
    joint = memory().together({one: place_strategy(one, 8, 8, HALVES)})
    room = room_beside(joint, with_shapes(TABLE, [one], joint), composing=False)
    again = ArenaRoom.of_record(json.loads(json.dumps(room.to_record())))
    assert again == room
    assert again.refusal(one) == ""
    assert "8 of h20, of which the job has 4" in again.refusal(other)


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


@pytest.mark.parametrize("stages", [[1.0], [1.0, 0.0], [1.0, 1.5], [True, 1.0], ["1", 1.0]])
def test_shares_of_stages_that_cannot_be_are_refused(stages: list[Any]) -> None:
    record = table_record(CostTable((row("pp2", stages=(1.0, 0.5)),)))
    assert read_table(record, "t").costs[0].stages == (1.0, 0.5)
    record["schemes"][0]["stages"] = stages
    with pytest.raises(ConfigError, match="stages"):
        read_table(record, "t")


def test_uniform_pipelines_are_priced_as_ever() -> None:
    """What entered with stages that differ must not change costs, plans and digests of others by a bit."""
    rows = CostTable((row("tp2pp2"), row("tp4pp2")))
    assert price(PipelineShape.parse("(tp2[0:4] > tp2[4:8])"), rows, memory()).stages == ()
    loads = np.random.default_rng(0).uniform(1, 90, 40).tolist()
    for pp in (1, 3, 8):
        cost = row(f"pp{pp}")
        assert cost.pipeline_ms(loads) == math.fsum(loads) + (pp - 1) * max(loads)
        assert "stages" not in table_record(CostTable((cost,)))["schemes"][0]
