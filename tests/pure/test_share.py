"""What a script hands in: same sequences on all ranks, fields, what items must not hold; a loss before its step."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch

from ds_hydra.config.deepspeed_settings import screen_deepspeed_settings
from ds_hydra.data.columns import IGNORE_INDEX, ItemCheck, ModelInput, read_item
from ds_hydra.data.sequences import SequenceData, read_share
from ds_hydra.data.tokens import LeftOut, Limits, Reads
from ds_hydra.engine.steps import Intake
from ds_hydra.host.settings import batch_sizes
from ds_hydra.host.three_calls import Collected, PendingLoss, Term, ThreeCalls
from ds_hydra.losses import group_advantages
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, Span, StepPlan, joined
from ds_hydra.step.delivery import pieces_of
from ds_hydra.zero_hetero.errors import ConfigError

# --- Whatever a script hands in is the same sequences; what cannot be trained on is refused with its place.
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


# --- Fields of items: how they stand beside tokens, what is refused, and that they travel and come back with
# them.
def test_fields_stand_where_labels_do() -> None:
    """Padding goes, a packed item is cut, a number of a sequence is that of each of its tokens."""
    batch = {
        "input_ids": [[5, 6, 7, 8, 0], [3, 4, 9, 9, 9]],
        "attention_mask": [[1, 1, 1, 1, 0], [1, 1, 2, 2, 2]],
        "labels": [[-100, 6, 7, 8, 0], [3, 4, 9, 9, 9]],
        "advantages": torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5], [1, 2, 3, 4, 5]]).bfloat16(),
        "top": np.arange(20).reshape(2, 5, 2),
        "reward": [0.5, 2],
    }
    share = read_share(batch, Limits(), fields=Reads({"temperature": 0.7}))
    assert share.layout is not None
    assert [(one.name, one.width, one.whole) for one in share.layout.fields] == [
        ("advantages", 0, False), ("reward", 0, False), ("temperature", 0, False), ("top", 2, True),
    ]  # fmt: skip
    first, second, third = (sequence.fields for sequence in share.sequences)
    assert first is not None
    assert second is not None
    assert third is not None
    assert np.allclose(first[:, 0], [0.2, 0.3, 0.4, 0], atol=1e-2)
    assert first[:-1, 1:].tolist() == [[0.5, 0.7, 2, 3, 3], [0.5, 0.7, 4, 5, 3], [0.5, 0.7, 6, 7, 3]]
    assert second.tolist() == [[2, 2, 0.7, 12, 13, 1], [0, 0, 0, 0, 0, 1]]
    assert third[:, 0].tolist() == [4, 5, 0]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"advantages": [1.0]}, r"item 0 of the data has 3 input_ids, but the field 'advantages' has the shape \(1,\)"),
        ({"advantages": np.zeros((3, 2, 2))}, r"has the shape \(3, 2, 2\)"),
        ({"advantages": np.zeros((3, 0))}, r"has the shape \(3, 0\)"),
        ({"ids": [1, 2, 2**60]}, "holds 1152921504606846976 at token 2"),
        ({"loss": torch.ones(3, requires_grad=True)}, "is no array of numbers"),
        ({"temperature": [1.0, -1.0, 1.0]}, "temperature must be a positive number"),
        ({"sequence": 1}, "a name that losses are given something else by"),
    ],
)
def test_what_is_no_field_is_refused(columns: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_share([{"input_ids": [5, 6, 7]} | columns], Limits(), fields=Reads())


def test_only_named_columns_are_read_where_some_are_named() -> None:
    share = read_share([{"input_ids": [5, 6, 7], "text": "x", "temperature": 2}], Limits(),
                       fields=Reads(only=frozenset({"temperature"})))  # fmt: skip
    assert share.layout is not None
    assert [one.name for one in share.layout.fields] == ["temperature"]


def test_every_token_is_found_by_one_rank() -> None:
    """Slices, sequence parallel ranks, padding that ranks which share tokens need, and two phases."""
    shapes = [StrategyShape.parse("sp2tp2pp2"), StrategyShape.parse("tp2pp2 + 2*sp2")]
    lengths = (5, 3, 9, 1)
    rows: list[list[tuple[Span, ...]]] = [
        [(Span(0, 0, 5), Span(1, 0, 3)), (Span(2, 0, 4),), (Span(2, 4, 9), Span(3, 0, 1))]
    ]
    other: list[list[tuple[Span, ...]]] = [[(Span(0, 0, 5),)], [(Span(1, 0, 3),)], [(Span(2, 0, 9), Span(3, 0, 1))]]
    plans = [
        StepPlan(0, (0, 1, 2, 3), lengths, (Phase(tuple(
            PipelinePlan(pipeline, tuple(MicroBatchPlan(row) for row in of), 1.0)
            for pipeline, of in zip(shape.pipelines, found, strict=True))),), 1.0)
        for shape, found in zip(shapes, (rows, other), strict=True)
    ]  # fmt: skip
    whole = joined(plans)
    placed = [place_strategy(shape, 8, 4) for shape in shapes]
    seen = sorted(
        (piece.sequence, token)
        for pieces in pieces_of(whole, placed, 8, token_sharding=True)
        for piece in pieces
        for token in range(piece.start, piece.stop)
    )
    assert seen == [(number, token) for number, length in enumerate(2 * lengths) for token in range(length)]


def test_advantages_of_a_group_are_its_own() -> None:
    rewards = torch.tensor([1.0, 3.0, 5.0, 2.0], dtype=torch.float64)
    groups = torch.tensor([7, 7, 2, 7])
    assert torch.allclose(group_advantages(rewards, groups), torch.tensor([-1.0, 1.0, 0.0, 0.0]).double(), atol=1e-3)
    assert group_advantages(rewards, groups, scaled=False).tolist() == [-1.0, 1.0, 0.0, 0.0]


# --- What an item must not hold, for any model or for the one that is trained; what is said of it once.
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


def test_a_label_of_the_first_token_behind_padding_is_told_once_and_not_learnt() -> None:
    item = {"input_ids": TOKENS, "labels": [IGNORE_INDEX] * 2 + TOKENS[2:], "attention_mask": [0] * 2 + [1] * 8}
    check = ItemCheck()
    (line,) = check.check(item, read_item(item, 3), 3)
    assert line.startswith("item 3 of the data begins with 2 tokens of padding, and the first token behind them has a")
    assert check.check(item, read_item(item, 4), 4) == []
    item["labels"][2] = IGNORE_INDEX
    assert ItemCheck().check(item, read_item(item, 0), 0) == []
    for empty in ([], [0, 0]):
        item = {"input_ids": [5] * len(empty), "labels": [IGNORE_INDEX] * len(empty), "attention_mask": empty}
        assert ItemCheck().check(item, read_item(item, 0), 0) == []


# --- A loss before its step: what scripts do with it, and when it may be read.
def handed_out() -> tuple[Collected, Any]:
    """What a step settles, and its `PendingLoss`, of which torch's stubs do not say that arithmetic keeps the class."""
    entry = Collected(None, lambda loss, **_: None)
    return entry, PendingLoss([Term(entry, 1.0)])


