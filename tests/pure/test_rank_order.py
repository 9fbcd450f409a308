"""Odd nodes and any number of ranks: pipelines stand so that tensor parallel groups stay inside nodes, and use all."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.costs.analytic import ModelShape, analytic_cost_table
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.plan.rank_order import crossings, fillings, most_used, ordered, stays_inside
from ds_hydra.planner.exact.counts import counts_to_strategy
from ds_hydra.planner.proposal.propose import ProposalEffort, propose_strategies
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.nodes import NodeSize, largest_node, node_of, node_ranks

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
