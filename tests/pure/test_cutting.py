"""Micro-batches made to profiles of loads: every token once, slices in order, nothing above its limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_hydra.planner.kernels as kernels
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.shares import Shares
from ds_hydra.pipe.schedules.list_walk import NEVER
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.plan.phase import MicroBatchPlan, PipelinePlan, Span
from ds_hydra.plan.simulate import simulate_pipeline
from ds_hydra.planner.cutting import Effort, cut_best, longest_of, microbatches_of, pipe_of, profiles_of
from ds_hydra.planner.kernels.arrays import Pieces, Profile
from ds_hydra.planner.kernels.cut_moves import move
from ds_hydra.planner.kernels.list_time import list_time
from ds_hydra.planner.kernels.slots import cut, empty_pieces, most_slots, set_targets
from ds_hydra.planner.recompute import Scheduled, cover_exactly, covering
from tests.support.planner_cases import TABLES

COST = SchemeCost(ParallelScheme(pp=3), 1e-4, 0.1, 4.0, 400, 50)
SHARES = Shares.usual()
PIPE = pipe_of(COST, SHARES)
LONGEST = longest_of(COST, SHARES)
LENGTHS = st.lists(st.integers(1, 900), min_size=1, max_size=12)
PROFILES = st.builds(
    Profile, st.integers(2, 8), st.floats(0.1, 1), st.floats(1, 2), st.floats(0.2, 1), st.integers(0, 3)
)


def longest_first(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.sort(np.array(lengths, dtype=np.int64))[::-1].copy()
    return COST.sequence_ms(tokens), tokens


def pieces_of(profile: Profile, lengths: list[int]) -> Pieces:
    work, tokens = longest_first(lengths)
    most = most_slots(PIPE, tokens, profile.slots)
    made = empty_pieces(most + len(tokens), most)
    assert cut(PIPE, profile, work, tokens, made), "whatever is too long is cut"
    return made


def check(made: Pieces, lengths: list[int]) -> tuple[MicroBatchPlan, ...]:
    """Every token once, slices of a sequence in order, and within MaxLen and UtilLen."""
    tokens = sorted(lengths, reverse=True)
    batches = microbatches_of(made, range(len(tokens)))
    plan = PipelinePlan(PipelineShape.parse("pp3"), batches, 1.0)
    before = tuple(made.before[: len(batches)].tolist())
    assert plan.chain == before
    found: dict[int, list[Span]] = {}
    for number, batch in enumerate(batches):
        assert batch.spans
        assert batch.num_tokens == made.held[number] <= COST.max_length
        if number in before:
            assert len(batch.spans) == 1, "nothing stands beside a slice that another follows"
        for span in batch.spans:
            found.setdefault(span.sequence, []).append(span)
    assert sorted(found) == list(range(len(tokens)))
    for item, spans in found.items():
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == tokens[item]
        if len(spans) > 1:
            # A rest that is too short for a slice of its own joins the one before only where that has room for it.
            assert all(span.stop - span.start >= COST.util_length for span in spans[:-1])
    return batches


@given(LENGTHS, PROFILES)
def test_every_token_is_in_one_slice(lengths: list[int], profile: Profile) -> None:
    check(pieces_of(profile, lengths), lengths)


@given(LENGTHS, PROFILES, st.integers(0, 99))
def test_small_changes_keep_what_is_right(lengths: list[int], profile: Profile, seed: int) -> None:
    made, state = pieces_of(profile, lengths), np.array([seed], dtype=np.int64)
    for _ in range(30):
        move(PIPE, made, state)
        check(made, lengths)


@settings(max_examples=15)
@given(LENGTHS, st.sampled_from([1, 2]), st.integers(0, 9))
def test_the_best_is_what_its_plan_is_simulated_to_take(lengths: list[int], parts: int, seed: int) -> None:
    """The same with numba and without; and a plan's check comes to the same microsecond."""
    work, tokens = longest_first(lengths)
    pipe = pipe_of(COST, SHARES, parts=parts)
    found = [
        cut_best(kernel, pipe, work, tokens, effort=Effort(6, 12), seed=seed)
        for kernel in (kernels.compiled(), kernels.pure())
    ]
    best, pure = found
    if best is None or pure is None:
        assert best is pure
        assert max(lengths) > LONGEST, "the list order holds what its memory holds"
        return
    batches = check(best.pieces, lengths)
    assert batches == microbatches_of(pure.pieces, range(len(lengths)))
    assert best._replace(pieces=pure.pieces) == pure
    shape = PipelineShape.parse("pp3/list" if parts == 1 else "(tp1[0:1,5:6] > tp1[1:2,4:5] > tp1[2:3,3:4])/list")
    table = CostTable((SchemeCost(shape.cost_key, COST.a, COST.b, COST.c, COST.max_length, COST.util_length),))
    assert best.us / 1e3 == simulate_pipeline(PipelinePlan(shape, batches, 1.0), table)


