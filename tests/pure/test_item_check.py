"""What an item must not hold, for any model or for the one that is trained; what is said of it once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds_hydra.data.columns import IGNORE_INDEX, read_item
from ds_hydra.data.item_check import ItemCheck, ModelInput
from ds_hydra.data.sequences import SequenceData
from ds_hydra.data.share import read_share
from ds_hydra.data.tokens import Limits
from ds_hydra.zero_hetero.errors import ConfigError

TOKENS = list(range(20, 30))
TYPED = ModelInput(frozenset({"token_type_ids", "langs", "lengths"}), zero_types=True)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([1, 1, 0, 0, 1, 1, 1, 1, 1, 1], "item 7 .* attention_mask is 0 at token 2, between tokens of one sequence"),
        ([0, 1, 1, 1, 1, 1, 1, 1, 0, 1], "0 at token 8"),
        ([1, 1, 0, 1, 1, 2, 2, 2, 2, 2], "0 at token 2"),
        ([0] * 7 + [-10000] * 3, "attention_mask has -10000 at token 7"),
        ([1] * 5 + [3] * 5, "has 3 at token 5"),
        ([1, 1, 1, 2, 2, 2, 1, 1, 1, 1], "has 1 at token 6"),
        ([2] * 10, "has 2 at token 0"),
        ([0] * 10, "is 0 at all of its 10 tokens"),
        ([1.0] * 10, "whole numbers, but has shape"),
        ([[[1] * 10] * 10], "whole numbers, but has shape"),
    ],
)
def test_masks_that_are_none_of_padding_are_refused(mask: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_item({"input_ids": TOKENS, "attention_mask": mask}, 7)


@pytest.mark.parametrize(
    ("columns", "lengths"),
    [
        ({"attention_mask": [0, 0, 1, 1, 1, 1, 1, 1, 1, 0]}, (7,)),
        ({"attention_mask": [1, 1, 1, 0, 0, 2, 2, 0, 0, 0]}, (3, 2)),
        ({"attention_mask": [1, 1, 0, 0, 1, 1, 1, 0, 0, 0], "position_ids": [0, 1, 0, 0, 0, 1, 2, 0, 0, 0]}, (2, 3)),
        ({"attention_mask": [1, 1, 0, 0, 1, 1, 1, 0, 0, 0], "seq_lengths": [2, 3]}, (2, 3)),
        ({"attention_mask": [True] * 10}, (10,)),
        ({"attention_mask": [0] * 10, "labels": [IGNORE_INDEX] * 10}, (0,)),
    ],
)
def test_padding_lies_before_behind_and_between_sequences(columns: dict[str, Any], lengths: tuple[int, ...]) -> None:
    read = read_item({"input_ids": TOKENS} | columns, 0)
    assert read.lengths == lengths
    kept = np.asarray(columns["attention_mask"]) != 0
    assert read.input_ids.tolist() == np.asarray(TOKENS)[kept].tolist()


def check(inputs: ModelInput, **columns: Any) -> list[str]:
    item = {"input_ids": TOKENS} | columns
    return ItemCheck(inputs).check(item, read_item(item, 3), 3)


@pytest.mark.parametrize(
    ("inputs", "columns", "words"),
    [
        (TYPED, {"token_type_ids": [0] * 9 + [1]}, "item 3 .* token_type_ids has 1 at token 9, and the model"),
        (TYPED._replace(zero_types=False), {"token_type_ids": [0] * 10}, "token_type_ids has 0 at token 0"),
        (TYPED, {"langs": [4] * 10}, "'langs', which the model's forward takes"),
        (TYPED, {"lengths": 10}, "'lengths', which the model's forward takes"),
        (ModelInput(), {"segment_ids": [4] * 10}, "'segment_ids', which looks like a mask"),
        (ModelInput(counts_padding=True), {"attention_mask": [0] * 2 + [1] * 8}, "has 2 tokens of padding before its"),
        (ModelInput(first_position=2), {"position_ids": list(range(10))}, "from 2 on: take the column out"),
    ],
)
def test_columns_that_the_model_would_use_are_refused(inputs: ModelInput, columns: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(inputs, **columns)


def test_padding_behind_or_with_positions_is_right_for_every_model() -> None:
    counting = ModelInput(counts_padding=True)
    assert check(counting, attention_mask=[1] * 8 + [0] * 2) == []
    assert check(counting, attention_mask=[0] * 2 + [1] * 8, position_ids=[1, 1, *range(8)]) == []


def test_columns_that_it_would_not_are_named_once() -> None:
    assert check(TYPED, token_type_ids=[0] * 10) == check(ModelInput(), token_type_ids=[1] * 10)
    assert check(TYPED, langs=None) == []
    seen = ItemCheck()
    item = {"input_ids": TOKENS, "langs": [4] * 10, "source": "web"}
    assert seen.check(item, read_item(item, 0), 0) == [
        "items of the data also hold langs, source, which training does not read"
    ]
    assert seen.check(item, read_item(item, 1), 1) == []


def test_each_item_is_looked_at_though_the_first_was_right() -> None:
    items = [{"input_ids": TOKENS, "token_type_ids": [kind] * 10} for kind in (0, 1)]
    with pytest.raises(ConfigError, match="item 1 of the data: token_type_ids has 1"):
        read_share(items, Limits(inputs=TYPED))
    with pytest.raises(ConfigError, match="item 1 of the data: token_type_ids has 1"):
        SequenceData(items, inputs=TYPED).load_sequence(1)


def test_tokens_that_a_model_does_not_count_are_refused() -> None:
    limits = Limits(inputs=ModelInput(uncounted=(25,)))
    with pytest.raises(ConfigError, match="item 1 of the data holds the token 25 at position 5, which the model does"):
        read_share([TOKENS[:5], TOKENS], limits)
    padded = {"input_ids": [20, 21, 25, 25], "attention_mask": [1, 1, 0, 0]}
    assert len(read_share([padded], limits).sequences) == 1


@pytest.mark.parametrize(("shift", "words"), [(1, "the one after the next"), (-1, "predict itself")])
def test_labels_that_are_shifted_already_are_told_once(shift: int, words: str) -> None:
    tokens = np.arange(3, 33)
    items = [{"input_ids": tokens + n, "labels": tokens + n + shift} for n in range(4)]
    prompts = [item | {"labels": np.where(tokens < 20, IGNORE_INDEX, item["labels"])} for item in items]
    for data, told_in in ((items, 1), (prompts, 2)):
        seen = ItemCheck()
        told = [seen.check(item, read_item(item, n), n) for n, item in enumerate(data)]
        assert [len(lines) for lines in told] == [int(n == told_in) for n in range(4)]
        assert words in told[told_in][0]


def test_labels_that_are_not_shifted_are_right() -> None:
    same = [{"input_ids": [5] * 60, "labels": [5] * 60}, {"input_ids": list(range(60)), "labels": list(range(60))}]
    noise = {"input_ids": list(range(60)), "labels": list(range(60, 0, -1))}
    for item in (*same, noise):
        assert ItemCheck().check(item, read_item(item, 0), 0) == []
    padded = {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": [1] * 8 + [0] * 2}
    (line,) = ItemCheck().check(padded, read_item(padded, 0), 0)
    assert "labels at padding" in line


def test_labels_of_first_tokens_behind_another_sequence_are_told_once() -> None:
    packed = {"input_ids": TOKENS, "labels": TOKENS, "seq_lengths": [4, 6]}
    check = ItemCheck()
    (line,) = check.check(packed, read_item(packed, 0), 0)
    assert "first token of a sequence, behind another sequence: it is not learnt" in line
    assert check.check(packed, read_item(packed, 1), 1) == []
    right = packed | {"labels": [IGNORE_INDEX if at == 4 else one for at, one in enumerate(TOKENS)]}
    assert ItemCheck().check(right, read_item(right, 0), 0) == []


def test_a_label_of_the_first_token_behind_padding_is_refused() -> None:
    item = {"input_ids": TOKENS, "labels": [IGNORE_INDEX] * 2 + TOKENS[2:], "attention_mask": [0] * 2 + [1] * 8}
    with pytest.raises(ConfigError, match=r"item 3 of the data begins with 2 tokens of padding, .*pad at the end"):
        read_item(item, 3)
    item["labels"][2] = IGNORE_INDEX
    assert ItemCheck().check(item, read_item(item, 0), 0) == []
