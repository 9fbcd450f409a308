"""Sequences, samplers and streams: what each step draws, in which order, and where a job goes on."""

from __future__ import annotations

import copy
import json
import math
import random
import time
import weakref
from collections import OrderedDict, deque
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.data.columns import IGNORE_INDEX
from ds_hydra.data.sampler import DataCursor, SortedPairs, StepLoader, TokenBudgetSampler, cut_in_two
from ds_hydra.data.sequences import SequenceData
from ds_hydra.data.stream import StreamSampler, StreamSteps, is_stream, state_from_json, state_to_json
from ds_hydra.data.tokens import LeftOut, Limits
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError
from tests.support.small_job import REAL_STREAMS, STREAMS, Plain, Stateful, WithEpoch


# --- Sequences and the sampler: the order is global and reproducible, labels are shifted, nothing goes
# uncounted.
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


NONE = IGNORE_INDEX
FOUR = {"input_ids": [3, 4, 5, 6]}


@pytest.mark.parametrize(
    ("item", "ids", "labels"),
    [
        ([5, 6, 7], [5, 6, 7], [6, 7, NONE]),
        ({"input_ids": [3, 4, 5, 0], "labels": [NONE, 4, 5, NONE], "attention_mask": [1, 1, 1, 0]}, [3, 4, 5],
         [4, 5, NONE]),
        ({"input_ids": [3, 4, 5], "labels": [NONE, NONE, 5]}, [3, 4, 5], [NONE, 5, NONE]),
        (FOUR | {"completion_mask": [0, 0, 1, 1]}, [3, 4, 5, 6], [NONE, 5, 6, NONE]),
        (FOUR | {"assistant_masks": [0, 0, 1, 1]}, [3, 4, 5, 6], [NONE, 5, 6, NONE]),
        (FOUR | {"completion_mask": [0, 0, 1, 1], "labels": [3, 4, NONE, 7]}, [3, 4, 5, 6], [NONE, NONE, 7, NONE]),
        (FOUR | {"completion_mask": [0, 1, 1, 1], "assistant_masks": [0, 1, 0, 1]}, [3, 4, 5, 6], [4, NONE, 6, NONE]),
    ],
)  # fmt: skip
def test_labels_are_shifted_within_a_sequence_and_padding_is_taken_out(
    item: Any, ids: list[int], labels: list[int]
) -> None:
    found = SequenceData([item, [8, 9]], vocab_size=10).load_sequence(0)
    assert (found.input_ids.tolist(), found.labels.tolist()) == (ids, labels)


@pytest.mark.parametrize(
    "columns",
    [
        {"seq_lengths": [3, 2]},
        {"position_ids": [0, 1, 2, 0, 1]},
        {"attention_mask": [1, 1, 1, 2, 2]},
        {"seq_lengths": [3, 2], "position_ids": [0, 1, 2, 0, 1], "attention_mask": [1] * 5},
    ],
)
@pytest.mark.parametrize("padding", [0, 2])
def test_packed_items_are_cut_into_their_sequences(columns: dict[str, list[int]], padding: int) -> None:
    """Two sequences in the second of three items, whose masks and labels are cut with them."""
    mask = columns.get("attention_mask", [1] * 5) + [0] * padding
    columns = {name: values + ([0] * padding if name == "position_ids" else []) for name, values in columns.items()}
    packed = columns | {"input_ids": [5, 6, 7, 8, 9] + [0] * padding, "attention_mask": mask}
    packed["completion_mask"] = [0, 1, 1, 1, 1] + [0] * padding
    data = SequenceData([{"input_ids": [1, 2]}, packed, {"input_ids": [3, 4, 5]}])
    assert data.lengths.tolist() == [2, 3, 2, 3]
    assert len(data) == 4
    assert [data.load_sequence(i)[0].tolist() for i in range(4)] == [[1, 2], [5, 6, 7], [8, 9], [3, 4, 5]]
    assert [data.load_sequence(i)[1].tolist() for i in (1, 2)] == [[6, 7, IGNORE_INDEX], [9, IGNORE_INDEX]]
    assert "4 of 4 sequences used, 10 tokens, packed in 3 items" in str(data.counts)
    assert SequenceData([packed], context_length=2, too_long="truncate").lengths.tolist() == [2, 2]


