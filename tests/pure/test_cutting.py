"""Micro-batches made to profiles of loads: every token once, slices in order, nothing above its limits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.plan.phase import PipelinePlan, Span
from ds_hydra.plan.simulate import simulate_pipeline
from ds_hydra.planner.cut_moves import Cut, moved
from ds_hydra.planner.cutting import Effort, Pipe, Profile, cut, cut_best

COST = SchemeCost(ParallelScheme(pp=3), 1e-4, 0.1, 4.0, 400, 50)
PIPE = Pipe(COST, Shares.usual())
LENGTHS = st.lists(st.integers(1, 900), min_size=1, max_size=12)
PROFILES = st.builds(
    Profile, st.integers(2, 8), st.floats(0.1, 1), st.floats(1, 2), st.floats(0.2, 1), st.integers(0, 3)
)


def check(made: Cut, lengths: list[int]) -> None:
    """Every token once, slices of a sequence in order, and within MaxLen and UtilLen."""
    plan = PipelinePlan(PipelineShape.parse("pp3"), made.microbatches, 1.0)
    assert plan.chain == made.before
    found: dict[int, list[Span]] = {}
    for number, batch in enumerate(made.microbatches):
        assert batch.spans
        assert batch.num_tokens <= COST.max_length
        if number in made.before:
            assert len(batch.spans) == 1, "nothing stands beside a slice that another follows"
        for span in batch.spans:
            found.setdefault(span.sequence, []).append(span)
    assert sorted(found) == list(range(len(lengths)))
    for position, spans in found.items():
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == lengths[position]
        if len(spans) > 1:
            # A rest that is too short for a slice of its own joins the one before only where that has room for it.
            assert all(span.stop - span.start >= COST.util_length for span in spans[:-1])


@given(LENGTHS, PROFILES)
def test_every_token_is_in_one_slice(lengths: list[int], profile: Profile) -> None:
    made = cut(PIPE, profile, range(len(lengths)), lengths)
    assert made is not None, "whatever is too long is cut"
    check(made, lengths)


@given(LENGTHS, PROFILES, st.integers(0, 99))
def test_small_changes_keep_what_is_right(lengths: list[int], profile: Profile, seed: int) -> None:
    rng = random.Random(seed)
    made = cut(PIPE, profile, range(len(lengths)), lengths)
    for _ in range(30):
        assert made is not None
        changed = moved(made, rng, COST.max_length, COST.util_length)
        if changed is not None:
            made = changed
            check(made, lengths)


@settings(max_examples=15)
@given(LENGTHS, st.sampled_from(["1f1b", "list"]))
def test_the_best_is_what_its_plan_is_simulated_to_take(lengths: list[int], schedule: str) -> None:
    table = CostTable((COST,))
    pipe = Pipe(COST, table.shares(COST.scheme), schedule)
    effort = Effort(3, 3)
    best = cut_best(pipe, range(len(lengths)), lengths, effort=effort)
    if best is None:
        assert max(lengths) > pipe.longest or schedule == "1f1b", "the list order holds what its memory holds"
        return
    check(best.made, lengths)
    assert cut_best(pipe, range(len(lengths)), lengths, effort=effort) == best
    shape = PipelineShape.parse("pp3" if schedule == "1f1b" else f"pp3/{schedule}")
    plan = PipelinePlan(shape, best.made.microbatches, 1.0)
    if plan.in_slices or schedule == "list":
        assert best.us / 1e3 == simulate_pipeline(plan, table)


def test_slots_of_the_note() -> None:
    targets = Profile(6, 0.3, 1.5, 0.7, 0).targets(280.0)
    assert [round(target) for target in targets] == [21, 32, 48, 70, 60, 49]
    assert sum(targets) == pytest.approx(280.0)


def test_whole_sequences_stay_whole_and_too_long_ones_are_refused() -> None:
    whole = Pipe(COST, Shares.usual(), "1f1b", slices=False)
    lengths = [390, 300, 20, 10]
    best = cut_best(whole, range(4), lengths)
    assert best is not None
    assert best.made.before == (-1,) * len(best.made.microbatches)
    assert cut_best(whole, range(1), [401]) is None
    assert cut_best(PIPE, range(1), [PIPE.longest + 100]) is None
    held = cut_best(PIPE, range(1), [PIPE.longest])
    assert held is not None
    assert len(held.made.microbatches) > 1
