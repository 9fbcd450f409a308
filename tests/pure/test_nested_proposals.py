"""A wider table of schemes never makes proposals worse: larger spaces begin with what smaller ones have found."""

from __future__ import annotations

import functools
import itertools
import statistics

import numpy as np
import pytest

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.data.length_sources import sample_batches
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.planner import Planner, PlannerOptions
from ds_hydra.planner.proposal.pool import greedy_subset
from ds_hydra.planner.proposal.propose import ProposalEffort, Wider, propose_strategies
from ds_hydra.planner.proposal.spaces import ChunkedShapes, wider_shapes

RANKS, NODE, CONTEXT, TOKENS, LAYERS = 32, 4, 16_384, 100_000, 24
EFFORT = ProposalEffort(batches=6, milp_batches=2, node_limit=5, rounds=1, moves=20, corrections=1)
LENGTHS = np.minimum(np.exp(np.random.default_rng(0).normal(7.4, 1.4, 4000)), CONTEXT).astype(int).tolist()
BATCHES = sample_batches(LENGTHS, TOKENS, 6, 7, CONTEXT)


def _table(widest: int) -> CostTable:
    """TP up to a node and SP besides, on stages of up to `widest` ranks; messages between nodes cost a quarter of b."""
    costs = []
    for tp, pp, sp in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8)):
        ranks = tp * pp * sp
        if (pp > 1 and tp * sp > widest) or ranks > RANKS:
            continue
        dear = 1.0 + 0.06 * (tp - 1) + 0.01 * (sp - 1) + (0.25 if tp * sp > NODE else 0.0)
        limit = 1500 * tp * sp if ranks > 1 else 900
        costs.append(
            SchemeCost(
                ParallelScheme(tp, pp, sp), 6e-6 / ranks, 0.2 * dear / ranks, 8.0 / pp, limit, 64, Shares.usual()
            )
        )
    return CostTable(tuple(costs))


@functools.cache
def _found(widest: int) -> tuple[StrategyShape, ...]:
    return _proposed(_table(widest))


def _proposed(table: CostTable) -> tuple[StrategyShape, ...]:
    wider = Wider(wider_shapes(table, num_layers=LAYERS), layers=LAYERS, plain=False)
    return propose_strategies(
        table, RANKS, LENGTHS, TOKENS, CONTEXT, node_size=NODE, count=6, effort=EFFORT, wider=wider
    )


@pytest.mark.drawn
def test_a_larger_space_keeps_the_better_half_of_a_smaller_one_and_is_no_worse() -> None:
    means, found = [], []
    for widest in (NODE, 2 * NODE):
        found.append(_found(widest))
        planner = Planner(_table(widest), found[-1], PlannerOptions(kernels="compiled", layers=LAYERS))
        means.append(statistics.fmean(planner.plan(0, range(len(b)), b.tolist()).predicted_ms for b in BATCHES))
    assert set(found[0][:3]) <= set(found[1])
    assert means[1] <= 1.005 * means[0]
    assert _proposed(_table(2 * NODE)) == found[1], "the same proposals again"


def test_a_subset_that_begins_with_some_adds_what_helps_beside_them() -> None:
    times: dict[tuple[int, ...], np.ndarray] = {
        (1, 0, 0): np.array([10.0, 30.0]), (0, 1, 0): np.array([30.0, 10.0]), (0, 0, 1): np.array([18.0, 18.0]),
    }  # fmt: skip
    weights = np.array([0.5, 0.5])
    assert greedy_subset(times, weights, 2) == [(0, 0, 1), (1, 0, 0)]
    assert greedy_subset(times, weights, 2, [(1, 0, 0)]) == [(1, 0, 0), (0, 1, 0)]


@pytest.mark.parametrize("widest", [NODE, 2 * NODE])
def test_all_that_is_proposed_has_costs_and_fills_the_ranks(widest: int) -> None:
    table = _table(widest)
    for strategy in _found(widest):
        assert strategy.num_ranks == RANKS
        assert all(table[pipeline] for pipeline in strategy.pipelines)


@pytest.mark.parametrize("text", ["8*pp4/list", "16*pp2/list", "pp4sp4/v + 8*pp2/list"])
def test_what_a_proposal_says_that_a_strategy_takes_is_what_its_plans_take(text: str) -> None:
    """A long sequence beside few others stands alone on a pipeline that has nothing to give away."""
    table, strategy = _table(NODE), StrategyShape.parse(text)
    lengths = np.array([1800, *sorted(one for one in LENGTHS[:60] if one < 900)[::-1]])
    shapes = ChunkedShapes(table, list(dict.fromkeys(strategy.pipelines)), slices=True, layers=LAYERS)
    planner = Planner(table, [strategy], PlannerOptions(kernels="compiled", layers=LAYERS, highs="off"))
    planned = planner.plan(0, range(len(lengths)), lengths.tolist()).predicted_ms
    rated = shapes.simulated(strategy, lengths, shapes.arrays([lengths], RANKS))
    assert rated == pytest.approx(planned, rel=0.02)
