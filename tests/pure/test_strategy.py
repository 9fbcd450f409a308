"""Strategies: text to shapes and back, shapes to ranks, and the pairs of ranks that are connected at start."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.costs.analytic import ModelShape, analytic_cost_table
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.model_plan import ModelPlan, twins_of
from ds_hydra.pipe.placement import Pipeline, Stage, Strategy, place_pipeline, place_strategy, split_layers
from ds_hydra.pipe.rows import edge
from ds_hydra.pipe.schedules.actions import backward_of_first_push, last_weight_gradient
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import training_slots
from ds_hydra.pipe.shape import LayerRange, ParallelScheme, PipelineShape, StageShape, StrategyShape
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.plan.layouts import crossings, fillings, most_used, ordered, stays_inside
from ds_hydra.planner.exact import counts_to_strategy
from ds_hydra.planner.propose import ProposalEffort, propose_strategies
from ds_hydra.step.strategy_runtime import Pairs, connections_of, edge_pairs, link_pairs
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import even_layout
from ds_hydra.zero_hetero.nodes import NodeSize, largest_node, node_of, node_ranks
from ds_hydra.zero_hetero.transfer_plan import TransferPlan
from ds_hydra.zero_hetero.twin_plan import plan_twin_pull, plan_twin_push
from tests.pure.test_model_plan import CASES
from tests.support.planner_cases import fused_llama_plan


# --- Strategies: text to shapes and back, shapes to ranks, and refusals that say what to change.
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


UNREAD = (
    "", "tp", "4tp", "tp4+", "tp2tp2", "2*", "dp4", "tp4 pp2 +", "1.5*tp2", "-1*tp2", "tp-2",
    "(tp2", "tp2)", "()", "(tp2 > )", "tp2 > tp2", "((tp2))", "tp2[0-4]", "tp2[0:4", "tp2[]", "tp2[0:2;3:4]",
    "tp2pp2[0:4]", "tp2@", "tp2/", "tp2/a/b", "tp2@h 100/-x", "tp2 2*tp1", "(tp2)x",
)  # fmt: skip
SPREAD = r"ep=\d beside tp=.*over its tensor parallel ranks, or over all of its ranks"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "cannot read the term") for text in UNREAD),
        ("0*tp1", "count must be at least 1"),
        ("tp0", "at least 1"),
        ("ep0", "at least 1"),
        ("(tp2[0:2] > tp2)", "either every stage says"),
        ("(tp2[0:2] > tp2[3:4])", "must hold layers 0:4 once each"),
        ("(tp2[0:2] > tp2[1:4])", "must hold layers 0:4 once each"),
        ("tp2[1:4]", "must hold layers 0:4 once each"),
        ("tp2[3:3]", "needs first < last"),
        ("(tp2[2:4,0:2])", "in rising order"),
        *((text, SPREAD) for text in ("tp4ep2", "ep2", "tp2sp4ep4", "sp4ep2", "(tp2 > tp2ep4)")),
    ],
)
def test_texts_that_are_no_strategy_are_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
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


# --- Odd nodes and any number of ranks: pipelines stand so that tensor parallel groups stay inside nodes, and
# use all.
MODEL = ModelShape(hidden=512, layers=12, heads=8, kv_heads=8, intermediate=2048, vocab=1000, params=40_000_000)
LITTLE = ProposalEffort(batches=4, milp_batches=1, node_limit=2, rounds=1, moves=8)
LENGTHS = [64, 100, 100, 180, 250, 300, 700, 900] * 40


def across(strategy: StrategyShape, node_size: NodeSize) -> bool:
    """Whether some TP group lies on more nodes than it must, by the ranks on which it is placed."""
    layers = max(8, max(pipeline.pp for pipeline in strategy.pipelines))
    for pipeline in place_strategy(strategy, strategy.num_ranks, layers).pipelines:
        for stage in pipeline.stages:
            for rank in stage.ranks[:: stage.tp]:
                nodes = {node_of(each, node_size) for each in stage.tp_ranks(rank)}
                if len(nodes) > -(-stage.tp // largest_node(node_size)):
                    return True
    return False


def test_groups_of_two_nodes_of_seven_stay_inside() -> None:
    strategy = StrategyShape.parse("2*tp4 + 2*tp2 + 2*tp1")
    (one,) = crossings(strategy, 7)
    assert str(one) == "the ranks 4..7 of a tensor parallel group of pipeline 1"
    assert str(ordered(strategy, 7)) == "tp4 + tp2 + tp1 + tp4 + tp2 + tp1"
    assert ordered(strategy, 8) == ordered(strategy, 14) == strategy
    # A pipeline over both nodes, begun where its second stage begins with the second node.
    assert str(ordered(StrategyShape.parse("tp4pp2 + 2*tp2 + 2*tp1"), 7)) == "tp2 + tp1 + tp4pp2 + tp2 + tp1"
    assert ordered(StrategyShape.parse("7*tp2"), 7) is None
    assert str(ordered(StrategyShape.parse("tp8 + tp4 + tp2 + tp1"), (7, 8))) == "tp4 + tp2 + tp1 + tp8"


def test_nodes_hold_pipelines_of_one_kind_where_they_can() -> None:
    assert str(ordered(StrategyShape.parse("tp4 + 2*tp2 + 7*tp1"), (7, 8))) == "7*tp1 + tp4 + 2*tp2"
    mixed = StrategyShape.parse("2*tp8 + 4*tp4 + 3*tp2 + 25*tp1")
    assert str(ordered(mixed, (8, 8, 8, 7, 8, 8, 8, 8))) == "2*tp8 + 2*tp4 + 7*tp1 + 2*tp4 + 16*tp1 + 3*tp2 + 2*tp1"


small = st.builds(ParallelScheme, st.sampled_from((1, 2, 3, 4, 8)), st.integers(1, 2), st.integers(1, 2))


@settings(max_examples=60)
@given(st.lists(small, min_size=1, max_size=5), st.one_of(st.integers(2, 8), st.lists(st.integers(2, 8), min_size=20)))
def test_an_order_is_found_where_there_is_one(schemes: list[ParallelScheme], size: int | list[int]) -> None:
    node_size = size if isinstance(size, int) else tuple(size)
    strategy = StrategyShape.of(schemes)
    found = ordered(strategy, node_size)
    if found is not None:
        assert Counter(found.pipelines) == Counter(strategy.pipelines)
        assert not across(found, node_size)
        assert not list(crossings(found, node_size))
    else:
        orders = itertools.permutations(strategy.pipelines)
        assert all(across(StrategyShape(order), node_size) for order in orders)


@given(st.lists(st.builds(ParallelScheme, st.sampled_from((1, 2, 4, 8, 16)), st.integers(1, 3), st.integers(1, 3)),
                min_size=1, max_size=8), st.sampled_from((1, 2, 4, 8)))  # fmt: skip
def test_widest_first_is_an_order_on_nodes_of_a_power_of_two(schemes: list[ParallelScheme], node_size: int) -> None:
    kinds = [PipelineShape.of(scheme) for scheme in dict.fromkeys(schemes)]
    assert stays_inside(kinds, node_size)
    strategy = counts_to_strategy([1] * len(kinds), kinds)
    assert ordered(strategy, node_size) == strategy
    assert not across(strategy, node_size)


@pytest.mark.drawn
@pytest.mark.parametrize("node_size", [1, 2, 3, 4, 5, 6, 7, 8, (7, 8), (8, 7, 7), (4, 7), (3, 5, 8)])
def test_every_number_of_ranks_can_be_used_whole_on_nodes_of_any_size(node_size: NodeSize) -> None:
    for num_ranks in range(2, 65):
        sizes = (node_size,) if isinstance(node_size, int) else node_size
        nodes = tuple(itertools.islice(itertools.cycle(sizes), num_ranks)) if len(sizes) > 1 else node_size
        widths = [width for width in (1, 2, 4, 8) if width <= min(largest_node(node_size), num_ranks)]
        each = [len(node) for node in node_ranks(num_ranks, nodes)]
        shapes = [PipelineShape.of(ParallelScheme(width)) for width in widths]
        filled = [counts_to_strategy(counts, shapes) for counts in fillings(widths, num_ranks, nodes, each)]
        assert all(strategy.num_ranks == num_ranks for strategy in filled)
        assert most_used(widths, num_ranks) == num_ranks
        standing = [found for strategy in filled if (found := ordered(strategy, nodes)) is not None]
        assert not any(across(strategy, nodes) for strategy in standing)
        # On each node the widest groups that fit are one of them: seven ranks are 4 + 2 + 1.
        assert max(max(pipeline.num_ranks for pipeline in one.pipelines) for one in standing) == max(
            width for width in widths if width <= max(each)
        )


@pytest.mark.parametrize(
    ("num_ranks", "node_size"), [(7, 7), (13, (7, 6)), (15, (7, 8)), (15, 8), (31, 8), (29, 7), (11, 3)]
)
def test_strategies_are_proposed_for_odd_nodes(num_ranks: int, node_size: NodeSize) -> None:
    schemes = [ParallelScheme(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 3) if tp <= largest_node(node_size)]
    table = analytic_cost_table(MODEL, schemes, 1024)

    def proposed() -> tuple[StrategyShape, ...]:
        return propose_strategies(
            table, num_ranks, LENGTHS, 1000 * num_ranks, 1024, node_size=node_size, effort=LITTLE, count=6
        )

    found = proposed()
    assert found == proposed()
    for strategy in found:
        assert strategy.num_ranks == num_ranks
        assert not across(strategy, node_size)


@pytest.mark.parametrize(
    ("num_ranks", "node_size", "words"),
    [
        (7, 7, "no strategy uses all 7 ranks on nodes of 7: 1 of them would be spare, as pipelines .* have 2, 4 ranks"),
        (14, 7, "no strategy uses all 14 ranks on nodes of 7: tensor parallel groups would lie on two nodes"),
    ],
)
def test_ranks_that_nothing_uses_are_told(num_ranks: int, node_size: int, words: str) -> None:
    table: CostTable = analytic_cost_table(MODEL, [ParallelScheme(2), ParallelScheme(4)], 1024)
    with pytest.raises(PlanError, match=words):
        propose_strategies(table, num_ranks, LENGTHS, 7000, 1024, node_size=node_size, effort=LITTLE)


# --- Pairs that are connected at start: they hold every message of every step, so no rank connects within one.
PARTS = ("tp1", "tp2", "tp4", "tp8", "pp2", "tp2pp2", "tp4pp2", "tp2pp4", "sp2pp2", "tp2sp2", "tp4pp4", "pp8")


@st.composite
def large_strategies(draw: st.DrawFn) -> Strategy:
    """Pipelines of one model of 8 layers, on at most 64 ranks."""
    shapes: list[str] = []
    left = draw(st.integers(1, 64))
    while fitting := [part for part in PARTS if StrategyShape.parse(part).num_ranks <= left]:
        shapes.append(draw(st.sampled_from(fitting)))
        left -= StrategyShape.parse(shapes[-1]).num_ranks
    return placed(" + ".join(shapes))


def placed(text: str, num_layers: int = 8) -> Strategy:
    shape = StrategyShape.parse(text)
    return place_strategy(shape, shape.num_ranks, num_layers)


def pulls(plan: ModelPlan, strategy: Strategy, node_size: int) -> list[TransferPlan]:
    """The messages of a step's pulls, one bucket after the other."""
    found: list[TransferPlan] = []
    for bucket in plan.buckets:
        masters, layout = even_layout(bucket.numel, strategy.num_ranks), plan.pull_layout(bucket, strategy)
        found.append(plan_twin_pull(masters, layout, twins_of(strategy, node_size)).enter)
    return found


