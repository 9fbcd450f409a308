"""Shares of a scheme's costs from micro-batches with the backward split: exact where they can be, usual where not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_hydra.costs.activations import Activations
from ds_hydra.costs.cost_table import SchemeCost
from ds_hydra.costs.shares import Shares, Terms
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.profiling.entry import SchemeEntry, StageEntry, entry_from_record
from ds_hydra.profiling.fit import Fit, fit_points
from ds_hydra.profiling.ladder import make_ladder, split_rungs
from ds_hydra.profiling.split_fit import SplitPoint, fit_split

COST = SchemeCost(ParallelScheme(pp=4), 2e-6, 0.01, 5.0, 32768)
SHARES = Shares(Terms(0.30, 0.36, 0.40), Terms(0.0, 0.25, 0.10), 0.8, 0.1)


def points(cost: SchemeCost, shares: Shares) -> list[SplitPoint]:
    """The ladder's micro-batches and slices, with exactly the times that costs and shares say."""
    found = []
    for rung in split_rungs(make_ladder(128, 32768, 7), None):
        stop = rung.start + rung.lengths[0]
        squares = sum(n * n for n in rung.lengths[1:]) + stop * stop - rung.start * rung.start
        terms = (cost.a * squares, cost.b * sum(rung.lengths), cost.c)
        forward, weight = (
            sum(share * term for share, term in zip(part, terms, strict=True))
            for part in (shares.forward, shares.weight)
        )
        found.append(
            SplitPoint(rung.lengths, rung.start, forward, sum(terms) - forward - weight, weight, rung.held_out)
        )
    return found


def whole_fit(cost: SchemeCost) -> Fit:
    return fit_points([point.point for point in points(cost, SHARES) if not point.start])


def test_shares_come_back_and_slices_cost_what_the_whole_does() -> None:
    found = fit_split(points(COST, SHARES), whole_fit(COST))
    assert found is not None
    assert found.forward == pytest.approx(SHARES.forward, abs=5e-3)
    assert found.weight == pytest.approx(SHARES.weight, abs=5e-3)
    for error in (found.held_out, found.slices, found.slice_parts):
        assert error is not None
        assert error < 0.01
    slow = [replace(p, forward=1.5 * p.forward) if p.start else p for p in points(COST, SHARES)]
    worse = fit_split(slow, whole_fit(COST))
    assert worse is not None
    assert (worse.forward, worse.held_out) == (found.forward, found.held_out), "no slice is fitted"
    assert worse.slices == pytest.approx(1 - 1 / (1 + 0.5 * 0.33), abs=0.03)


def test_a_share_that_nothing_tells_is_the_usual_one() -> None:
    cost = replace(COST, a=0.0)
    found = fit_split(points(cost, SHARES), whole_fit(cost))
    assert found is not None
    assert found.forward == pytest.approx((Shares.usual().forward.a, 0.36, 0.40), abs=5e-3)
    assert fit_split([replace(point, held_out=True) for point in points(COST, SHARES)], whole_fit(COST)) is None


def test_forward_and_weight_never_take_more_than_all() -> None:
    most = [replace(p, forward=0.7 * p.ms, weight=0.3 * p.ms, backward=1e-9 * p.ms) for p in points(COST, SHARES)]
    found = fit_split(most, whole_fit(COST))
    assert found is not None
    assert Shares(found.forward, found.weight)


def test_noise_in_columns_that_are_alike_leaves_shares_that_a_kernel_could_have() -> None:
    """Of micro-batches of one length a and b cannot be told apart, and the least squares put all into one of them."""
    alike = [point for point in points(COST, SHARES) if not point.start and sum(point.lengths) > 4000]
    noisy = [replace(p, forward=p.forward * (1.4 if n % 2 else 0.7)) for n, p in enumerate(alike)]
    found = fit_split(noisy, whole_fit(COST))
    assert found is not None
    assert 0.15 <= min(found.forward) <= max(found.forward) <= 0.6
    assert 0.0 < found.weight.b < 0.5


def test_split_rungs_stop_where_the_head_is_computed_twice() -> None:
    ladder = make_ladder(128, 32768, 7)
    every = split_rungs(ladder, None)
    assert {rung.held_out for rung in every if not rung.start} == {False, True}
    assert {(rung.start, sum(rung.lengths)) for rung in every if rung.start} == {
        (28672, 4096), (24576, 8192), (8192, 8192)
    }  # fmt: skip
    once = split_rungs(ladder, 10_000)
    assert max(sum(rung.lengths) for rung in once if not rung.start) <= 10_000
    assert split_rungs(ladder, 64) == every, "where all compute it twice"


def test_a_scheme_keeps_its_shares_in_the_table() -> None:
    in_parts, fit = tuple(points(COST, SHARES)), whole_fit(COST)
    whole = tuple(point.point for point in in_parts if not point.start)
    stage = StageEntry(0, 4, "ranks", whole, fit, None, None, in_parts, fit_split(in_parts, fit))
    entry = SchemeEntry(COST.uniform, (stage,), "wall", False)
    kept = Activations(1.0, 1.0, 1.0, 1.0, until_weight=0.8, context=0.1)
    shares = entry.cost(32768, kept).shares
    assert shares is not None
    assert (shares.until_weight, shares.context) == (0.8, 0.1)
    assert entry_from_record(COST.uniform, json.loads(json.dumps(entry.record()))) == entry
    old = replace(stage, split_points=(), split=None)
    before = json.loads(json.dumps(SchemeEntry(COST.uniform, (old,), "wall", False).record()))
    assert "split" not in before["stages"][0]
    assert entry_from_record(COST.uniform, before).cost(32768, kept).shares is None