def test_packed_items_are_read_though_lengths_are_given() -> None:
    packed = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}
    assert SequenceData(Items([packed], lengths=[5])).lengths.tolist() == [3, 2]
    with pytest.raises(ConfigError, match=r"item 0 .* 5 tokens .* length as 4"):
        SequenceData(Items([packed], lengths=[4]))
    late = SequenceData(Items([{"input_ids": [1, 2]}, packed], lengths=[2, 5]))
    with pytest.raises(ConfigError, match=r"item 1 .* 2 packed sequences, but 1 .* the same columns"):
        late.load_sequence(1)


class Columns(Items):
    """As `datasets` has it: a name gives a column."""

    column_names = ("input_ids", "length")

    def __getitem__(self, index: Any) -> Any:
        return [item["length"] for item in self] if index == "length" else super().__getitem__(index)


def test_a_length_column_spares_reading_every_item() -> None:
    data = Columns([{"input_ids": [1] * length, "length": length} for length in (5, 3, 9)])
    assert SequenceData(data).lengths.tolist() == [5, 3, 9]
    assert data.num_reads < 3
    data[0]["length"] = 20  # characters, say
    with pytest.raises(ConfigError, match=r"item 0 .* 5 tokens .* length as 20.* column 'length'"):
        SequenceData(data)


def test_columns_without_effect_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    item = {"input_ids": [1, 2], "token_type_ids": [0, 0], "special_tokens_mask": [1, 0], "source": "web", "id": 3}
    data = SequenceData([item] * 3)
    data.load_sequence(0)
    assert [record.getMessage() for record in caplog.records] == [
        "items of the data also hold id, source, special_tokens_mask, token_type_ids, which training does not read"
    ]


def test_truncate_and_skip_are_counted() -> None:
    items = [list(range(n)) for n in (5, 30, 1, 0, 12)]
    cut = SequenceData(items, context_length=10, too_long="truncate")
    assert cut.lengths.tolist() == [5, 10, 0, 0, 10]
    assert cut.counts.left_out == LeftOut(truncated=2, short=2, tokens=22)
    ids, labels, *_ = cut.load_sequence(1)
    assert (len(ids), labels[-1], labels[-2]) == (10, IGNORE_INDEX, 9)
    skipped = SequenceData(items, context_length=10, too_long="skip")
    assert skipped.lengths.tolist() == [5, 0, 0, 0, 0]
    assert (skipped.counts.num_used, skipped.counts.left_out) == (1, LeftOut(skipped=2, short=2, tokens=42))
    assert "2 skipped as too long" in str(skipped.counts)