def test_arithmetic_now_and_the_value_after_the_step() -> None:
    entry, loss = handed_out()
    other_entry, other = handed_out()
    made = {
        "half": loss / 2,
        "both": (loss + other) / 2,
        "sum": sum([loss, other]),
        "minus": 1 - loss * 3 + 0.5,
        "difference": other - loss,
        "negative": -loss,
        "tensor": torch.tensor(2.0) * loss.detach().float().mean(),
    }
    assert not any(one.is_known for one in made.values())
    assert (f"{loss:.4f}", str(loss)) == ("pending", "PendingLoss(pending)")
    entry.settle(3.0)
    other_entry.settle(5.0)
    assert {name: one.item() for name, one in made.items()} == {
        "half": 1.5, "both": 4.0, "sum": 8.0, "minus": -7.5, "difference": 2.0, "negative": -3.0, "tensor": 6.0,
    }  # fmt: skip
    assert (f"{loss:.2f}", float(loss / 4), str(loss)) == ("3.00", 0.75, "tensor(3.)")


def test_a_known_loss_is_a_scalar_tensor() -> None:
    entry, loss = handed_out()
    entry.settle(3.0)
    assert torch.stack([loss, loss / 3]).tolist() == [3.0, 1.0]
    assert loss.repeat(2).tolist() == torch.tensor([loss, loss]).tolist() == [3.0, 3.0]
    assert (type(loss.detach()), type(loss * 2), type(loss.loss)) == (torch.Tensor,) * 3
    assert (loss < 4, loss == 3.0, abs(-loss), loss**2, max(loss, 1.0), bool(loss)) == (True, True, 3.0, 9.0, 3.0, True)
    written = copy.deepcopy(loss)
    assert isinstance(loss.div_(2), PendingLoss)
    loss += 1
    assert (loss.item(), loss.detach().numpy(), written.item(), torch.is_tensor(loss)) == (2.5, 2.5, 3.0, True)
    saved = io.BytesIO()
    torch.save(loss, saved)
    saved.seek(0)
    assert torch.load(saved) == 2.5
    loss.copy_(torch.tensor(3.0))
    total: Any = 0.0
    for _ in range(3):
        total = total + loss
    assert total.item() == 9.0


