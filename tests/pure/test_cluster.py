"""Nodes of any size and device classes: from what ranks say of themselves, or as the config gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.config.hydra_block import parse_config
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.plan.phase import MicroBatchPlan, Phase, PipelinePlan
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.ranks.nodes import GivenNode, Standing, class_name, cluster_of
from ds_hydra.simulate.links import LinkModel
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import Cluster, as_node_size, node_of, node_ranks, node_size_of, nodes_of
from ds_hydra.zero_hetero.twin_plan import Twins

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
