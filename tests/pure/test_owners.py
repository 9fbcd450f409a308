"""Who owns the masters of which layers: with a pipeline's stages, and what that brings where links are slow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.costs.analytic import analytic_cost_table
from ds_hydra.costs.cost_table import TableFile
from ds_hydra.pipe.model_plan import ModelPlan, plan_transfers
from ds_hydra.pipe.placement import Strategy, place_strategy
from ds_hydra.pipe.shape import ParallelScheme, StrategyShape
from ds_hydra.planner.options import PlannerOptions
from ds_hydra.simulate.job import SimulatedJob, llama_plan
from ds_hydra.simulate.links import LinkModel, Speed
from ds_hydra.simulate.owners import best_owners, nearest_exposed_ms, owned_by_stages
from ds_hydra.simulate.step import exposed_ms
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import even_layout
from ds_hydra.zero_hetero.nodes import nodes_of
from ds_hydra.zero_hetero.transfer_plan import TransferPlan
from tests.support.planner_cases import MODEL

RANKS, NODE, TOKENS = 8, 4, 30_000
SCHEMES = (ParallelScheme(pp=2, sp=4), ParallelScheme(sp=4), ParallelScheme(tp=4), ParallelScheme(pp=4, sp=2))
WAYS = ("pp2sp4", "pp2sp4/v", "2*pp4/v", "tp2pp4", "4*pp2", "8*pp1", "pp3sp2 + 2*tp1")


def placed(text: str) -> Strategy:
    return place_strategy(StrategyShape.parse(text), RANKS, MODEL.layers)


def job(bytes_per_s: float) -> SimulatedJob:
    """Two nodes with links of this speed between them."""
    links = LinkModel(NODE, between=Speed(1e-5, bytes_per_s))
    table = analytic_cost_table(MODEL, SCHEMES, 4096)
    return SimulatedJob(llama_plan(MODEL), MODEL.hidden, TableFile(table), links, RANKS)


@pytest.mark.parametrize("text", WAYS)
def test_layers_are_owned_by_those_who_compute_them_and_all_own_as_much(text: str) -> None:
    plan, strategy = llama_plan(MODEL), placed(text)
    owned = owned_by_stages(plan, strategy)
    for bucket in owned.buckets:
        layout = bucket.masters(RANKS)
        layout.validate()
        stages = {strategy.stage_of(rank) for rank in bucket.owners}
        assert all({param.name for param in bucket.params} <= owned.needed(stage) for stage in stages)
    most = max(sum(bucket.masters(RANKS).sizes[rank] for bucket in owned.buckets) for rank in range(RANKS))
    assert most <= 1.05 * sum(bucket.numel for bucket in plan.buckets) / RANKS + len(plan.buckets)
    assert 0 <= owned.most_owned(RANKS, trainable=True) - most <= len(plan.buckets)
    assert (owned == plan) == (text in ("8*pp1", "pp3sp2 + 2*tp1"))  # all compute all layers; and some would own more


@given(st.integers(0, 300), st.integers(1, 12), st.data())
def test_owners_hold_a_tensor_in_near_equal_parts_in_their_order(numel: int, ranks: int, data: st.DataObject) -> None:
    owners = tuple(sorted(data.draw(st.sets(st.integers(0, ranks - 1)))))
    layout = even_layout(numel, ranks, owners)
    pieces = [piece for of_rank in layout.pieces for piece in of_rank]
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces)][:-1] * bool(pieces)
    assert sum(layout.sizes) == numel
    sizes = [layout.sizes[rank] for rank in owners or range(ranks)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("owners", [(1, 0), (0, 0), (4,)])
def test_owners_that_are_no_ranks_in_order_are_refused(owners: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="4 ranks in rising order"):
        even_layout(10, 4, owners)


def crossing(plan: ModelPlan, text: str) -> int:
    """Elements of layers that are pulled and pushed from node to node."""
    found = 0
    for bucket, (pull, push) in zip(plan.buckets, plan_transfers(plan, placed(text), NODE), strict=True):
        for moved in (pull, push) if bucket.name.startswith("layer") else ():
            assert moved is not None
            for hop in (moved,) if isinstance(moved, TransferPlan) else moved.hops:
                far = nodes_of(hop.slices.src, NODE) != nodes_of(hop.slices.dst, NODE)
                found += int(np.sum(hop.slices.length[far]))
    return found


def test_no_layer_leaves_its_node_under_the_strategy_that_owns_it() -> None:
    plan = llama_plan(MODEL)
    for text in ("pp2sp4/v", "pp4sp2", "tp2pp4/v"):
        assert crossing(plan, text) > 0
        assert crossing(owned_by_stages(plan, placed(text)), text) == 0
    # Another one pulls and pushes no less than before.
    assert crossing(owned_by_stages(plan, placed("pp2sp4/v")), "2*sp4") == crossing(plan, "2*sp4")


def test_owners_are_chosen_where_links_are_slow() -> None:
    strategies = [StrategyShape.parse(text) for text in ("2*sp4", "pp2sp4", "pp4sp2")]
    batches = [[900, 400, 2000, 3500] * 5, [300] * 100]
    options = PlannerOptions(kernels="pure", layers=MODEL.layers)
    slow = job(1e8)
    found = best_owners(slow, strategies, batches, TOKENS, options)
    assert found is not None
    assert str(found.by) == "pp2sp4"
    assert found.ms < 0.98 * found.even_ms
    assert best_owners(job(1e13), strategies, batches, TOKENS, options) is None
    assert best_owners(slow, strategies[:1], batches, TOKENS, options) is None  # nobody computes some layers alone


@pytest.mark.parametrize("text", ["2*sp4", "pp2sp4", "pp4sp2"])
def test_what_is_proposed_is_priced_with_the_owners_that_suit_it(text: str) -> None:
    strategy, cluster = StrategyShape.parse(text), job(1e8)
    even, nearest = exposed_ms(cluster, strategy, TOKENS), nearest_exposed_ms(cluster, strategy, TOKENS)
    own = replace(cluster, plan=owned_by_stages(cluster.plan, placed(text)))
    assert nearest == min(even, exposed_ms(own, strategy, TOKENS))
    assert (nearest < even) == ("pp" in text)