def test_what_is_written_before_the_step_counts_after_it() -> None:
    (entry, loss), (other_entry, other) = handed_out(), handed_out()
    total, kept = torch.ones(1), loss.clone()
    total += loss
    total -= other.detach()
    kept.div_(4).add_(1)
    kept += other
    reset = torch.ones(())
    reset += loss
    reset.zero_()
    entry.settle(3.0)
    assert (kept.is_known, kept.shape) == (False, ())
    other_entry.settle(5.0)
    assert (total.tolist(), kept.item(), reset.item(), type(total)) == ([-1.0], 6.75, 0.0, torch.Tensor)


READS = [
    float, bool, abs, copy.deepcopy, torch.exp,
    lambda loss: loss.item(), lambda loss: loss.tolist(), lambda loss: loss.numpy(), lambda loss: loss < 3,
    lambda loss: loss**2, lambda loss: loss * loss, lambda loss: 1 / loss, lambda loss: torch.stack([loss]),
    lambda loss: torch.save(loss, io.BytesIO()), lambda loss: torch.tensor([loss]), lambda loss: loss.data.item(),
    lambda loss: torch.full((2,), loss), lambda loss: torch.full_like(loss, loss),
    lambda loss: torch.zeros(2)[0].add_(loss), lambda loss: loss + torch.zeros(2), lambda loss: loss / torch.ones(2),
    lambda loss: torch.zeros(()).add_(loss).item(), lambda loss: torch.zeros(()).add_(loss).mul_(2),
    lambda loss: loss + torch.zeros((), requires_grad=True),
]  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_reading_it_before_the_step_says_what_to_do(read: Any) -> None:
    with pytest.raises(RuntimeError, match=r"not computed yet.*engine\.step\(\).*engine\.last_step\.loss"):
        read(handed_out()[1])


def test_it_stands_for_the_whole_output() -> None:
    _, loss = handed_out()
    assert loss.loss is loss[0] is loss["loss"] is loss.get("loss") is loss
    assert loss.get("hidden_states") is None
    assert ("loss" in loss, "logits" in loss, loss[None].shape) == (True, False, (1,))
    reads = (lambda: loss.logits, lambda: loss[1], lambda: loss["logits"], lambda: loss[:2], lambda: list(loss),
             lambda: loss.get("logits"), loss.to_tuple)  # fmt: skip
    for read in reads:
        with pytest.raises(ConfigError, match=r"forward_backward\(batch, loss\).*loss_fn\(logits, labels\)"):
            read()


def read_early(value: float) -> tuple[list[Collected], list[PendingLoss], ThreeCalls]:
    """Two batches whose losses are found when they are read."""
    calls = ThreeCalls({}, torch.device("cpu"), lambda: 2, torch.float64)
    entries = [calls.collect([], None, None) for _ in range(2)]  # type: ignore[arg-type]
    losses = {id(entry): value + number for number, entry in enumerate(entries)}

    def read(entry: Collected) -> None:
        if entry.early is None:
            calls.found(entry, losses[id(entry)])

    for entry in entries:
        entry.read = read
    return entries, [calls.loss_of(entry) for entry in entries], calls