@pytest.mark.parametrize(
    ("items", "options", "words"),
    [
        ([], {}, ["empty"]),
        (iter([[1, 2]]), {}, ["map-style"]),
        ([[1]], {}, ["no sequence is left"]),
        ([[1, 2, 3]], {"context_length": 2}, ["1 of 1", "context_length 2", "sequence 0 has 3", "truncate"]),
        ([[1, 2, 3]], {"context_length": 2, "too_long": "skip"}, ["no sequence is left", "1 skipped"]),
        ([[1, 2], [1, 2, 3]], {"max_positions": 2}, ["sequence 1 has 3", "2 positions", "hydra.context_length"]),
        ([[1, 2]], {"context_length": 8, "max_positions": 4}, ["hydra.context_length 8", "4 positions", "at most 4"]),
        ([[1.5, 2.0]], {}, ["item 0", "whole numbers", "float64", "token ids"]),
        ([[[1, 2], [3, 4]]], {}, ["item 0", "one-dimensional", "(2, 2)", "one sequence an item"]),
        ([{"text": "x"}], {}, ["item 0", "'text'", "input_ids", "tokenizer"]),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, ["item 0", "2 input_ids but 1 entries in 'labels'"]),
        ([{"input_ids": [1, 2], "completion_mask": [1]}], {}, ["2 input_ids but 1 entries in 'completion_mask'"]),
        ([{"input_ids": [1, 2], "loss_mask": [0, 1]}], {}, ["'loss_mask'", "looks like a mask", "completion_mask"]),
        ([{"input_ids": [1, 2], "is_answer": [0, 1]}], {}, ["'is_answer'", "looks like a mask", "-100"]),
        ([{"input_ids": [1, 2], "loss_weights": [0.5, 2.0]}], {}, ["'loss_weights'", "remove it"]),
        ([{"input_ids": [1, 2], "document_ids": [0, 2]}], {}, ["'document_ids'", "seq_lengths"]),
        ([{"input_ids": [1, 2, 3], "seq_lengths": [2, 2]}], {}, ["seq_lengths 2, 2", "add up to its 3 tokens"]),
        ([{"input_ids": [1, 2, 3], "seq_lengths": [3, 0]}], {}, ["seq_lengths 3, 0", "at least 1"]),
        ([{"input_ids": [1, 2, 3], "position_ids": [0, 1, 5]}], {}, ["has 5 at token 2", "only 2", "seq_lengths"]),
        ([{"input_ids": [1, 2, 3], "position_ids": [4, 5, 6]}], {}, ["has 4 at token 0", "only 0"]),
        (
            [{"input_ids": [1, 2, 3], "position_ids": [0, 0, 1], "seq_lengths": [2, 1]}],
            {},
            ["1, 2 tokens by position_ids", "2, 1 by seq_lengths"],
        ),
        ({"input_ids": [[1, 2]], "labels": [[1, 2]]}, {}, ["'input_ids', 'labels'", "not a collated batch"]),
    ],
)
def test_bad_data_are_refused(items: Any, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        SequenceData(items, **options)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("tokens", [[1, 99, 3], [1, -2, 3]])
def test_token_outside_the_vocabulary_names_sequence_token_and_vocabulary(tokens: list[int]) -> None:
    data = SequenceData([[1, 2], tokens], vocab_size=50)
    with pytest.raises(ConfigError, match=rf"sequence 1 .* id {tokens[1]}, .*vocabulary of 50"):
        data.load_sequence(1)


def test_a_sequence_is_kept_only_while_a_coming_step_is_read() -> None:
    data = SequenceData([[5, 6, 7], [8, 9]])
    before = weakref.ref(data.load_sequence(0).input_ids)
    data.unchanged.begin()
    coming = weakref.ref(data.load_sequence(0).input_ids)
    assert before() is None
    assert coming() is not None
    data.unchanged.keep()
    data.check_unchanged(1)
    after = weakref.ref(data.load_sequence(1).input_ids)
    assert coming() is None
    assert after() is None


def test_known_lengths_spare_the_scan_and_are_checked() -> None:
    items = Items([[1, 2, 3], [1, 2]], lengths=[3, 3])
    data = SequenceData(items)
    before = items.num_reads
    assert before <= 2, "only the first item is looked at"
    data.load_sequence(0)
    assert items.num_reads == before + 1
    with pytest.raises(ConfigError, match=r"sequence 1 has 2 tokens but .* 3: correct dataset\.lengths"):
        data.load_sequence(1)
    for lengths in ([3], [3, -1], [3.0, 2.0]):
        with pytest.raises(ConfigError, match=r"dataset\.lengths"):
            SequenceData(Items([[1, 2, 3], [1, 2]], lengths=lengths))


# --- Which sequences each step draws, in which order, and where a job goes on.
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


# --- Steps of a stream: whole items in order, pass after pass, and places from which the rest follows exactly.
LIMITS = Limits(context_length=20, too_long="skip")
ITEMS = [[number] * length for number, length in enumerate((4, 5, 7, 3, 1, 8, 30, 2, 6, 4, 9))]


def sampler_of(stream: Any, budget: int = 10, ahead: int = 2) -> StreamSampler:
    return StreamSampler(stream, budget, LIMITS, ahead, reads=True)


def firsts(sampler: StreamSampler, steps: range) -> list[list[int]]:
    """The items of each step, by their tokens."""
    return [[int(one.input_ids[0]) for one in sampler.taken(step).values()] for step in steps]


def test_a_step_takes_whole_items_until_it_has_its_tokens() -> None:
    sampler = sampler_of(Plain([[1] * 4, [2] * 5, [3] * 7, [4] * 3]))
    assert firsts(sampler, range(3)) == [[1, 2, 3], [4, 1, 2], [3, 4]]
    assert [sampler.batch(2), sampler.batch_lengths(2)] == [(6, 7), (7, 3)]
    sampler.close()


def test_what_is_left_out_is_told_and_costs_no_step(caplog: pytest.LogCaptureFixture) -> None:
    sampler = sampler_of(Plain(ITEMS))
    assert firsts(sampler, range(3)) == [[0, 1, 2], [3, 5], [7, 8, 9]]
    assert "1 skipped as too long, 1 of fewer than two tokens" in caplog.text
    sampler.close()


@pytest.mark.drawn
@pytest.mark.parametrize("kind", [*STREAMS, *REAL_STREAMS])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_place_is_where_the_step_begins_however_far_was_read(kind: Any, ahead: int) -> None:
    whole = sampler_of(kind(ITEMS), ahead=ahead)
    expected, places, ids = [], [], []
    for step in range(9):
        places.append(json.loads(json.dumps(whole.saved(step))))
        ids.append(whole.batch(step))
        expected += firsts(whole, range(step, step + 1))
    whole.close()
    assert len(set(map(tuple, expected))) > 3
    for begin in range(9):
        stream = kind(ITEMS)
        again = sampler_of(stream, ahead=ahead)
        again.check_saved(places[begin])
        again.restore(places[begin])
        assert json.loads(json.dumps(again.saved(begin))) == places[begin]
        assert firsts(again, range(begin, 9)) == expected[begin:]
        assert again.batch(8) == ids[8]
        again.close()


def test_going_back_with_the_same_stream() -> None:
    for kind in STREAMS:
        sampler = sampler_of(kind(ITEMS))
        expected = firsts(sampler, range(2))
        place = sampler.saved(2)
        expected += firsts(sampler, range(2, 6))
        sampler.restore(place)
        assert firsts(sampler, range(2, 6)) == expected[2:], kind
        sampler.close()


def test_only_a_stream_without_state_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    for kind, again in ((Plain, True), (Stateful, False), (WithEpoch, False)):
        caplog.clear()
        sampler = sampler_of(kind(ITEMS), ahead=0)
        firsts(sampler, range(2))
        place = sampler.saved(2)
        stream = kind(ITEMS)
        restored = sampler_of(stream, ahead=0)
        restored.restore(place)
        firsts(restored, range(2, 3))
        assert (stream.reads > place["items"]) == again
        assert ("read again and passed over" in caplog.text) == again


def test_reading_stays_ahead_without_being_asked() -> None:
    stream = Plain(ITEMS)
    sampler = sampler_of(stream, ahead=2)
    sampler.batch(0)
    deadline = time.monotonic() + 10
    while not sampler.ready(2) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sampler.ready(2)
    assert not sampler.ready(3)
    sampler.close()


def test_streams_that_end_for_good() -> None:
    sampler = sampler_of(iter(ITEMS[:3]), ahead=0)
    sampler.batch(0)
    with pytest.raises(ConfigError, match="pass 2 over them gave no sequence"):
        sampler.batch(1)
    with pytest.raises(ConfigError, match="pass 1 over them gave no sequence of at least two tokens in 2 items"):
        sampler_of(Plain([[1], [2]]), ahead=0).batch(0)


def test_an_iterator_cannot_go_back_but_can_be_read_forward() -> None:
    sampler = sampler_of(iter(ITEMS), ahead=0)
    expected = firsts(sampler, range(3))
    place = sampler_of(iter(ITEMS), ahead=0)
    firsts(place, range(1))
    forward = sampler_of(iter(ITEMS), ahead=0)
    forward.restore(place.saved(1))
    assert firsts(forward, range(1, 3)) == expected[1:]
    sampler.restore(place.saved(1))
    with pytest.raises(ConfigError, match="an iterator, which cannot go back"):
        sampler.batch(1)


def test_places_of_other_data_are_refused() -> None:
    stateful, plain = sampler_of(Stateful(ITEMS), ahead=0), sampler_of(Plain(ITEMS), ahead=0)
    firsts(stateful, range(1))
    with pytest.raises(ConfigError, match=r"state_dict\(\) of the stream that it was saved with"):
        plain.check_saved(stateful.saved(1))
    mapped = TokenBudgetSampler([5, 6], 5)
    with pytest.raises(ConfigError, match="saved with map-style data"):
        plain.check_saved(mapped.saved(0))
    with pytest.raises(ConfigError, match="saved with a stream"):
        mapped.check_saved(plain.saved(0))
    shorter = sampler_of(Plain(ITEMS[:1]), ahead=0)
    firsts(plain, range(1))
    shorter.restore(plain.saved(1))
    with pytest.raises(ConfigError, match="ended after 1 items, but the checkpoint was saved after 3"):
        shorter.batch(1)


def test_what_a_stream_needs() -> None:
    with pytest.raises(ConfigError, match=r"need hydra\.context_length"):
        StreamSampler(Plain(ITEMS), 10, Limits(), 2, reads=True)
    split = Plain(ITEMS)
    split._distributed = type("Split", (), {"rank": 0, "world_size": 4})()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="split by node"):
        sampler_of(split)
    with pytest.raises(ConfigError, match=r"hydra\.total_steps"):
        len(StreamSteps(None, lambda: 0))
    assert list(StreamSteps(5, lambda: 3)) == [3, 4]


