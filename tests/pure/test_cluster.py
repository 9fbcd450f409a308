"""Nodes and devices: of any size, of several classes, and slow ones."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.config.hydra_block import parse_config
from ds_hydra.costs.cost_table import CostTable, SchemeCost, TableFile, read_table, read_table_file, table_record
from ds_hydra.costs.memory import Activations, JobMemory
from ds_hydra.costs.shape_costs import price, used_schemes, with_shapes
from ds_hydra.costs.shares import NONE, Shares, SlowRanks
from ds_hydra.pipe.placement import crossing_groups, place_strategy
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.simulate import simulate_pipeline
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan
from ds_hydra.plan.validate import validate_plan
from ds_hydra.planner import Planner, PlannerOptions, PlanRecipe
from ds_hydra.planner.composing import ArenaRoom, room_beside
from ds_hydra.ranks.nodes import GivenNode, Standing, class_name, cluster_of
from ds_hydra.report.calibration import LEAST_STEPS, StageTime, Stragglers, stage_loads
from ds_hydra.simulate.job import SimulatedJob, job_record, read_job
from ds_hydra.simulate.links import LinkModel
from ds_hydra.simulate.step import Simulator
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from ds_hydra.zero_hetero.nodes import Cluster, as_node_size, node_of, node_ranks, node_size_of, nodes_of
from ds_hydra.zero_hetero.twin_plan import Twins
from tests.support.planner_cases import GIB, small_llama_plan

# --- Nodes of any size and device classes: from what ranks say of themselves, or as the config gives them.
H800, H20 = "NVIDIA H800", "NVIDIA H20"


def on(hosts: str, launched: Sequence[int] | None = None, devices: Sequence[str] = ()) -> list[Standing]:
    """Ranks on hosts of one letter each."""
    told: Sequence[int | None] = launched or [None] * len(hosts)
    return [
        Standing(f"{host}/boot", size, device)
        for host, size, device in zip(hosts, told, devices or [""] * len(hosts), strict=True)
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_every_rank_is_on_one_node_however_sizes_are_written(sizes: list[int]) -> None:
    cluster = Cluster(tuple(sizes))
    whole, ranks = cluster.node_size, np.arange(cluster.num_ranks)
    for size in (whole, tuple(sizes)):
        nodes = list(node_ranks(cluster.num_ranks, size))
        assert [len(node) for node in nodes] == sizes
        assert [node_of(rank, size) for node in nodes for rank in node] == nodes_of(ranks, size).tolist()
        assert nodes_of(ranks, size).tolist() == [at for at, node in enumerate(nodes) for _ in node]
    assert [cluster.ranks_beside(rank) for rank in ranks.tolist()] == [size for size in sizes for _ in range(size)]
    # Nodes that are alike have no digest: plans of such jobs are named as they always were.
    assert (cluster.digest == b"") == isinstance(whole, int) == (whole == sizes[0])


def test_ranks_of_a_part_of_the_nodes() -> None:
    assert as_node_size([8, 8, 7]) == 8
    assert as_node_size([7, 8]) == (7, 8)
    assert [node_size_of(count, (7, 8)) for count in (3, 7, 8, 14, 15)] == [3, 7, 7, 7, (7, 8)]
    assert [node_size_of(count, 8) for count in (6, 8, 20)] == [6, 8, 8]


def test_twins_and_links_know_where_an_uneven_node_ends() -> None:
    # On nodes of 3 and 5 the ranks 2 and 3 are on two; on two nodes of 4 they share one.
    assert Twins.of([1, 2, 4, 5], (3, 5)) == Twins((1, 2, 4, 5), ((1, 2), (4, 5)))
    assert Twins.of([2, 3], (3, 5)) == Twins.of([2, 3], 4) == Twins((2, 3))  # one on each of two nodes, or both on one
    assert Twins.of([1, 2, 3], (3, 5)) == Twins((1, 2, 3), ((1, 2), (3,)))  # two of one node and one of the other
    links = LinkModel((3, 5))
    assert links.speed(2, 3) == links.between
    assert links.speed(3, 7) == links.inside
    assert links.crosses([2, 3])
    assert not links.crosses([3, 4, 7])
    with pytest.raises(ConfigError, match="a node of 0 ranks"):
        LinkModel((3, 0))


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (on("aaaa"), (4,)),
        (on("aaabbbc"), (3, 3, 1)),
        (on("aabbbb"), (2, 4)),
        (on("aaaa", [2, 2, 2, 2]), (2, 2)),  # the launcher knows better than the names of the hosts
        (on("aaabb", [3, 3, 3, 3, 3]), (3, 2)),  # a launcher's last node may have fewer
        (on("aabbb", [2, 2, 3, 3, 3]), (2, 3)),  # each rank knows of its own node alone
    ],
)
def test_launcher_or_hosts_tell_the_nodes(ranks: list[Standing], sizes: tuple[int, ...]) -> None:
    assert cluster_of(ranks) == Cluster(sizes)
    assert cluster_of(ranks, node_size=3) == Cluster.of(len(ranks), 3)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (on("abab"), "hosts alternate .rank 0 on a, rank 1 on b.*hydra.node_size"),
        (on("aabbaa"), "hosts alternate"),
        (on("aabbb", [3, 3, 2, 2, 2]), "rank 0 is on a node of 3 ranks and rank 2, within it, on one of 2"),
    ],
)
def test_nodes_that_nobody_can_tell_are_refused(ranks: list[Standing], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster_of(ranks)


def test_drivers_tell_the_device_classes() -> None:
    mixed = cluster_of(on("aabbb", devices=[H800] * 2 + [H20] * 3))
    assert mixed.classes == {"h800": (0, 1), "h20": (2, 3, 4)}
    assert mixed.mixed
    assert mixed.digest
    assert str(mixed).endswith("2 of h800 (ranks 0..1), 3 of h20 (ranks 2..4)")
    # A workstation's devices may differ within a node.
    assert "h20 (ranks 0, 2..3)" in str(cluster_of(on("aaaa", devices=[H20, H800, H20, H20])))
    alike = cluster_of(on("aabb", devices=[H800] * 4))
    assert alike == Cluster((2, 2))
    assert not alike.mixed
    assert class_name("NVIDIA A800-SXM4-80GB") == "a800-sxm4-80gb"


def test_a_given_cluster_names_nodes_and_classes() -> None:
    ranks = on("aaabb", devices=[H800] * 3 + [H20] * 2)
    nodes = [GivenNode(3, "h800"), GivenNode(2, None)]
    assert cluster_of(ranks, given=nodes).classes == {"h800": (0, 1, 2), "h20": (3, 4)}
    # Called alike they count as equal; parts of a host may stand for nodes.
    alike = cluster_of(ranks, given=[GivenNode(1, "nvidia"), GivenNode(2, "nvidia"), GivenNode(2, "nvidia")])
    assert alike.sizes == (1, 2, 2)
    assert not alike.mixed
    assert cluster_of(on("aa"), given=[GivenNode(1, "fast"), GivenNode(1, "slow")]).mixed  # CPUs may be called anything


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([GivenNode(3, None), GivenNode(3, None)], "nodes of 3 . 3 = 6 ranks but the job has 5"),
        ([GivenNode(2, None), GivenNode(3, None)], "ranks 2 and 3 on one node, but rank 2 is on a and rank 3 on b"),
        ([GivenNode(3, "h800"), GivenNode(2, "h200")], "gives rank 3 a device of class 'h200', but .* 'NVIDIA H20'"),
        ([GivenNode(3, "h20"), GivenNode(2, "h800")], "gives rank 0 a device of class 'h20', but .* such as 'h800'"),
    ],
)
def test_a_cluster_that_is_not_so_is_refused(nodes: list[GivenNode], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster_of(on("aaabb", devices=[H800] * 3 + [H20] * 2), given=nodes)


def test_a_cluster_that_contradicts_the_launcher_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="ranks 1 and 2 on one node, but the launcher begins another node with rank 2"
    ):
        cluster_of(on("aaaa", [2] * 4), given=[GivenNode(4, None)])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cluster": [{"ranks": 8, "nodes": 2, "device": "h800"}, {"ranks": 7}]}, ""),
        ({"cluster": None}, ""),
        ({"cluster": []}, "hydra.cluster must be a list of nodes, such as"),
        ({"cluster": "h800"}, "must be a list of nodes"),
        ({"cluster": [{"nodes": 2}]}, r"hydra.cluster\[0\]' lacks 'ranks'"),
        ({"cluster": [{"ranks": 0}]}, r"hydra.cluster\[0\].ranks must be from 1"),
        ({"cluster": [{"ranks": 1, "devices": "h20"}]}, "unknown key 'devices'.*device"),
        ({"cluster": [{"ranks": 1, "device": "H 20"}]}, "use lower-case letters, digits"),
        ({"cluster": [{"ranks": 8}], "node_size": 8}, "remove hydra.node_size"),
    ],
)
def test_the_setting_is_read_strictly(settings: dict[str, Any], words: str) -> None:
    config = {"hydra": {"tokens_per_step": 100, **settings}}
    if not words:
        parsed = parse_config(config)
        assert parsed is not None
        assert len(parsed.hydra.cluster) == len(settings["cluster"] or ())
        return
    with pytest.raises(ConfigError, match=words):
        parse_config(config)


def test_a_plan_is_named_by_the_cluster_too_where_ranks_differ() -> None:
    pipeline = PipelinePlan(PipelineShape.parse("tp2"), (MicroBatchPlan.of_whole([0], [5]),), 1.0)
    plan = StepPlan(0, (0,), (5,), (Phase((pipeline,)),), 1.0)
    clusters = [Cluster((2, 1)), Cluster((1, 2)), Cluster((2, 1), ("a", "a", "b")), Cluster((2, 1), ("a", "b", "b"))]
    assert plan.digest() == plan.digest(clusters[0].digest)
    assert len({plan.digest(cluster.digest) for cluster in clusters}) == 4


# --- Devices of several classes: which ranks stages are put on, what they cost and hold, and what is refused.
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
    return JobMemory(small_llama_plan(), cluster.num_ranks, figures, 2, device_bytes=GIB, vocab=1000, cluster=cluster,
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
    cluster = SimulatedJob(small_llama_plan(), 64, TableFile(table), LinkModel(4), 8, cluster=APART)
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


# --- Plans count with slow ranks: their pipelines get less, and each plan says what it counted with.
CLASSES = ("tp1@slow", "tp1@fast")
COSTS = tuple(
    SchemeCost(PipelineShape.parse(text).cost_key, 1e-6, 0.1, 2.0, 4000, 30, Shares.usual())
    for text in ("tp1", "tp2", "pp2", "tp2pp2", "pp4", *CLASSES)
)
_DRAWN = random.Random(1)
LENGTHS = [_DRAWN.randrange(20, 900) for _ in range(120)]


def table(**slow: float) -> CostTable:
    """Ranks as "r3", with their paces."""
    return CostTable(COSTS, "made up", SlowRanks(tuple((int(rank[1:]), pace) for rank, pace in slow.items())))


def plan_of(text: str, costs: CostTable, **options: object) -> StepPlan:
    planner = Planner(costs, [StrategyShape.parse(text)], PlannerOptions(kernels="compiled", **options))  # type: ignore[arg-type]
    plan = planner.plan(0, range(len(LENGTHS)), LENGTHS)
    validate_plan(plan, CostTable(COSTS), planner.num_ranks)  # it states all that its times follow from
    return plan


@pytest.mark.parametrize(
    ("text", "paces"),
    [
        ("8*tp1", [(), (), (), (1.5,), (), (2.0,), (), ()]),
        ("2*tp2 + pp4", [(), (1.5,), (1.0, 2.0, 1.0, 1.0)]),
        ("tp2pp2 + 2*pp2/list", [(1.0, 1.5), (1.0, 2.0), ()]),
        ("(tp2[0:3] > tp2[3:7]) + 4*tp1", [(1.0, 1.5), (), (2.0,), (), ()]),
    ],
)
def test_a_stage_is_as_slow_as_its_slowest_rank(text: str, paces: list[tuple[float, ...]]) -> None:
    slow = SlowRanks(((3, 1.5), (5, 2.0)))
    assert list(slow.of(StrategyShape.parse(text))) == paces
    assert NONE.of(StrategyShape.parse(text)) == ((),) * len(paces)


def test_where_devices_differ_the_cluster_says_which_ranks_a_stage_stands_on() -> None:
    slow = SlowRanks(((2, 1.5),), Cluster((2, 2), ("slow", "fast", "fast", "slow")))
    assert slow.of(StrategyShape.parse("2*tp1@slow + 2*tp1@fast")) == ((), (), (), (1.5,))
    assert SlowRanks.of_record(json.loads(json.dumps(slow.to_record()))) == slow


@pytest.mark.parametrize("text", ["4*tp1", "2*tp2", "2*pp2", "2*pp2/list", "2*pp2/v", "tp2 + 2*tp1"])
@pytest.mark.parametrize("pace", [1.2, 2.0])
def test_the_pipeline_of_a_slow_rank_gets_less(text: str, pace: float) -> None:
    even, uneven = plan_of(text, table()), plan_of(text, table(r1=pace))
    tokens = [[sum(b.num_tokens for b in one.microbatches) for one in plan.pipelines] for plan in (even, uneven)]
    share = 1.0 / len(even.pipelines)  # all cost the same
    (at,) = [index for index, one in enumerate(uneven.pipelines) if one.paces]
    assert tokens[1][at] < tokens[0][at]
    assert uneven.predicted_ms == pytest.approx(even.predicted_ms / (1.0 - share + share / pace), rel=0.04)
    assert uneven.gap < 0.05
    if "/" not in text:
        known = plan_of(text, table())
        unknown = max(
            simulate_pipeline(replace(one, paces=paces), CostTable(COSTS))
            for one, paces in zip(known.pipelines, table(r1=pace).slow.of(known.phases[0].shape), strict=True)
        )
        won = (unknown - uneven.predicted_ms) / (unknown - even.predicted_ms)
        assert won > 0.9 * (1 - share)


def test_a_plan_states_its_paces_and_is_read_back() -> None:
    plan = plan_of("2*pp2", table(r2=1.25))
    assert [one.paces for one in plan.pipelines] == [(), (1.25, 1.0)]
    assert StepPlan.from_json(plan.to_json()) == plan
    without = plan_of("2*pp2", table())
    assert "paces" not in without.to_json()
    assert plan.digest() != without.digest()
    for wrong in ([1.25], [0.5, 1.0], "2", [True, 1.0], [1e9, 1.0]):
        record = json.loads(plan.to_json())
        record["phases"][0][1]["paces"] = wrong
        with pytest.raises(ValueError, match=r"pace|times as long"):
            StepPlan.from_json(json.dumps(record))


def test_costs_are_read_back_with_slow_ranks_and_a_users_table_names_none(tmp_path: object) -> None:
    costs = table(r1=1.25)
    assert read_table(table_record(costs), "a recipe") == costs
    assert "slow" not in table_record(table())
    recipe = PlanRecipe(costs, (StrategyShape.parse("2*tp1"),), PlannerOptions(kernels="compiled"))
    assert PlanRecipe.of_text(recipe.text) == recipe
    assert recipe.digest != replace(recipe, table=table()).digest
    path = f"{tmp_path}/costs.json"
    TableFile(costs).save(path)
    with pytest.raises(ConfigError, match='which ranks are "slow" is what a job finds out'):
        read_table_file(path)
    record = table_record(costs) | {"slow": {"paces": [[1, 0.5]]}}
    with pytest.raises(ConfigError, match="how many times as long"):
        read_table(record, "a recipe")


def test_paced_costs_of_stages_that_differ_drain_by_their_own_times() -> None:
    cost = SchemeCost(ParallelScheme(1, 2), 0.0, 1.0, 0.0, 100, stages=(0.5, 1.0))
    assert cost.paced(()) is cost
    assert (cost.paced((2.0, 1.0)).b, cost.paced((2.0, 1.0)).stages) == (1.0, ())
    assert (cost.paced((4.0, 1.0)).b, cost.paced((4.0, 1.0)).stages) == (2.0, (1.0, 0.5))


def step(pace: float) -> list[StageTime]:
    return [StageTime("a", (rank,), 10.0, 10.0 * (pace if rank == 1 else 1.0)) for rank in range(4)]


def test_a_pace_follows_the_rank_and_goes_on_from_a_checkpoint() -> None:
    watch = Stragglers()
    seen = []
    for pace in [1.0] * 12 + [1.2] * 20 + [2.0] * 20 + [1.0] * 20:
        watch.observe(step(pace))
        seen.append(dict(watch.paces).get(1, 1.0))
        watch = Stragglers(state=json.loads(json.dumps(watch.state())))
    assert seen[:12] == [1.0] * 12
    assert list(dict.fromkeys(seen)) == [1.0, 1.2, 2.0]
    assert seen.index(1.2) < 12 + 12
    assert seen.index(2.0) < 32 + 12
    assert seen[52 + 8 :] == [1.0] * 12
    bad: list[dict[str, Any]] = [
        {"ratios": [], "paces": [[1, "2"]]}, {"ratios": [[0, ["x"]]], "paces": []}, {"ratios": []},
    ]  # fmt: skip
    for wrong in bad:
        with pytest.raises((KeyError, ValueError, TypeError)):
            Stragglers(state=wrong)


# --- Slow ranks are told by what they compute beside others, whatever the cost table is wrong by.
def step_of(
    rng: random.Random, slow: dict[int, float], *, tp: int = 1, num: int = 16, wrong: float = 3.0
) -> list[StageTime]:
    """A step of pipelines of two kinds of stages, of `num` ranks in all; the table is wrong for the second kind."""
    stages = []
    for first in range(0, num, tp):
        ranks, kind = tuple(range(first, first + tp)), first // tp % 2
        expected = rng.uniform(50.0, 200.0)
        pace = max(slow.get(rank, 1.0) for rank in ranks) * rng.gauss(1.0, 0.02) * (wrong if kind else 1.0)
        stages.append(StageTime(kind, ranks, expected, expected * pace))
    return stages


@pytest.mark.parametrize("factor", [1.2, 2.0])
@pytest.mark.parametrize("rank", [0, 5])
def test_a_slow_rank_is_told_once_within_20_steps_and_when_it_recovers(rank: int, factor: float) -> None:
    rng, watch = random.Random(rank), Stragglers()
    for _ in range(30):
        assert watch.observe(step_of(rng, {})) == []
    told = [line for _ in range(20) for line in watch.observe(step_of(rng, {rank: factor}))]
    assert len(told) == 1
    found = re.match(r"rank (\d+) computes (\S+) times as long", told[0])
    assert found is not None
    assert int(found[1]) == rank
    assert float(found[2]) == pytest.approx(factor, rel=0.04)
    later = [line for _ in range(20) for line in watch.observe(step_of(rng, {}))]
    assert later == [f"rank {rank} computes as fast as others again"]


def test_a_rank_that_is_slow_from_the_start_is_told_as_soon_as_enough_steps_tell() -> None:
    rng, watch = random.Random(0), Stragglers()
    told = [watch.observe(step_of(rng, {3: 1.3})) for _ in range(LEAST_STEPS)]
    assert told[:-1] == [[]] * (LEAST_STEPS - 1)
    assert len(told[-1]) == 1


def test_ranks_of_one_stage_are_named_together() -> None:
    rng, watch = random.Random(0), Stragglers()
    (line,) = [line for _ in range(20) for line in watch.observe(step_of(rng, {6: 1.25}, tp=4))]
    assert line.startswith("ranks 4, 5, 6, 7 compute 1.")
    assert "one may hold up the others" in line


def test_nobody_is_told_for_noise_for_single_long_steps_or_for_a_stage_without_its_like() -> None:
    rng, watch = random.Random(0), Stragglers()
    for number in range(300):
        long = {rng.randrange(16): 5.0} if number % 3 == 0 else {}
        assert watch.observe(step_of(rng, long)) == []
    alone = Stragglers()
    for _ in range(50):
        assert alone.observe([StageTime("a", (0,), 10.0, 30.0), StageTime("b", (1,), 10.0, 10.0)]) == []
        assert alone.observe([StageTime("a", (0,), 0.0, 0.0), StageTime("a", (1,), 10.0, 10.0)]) == []
