"""The planner against plain enumeration on random small instances: 1,500 in a test run, 5,000 with the long rows."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.costs.cost_table import CostTable
from ds_hydra.planner import validate_plan
from ds_hydra.planner.kernels.arrays import Prospect
from ds_hydra.planner.kernels.packing import ideal_ms
from ds_hydra.planner.kernels.problem import Batch, PipelineKinds, scheme_arrays, scheme_row
from ds_hydra.planner.one_strategy import StrategySearch
from tests.support.planner_cases import Instance, pipeline_optimum, random_instance, strategy_optimum

PER_SEED = 240


@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(21))
def test_bounds_and_plans_against_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(PER_SEED):
        most = int(rng.choice([3, 4, 5], p=[0.4, 0.45, 0.15]))
        check_instance(random_instance(rng, most))


def check_instance(instance: Instance) -> None:
    """Bound <= optimum, nothing reachable is refuted, the plan is optimal, valid, and certified."""
    planner = instance.planner()
    optimum = math.inf
    for strategy in instance.strategies:
        best = strategy_optimum(instance, strategy)
        optimum = min(optimum, best)
        batch = Batch.of(instance.lengths, instance.table)
        search = StrategySearch(planner._schemes, planner.options, batch)
        kinds = PipelineKinds.of(strategy, instance.table)
        bound = search.bound(kinds, kinds.num_ranks.copy(), 10, 12)
        assert bound <= best * (1 + 1e-9), instance
        if math.isfinite(best):
            assert not search.refute(kinds, best * (1 + 1e-9), kinds.num_ranks.copy()), instance
            found = search.assign(kinds, Prospect(bound, kinds.num_ranks.copy(), math.inf))
            assert found is not None, instance
            assert found.ms >= best * (1 - 1e-9), instance
    plan = planner.plan(0, range(len(instance.lengths)), instance.lengths)
    validate_plan(plan, instance.table, 4)
    assert plan.lower_bound_ms <= optimum * (1 + 1e-9), instance
    assert optimum * (1 - 1e-9) <= plan.searched_ms <= optimum * 1.01, instance


def test_bounds_hold_where_micro_batches_have_a_floor() -> None:
    """The search knows the floor of all micro-batches of a pipeline together, so its plans are not always the best."""
    rng, gaps = np.random.default_rng(4), []
    for _ in range(600):
        instance = random_instance(rng, 4, floors=True)
        optimum = min(strategy_optimum(instance, strategy) for strategy in instance.strategies)
        plan = instance.planner().plan(0, range(len(instance.lengths)), instance.lengths)
        validate_plan(plan, instance.table, 4)
        assert plan.lower_bound_ms <= optimum * (1 + 1e-9), instance
        gaps.append(plan.searched_ms / optimum - 1.0)
    assert min(gaps) >= -1e-9
    assert np.mean(gaps) < 0.01
    assert max(gaps) < 0.25


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_packing_takes_less_than_the_ideal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = random_instance(rng, floors=True).table.costs[int(rng.integers(5))]
    lengths = rng.integers(1, cost.max_length + 1, size=int(rng.integers(1, 6)))
    work = cost.sequence_ms(lengths)
    scheme = scheme_row(scheme_arrays(CostTable((cost,))), 0)
    ideal = ideal_ms(scheme, float(work.sum()), int(lengths.sum()), float(work.max()))
    assert ideal <= pipeline_optimum(cost, tuple(lengths.tolist())) * (1 + 1e-9)


def test_search_without_enumeration_is_close_to_the_optimum() -> None:
    """The heuristic alone, which larger steps rely on: the mean of its gap to the optimum."""
    rng, gaps = np.random.default_rng(3), []
    for _ in range(300):
        instance = random_instance(rng)
        planner = instance.planner()
        for strategy in instance.strategies:
            best = strategy_optimum(instance, strategy)
            kinds = PipelineKinds.of(strategy, instance.table)
            search = StrategySearch(planner._schemes, planner.options, Batch.of(instance.lengths, instance.table))
            price = kinds.num_ranks.copy()
            found = search.assign(kinds, Prospect(search.bound(kinds, price, 10, 12), price, math.inf))
            if found is not None:
                gaps.append(found.ms / best - 1.0)
    assert np.mean(gaps) < 0.01
    assert np.quantile(gaps, 0.9) < 0.02