def test_what_counts_as_a_stream() -> None:
    numbers: Any = [1, 2]
    loader = torch.utils.data.DataLoader(numbers)
    assert all(map(is_stream, (iter([1]), Plain([]), Stateful([]), loader, {1, 2})))
    assert not any(map(is_stream, ([1], (1,), {"a": 1}, "text", torch.tensor([1]), 17, range(3))))


STATES: list[Any] = [
    {"at": 3, "seed": 2**127 + 1, "done": False, "name": "x", "none": None, "loss": math.inf},
    {1: ("a", (2, 3)), "!odd": {4, 5}, (1, 2): frozenset({"b"})},
    OrderedDict(b=1, a=[deque([1, 2]), b"\x00\xff"]),
    {"numpy": np.random.default_rng(1).bit_generator.state, "python": random.Random(1).getstate()},
    {"old": np.random.RandomState(1).get_state(), "scalar": np.float32(1.5), "big": np.arange(3, dtype=">i4")},
    {"tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(), "none": torch.empty(0, 2), "0": torch.tensor(7)},
]


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_a_state_keeps_its_types_as_json(state: Any) -> None:
    again = state_from_json(json.loads(json.dumps(state_to_json(state), allow_nan=False)))
    assert equal_trees(again, state)


def equal_trees(one: Any, other: Any) -> bool:
    """Equal values of equal types, tensors and arrays among them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal_trees(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(equal_trees, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype.name == other.dtype.name and np.array_equal(one, other)
    return bool(one == other)


class Named(NamedTuple):
    """What JSON would make a plain tuple of."""

    at: int


def itself() -> list[Any]:
    state: list[Any] = []
    state.append(state)
    return state


@pytest.mark.parametrize("state", [object(), Named(1), {"f": print}, torch.ones(1, requires_grad=True), itself()])
def test_a_state_that_json_cannot_hold_is_refused_at_the_first_step(state: Any) -> None:
    class Odd(Stateful):
        def state_dict(self) -> Any:
            return {"inner": state}

    with pytest.raises(ConfigError, match=r"cannot be saved: state_dict\(\)"):
        sampler_of(Odd(ITEMS), ahead=0).batch(0)
    lax = StreamSampler(Odd(ITEMS), 10, LIMITS, 0, reads=True, saves=False)
    firsts(lax, range(1))
    with pytest.raises(CheckpointError, match=r"cannot be saved: state_dict\(\)"):
        lax.saved(1)


@pytest.mark.parametrize(
    "change",
    [
        {"state": {"torch": "gASVAAAA"}}, {"state": {}}, {"state": 3}, {"state": {"json": {"!tensor": 1}}},
        {"state": {"json": {"!tensor": {"dtype": "int64", "shape": [3], "data": "AAAA"}}}},
        {"state": {"json": {"!object": []}}}, {"state": {"json": {"!tuple": [], "x": 1}}}, {"items": -1},
        {"sequences": 1.5}, {"passes": 2**61}, {"step": "1"},
    ],
)  # fmt: skip
def test_a_forged_place_is_refused_before_anything_moves(change: dict[str, Any]) -> None:
    sampler = sampler_of(Stateful(ITEMS), ahead=0)
    firsts(sampler, range(1))
    with pytest.raises((ConfigError, CheckpointError), match=r"tag|pickle"):
        sampler.check_saved({**sampler.saved(1), **change})