@pytest.mark.parametrize(
    ("made", "factors"),
    [
        (lambda a, b: a**2, (6.0, None)),
        (lambda a, b: a * b + b.detach(), (4.0, 3.0)),
        (lambda a, b: (a / 2 + b).clamp(max=5.0), (None, None)),
        (lambda a, b: torch.stack([a / 3, b]).sum(), (1 / 3, 1.0)),
        (lambda a, b: (a if a < 4 else b) * 5, (5.0, None)),
        (lambda a, b: a + torch.ones((), requires_grad=True), (1.0, None)),
    ],
)
def test_a_function_of_losses_counts_by_its_gradient(made: Any, factors: tuple[float | None, ...]) -> None:
    entries, losses, calls = read_early(3.0)
    loss = made(*losses)
    plain = made(*[torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (3.0, 4.0)])
    assert float(loss) == pytest.approx(float(plain), rel=1e-15)
    calls.backward(loss, retain_graph=False, scale_wrt_gas=True)
    assert [entry.factor or None for entry in entries] == [pytest.approx(one) for one in factors]
    entries, losses, calls = read_early(3.0)
    calls.backward(made(*losses) / 2, retain_graph=False, scale_wrt_gas=False)  # the script divides by itself
    assert [entry.factor or None for entry in entries] == [pytest.approx(one) for one in factors]


def test_what_is_read_before_the_step_is_told_in_texts_too() -> None:
    (entry, _), (loss, _), calls = read_early(3.0)
    total = torch.zeros(())
    total += loss.detach()
    assert (f"{loss:.2f}", f"{total.item():.1f}", str(loss)[:6], copy.deepcopy(loss).item()) == (
        "3.00", "3.0", "tensor", 3.0,
    )  # fmt: skip
    assert (loss.data.item(), loss.detach().numpy().item(), loss.requires_grad) == (3.0, 3.0, True)
    (loss * 2).exp().backward()
    assert entry.factor == pytest.approx(2 * np.exp(6))
    with pytest.raises(RuntimeError, match="write loss = loss"):
        loss.exp_()
    calls.taken()
    calls.taken()
    with pytest.raises(RuntimeError, match="has run already"):
        calls.backward(loss.exp(), retain_graph=False, scale_wrt_gas=True)


def test_backward_of_the_loss_is_the_engines() -> None:
    called: list[Any] = []
    loss = PendingLoss([Term(Collected(None, lambda loss, **kwargs: called.append((loss, kwargs))), 1.0)]) / 2
    loss.requires_grad_(True).backward()
    loss.backward(torch.tensor(3.0), retain_graph=True)
    assert called[0] == (loss, {"retain_graph": False})
    assert (called[1][0].terms[0].factor, called[1][1]) == (1.5, {"retain_graph": True})
    with pytest.raises(ConfigError, match="create_graph"):
        loss.backward(create_graph=True)
    with pytest.raises(RuntimeError, match="has run already"):
        PendingLoss((), 1.0).backward()


def test_the_number_alone_has_no_gradient() -> None:
    entry, loss = handed_out()
    with torch.no_grad():
        doubled = loss * 2
    parts = [loss.detach(), loss.data, doubled, loss + loss.detach(), torch.zeros_like(loss)]
    assert [part.requires_grad for part in parts] == [False, False, False, True, False]
    assert loss.clone().detach_().requires_grad is False
    with pytest.raises(RuntimeError, match="keeps its gradient"):
        loss.requires_grad = False
    entry.settle(3.0)
    assert [part.item() for part in parts] == [3.0, 3.0, 6.0, 6.0, 0.0]


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({}, 1),
        ({"gradient_accumulation_steps": 3}, 3),
        ({"gradient_accumulation_steps": "3", "train_batch_size": 12.0}, 3),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, 4),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 8}, 8),
    ],
)
def test_accumulation_steps(config: dict[str, Any], steps: int) -> None:
    assert batch_sizes(config, 2).accumulation == steps


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_accumulation_steps": "auto"}, "transformers' Trainer fills in"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be from 1 to .* but is 0"),
        ({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}, "9 is not a multiple"),
    ],
)
def test_bad_accumulation_steps(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        batch_sizes(config, 2)


def test_accelerates_steps_per_print_means_never() -> None:
    kept, _ = screen_deepspeed_settings({"steps_per_print": float("inf")})
    assert kept["steps_per_print"] > 10**14