@pytest.mark.drawn
@settings(max_examples=15)
@given(st.integers(0, 40), st.integers(0, 9), st.sampled_from([1, 2]))
def test_layers_are_computed_again_until_all_fits(more: int, seed: int, parts: int) -> None:
    """With numba and without; hardly more than the least that HiGHS finds, and to the microsecond of a plan's check."""
    longest = longest_of(COST, SHARES, layers=6)
    length = LONGEST + 1 + more * (longest - LONGEST - 1) // 40
    work, tokens = longest_first([length, 60, 30, 200])
    pipe = pipe_of(COST, SHARES, parts=parts, layers=6 // parts)
    best, pure = (
        cut_best(kernel, pipe, work, tokens, effort=Effort(6, 12), seed=seed)
        for kernel in (kernels.compiled(), kernels.pure())
    )
    assert best is not None
    assert pure is not None
    batches = microbatches_of(best.pieces, range(4))
    assert batches == microbatches_of(pure.pieces, range(4))
    shape = PipelineShape.parse("pp3/list" if parts == 1 else "(tp1[0:1,5:6] > tp1[1:2,4:5] > tp1[2:3,3:4])/list")
    table = CostTable((SchemeCost(shape.cost_key, COST.a, COST.b, COST.c, COST.max_length, COST.util_length),))
    assert best.us / 1e3 == simulate_pipeline(PipelinePlan(shape, batches, 1.0), table)
    kept = tuple(replace(batch, recompute=0.0) for batch in batches)
    before = tuple(best.pieces.before[: len(batches)].tolist())
    problem = covering(Scheduled(kept, before, COST, SHARES, parts=parts), 6 // parts)
    layers = np.rint([batch.recompute * (6 // parts) for batch in batches])
    assert (problem.saved @ layers >= problem.missing * (1 - 1e-9)).all()
    exact = cover_exactly(problem)
    assert exact is not None
    assert problem.cost @ layers <= 1.3 * exact[1] + problem.cost.max()


@given(LENGTHS, PROFILES)
def test_a_ceiling_hides_no_better_time(lengths: list[int], profile: Profile) -> None:
    made = pieces_of(profile, lengths)
    took = list_time(PIPE, made, NEVER)
    assert list_time(PIPE, made, took) == NEVER
    if took < NEVER:
        assert list_time(PIPE, made, took + 1) == took


def test_slots_of_the_note() -> None:
    target = np.zeros(6)
    assert set_targets(Profile(6, 0.3, 1.5, 0.7, 0), 280.0, target) == max(target)
    assert [round(ms) for ms in target] == [21, 32, 48, 70, 60, 49]
    assert sum(target) == pytest.approx(280.0)


def test_whole_sequences_stay_whole_and_too_long_ones_are_refused() -> None:
    kernel, whole = kernels.pure(), pipe_of(COST, SHARES, slices=False)
    best = cut_best(kernel, whole, *longest_first([390, 300, 20, 10]))
    assert best is not None
    assert (best.pieces.before[: best.pieces.counts[1]] == -1).all()
    assert cut_best(kernel, whole, *longest_first([401])) is None
    assert cut_best(kernel, PIPE, *longest_first([LONGEST + 100])) is None
    held = cut_best(kernel, PIPE, *longest_first([LONGEST]))
    assert held is not None
    assert held.pieces.counts[1] > 1


def test_the_more_full_micro_batches_a_pipeline_has_work_for_the_more_slots_are_tried() -> None:
    few, many = ({one.slots for one in profiles_of(PIPE, np.array([tokens]))} for tokens in (800, 16 * COST.max_length))
    assert few == {3, 4, 5, 6, 8, 10, 13, 17}
    assert len(many) == len(few), "no more tries"
    assert min(many) <= 16
    assert max(many) >= 5 * 16
    lean = profiles_of(PIPE, np.array([16 * COST.max_length]), lean=True)
    assert set(lean) < set(profiles_of(PIPE, np.array([16 * COST.max_length])))


def test_a_pipeline_with_much_work_is_done_sooner_with_small_micro_batches() -> None:
    """tp2pp4 of a 32B model as a V, with work for 16 full micro-batches and two sequences of a fifth of it each."""
    cost = CostTable.load(TABLES / "llama_32b_a800.json")[ParallelScheme(2, 4)]
    assert cost.shares is not None
    pipe = pipe_of(cost, cost.shares, parts=2, layers=7)
    tokens = np.array([20_000, 18_000, *[1_500] * 44], dtype=np.int64)
    work = cost.sequence_ms(tokens)
    kernel, effort = kernels.compiled(), Effort(6, 0)
    coarse = [one for one in profiles_of(pipe, tokens[:1]) if one.slots <= 17]
    before, found = (cut_best(kernel, pipe, work, tokens, profiles=some, effort=effort) for some in (coarse, None))
    assert before is not None
    assert found is not None
    assert found.pieces.counts[1] > 17
    assert found.us < 0.95 * before.us
