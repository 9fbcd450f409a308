"""Strategies: text to schemes and back, schemes to ranks, and refusals that say what to change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.pipe.placement import Pipeline, Stage, Strategy, place_pipeline, place_strategy, split_layers
from ds_hydra.pipe.shape import ParallelScheme, format_strategy, parse_strategy
from ds_hydra.zero_hetero.errors import PlanError

SCHEMES = st.builds(ParallelScheme, st.integers(1, 8), st.integers(1, 6), st.integers(1, 8))


@pytest.mark.parametrize(
    ("text", "schemes"),
    [
        ("tp1", [(1, 1, 1)]),
        ("tp4 + 2*tp1pp2 + sp2", [(4, 1, 1), (1, 2, 1), (1, 2, 1), (1, 1, 2)]),
        ("3*PP2TP8SP16", [(8, 2, 16)] * 3),
        ("sp2tp3", [(3, 1, 2)]),
    ],
)
def test_reading(text: str, schemes: list[tuple[int, int, int]]) -> None:
    assert parse_strategy(text) == tuple(ParallelScheme(*degrees) for degrees in schemes)


@given(st.lists(SCHEMES, min_size=1, max_size=12))
def test_text_and_back(schemes: list[ParallelScheme]) -> None:
    text = format_strategy(schemes)
    assert parse_strategy(text) == tuple(schemes)
    assert format_strategy(parse_strategy(text)) == text


@pytest.mark.parametrize(
    "text", ["", "tp", "4tp", "tp4+", "tp2tp2", "2*", "dp4", "tp4 pp2 +", "1.5*tp2", "-1*tp2", "tp-2"]
)
def test_terms_that_cannot_be_read(text: str) -> None:
    with pytest.raises(PlanError, match="cannot read the term"):
        parse_strategy(text)


@pytest.mark.parametrize(("text", "words"), [("0*tp1", "count must be at least 1"), ("tp0", "at least 1")])
def test_zeros(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_strategy(text)


@given(st.lists(SCHEMES, min_size=1, max_size=6), st.integers(6, 40))
def test_placement_tiles_ranks_and_layers(schemes: list[ParallelScheme], num_layers: int) -> None:
    total = sum(scheme.num_ranks for scheme in schemes)
    strategy = place_strategy(schemes, total, num_layers)
    seen: list[int] = []
    for index, (scheme, pipeline) in enumerate(zip(schemes, strategy.pipelines, strict=True)):
        layers: list[int] = []
        for number, stage in enumerate(pipeline.stages):
            layers += range(stage.first_layer, stage.last_layer)
            assert (stage.tp, stage.sp) == (scheme.tp, scheme.sp)
            for rank in stage.ranks:
                tp_rank, sp_rank = stage.coordinates(rank)
                first = pipeline.ranks[0]
                assert rank == first + (number * scheme.sp + sp_rank) * scheme.tp + tp_rank
                assert strategy.locate(rank) == (index, number)
                assert stage.tp_ranks(rank)[tp_rank] == rank == stage.sp_ranks(rank)[sp_rank]
                assert {stage.coordinates(r)[1] for r in stage.tp_ranks(rank)} == {sp_rank}
                assert {stage.coordinates(r)[0] for r in stage.sp_ranks(rank)} == {tp_rank}
        assert layers == list(range(num_layers))
        seen += pipeline.ranks
    assert seen == list(range(total)) == list(range(strategy.num_ranks))


@given(st.integers(1, 200), st.integers(1, 200))
def test_layers_are_split_evenly(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        with pytest.raises(PlanError, match=f"{num_stages} stages for {num_layers} layers.*pp <= {num_layers}"):
            split_layers(num_layers, num_stages)
        return
    split = split_layers(num_layers, num_stages)
    assert sum(split) == num_layers
    assert list(split) == sorted(split, reverse=True)
    assert 1 <= split[-1] >= split[0] - 1


def test_uneven_layers_on_request() -> None:
    pipeline = place_pipeline(ParallelScheme(pp=3), 4, 7, (1, 4, 2))
    assert [(s.ranks, s.first_layer, s.last_layer) for s in pipeline.stages] == [
        ((4,), 0, 1),
        ((5,), 1, 5),
        ((6,), 5, 7),
    ]
    for split in ((3, 4), (1, 1, 1), (0, 3, 4)):
        with pytest.raises(PlanError, match="layer"):
            place_pipeline(ParallelScheme(pp=3), 0, 7, split)


def test_ranks_must_add_up() -> None:
    schemes = parse_strategy("tp4 + 2*pp2")
    with pytest.raises(PlanError, match=r"'tp4 \+ 2\*pp2' uses 8 ranks but the job has 6: remove 2"):
        place_strategy(schemes, 6, 8)
    with pytest.raises(PlanError, match="uses 8 ranks but the job has 12: add pipelines for 4 more"):
        place_strategy(schemes, 12, 8)


def test_contradictory_stages_are_refused() -> None:
    with pytest.raises(PlanError, match="needs 4 ranks but was given 3"):
        Stage((0, 1, 2), 0, 1, tp=2, sp=2)
    with pytest.raises(PlanError, match="holds no layer"):
        Stage((0,), 2, 2)
    with pytest.raises(PlanError, match=r"must tile 0\.\.1"):
        Strategy((Pipeline((Stage((0,), 0, 2),)), Pipeline((Stage((0,), 0, 2),))))
    with pytest.raises(PlanError, match="pipeline 1 does not hold layers"):
        Strategy((Pipeline((Stage((0,), 0, 2),)), Pipeline((Stage((1,), 0, 1),))))
    with pytest.raises(PlanError, match="pipeline 0 does not hold layers"):
        Strategy((Pipeline((Stage((0,), 0, 1), Stage((1,), 2, 3))),))
    strategy = place_strategy([ParallelScheme(2)], 2, 1)
    with pytest.raises(PlanError, match="rank 5 is in no"):
        strategy.locate(5)
    with pytest.raises(PlanError, match="rank 5 is in no"):
        strategy.pipelines[0].stage_index(5)
