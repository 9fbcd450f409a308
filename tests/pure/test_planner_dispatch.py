"""Dispatch and packing: Algorithm 1 as printed, HiGHS, our search; kernels alike with and without numba."""

import itertools
import math
import random

import numpy as np
import pytest

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.planner import PlannerOptions
from ds_hydra.planner.exact.paper_problem import DispatchProblem
from ds_hydra.planner.exact.programs import dispatch_ms, pack_exactly, relabel
from ds_hydra.planner.kernels.arrays import Prospect, Scheme
from ds_hydra.planner.kernels.problem import Batch, PipelineKinds
from ds_hydra.planner.one_strategy import StrategySearch
from ds_hydra.planner.pipelines import order_microbatches
from tests.support.planner_cases import TABLES, a800_batch, a800_planner, random_instance

TABLE = CostTable.load(TABLES / "llama_32b_a800.json")


def algorithm_1(
    times: np.ndarray, tokens: list[int], limits: list[int], pp: list[int], seed: int, trials: int
) -> list[int]:
    """The paper's lines 1-27, without any of the shortcuts of the kernel; the same permutations."""
    pipelines, n = times.shape
    order, state = list(range(n)), seed + 1
    best, best_owner = math.inf, [-1] * n
    for _ in range(trials):
        for i in range(n - 1, 0, -1):
            state = (state * 6364136223846793005 + 1442695040888963407) % 4611686018427387904
            j = (state >> 20) % (i + 1)
            order[i], order[j] = order[j], order[i]
        c, e, longest, owner = [0.0] * pipelines, [0.0] * pipelines, [0] * pipelines, [-1] * n
        by_length = [{tokens[i]: times[j, i] for i in range(n)} for j in range(pipelines)]
        for i in order:
            least, chosen = math.inf, -1
            for j in range(pipelines):
                if tokens[i] > limits[j]:
                    continue
                c_new = c[j] + times[j, i]
                e_new = by_length[j][max(longest[j], tokens[i])] * (pp[j] - 1)
                worst = max([c_new + e_new, *(c[k] + e[k] for k in range(pipelines) if k != j)])
                if worst < least:
                    least, chosen = worst, j
            owner[i] = chosen
            c[chosen] += times[chosen, i]
            longest[chosen] = max(longest[chosen], tokens[i])
            e[chosen] = by_length[chosen][longest[chosen]] * (pp[chosen] - 1)
        total = max(x + y for x, y in zip(c, e, strict=True))
        if total < best:
            best, best_owner = total, owner
    return best_owner


@pytest.mark.parametrize("text", ["tp16 + 2*tp8 + 8*tp4", "tp16 + 2*tp8pp3", "tp16 + tp8 + 8*tp4 + tp2pp4"])
def test_algorithm_1_is_the_printed_one(text: str) -> None:
    problem = DispatchProblem.of(a800_batch(3, 80), StrategyShape.parse(text), TABLE)
    ours = problem.by_paper(trials=5, seed=2)
    assert ours is not None
    printed = algorithm_1(
        problem.times, problem.items.tokens.tolist(), problem.max_length.tolist(), problem.pp.tolist(), 2, 5
    )
    assert ours.tolist() == printed


def test_ties_of_algorithm_1_go_to_the_first_pipeline() -> None:
    problem = DispatchProblem.of([50], StrategyShape.parse("4*tp16"), TABLE)
    owner = problem.by_paper()
    assert owner is not None
    assert owner.tolist() == [0]


def test_highs_finds_the_optimum_of_small_dispatches() -> None:
    draw = random.Random(1)
    for text in ("tp16 + 2*tp8", "2*tp8pp2 + 2*tp4", "tp16 + 2*tp4pp2"):
        lengths = [draw.randrange(100, 6000) for _ in range(7)]
        problem = DispatchProblem.of(lengths, StrategyShape.parse(text), TABLE)
        greedy = problem.by_paper()
        found = problem.by_search()
        assert greedy is not None
        assert found is not None
        exact = problem.by_highs(greedy, found[1])
        assert exact is not None
        pipelines = len(problem.pp)
        optimum = min(
            dispatch_ms(problem.times, problem.pp, np.array(owner))
            for owner in itertools.product(range(pipelines), repeat=len(lengths))
        )
        assert exact.optimal
        assert exact.ms == pytest.approx(optimum, rel=1e-6)
        assert found[1] <= optimum * (1 + 1e-9)
        assert optimum * (1 - 1e-9) <= problem.ms(found[0]) <= optimum * 1.01


def test_search_beats_algorithm_1_and_respects_its_bound() -> None:
    for seed in range(6):
        problem = DispatchProblem.of(a800_batch(seed), StrategyShape.parse("tp16 + 2*tp8 + 8*tp4"), TABLE)
        found, greedy = problem.by_search(), problem.by_paper()
        assert found is not None
        assert greedy is not None
        assert found[1] <= problem.ms(found[0]) <= problem.ms(greedy) * (1 + 1e-9)


def test_equal_pipelines_are_named_by_their_longest_sequence() -> None:
    owner = np.array([2, 1, 2, 0, 4, 3])
    assert relabel(owner, np.array([0, 3]), np.array([3, 2])).tolist() == [0, 1, 0, 2, 3, 4]


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("pp", [1, 3])
def test_packing_is_between_its_bound_and_highs(pp: int, paper: bool) -> None:
    rng = np.random.default_rng(pp)
    for _ in range(12):
        tokens = np.sort(rng.integers(20, 900, size=10))[::-1].copy()
        work = tokens * 0.5 + tokens**2 * 1e-4
        scheme = Scheme(30.0, 1500, 100, pp, paper)
        bins = np.zeros(10, dtype=np.int64)
        v, ms, _ = kernels.compiled().pack(scheme, work, tokens, 40, bins)
        held = np.bincount(bins, weights=tokens, minlength=v)
        assert len(held) == v
        assert held.max() <= 1500
        bound = kernels.compiled().packing_bound(scheme, work, tokens, v, ms)
        exact = pack_exactly(work, tokens, v, 1500, bins)
        assert exact is not None
        peak = exact.ms + 30.0
        best = peak * (pp - 1 + v) if paper else work.sum() + v * 30.0 + (pp - 1) * peak
        assert bound <= ms * (1 + 1e-9)
        assert best <= ms * (1 + 1e-9)
        if pp > 1 or paper:
            assert ms <= best * 1.03


def test_packing_fills_micro_batches_to_the_last_token() -> None:
    tokens = np.array([600, 500, 400, 300, 250, 250, 250, 150, 150, 150], dtype=np.int64)  # two of 1500 each
    bins = np.zeros(10, dtype=np.int64)
    v, _, _ = kernels.compiled().pack(Scheme(30.0, 1500, 1, 1, False), tokens.astype(np.float64), tokens, 40, bins)
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
            object.__setattr__(planner, "options", PlannerOptions(objective=instance.objective, kernels=name))
            plan = planner.plan(0, range(len(instance.lengths)), instance.lengths)
            plans.append((plan.phases, plan.predicted_ms))
        assert plans[0] == plans[1]


def test_heavy_micro_batches_run_in_the_middle() -> None:
    loaded: list[tuple[float, tuple[int, ...]]] = [(float(x), (x,)) for x in (3, 1, 5, 2, 4)]
    assert [load for load, _ in order_microbatches(loaded)] == [1.0, 3.0, 5.0, 4.0, 2.0]
