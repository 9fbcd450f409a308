"""Sequences and the sampler: the order is global and reproducible, labels are shifted, nothing goes uncounted."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from ds_hydra.data.columns import IGNORE_INDEX
from ds_hydra.data.sequences import SequenceData
from ds_hydra.data.tokens import LeftOut
from ds_hydra.zero_hetero.errors import ConfigError


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
    ids, labels, *_ = data.load_sequence(0)
    assert ids.tolist() == [5, 6, 7]
    assert labels.tolist() == [6, 7, IGNORE_INDEX]


def test_users_labels_are_shifted_and_padding_is_taken_out() -> None:
    item = {"input_ids": [3, 4, 5, 0], "labels": [IGNORE_INDEX, 4, 5, IGNORE_INDEX], "attention_mask": [1, 1, 1, 0]}
    data = SequenceData([item])
    ids, labels, *_ = data.load_sequence(0)
    assert ids.tolist() == [3, 4, 5]
    assert labels.tolist() == [4, 5, IGNORE_INDEX]
    prompt = {"input_ids": [3, 4, 5], "labels": [IGNORE_INDEX, IGNORE_INDEX, 5]}
    assert SequenceData([prompt]).load_sequence(0)[1].tolist() == [IGNORE_INDEX, 5, IGNORE_INDEX]


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
def test_masked_positions_are_not_learnt(name: str) -> None:
    item = {"input_ids": [3, 4, 5, 6], name: [0, 0, 1, 1]}
    assert SequenceData([item]).load_sequence(0)[1].tolist() == [IGNORE_INDEX, 5, 6, IGNORE_INDEX]
    labelled = item | {"labels": [3, 4, IGNORE_INDEX, 7]}
    assert SequenceData([labelled]).load_sequence(0)[1].tolist() == [IGNORE_INDEX, IGNORE_INDEX, 7, IGNORE_INDEX]
    both = {"input_ids": [3, 4, 5, 6], "completion_mask": [0, 1, 1, 1], "assistant_masks": [0, 1, 0, 1]}
    assert SequenceData([both]).load_sequence(0)[1].tolist() == [4, IGNORE_INDEX, 6, IGNORE_INDEX]


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


def test_data_without_length_or_index() -> None:
    with pytest.raises(ConfigError, match="map-style"):
        SequenceData(iter([[1, 2]]))


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
