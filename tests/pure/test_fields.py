"""Fields of items: how they stand beside tokens, what is refused, and that they travel and come back with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ds_hydra.data.fields import Reads
from ds_hydra.data.share import read_share
from ds_hydra.data.tokens import Limits
from ds_hydra.losses import group_advantages
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.phase import MicroBatchPlan, Phase, PipelinePlan, Span
from ds_hydra.plan.step_plan import StepPlan, joined
from ds_hydra.step.collecting import pieces_of
from ds_hydra.zero_hetero.errors import ConfigError


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
