"""Dispatch and packing: HiGHS and our search; kernels alike with and without numba."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.planner import PlannerOptions
from ds_hydra.planner.exact.programs import pack_exactly, relabel
from ds_hydra.planner.kernels.arrays import Bins, Problem, Prospect, Scheme
from ds_hydra.planner.kernels.placing import empty_placement
from ds_hydra.planner.kernels.problem import Batch, PipelineKinds
from ds_hydra.planner.one_strategy import StrategySearch
from ds_hydra.planner.pipelines import order_microbatches, whole_pipeline
from tests.support.planner_cases import a800_batch, a800_planner, random_instance


def test_equal_pipelines_are_named_by_their_longest_sequence() -> None:
    owner = np.array([2, 1, 2, 0, 4, 3])
    assert relabel(owner, np.array([0, 3]), np.array([3, 2])).tolist() == [0, 1, 0, 2, 3, 4]


@pytest.mark.drawn
@pytest.mark.parametrize("pp", [1, 3])
def test_packing_is_between_its_bound_and_highs(pp: int) -> None:
    rng = np.random.default_rng(pp)
    for _ in range(12):
        tokens = np.sort(rng.integers(20, 900, size=10))[::-1].copy()
        work = tokens * 0.5 + tokens**2 * 1e-4
        scheme = Scheme(30.0, 1500, 100, pp, 0.0)
        bins = np.zeros(10, dtype=np.int64)
        v, ms, _, _ = kernels.compiled().pack(scheme, work, tokens, 40, bins)
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
    v, *_ = kernels.compiled().pack(Scheme(30.0, 1500, 1, 1, 0.0), tokens.astype(np.float64), tokens, 40, bins)
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


def test_rows_that_ranks_share_have_their_longest_sequences_in_the_middle() -> None:
    tokens = [50, 10, 40, 20, 30]
    for text, lengths in (("sp2", (10, 30, 50, 40, 20)), ("tp2", tuple(tokens))):
        cost = SchemeCost(ParallelScheme.parse(text), a=0.0, b=1.0, c=1.0, max_length=200)
        made = whole_pipeline(
            PipelineShape.parse(text), cost, [range(5)], work=[float(n) for n in tokens], tokens=tokens
        ).plan
        assert made.microbatches[0].lengths == lengths


def most_bins(sizes: list[int], capacity: int) -> int:
    """The bound of Martello and Toth as it is defined: over every size that is left out below."""
    best = math.ceil(sum(sizes) / capacity)
    for small in [size for size in sizes if 2 * size <= capacity]:
        large = sum(size > capacity - small for size in sizes)
        middle = [size for size in sizes if size <= capacity - small and 2 * size > capacity]
        rest = sum(size for size in sizes if small <= size and 2 * size <= capacity)
        room = sum(capacity - size for size in middle)
        best = max(best, large + len(middle) + math.ceil(max(0, rest - room) / capacity))
    return best


@settings(max_examples=150, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=24), v=st.integers(1, 8), by_room=st.booleans())
def test_bins_are_bounded_filled_and_levelled_as_when_all_are_looked_at(
    sizes: list[int], v: int, by_room: bool
) -> None:
    tokens = np.array(sorted(sizes, reverse=True), dtype=np.int64)
    work, n, kernel = tokens * 1.0 + tokens**2 / 64, len(sizes), kernels.pure()
    assert kernel.bins_needed(tokens, 40, 0.0) == most_bins(tokens.tolist(), 40)  # type: ignore[attr-defined]
    bins = Bins(np.zeros(n, dtype=np.int64), np.zeros(v), np.zeros(v, dtype=np.int64), np.zeros(1, dtype=np.int64))
    fits = kernel.fill_bins(work, tokens, v, 40, by_room, bins)  # type: ignore[attr-defined]
    owner: list[int] = []
    load, used = [0.0] * v, [0] * v
    for size, ms in zip(tokens.tolist(), work.tolist(), strict=True):
        roomy = [j for j in range(v) if used[j] + size <= 40]
        if not roomy:
            break
        owner.append(min(roomy, key=lambda j: (-used[j] if by_room else load[j], j)))
        load[owner[-1]] += ms
        used[owner[-1]] += size
    assert fits == (len(owner) == n)
    assert bins.bin_of[: len(owner)].tolist() == owner
    if not fits:
        return
    top = int(bins.load.argmax())
    exchanges = [
        max(bins.load[top] - work[i] + less, bins.load[j] + work[i] - less)
        for i in np.flatnonzero(bins.bin_of == top)
        for j in range(v)
        for less, back in [(0.0, 0), *((work[k], tokens[k]) for k in np.flatnonzero(bins.bin_of == j))]
        if j != top and used[j] + tokens[i] - back <= 40
    ]
    rest = np.delete(bins.load, top).max(initial=0.0)
    best = max(rest, min([bins.load[top], *exchanges]))
    assert kernel.level_bins(work, tokens, v, 40, 0.0, 1, bins) == pytest.approx(best)  # type: ignore[attr-defined]
    assert np.bincount(bins.bin_of, weights=tokens, minlength=v).max() <= 40


def test_repairs_do_no_more_than_the_dispatch_and_pack_nothing_in_vain() -> None:
    planner, kernel = a800_planner(), kernels.compiled()
    kinds = PipelineKinds.of(StrategyShape.parse("8*tp4pp2"), planner.cost_table)
    lengths = [min(length, 6000) for length in a800_batch(1, 1500)]
    items = Batch.of(lengths, planner.cost_table).items
    problem = Problem(planner._schemes, items, kinds.shape)
    place = empty_placement(len(lengths), len(kinds.rank_order))
    assert kernel.place_greedily(problem, place)  # type: ignore[attr-defined]
    before = kernel.pack_all(problem, 40, place)
    after = kernel.repair(problem, 40, 0.0, 400, place)  # type: ignore[attr-defined]
    work, repairs = place.spent.tolist()
    assert after < before
    assert 0 < repairs < 1.2 * work, "one exchange may begin before the work is spent"
    # Equal sequences, one more on one of the pipelines: whatever is exchanged, by the sums one stays as late.
    equal = Batch.of([1000] * 17, planner.cost_table).items
    kinds = PipelineKinds.of(StrategyShape.parse("16*tp4"), planner.cost_table)
    place = empty_placement(17, 16)
    place.spent[0] = 10**9
    problem = Problem(planner._schemes, equal, kinds.shape)
    kernel.place_greedily(problem, place)  # type: ignore[attr-defined]
    kernel.pack_all(problem, 40, place)
    assert kernel.relieve(problem, 40, 400, place) == -1  # type: ignore[attr-defined]
    assert place.spent[1] <= 3 * 17 + 2 * (17 + 16), "looks only"
