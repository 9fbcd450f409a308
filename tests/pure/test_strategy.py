"""Strategies: text to shapes and back, shapes to ranks, and refusals that say what to change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.pipe.placement import Pipeline, Stage, Strategy, place_pipeline, place_strategy, split_layers
from ds_hydra.pipe.shape import LayerRange, ParallelScheme, PipelineShape, StageShape, StrategyShape
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.zero_hetero.errors import PlanError


@st.composite
def schemes(draw: st.DrawFn) -> ParallelScheme:
    """Any uniform scheme."""
    tp, sp = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    return ParallelScheme(tp, draw(st.integers(1, 6)), sp, draw(st.sampled_from([1, 1, tp, tp * sp])))


SCHEMES = schemes()
NAMES = st.from_regex(r"\A[a-z0-9][a-z0-9_.-]{0,6}\Z")


@st.composite
def pipelines(draw: st.DrawFn) -> PipelineShape:
    """Any pipeline: stages that differ, some on devices of a class, with or without layers, one or two ranges each."""
    size = draw(st.integers(1, 4))
    layers: list[tuple[LayerRange, ...]] = [()] * size
    visits = draw(st.integers(0, 2))  # ranges of layers in each stage
    if visits:
        ends = draw(st.lists(st.integers(1, 60), min_size=visits * size, max_size=visits * size, unique=True))
        ranges = list(map(LayerRange, [0, *sorted(ends)], sorted(ends)))
        layers = (
            list(zip(ranges[:size], reversed(ranges[size:]), strict=True)) if visits == 2 else [(r,) for r in ranges]
        )
    degree, device = st.integers(1, 3), st.just("") | NAMES
    degrees = [(draw(degree), draw(degree)) for _ in layers]
    stages = [
        StageShape(tp, sp, held, draw(device), draw(st.sampled_from([1, tp, tp * sp])))
        for (tp, sp), held in zip(degrees, layers, strict=True)
    ]
    return PipelineShape(tuple(stages), draw(st.just("1f1b") | NAMES))


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
    expected = [ParallelScheme(*degrees) for degrees in schemes]
    assert StrategyShape.parse(text) == StrategyShape.of(expected)
    assert [pipeline.scheme for pipeline in StrategyShape.parse(text).pipelines] == expected


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("TP4 +pp2+pp2", "tp4 + 2*pp2"),
        ("tp1pp2 + 2*pp2sp1", "3*pp2"),
        ("pp2 + tp4 + pp2", "pp2 + tp4 + pp2"),  # in rank order, not sorted
        ("sp2pp4tp8", "tp8pp4sp2"),
        ("(tp2 > tp2 > tp2)", "tp2pp3"),
        ("tp2/1F1B", "tp2"),
        ("(tp2>pp2sp3)", "(tp2 > pp2sp3)"),
        ("2 * (sp2[0:1] > tp2[1:4])", "2*(sp2[0:1] > tp2[1:4])"),
        ("(tp2[0:2,6:8] > tp2[2:6])/zero-bubble", "(tp2[0:2,6:8] > tp2[2:6])/zero-bubble"),
        ("(tp2@H100 > PP2@l40) + tp1pp3@a800-80g/zb_2", "(tp2@h100 > pp2@l40) + pp3@a800-80g/zb_2"),
        ("tp2[0:4]", "tp2[0:4]"),
        ("ep2tp2 + sp4tp2ep8 + sp2ep2pp3 + tp2ep1", "tp2ep2 + tp2sp4ep8 + pp3sp2ep2 + tp2"),
        ("(tp2ep2[0:2]@h20 > sp2ep2[2:4])/list", "(tp2ep2[0:2]@h20 > sp2ep2[2:4])/list"),
    ],
)
def test_printing(text: str, printed: str) -> None:
    assert str(StrategyShape.parse(text)) == printed
    assert StrategyShape.parse(printed) == StrategyShape.parse(text)


@given(st.lists(pipelines() | SCHEMES.map(PipelineShape.of), min_size=1, max_size=6))
def test_text_and_back(shapes: list[PipelineShape]) -> None:
    strategy = StrategyShape(tuple(shapes))
    assert StrategyShape.parse(str(strategy)) == strategy
    assert strategy.num_ranks == sum(stage.num_ranks for shape in shapes for stage in shape.stages)


@given(SCHEMES)
def test_uniform_pipelines_are_their_scheme(scheme: ParallelScheme) -> None:
    shape = PipelineShape.of(scheme)
    assert (shape.scheme, shape.cost_key, str(shape)) == (scheme, scheme, str(scheme))
    assert (shape.num_ranks, shape.pp, shape.num_layers) == (scheme.num_ranks, scheme.pp, None)
    assert ParallelScheme.parse(str(scheme)) == scheme
    for text in (f"{scheme}/zb", f"{scheme}@h100", f"({scheme} > tp9)"):
        other = PipelineShape.parse(text)
        assert other.scheme is None
        assert other.cost_key == (scheme if text.endswith("/zb") else other)


@pytest.mark.parametrize(
    "text",
    ["", "tp", "4tp", "tp4+", "tp2tp2", "2*", "dp4", "tp4 pp2 +", "1.5*tp2", "-1*tp2", "tp-2",
     "(tp2", "tp2)", "()", "(tp2 > )", "tp2 > tp2", "((tp2))", "tp2[0-4]", "tp2[0:4", "tp2[]", "tp2[0:2;3:4]",
     "tp2pp2[0:4]", "tp2@", "tp2/", "tp2/a/b", "tp2@h 100/-x", "tp2 2*tp1", "(tp2)x"],
)  # fmt: skip
def test_terms_that_cannot_be_read(text: str) -> None:
    with pytest.raises(PlanError, match="cannot read the term"):
        StrategyShape.parse(text)


@pytest.mark.parametrize(
    ("text", "words"), [("0*tp1", "count must be at least 1"), ("tp0", "at least 1"), ("ep0", "at least 1")]
)
def test_zeros(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        StrategyShape.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(tp2[0:2] > tp2)", "either every stage says"),
        ("(tp2[0:2] > tp2[3:4])", "must hold layers 0:4 once each"),
        ("(tp2[0:2] > tp2[1:4])", "must hold layers 0:4 once each"),
        ("tp2[1:4]", "must hold layers 0:4 once each"),
        ("tp2[3:3]", "needs first < last"),
        ("(tp2[2:4,0:2])", "in rising order"),
    ],
)
def test_layers_that_make_no_model(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        StrategyShape.parse(text)


@pytest.mark.parametrize("text", ["tp4ep2", "ep2", "tp2sp4ep4", "sp4ep2", "(tp2 > tp2ep4)"])
def test_experts_are_spread_over_tensor_parallel_ranks_or_over_all_of_a_stage(text: str) -> None:
    with pytest.raises(PlanError, match=r"ep=\d beside tp=.*over its tensor parallel ranks, or over all of its ranks"):
        StrategyShape.parse(text)


def test_shapes_that_text_could_not_hold_are_refused() -> None:
    with pytest.raises(PlanError, match="at least one stage"):
        PipelineShape(())
    with pytest.raises(PlanError, match="device class 'H100'"):
        StageShape(device="H100")
    with pytest.raises(PlanError, match="schedule 'zero bubble'"):
        PipelineShape((StageShape(),), "zero bubble")
    with pytest.raises(PlanError, match="degree must be at least 1"):
        StageShape(tp=0)
    with pytest.raises(PlanError, match="names 2 pipelines where one is due"):
        PipelineShape.parse("2*tp1")
    with pytest.raises(PlanError, match="where a scheme such as"):
        ParallelScheme.parse("tp2@h100")


@given(st.lists(SCHEMES, min_size=1, max_size=6), st.integers(6, 40))
def test_placement_tiles_ranks_and_layers(schemes: list[ParallelScheme], num_layers: int) -> None:
    total = sum(scheme.num_ranks for scheme in schemes)
    strategy = place_strategy(StrategyShape.of(schemes), total, num_layers)
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
    pipeline = place_pipeline(PipelineShape.parse("(tp1[0:1] > sp2[1:5] > tp2[5:7])"), 4, 7)
    assert [(s.ranks, s.first_layer, s.last_layer, s.tp, s.sp) for s in pipeline.stages] == [
        ((4,), 0, 1, 1, 1),
        ((5, 6), 1, 5, 1, 2),
        ((7, 8), 5, 7, 2, 1),
    ]
    even = place_pipeline(PipelineShape.parse("(tp2 > pp2)"), 0, 7)
    assert [(s.ranks, s.first_layer, s.last_layer) for s in even.stages] == [((0, 1), 0, 3), ((2,), 3, 5), ((3,), 5, 7)]
    with pytest.raises(PlanError, match="is for 7 layers but the model has 8"):
        place_pipeline(PipelineShape.parse("(tp1[0:1] > tp1[1:7])"), 0, 8)
    with pytest.raises(PlanError, match="does not hold layers"):
        place_strategy(StrategyShape.parse("(tp1[2:4] > tp1[0:2])"), 2, 4)


def test_a_v_holds_two_ranges_on_each_rank() -> None:
    short, explicit = (PipelineShape.parse(text) for text in ("tp2pp2/v", "(tp2[0:2,6:8] > tp2[2:4,4:6])/list"))
    assert (str(short), short.parts, short.cost_key) == ("tp2pp2/v", 2, ParallelScheme(2, 2))
    assert (explicit.parts, PipelineShape.parse("tp2pp2/list").parts) == (2, 1)
    placed = place_pipeline(short, 0, 8)
    assert placed.stages == place_pipeline(explicit, 0, 8).stages
    assert (placed.parts, placed.ranks) == (2, (0, 1, 2, 3))
    assert placed.ranges == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert [stage.ranges for stage in placed.stages] == [((0, 2), (6, 8)), ((2, 4), (4, 6))]
    assert placed.stages[0].part(1) == Stage((0, 1), 6, 8, 2)
    places = StagePlace.all_of(placed, 2, lambda ranks: None)
    assert [(p.virtual, p.is_first, p.is_last, p.turns) for p in places] == [
        (1, False, False, False),
        (2, False, False, True),
    ]
    ends = StagePlace.all_of(placed, 0, lambda ranks: None)
    assert [(p.is_first, p.is_last) for p in ends] == [(True, False), (False, True)]
    uneven = place_strategy(StrategyShape.parse("pp3/v + tp1"), 4, 10).pipelines[0]
    assert [stage.num_layers for stage in uneven.stages] == [3, 3, 4]
    with pytest.raises(PlanError, match=r"3 stages hold two ranges of layers each, 6 in all, .* 5 layers; use pp <= 2"):
        place_pipeline(PipelineShape.parse("pp3/v"), 0, 5)
    with pytest.raises(PlanError, match="all must hold two and make a V"):
        place_pipeline(PipelineShape.parse("(tp1[0:2] > tp1[2:4])/v"), 0, 4)


def test_ranks_must_add_up() -> None:
    strategy = StrategyShape.parse("tp4 + 2*pp2")
    with pytest.raises(PlanError, match=r"'tp4 \+ 2\*pp2' uses 8 ranks but the job has 6: remove 2"):
        place_strategy(strategy, 6, 8)
    with pytest.raises(PlanError, match="uses 8 ranks but the job has 12: add pipelines for 4 more"):
        place_strategy(strategy, 12, 8)


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
    strategy = place_strategy(StrategyShape.parse("tp2"), 2, 1)
    with pytest.raises(PlanError, match="rank 5 is in no"):
        strategy.locate(5)
    with pytest.raises(PlanError, match="rank 5 is in no"):
        strategy.pipelines[0].stage_index(5)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("dp2", "2*tp1"), ("dp2tp1", "2*tp1"), ("tp2dp4", "4*tp2"), ("tp1 + 2*dp3pp2", "6*pp2"), ("tq2", None)],
)
def test_data_parallelism_is_a_count(text: str, meant: str | None) -> None:
    with pytest.raises(PlanError) as error:
        StrategyShape.parse(text)
    assert (f"here '{meant}'" in str(error.value)) == (meant is not None)