def pushes(plan: ModelPlan, strategy: Strategy, node_size: int) -> list[TransferPlan]:
    """The messages of a step's pushes."""
    found: list[TransferPlan] = []
    for bucket in (bucket for bucket in plan.buckets if bucket.trainable):
        masters, layout = even_layout(bucket.numel, strategy.num_ranks), plan.push_layout(bucket, strategy)
        found.append(plan_twin_push(masters, layout, twins_of(strategy, node_size)).leave)
    return found


def pairs_of(transfers: Sequence[TransferPlan]) -> Pairs:
    return frozenset(
        (message.src, message.dst)
        for transfer in transfers
        for message in transfer.messages
        if message.src != message.dst
    )


def waits_in_a_circle(strategy: Strategy, new: Pairs, early: set[int]) -> bool:
    """Whether ranks that connect these pairs in pushes, and the pipelines' messages, wait for each other for ever.

    `early`: ranks that push within their last backward although the stage before waits for a message of theirs.
    """
    waits_for: dict[int, set[int]] = {rank: set() for rank in range(strategy.num_ranks)}
    for one, other in new:
        for rank, peer in ((one, other), (other, one)):
            if rank in early:
                waits_for[rank].add(peer)
    for pipeline in strategy.pipelines:
        for before, after in pairwise(pipeline.stages):
            for rank in before.ranks:
                waits_for[rank] |= {peer for peer in after.ranks if peer in early}
    left = set(waits_for)
    while free := {rank for rank in left if not waits_for[rank] & left}:
        left -= free
    return bool(left)


