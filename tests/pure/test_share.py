"""Whatever a script hands in is the same sequences; what cannot be trained on is refused with its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ds_hydra.data.columns import IGNORE_INDEX
from ds_hydra.data.share import read_share
from ds_hydra.data.tokens import LeftOut, Limits
from ds_hydra.engine.handed import Intake
from ds_hydra.zero_hetero.errors import ConfigError

LIMITS = Limits(vocab_size=50)
PADDED = {"input_ids": [[5, 6, 7], [8, 9, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]}
LEFT_PADDED = {"input_ids": np.array([[5, 6, 7], [0, 8, 9]]), "attention_mask": np.array([[1, 1, 1], [0, 1, 1]])}


@pytest.mark.parametrize(
    "handed",
    [
        [[5, 6, 7], [8, 9]],
        ((5, 6, 7), (8, 9)),
        [np.array([5, 6, 7]), torch.tensor([8, 9])],
        [{"input_ids": torch.tensor([5, 6, 7])}, {"input_ids": [8, 9], "labels": [8, 9]}],
        PADDED,
        LEFT_PADDED,
        {name: torch.tensor(values) for name, values in PADDED.items()},
        {"input_ids": [[5, 6, 7], [8, 9]], "labels": None},
        [{"input_ids": [[5, 6, 7]]}, [8, 9]],
        [torch.tensor([[5, 6, 7]]), [[8, 9]]],
        {"input_ids": [[5, 6, 7, 8, 9]], "position_ids": [[0, 1, 2, 0, 1]]},
        [{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}],
        {"input_ids": [[5, 6, 7, 8, 9]], "seq_idx": [[4, 4, 4, 5, 5]]},
        {"input_ids": [[5, 6, 7, 8, 9]], "cu_seq_lens_q": torch.tensor([0, 3, 5]), "max_length_q": 3},
        {"input_ids": [[5, 6, 7, 8, 9]], "cu_seqlens": np.array([0, 3, 3, 5]), "max_seqlen": torch.tensor(8)},
        {**PADDED, "cu_seq_lens_k": [0, 3, 5]},
        {**PADDED, "cu_seq_lens_k": [0, 3, 6]},
        {**PADDED, "cu_seq_lens_k": [0, 3, 5, 6]},
        [{"input_ids": [5, 6, 7, 8, 9], "cu_seq_lens_q": [0, 3, 5], "seq_idx": 7}],
    ],
)
def test_every_form_is_the_same_two_sequences(handed: Any) -> None:
    share = read_share(handed, LIMITS)
    assert [sequence.input_ids.tolist() for sequence in share.sequences] == [[5, 6, 7], [8, 9]]
    assert [sequence.labels.tolist() for sequence in share.sequences] == [[6, 7, IGNORE_INDEX], [9, IGNORE_INDEX]]
    assert (share.num_targets, share.left_out) == (3, LeftOut())


@pytest.mark.parametrize("handed", [[5, 6, 7], torch.tensor([5, 6, 7]), np.array([5, 6, 7]), {"input_ids": [5, 6, 7]}])
def test_one_sequence_needs_no_list(handed: Any) -> None:
    assert [sequence.input_ids.tolist() for sequence in read_share(handed, LIMITS).sequences] == [[5, 6, 7]]


@pytest.mark.parametrize("handed", [[], (), {"input_ids": torch.zeros(0, 4, dtype=torch.int64)}, [[]], [[], []]])
def test_a_share_may_be_empty(handed: Any) -> None:
    assert read_share(handed, LIMITS).sequences == ()


def test_labels_and_weights_belong_to_their_rows() -> None:
    batch = {"input_ids": [[5, 6, 7], [8, 9, 1]], "labels": [[-100, 6, 7], [8, -100, 1]], "sequence_weight": [2.0, 0.5]}
    share = read_share(batch, LIMITS)
    assert [sequence.labels.tolist() for sequence in share.sequences] == [[6, 7, -100], [-100, 1, -100]]
    assert [sequence.weight for sequence in share.sequences] == [2.0, 0.5]


def test_what_is_left_out_is_counted() -> None:
    items = [list(range(n)) for n in (5, 30, 1, 12)]
    cut = read_share(items, Limits(10, "truncate"))
    assert [len(sequence.input_ids) for sequence in cut.sequences] == [5, 10, 10]
    assert cut.left_out == LeftOut(truncated=2, short=1, tokens=22)
    skipped = read_share(items, Limits(10, "skip"))
    assert (len(skipped.sequences), skipped.left_out) == (1, LeftOut(skipped=2, short=1, tokens=42))
    assert cut.left_out + skipped.left_out == LeftOut(2, 2, 2, 64)


@pytest.mark.parametrize(
    ("handed", "limits", "words"),
    [
        ([[1, 2], [1, 2, 60]], LIMITS, ["item 1", "id 60", "vocabulary of 50"]),
        ([[1, 2], {"text": "x"}], LIMITS, ["item 1", "'text'", "input_ids"]),
        ([[1, 2], [1.5, 2.5]], LIMITS, ["item 1", "whole numbers"]),
        ([PADDED, [1, -2]], LIMITS, ["item 2", "id -2"]),
        ({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2]]}, LIMITS, ["2 rows of input_ids but 1", "'labels'"]),
        ({"input_ids": [[1, 2]], "num_items": torch.tensor(3)}, LIMITS, ["no rows of 'num_items'", "take the column"]),
        ([{"input_ids": [1, 2], "loss_mask": [0, 1]}], LIMITS, ["'loss_mask'", "looks like a mask"]),
        ([{"input_ids": [1, 2], "sequence_weight": float("nan")}], LIMITS, ["sequence_weight", "one finite number"]),
        ([[1] * 9], Limits(8), ["item 0", "9 tokens", "hydra.context_length 8", "truncate"]),
        ([[1] * 9], Limits(max_positions=8), ["item 0", "9 tokens", "8 positions"]),
        (
            {"input_ids": [[1, 2, 3]], "position_ids": [[0, 1, 0]], "cu_seq_lens_q": [0, 1, 3]},
            LIMITS,
            ["2, 1 tokens by position_ids", "1, 2 by cu_seq_lens_q"],
        ),
        ({"input_ids": [[1, 2], [3, 4]], "cu_seq_lens_q": [0, 3, 4]}, LIMITS, ["rows of 2, 2 tokens", "0, 3, 4"]),
        ({"input_ids": [[1, 2, 3]], "cu_seq_lens_q": [0, 2]}, LIMITS, ["rows of 3 tokens", "0, 2"]),
        ([{"input_ids": [1, 2, 3], "cu_seq_lens_q": [1, 3]}], LIMITS, ["1, 3 must count up from 0 to its 3 tokens"]),
        ({"input_ids": [[1, 2, 3]], "max_length_k": 2}, LIMITS, ["max_length_k 2", "a sequence of 3 tokens"]),
        (["text"], LIMITS, ["item 0", "whole numbers"]),
    ],
)
def test_bad_items_are_refused(handed: Any, limits: Limits, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read_share(handed, limits)
    assert all(word in str(error.value) for word in words), error.value


def test_iterators_and_loaders_give_their_next_share() -> None:
    intake = Intake()
    shares = iter([[1], [2]])
    assert [intake.take(shares), intake.take(shares), intake.take([3])] == [[1], [2], [3]]
    with pytest.raises(StopIteration):
        intake.take(shares)
    numbers: Any = [1, 2, 3]
    loader = torch.utils.data.DataLoader(numbers, batch_size=2)
    assert [intake.take(loader).tolist() for _ in range(3)] == [[1, 2], [3], [1, 2]]
    other = torch.utils.data.DataLoader(numbers[2:], batch_size=1)
    assert [intake.take(other).tolist(), intake.take(other).tolist()] == [[3], [3]]
    with pytest.raises(StopIteration):
        intake.take({1, 2} & {3})
