"""Layers computed again: no fewer than needed, hardly more than HiGHS needs, and counted in time and memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.costs.shares import Shares, Terms
from ds_hydra.pipe.schedules.list_order import list_us
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.plan.phase import MicroBatchPlan, Span
from ds_hydra.plan.works import UNITS, work_of
from ds_hydra.planner.cutting import longest_of
from ds_hydra.planner.recompute import (
    Covering,
    Scheduled,
    cover,
    cover_exactly,
    covering,
    diagonal_problem,
    recomputed,
)
from ds_hydra.zero_hetero.errors import PlanError

COST = SchemeCost(ParallelScheme(pp=4), 1e-6, 0.01, 2.0, 1024)
SHARES = Shares(Terms(0.3, 0.35, 0.3), Terms(0.0, 0.3, 0.1), 0.75, 0.25, 0.2)


def one_sequence(*sizes: int) -> Scheduled:
    """A sequence in slices of these sizes."""
    ends = np.cumsum([0, *sizes]).tolist()
    batches = tuple(MicroBatchPlan((Span(0, *end),)) for end in pairwise(ends))
    return Scheduled(batches, tuple(range(-1, len(sizes) - 1)), COST, SHARES)


def test_a_micro_batch_that_recomputes_keeps_less_and_takes_a_forward_more() -> None:
    batch = MicroBatchPlan((Span(0, 1000, 2000),))
    none, half, every = (
        work_of(replace(batch, recompute=share), COST, SHARES, parts=1, followed=True) for share in (0.0, 0.5, 1.0)
    )
    assert (none.kept, half.kept, every.kept) == (1250 * UNITS, 850 * UNITS, 450 * UNITS)
    assert none.until_weight == int(1250 * UNITS * 0.75)
    assert every.until_weight == int(250 * UNITS * 0.75), "what is recomputed waits for nothing"
    assert (every.forward, every.weight) == (none.forward, 0)
    assert every.backward == pytest.approx(none.backward + none.forward + none.weight, abs=2)
    assert half.weight == pytest.approx(none.weight / 2, abs=1)


def test_early_slices_are_computed_again_first() -> None:
    made = one_sequence(1024, 1024, 1024, 1024)  # 4096 tokens of room, and a quarter of 3072 for contexts
    found = recomputed(made, 15)
    assert found is not None
    shares = [batch.recompute for batch in found.microbatches]
    assert shares == sorted(shares, reverse=True)
    one_layer = 1024 * 0.8 / 15
    assert 768 + one_layer <= sum(share * 1024 * 0.8 for share in shares) < 768 + 2 * one_layer
    with pytest.raises(PlanError, match="live together and need"):
        list_us(made.batches(), 4)
    assert list_us(found.batches(), 4) > 0
    fits = one_sequence(1024, 1024)
    assert recomputed(fits, 15) == fits


def test_a_sequence_that_fits_in_no_way_is_told() -> None:
    one_layer = 0.8 * 1024 / 15  # of the largest slice, while it is computed again
    assert longest_of(COST, SHARES, layers=15) == int((4096 - one_layer) / 0.45) > longest_of(COST, SHARES)
    assert recomputed(one_sequence(*(1024,) * 8), 15) is not None
    assert recomputed(one_sequence(*(1024,) * 10), 15) is None


def test_windows_of_eq_20_are_those_that_1f1b_keeps_alive() -> None:
    """4 stages and a sequence in 5 slices: stage 0 has all of them alive, and so have all others."""
    made = one_sequence(*(1024,) * 5)
    problem = diagonal_problem(made, 15)
    assert len(problem.cost) == 5 + 4 - 1
    # The first backward is that of slice 4. On the last stage (p = 4 of 4) it is C[0], on the first one C[3].
    assert {tuple(np.flatnonzero(row)) for row in problem.saved} == {tuple(range(x, x + 5)) for x in range(4)}
    assert len(covering(made._replace(schedule="1f1b"), 15).missing) == 1
    exact = cover_exactly(problem)
    assert exact is not None
    assert problem.cost @ exact[0] == pytest.approx(exact[1])


@given(st.integers(0, 10**6))
def test_the_fast_method_misses_nothing_and_is_near_the_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    windows, variables, layers = rng.integers(1, 4), rng.integers(1, 7), rng.integers(1, 8)
    saved = rng.uniform(1.0, 3.0, (windows, variables)) * (rng.random((windows, variables)) < 0.7)
    problem = Covering(rng.uniform(1.0, 2.0, variables), saved, rng.uniform(0.5, 12.0, windows), int(layers))
    fast, exact = cover(problem), cover_exactly(problem)
    assert (fast is None) == (exact is None) == bool((saved.sum(axis=1) * layers < problem.missing).any())
    if fast is not None and exact is not None:
        assert (saved @ fast >= problem.missing * (1 - 1e-6)).all()
        assert ((fast >= 0) & (fast <= layers)).all()
        assert problem.cost @ fast >= exact[1] * (1 - 1e-6)
        assert problem.cost @ fast <= 1.35 * exact[1] + 1e-9
