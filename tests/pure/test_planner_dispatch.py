"""Dispatch and packing: HiGHS and our search; kernels alike with and without numba."""

import math

import numpy as np
import pytest

import ds_hydra.planner.kernels as kernels
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner import PlannerOptions
from ds_hydra.planner.exact.programs import pack_exactly, relabel
from ds_hydra.planner.kernels.arrays import Prospect, Scheme
from ds_hydra.planner.kernels.problem import Batch, PipelineKinds
from ds_hydra.planner.one_strategy import StrategySearch
from ds_hydra.planner.pipelines import order_microbatches
from tests.support.planner_cases import a800_batch, a800_planner, random_instance


def test_equal_pipelines_are_named_by_their_longest_sequence() -> None:
    owner = np.array([2, 1, 2, 0, 4, 3])
    assert relabel(owner, np.array([0, 3]), np.array([3, 2])).tolist() == [0, 1, 0, 2, 3, 4]


@pytest.mark.parametrize("pp", [1, 3])
def test_packing_is_between_its_bound_and_highs(pp: int) -> None:
    rng = np.random.default_rng(pp)
    for _ in range(12):
        tokens = np.sort(rng.integers(20, 900, size=10))[::-1].copy()
        work = tokens * 0.5 + tokens**2 * 1e-4
        scheme = Scheme(30.0, 1500, 100, pp)
        bins = np.zeros(10, dtype=np.int64)
        v, ms, _ = kernels.compiled().pack(scheme, work, tokens, 40, bins)
        held = np.bincount(bins, weights=tokens, minlength=v)
        assert len(held) == v
        assert held.max() <= 1500
        bound = kernels.compiled().packing_bound(scheme, work, tokens, v, ms)
        exact = pack_exactly(work, tokens, v, 1500, bins)
        assert exact is not None
        peak = exact.ms + 30.0
        best = work.sum() + v * 30.0 + (pp - 1) * peak
        assert bound <= ms * (1 + 1e-9)
        assert best <= ms * (1 + 1e-9)
        if pp > 1:
            assert ms <= best * 1.03


def test_packing_fills_micro_batches_to_the_last_token() -> None:
    tokens = np.array([600, 500, 400, 300, 250, 250, 250, 150, 150, 150], dtype=np.int64)  # two of 1500 each
    bins = np.zeros(10, dtype=np.int64)
    v, _, _ = kernels.compiled().pack(Scheme(30.0, 1500, 1, 1), tokens.astype(np.float64), tokens, 40, bins)
    assert v == 2


def test_pure_and_compiled_kernels_give_the_same_bits() -> None:
    planner = a800_planner(effort=1)
    for seed in range(3):
        batch = Batch.of(a800_batch(seed, 24), planner.cost_table)
        results = []
        for kernel in (kernels.pure(), kernels.compiled()):
            search = StrategySearch(planner._schemes, planner.options, batch)
            search._kernels = kernel
            kinds = PipelineKinds.of(StrategyShape.parse("tp16 + tp8 + 8*tp4 + tp2pp4"), planner.cost_table)
            price = kinds.num_ranks.copy()
            bound = search.bound(kinds, price, 6, 8)
            found = search.assign(kinds, Prospect(bound, price, math.inf))
            assert found is not None
            results.append((bound, price.tolist(), found.owner.tolist(), found.bin_of.tolist(), found.ms))
        assert results[0] == results[1]


def test_tiny_steps_are_solved_alike_with_and_without_numba() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        instance = random_instance(rng)
        plans = []
        for name in ("pure", "compiled"):
            planner = instance.planner()
            object.__setattr__(planner, "options", PlannerOptions(kernels=name))
            plan = planner.plan(0, range(len(instance.lengths)), instance.lengths)
            plans.append((plan.phases, plan.predicted_ms))
        assert plans[0] == plans[1]


def test_heavy_micro_batches_run_in_the_middle() -> None:
    loaded: list[tuple[float, tuple[int, ...]]] = [(float(x), (x,)) for x in (3, 1, 5, 2, 4)]
    assert [load for load, _ in order_microbatches(loaded)] == [1.0, 3.0, 5.0, 4.0, 2.0]
