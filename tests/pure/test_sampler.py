"""Which sequences each step draws, in which order, and where a job goes on."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.data.reorder import SortedPairs, cut_in_two
from ds_hydra.data.sampler import DataCursor, StepLoader, TokenBudgetSampler
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError

LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(any)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths, and a budget of at most their sum."""
    lengths = draw(LENGTHS)
    return lengths, draw(st.integers(1, sum(lengths)))


@given(jobs(), st.integers(0, 5))
def test_every_epoch_draws_each_usable_sequence_once(job: tuple[list[int], int], seed: int) -> None:
    lengths, budget = job
    sampler = TokenBudgetSampler(lengths, budget, seed)
    usable = {i for i, length in enumerate(lengths) if length}
    drawn: list[int] = []
    step = 0
    while len(drawn) < 4 * len(usable):
        batch = sampler.batch(step)
        assert len(set(batch)) == len(batch), "a sequence is in a step twice"
        drawn += batch
        step += 1
    for epoch in range(4):
        assert sorted(drawn[epoch * len(usable) : (epoch + 1) * len(usable)]) == sorted(usable)


@given(jobs(), st.integers(0, 5))
def test_a_step_ends_with_the_sequence_that_reaches_the_budget(job: tuple[list[int], int], seed: int) -> None:
    lengths, budget = job
    sampler = TokenBudgetSampler(lengths, budget, seed)
    for step in range(4):
        tokens = sampler.batch_lengths(step)
        assert sum(tokens) >= budget > sum(tokens[:-1])


@given(jobs(), st.integers(0, 6), st.integers(0, 6))
def test_a_saved_cursor_goes_on_where_it_was(job: tuple[list[int], int], stop: int, further: int) -> None:
    lengths, budget = job
    whole = TokenBudgetSampler(lengths, budget, seed=1)
    saved = DataCursor(**json.loads(json.dumps(whole.cursor(stop).to_dict())))
    resumed = TokenBudgetSampler(lengths, budget, seed=1, cursor=saved)
    again = TokenBudgetSampler(lengths, budget, seed=1, cursor=resumed.cursor(stop + further))
    assert resumed.batch(stop + further) == whole.batch(stop + further) == again.batch(stop + further)


def test_what_a_step_passes_over_comes_first_in_the_next() -> None:
    """Four sequences of equal length, three a step; by its seed the second epoch begins with what the first ended."""
    seed = next(s for s in range(99) if orders(s)[0][3] == orders(s)[1][0])
    first, second = orders(seed)
    sampler = TokenBudgetSampler([1] * 4, 3, seed)
    assert sampler.batch(0) == first[:3]
    assert sampler.batch(1) == (first[3], *second[1:3])
    assert sampler.cursor(2).deferred == (first[3],)
    assert sampler.batch(2)[:2] == (first[3], second[3])
    bad = replace(sampler.cursor(2), deferred=(7,))
    with pytest.raises(CheckpointError, match=r"damaged.*use another tag"):
        TokenBudgetSampler([1] * 4, 3, seed, bad)


def orders(seed: int) -> list[tuple[int, ...]]:
    """The first two epochs of four sequences."""
    sampler = TokenBudgetSampler([1] * 4, 4, seed)
    return [sampler.batch(0), sampler.batch(1)]


@pytest.mark.parametrize("budget", [19, 10**12])
def test_budget_that_only_repeats_could_reach(budget: int) -> None:
    with pytest.raises(ConfigError) as error:
        TokenBudgetSampler([5, 6, 0, 7], budget)
    times = f"{budget / 18:.1f} times"
    for word in (f"hydra.tokens_per_step {budget}", "18 tokens", "3 sequences", times, "at most 18"):
        assert word in str(error.value), error.value


def test_look_ahead_does_not_change_what_is_drawn() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 50)
    plain, ahead = TokenBudgetSampler(lengths, 500), TokenBudgetSampler(lengths, 500)
    far = ahead.batch(40)
    assert [plain.batch(step) for step in range(20)] == [ahead.batch(step) for step in range(20)]
    assert plain.batch(40) == far
    assert TokenBudgetSampler(lengths, 500, seed=1).batch(0) != plain.batch(0)


def test_sampler_refuses_what_it_cannot_continue() -> None:
    sampler = TokenBudgetSampler([5, 6, 7], 8, seed=1)
    cursor = sampler.cursor(3)
    for arguments, word in [
        (([5, 6, 7], 9, 1), "tokens_per_step 8, but this job has 9"),
        (([5, 6, 7], 8, 2), "seed 1, but this job has 2"),
        (([5, 6, 8], 8, 1), "data"),
    ]:
        with pytest.raises(ConfigError, match=word):
            TokenBudgetSampler(*arguments, cursor)
    resumed = TokenBudgetSampler([5, 6, 7], 8, 1, cursor)
    with pytest.raises(ConfigError, match="step 2 lies before"):
        resumed.batch(2)
    with pytest.raises(ConfigError, match="none of the 2 sequences"):
        TokenBudgetSampler([0, 0], 8)