def pushing_early(strategy: Strategy, *, as_before: bool = False) -> set[int]:
    """Ranks that start a push while the stage before them waits for a gradient; `as_before`: in the last backward."""
    first_push = last_weight_gradient if as_before else backward_of_first_push
    return {
        rank
        for pipeline in strategy.pipelines
        for index, stage in enumerate(pipeline.stages)
        for rank in stage.ranks
        if index > 0 and first_push(training_slots("1f1b", Batches.whole(3), len(pipeline.stages), index)) is not None
    }


@pytest.mark.drawn
@settings(max_examples=25)
@given(large_strategies(), st.sampled_from([4, 8, 64]))
def test_a_push_connects_no_pair_and_no_ranks_wait_in_a_circle(strategy: Strategy, node_size: int) -> None:
    plan = fused_llama_plan(8)
    listed = link_pairs(plan, strategy, node_size)
    pushed = pairs_of(pushes(plan, strategy, node_size))
    assert pushed | pairs_of(pulls(plan, strategy, node_size)) == listed
    assert not waits_in_a_circle(strategy, pushed - listed, pushing_early(strategy, as_before=True))
    assert not waits_in_a_circle(strategy, pushed, pushing_early(strategy)), "nor if nothing were connected"


@pytest.mark.parametrize("text", ["tp4pp2", "2*tp4pp2", "4*tp2pp2", "tp8 + tp4pp2", "4*tp4pp4"])
def test_without_the_list_some_strategies_would_wait_for_ever(text: str) -> None:
    """What enters and what leaves are between other pairs: pulls alone do not connect what pushes use."""
    plan, strategy = fused_llama_plan(8), placed(text)
    new = pairs_of(pushes(plan, strategy, node_size=8)) - pairs_of(pulls(plan, strategy, node_size=8))
    assert new
    assert waits_in_a_circle(strategy, new, pushing_early(strategy, as_before=True))
    assert not waits_in_a_circle(strategy, new, pushing_early(strategy))
    assert not new - link_pairs(plan, strategy, node_size=8)


