"""Which schemes stand for a job's strategies in the self-check, and which config stands for its model's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StageShape, StrategyShape
from ds_hydra.self_check.schemes import (
    BASE,
    Team,
    head_divisor,
    num_layers,
    parts,
    shapes_to_run,
    stand_in,
    teams,
    uneven_pipeline,
)
from ds_hydra.self_check.shrink import FEW_POSITIONS, HEAD_DIM, POSITIONS, kept_layers, shrunk_config

STAGES = st.builds(StageShape, st.integers(1, 64), st.integers(1, 64))
PIPELINES = st.builds(PipelineShape, st.lists(STAGES, min_size=1, max_size=6).map(tuple))


def uniform(**degrees: int) -> PipelineShape:
    return PipelineShape.of(ParallelScheme(**degrees))


@given(PIPELINES)
def test_a_stand_in_has_the_same_kinds_of_groups_and_stages(shape: PipelineShape) -> None:
    small = stand_in(shape)
    assert stand_in(small) == small
    assert min(shape.pp, 2) <= small.pp <= shape.pp
    for mine, own in ((small.stages[0], shape.stages[0]), (small.stages[-1], shape.stages[-1])):
        for degree, whole in ((mine.tp, own.tp), (mine.sp, own.sp)):
            assert whole % degree == 0
            assert (degree > 1) == (whole > 1)
    if all(degree in (1, 2, 4, 8, 16, 32, 64) for stage in shape.stages for degree in (stage.tp, stage.sp)):
        assert max(stage.num_ranks for stage in small.stages) <= 8


@pytest.mark.parametrize(
    ("text", "run"),
    [("tp2pp8", "tp2pp3"), ("tp4sp8", "tp4sp2"), ("tp8", "tp8"), ("sp32", "sp8"), ("tp8sp2", "tp4sp2"), ("pp2", "pp2"),
     ("(sp2[0:1] > tp2[1:4])", "(sp2 > tp2)"), ("(tp2@a > pp4@b > sp16)", "(tp2 > tp1 > sp8)")],
)  # fmt: skip
def test_stand_ins(text: str, run: str) -> None:
    assert stand_in(PipelineShape.parse(text)) == PipelineShape.parse(run)


def test_each_pipeline_is_run_once_and_one_rank_alone_first() -> None:
    strategies = [StrategyShape.parse(text) for text in ("tp2 + 2*pp4", "pp8", "sp2 + tp2")]
    assert list(map(str, shapes_to_run(strategies))) == ["tp1", "sp2", "tp2", "pp3"]
    assert list(map(str, shapes_to_run(strategies, whole=True))) == ["tp1", "sp2", "tp2", "pp4", "pp8"]


@given(PIPELINES)
def test_stages_of_the_copy_are_uneven_where_there_are_several(shape: PipelineShape) -> None:
    layers = num_layers([shape, BASE])
    pipeline = uneven_pipeline(shape, layers)
    depths = [stage.last_layer - stage.first_layer for stage in pipeline.stages]
    assert sum(depths) == layers >= 4
    assert shape.pp == 1 or len(set(depths)) == 2
    assert [(stage.tp, stage.sp) for stage in pipeline.stages] == [(stage.tp, stage.sp) for stage in shape.stages]


def test_parts_are_the_degrees_alone() -> None:
    assert parts(uniform(tp=2, pp=3)) == {"tp": uniform(tp=2), "pp": uniform(pp=3)}
    assert parts(PipelineShape.parse("(sp2 > tp4)")) == {"tp": uniform(tp=4), "pp": uniform(pp=2), "sp": uniform(sp=2)}
    split = PipelineShape.parse("tp1/zb-h1")
    assert parts(PipelineShape.parse("tp2pp2/zb-h1")) == {
        "tp": uniform(tp=2),
        "pp": uniform(pp=2),
        "schedule": split,
    }
    assert parts(split) == {"schedule": split}
    assert parts(BASE) == {}


@given(st.integers(1, 16), st.integers(1, 8), st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3))
def test_fewer_heads_are_divided_by_every_degree_as_before(kv_heads: int, group: int, degrees: list[int]) -> None:
    heads = kv_heads * group
    factor = head_divisor(heads, kv_heads, [uniform(tp=n) for n in degrees])
    small, small_kv = heads // factor, kv_heads // factor
    assert (small * factor, small_kv * factor) == (heads, kv_heads)
    for n in degrees:
        assert (heads % n == 0) == (small % n == 0)
        assert (kv_heads % n == 0) == (small_kv % n == 0)
        assert (n % kv_heads == 0) == (n % small_kv == 0)


def test_many_heads_become_few() -> None:
    assert head_divisor(64, 8, [uniform(tp=2)]) == 2
    assert head_divisor(64, 8, [uniform(tp=8)]) == 1


def test_a_large_config_becomes_a_tiny_one_of_its_kind() -> None:
    rotary = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    config = AutoConfig.for_model(
        "llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, rope_parameters=rotary,
    )  # fmt: skip
    small = shrunk_config(config, layers=4, head_divisor=4)
    assert (small.num_hidden_layers, small.num_attention_heads, small.num_key_value_heads) == (4, 16, 2)
    assert (small.hidden_size, small.head_dim, small.intermediate_size) == (16 * HEAD_DIM, HEAD_DIM, 192)
    assert small.max_position_embeddings == POSITIONS
    assert small.rope_parameters["original_max_position_embeddings"] == FEW_POSITIONS
    assert (config.hidden_size, config.num_hidden_layers) == (8192, 80)


def test_every_kind_of_layer_is_kept() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=30, layer_types=kinds * 5)
    assert kept_layers(config, 4) == (0, 1, 2, 5)
    small = shrunk_config(config, 4, 1)
    assert small.layer_types == [kinds[0]] * 3 + [kinds[5]]
    assert kept_layers(AutoConfig.for_model("llama", num_hidden_layers=2), 4) == (0, 0, 1, 1)


def test_ranks_of_different_nodes_help_first_and_then_one_of_each_has_all_the_memory() -> None:
    assert list(teams(6, 4, 10)) == [Team((0, 4, 1), 2), Team((0, 4), 1)]
    assert list(teams(8, 8, 3)) == [Team((0,), 1)]
    assert list(teams(2, 1, 40)) == [Team((0, 1), 1)]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 200))
def test_every_run_is_done_once_by_each_team(num_ranks: int, node_size: int, num_runs: int) -> None:
    runs = list(range(num_runs))
    for team in teams(num_ranks, node_size, num_runs):
        shares = [team.share(rank, runs) for rank in range(num_ranks)]
        assert sorted(run for share in shares for run in share) == runs
        of_node = [sum(rank // node_size == node for rank in team.ranks) for node in range(num_ranks)]
        assert max(of_node) == team.of_node
