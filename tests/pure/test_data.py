"""Sequences and the sampler: the order is global and reproducible, labels are shifted, nothing goes uncounted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.data.sampler import StepLoader, TokenBudgetSampler
from ds_hydra.data.sequences import IGNORE_INDEX, SequenceData
from ds_hydra.zero_hetero.errors import ConfigError

LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(any)


class Items(list[Any]):
    """A dataset that counts what is read of it, with lengths of its own if given."""

    def __init__(self, items: list[Any], lengths: Any = None) -> None:
        super().__init__(items)
        self.num_reads = 0
        if lengths is not None:
            self.lengths = lengths

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)


def test_labels_are_the_next_tokens_of_the_same_sequence() -> None:
    data = SequenceData([[5, 6, 7], [8, 9]], vocab_size=10)
    ids, labels = data.load_sequence(0)
    assert ids.tolist() == [5, 6, 7]
    assert labels.tolist() == [6, 7, IGNORE_INDEX]


def test_users_labels_are_shifted_and_padding_is_taken_out() -> None:
    item = {"input_ids": [3, 4, 5, 0], "labels": [IGNORE_INDEX, 4, 5, IGNORE_INDEX], "attention_mask": [1, 1, 1, 0]}
    data = SequenceData([item])
    ids, labels = data.load_sequence(0)
    assert ids.tolist() == [3, 4, 5]
    assert labels.tolist() == [4, 5, IGNORE_INDEX]
    prompt = {"input_ids": [3, 4, 5], "labels": [IGNORE_INDEX, IGNORE_INDEX, 5]}
    assert SequenceData([prompt]).load_sequence(0)[1].tolist() == [IGNORE_INDEX, 5, IGNORE_INDEX]


def test_truncate_and_skip_are_counted() -> None:
    items = [list(range(n)) for n in (5, 30, 1, 0, 12)]
    cut = SequenceData(items, context_length=10, too_long="truncate")
    assert cut.lengths.tolist() == [5, 10, 0, 0, 10]
    assert (cut.counts.num_truncated, cut.counts.num_tokens_cut, cut.counts.num_without_target) == (2, 22, 2)
    ids, labels = cut.load_sequence(1)
    assert (len(ids), labels[-1], labels[-2]) == (10, IGNORE_INDEX, 9)
    skipped = SequenceData(items, context_length=10, too_long="skip")
    assert skipped.lengths.tolist() == [5, 0, 0, 0, 0]
    assert (skipped.counts.num_skipped, skipped.counts.num_used, skipped.counts.num_tokens_cut) == (2, 1, 42)
    assert "2 skipped as too long" in str(skipped.counts)


@pytest.mark.parametrize(
    ("items", "options", "words"),
    [
        ([], {}, ["empty"]),
        ([[1]], {}, ["no sequence is left"]),
        ([[1, 2, 3]], {"context_length": 2}, ["1 of 1", "context_length 2", "sequence 0 has 3", "truncate"]),
        ([[1, 2, 3]], {"context_length": 2, "too_long": "skip"}, ["no sequence is left", "1 skipped"]),
        ([[1.5, 2.0]], {}, ["sequence 0", "whole numbers", "float64"]),
        ([[[1, 2], [3, 4]]], {}, ["sequence 0", "one-dimensional", "(2, 2)"]),
        ([{"text": "x"}], {}, ["sequence 0", "'text'", "input_ids"]),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, ["sequence 0", "2 input_ids, 1 labels"]),
    ],
)
def test_bad_data_are_refused(items: list[Any], options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        SequenceData(items, **options)
    assert all(word in str(error.value) for word in words), error.value


def test_data_without_length_or_index() -> None:
    with pytest.raises(ConfigError, match="map-style"):
        SequenceData(iter([[1, 2]]))


@pytest.mark.parametrize("tokens", [[1, 99, 3], [1, -2, 3]])
def test_token_outside_the_vocabulary_names_sequence_token_and_vocabulary(tokens: list[int]) -> None:
    data = SequenceData([[1, 2], tokens], vocab_size=50)
    with pytest.raises(ConfigError, match=rf"sequence 1 .* id {tokens[1]}, .*vocabulary of 50"):
        data.load_sequence(1)


def test_known_lengths_spare_the_scan_and_are_checked() -> None:
    items = Items([[1, 2, 3], [1, 2]], lengths=[3, 3])
    data = SequenceData(items)
    assert items.num_reads == 0
    data.load_sequence(0)
    assert items.num_reads == 1
    with pytest.raises(ConfigError, match=r"sequence 1 has 2 tokens but .* 3"):
        data.load_sequence(1)
    for lengths in ([3], [3, -1], [3.0, 2.0]):
        with pytest.raises(ConfigError, match=r"dataset\.lengths"):
            SequenceData(Items([[1, 2, 3], [1, 2]], lengths=lengths))


@given(LENGTHS, st.integers(1, 200), st.integers(0, 5))
def test_every_epoch_draws_each_usable_sequence_once(lengths: list[int], budget: int, seed: int) -> None:
    sampler = TokenBudgetSampler(lengths, budget, seed)
    usable = {i for i, length in enumerate(lengths) if length}
    drawn: list[int] = []
    step = 0
    while len(drawn) < 3 * len(usable):
        drawn += sampler.batch(step)
        step += 1
    for epoch in range(3):
        assert sorted(drawn[epoch * len(usable) : (epoch + 1) * len(usable)]) == sorted(usable)


@given(LENGTHS, st.integers(1, 200), st.integers(0, 5))
def test_a_step_ends_with_the_sequence_that_reaches_the_budget(lengths: list[int], budget: int, seed: int) -> None:
    sampler = TokenBudgetSampler(lengths, budget, seed)
    for step in range(4):
        tokens = sampler.batch_lengths(step)
        assert sum(tokens) >= budget > sum(tokens[:-1])


@given(LENGTHS, st.integers(1, 200), st.integers(0, 6), st.integers(0, 6))
def test_a_saved_cursor_goes_on_where_it_was(lengths: list[int], budget: int, stop: int, further: int) -> None:
    whole = TokenBudgetSampler(lengths, budget, seed=1)
    resumed = TokenBudgetSampler(lengths, budget, seed=1, cursor=whole.cursor(stop))
    again = TokenBudgetSampler(lengths, budget, seed=1, cursor=resumed.cursor(stop + further))
    assert resumed.batch(stop + further) == whole.batch(stop + further) == again.batch(stop + further)


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
    with pytest.raises(ConfigError, match="none of 2 sequences"):
        TokenBudgetSampler([0, 0], 8)


def test_loader_counts_the_steps_of_an_epoch() -> None:
    sampler = TokenBudgetSampler([10] * 8, 20)
    loader = StepLoader(sampler, lambda: 4)
    assert len(loader) == 4
    assert list(loader) == [sampler.batch(step) for step in range(4, 8)]