def test_loader_ends_where_the_job_or_its_epoch_does() -> None:
    """A restart makes the steps that are left, not as many as the job has in all."""
    sampler = TokenBudgetSampler([10] * 8, 20)
    steps = {step: sampler.batch(step) for step in range(12)}

    def made(at: int, total_steps: int | None = None) -> list[int]:
        loader = StepLoader(sampler, lambda: at, total_steps)
        assert len(loader) == (total_steps or 4)
        assert list(loader) == [steps[step] for step in range(at, at + len(list(loader)))]
        return list(range(at, at + len(list(loader))))

    taken: Any = next(iter(StepLoader(sampler, lambda: 0)))
    for use, kind in ((lambda: taken.items(), AttributeError), (lambda: taken["input_ids"], TypeError)):
        with pytest.raises(kind, match=r"yields ids of sequences, no batches.*Call engine\.train_batch\(\)"):
            use()
    assert copy.deepcopy(taken) == taken
    assert made(0) == [0, 1, 2, 3]
    assert made(6) == [6, 7], "the rest of the second epoch"
    assert made(0, total_steps=10) == list(range(10))
    assert made(9, total_steps=10) == [9]
    assert made(10, total_steps=10) == []
    assert [StepLoader(sampler, partial(int, at)).epoch for at in (0, 3, 4, 11)] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "change", [{"step": 2**61}, {"step": 3}, {"step": 1}, {"epoch": 9}, {"position": 3}, {"epoch": -1}, {"step": 2.0}]
)
def test_a_place_that_no_step_has_is_refused(change: dict[str, object]) -> None:
    """Each step draws its budget and less than a sequence more: a place elsewhere is of no run."""
    sampler = TokenBudgetSampler([9, 10, 8, 10, 9, 10], 20)
    saved = sampler.saved(2)
    sampler.check_saved(saved)
    with pytest.raises(CheckpointError, match=r"saved place.*use another tag"):
        sampler.check_saved({**saved, **change})


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(0, 300))
def test_a_step_whose_place_is_not_known_begins_where_it_could(lengths: list[int], step: int) -> None:
    sampler = TokenBudgetSampler(lengths, max(1, sum(lengths) // 2))
    sampler.begin_at(step)
    saved = sampler.saved(step)
    sampler.check_saved(saved)
    assert saved["step"] == step
    assert step > 0 or saved == TokenBudgetSampler(lengths, max(1, sum(lengths) // 2)).saved(0)
    assert sampler.batch(step)


@given(jobs(), st.integers(0, 5), st.integers(0, 7))
def test_pairs_of_steps_are_sorted_and_hold_each_sequence_once(
    job: tuple[list[int], int], seed: int, stop: int
) -> None:
    """Each pair has the sequences that were drawn for it, none twice in a step; a run that stops anywhere goes on."""
    lengths, budget = job
    plain, pairs = (TokenBudgetSampler(lengths, budget, seed) for _ in range(2))
    reordered = SortedPairs(pairs)
    for first in range(0, 8, 2):
        drawn = [plain.batch(first), plain.batch(first + 1)]
        made = [reordered.batch(first), reordered.batch(first + 1)]
        assert sorted(sum(made, ())) == sorted(sum(drawn, ()))
        assert all(len(set(ids)) == len(ids) > 0 for ids in made)
        tokens = [reordered.batch_lengths(first), reordered.batch_lengths(first + 1)]
        assert tokens == [tuple(lengths[i] for i in ids) for ids in made]
        if set(drawn[0]) & set(drawn[1]):
            assert made == drawn
            continue
        both = tokens[0] + tokens[1]
        assert list(both) == sorted(both, reverse=True)
        assert abs(sum(tokens[0]) - sum(tokens[1])) <= max(tokens[0][-1], tokens[1][0])
    saved = json.loads(json.dumps(reordered.saved(stop)))
    again = SortedPairs(TokenBudgetSampler(lengths, budget, seed))
    again.check_saved(saved)
    again.restore(saved)
    assert saved["step"] == stop
    assert json.loads(json.dumps(again.saved(stop))) == saved
    assert [again.batch(step) for step in range(stop, stop + 4)] == [
        reordered.batch(step) for step in range(stop, stop + 4)
    ]


def test_a_pair_is_cut_nearest_to_its_middle() -> None:
    tokens = dict(enumerate([6, 1, 2, 3, 1, 5, 2, 4]))
    assert [list(half.values()) for half in cut_in_two(tokens)] == [[6, 5], [4, 3, 2, 2, 1, 1]]
    assert [list(half) for half in cut_in_two(tokens)] == [[0, 5], [7, 3, 2, 6, 1, 4]]
    assert cut_in_two({3: 1, 8: 90}) == ({8: 90}, {3: 1})


def test_a_place_with_pairs_and_one_without_are_told_apart() -> None:
    def plain() -> TokenBudgetSampler:
        return TokenBudgetSampler([5, 6, 7, 8, 9], 10)

    pairs = SortedPairs(plain())
    with pytest.raises(ConfigError, match=r"without hydra.reorder_steps.*remove the setting"):
        pairs.check_saved(plain().saved(3))
    with pytest.raises(ConfigError, match=r"with hydra.reorder_steps 2.*set it again"):
        plain().check_saved(pairs.saved(3))
    for change in ({"reorder_steps": 3}, {"step": "3"}, {"epoch": 9}, {"step": 2**61}):
        with pytest.raises(CheckpointError, match=r"saved place.*use another tag"):
            pairs.check_saved({**pairs.saved(3), **change})
    pairs.begin_at(5)
    assert pairs.saved(5)["step"] == 5
    assert pairs.ready(4)
    assert not pairs.ready(3)
    assert pairs.batch(5)