@settings(max_examples=30)
@given(CASES, st.integers(1, 4))
def test_all_messages_of_stages_that_differ_are_listed(case: tuple[ModelPlan, Strategy], node_size: int) -> None:
    plan, strategy = case
    used = pairs_of([*pulls(plan, strategy, node_size), *pushes(plan, strategy, node_size)])
    assert connections_of(plan, [strategy], node_size).links == used
    for shared in (False, True):
        messages: set[tuple[int, int]] = set()
        for pipeline in strategy.pipelines:
            for before, after in pairwise(pipeline.stages):
                for num_tokens in range(1, 40):
                    for src, dst in ((before, after), (after, before)):
                        sends = edge(src, dst, num_tokens, token_sharding=shared)[0]
                        messages |= {(rank, rows.peer) for rank, parts in sends.items() for rows in parts}
        assert edge_pairs(strategy, token_sharding=shared) == messages


def test_strategies_add_up() -> None:
    plan = fused_llama_plan(8)
    strategies = [placed(text) for text in ("2*tp2pp2", "tp8", "4*pp2")]
    each = [connections_of(plan, [strategy], 8) for strategy in strategies]
    together = connections_of(plan, strategies, 8)
    assert together.links == each[0].links | each[1].links | each[2].links
    assert together.edges == each[0].edges | each[2].edges
    assert each[1].edges == frozenset()
    assert connections_of(plan, [], 8) == (frozenset(), frozenset(), ())
    assert each[0].teams == ((0, 4), (1, 5), (2, 6), (3, 7))  # of both pipelines, stage by stage and TP rank by TP rank
    assert each[1].teams == ()
    assert edge_pairs(placed("2*tp2pp2/v")) == each[0].edges
    assert edge_pairs(placed("tp8/v")) == frozenset()
    # Each rank talks to its twin in the other stage, and the two ranks of a stage do not talk over an edge.
    assert edge_pairs(placed("tp2pp2")) == {(0, 2), (2, 0), (1, 3), (3, 1)}
