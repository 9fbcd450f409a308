"""Pairs that are connected at start: they hold every message of every step, so no rank connects within one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.pipe.model_plan import ModelPlan
from ds_hydra.pipe.p2p import edge
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.schedules.actions import backward_of_first_push, last_weight_gradient
from ds_hydra.pipe.schedules.batches import Batches
from ds_hydra.pipe.schedules.registry import training_slots
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.transfers import twins_of
from ds_hydra.step.connections import Pairs, connections_of, edge_pairs, link_pairs
from ds_hydra.zero_hetero.layout import even_layout
from ds_hydra.zero_hetero.transfer_plan import TransferPlan
from ds_hydra.zero_hetero.twin_plan import plan_twin_pull, plan_twin_push
from tests.pure.test_model_plan import CASES
from tests.support.fused_llama import llama_plan

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
    plan = llama_plan(8)
    listed = link_pairs(plan, strategy, node_size)
    pushed = pairs_of(pushes(plan, strategy, node_size))
    assert pushed | pairs_of(pulls(plan, strategy, node_size)) == listed
    assert not waits_in_a_circle(strategy, pushed - listed, pushing_early(strategy, as_before=True))
    assert not waits_in_a_circle(strategy, pushed, pushing_early(strategy)), "nor if nothing were connected"


@pytest.mark.parametrize("text", ["tp4pp2", "2*tp4pp2", "4*tp2pp2", "tp8 + tp4pp2", "4*tp4pp4"])
def test_without_the_list_some_strategies_would_wait_for_ever(text: str) -> None:
    """What enters and what leaves are between other pairs: pulls alone do not connect what pushes use."""
    plan, strategy = llama_plan(8), placed(text)
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
    plan = llama_plan(8)
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
