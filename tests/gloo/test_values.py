"""Critics on ranks: a head of one output for each token, its values, and losses of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

import ds_hydra
from ds_hydra.losses import GSPO, Distillation, ValueLoss, dapo
from ds_hydra.pipe import collectives
from ds_hydra.pipe.models import causal_stage
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.checks import check
from tests.support.families import build_model
from tests.support.small_job import refused_calls, shared_source, small_config, small_engine
from tools import aims
from tools.post_training import equality
from tools.post_training.plain import VALUE_LOSSES
from tools.post_training.rollouts import rollouts, share

VALUES = "llama, values"


@pytest.mark.drawn
def test_losses_of_values_are_those_of_one_process() -> None:
    layouts = [equality.LAYOUTS[at] for at in (5, 7)]
    rows, slices = equality.compare(VALUES, list(product(layouts, VALUE_LOSSES))[::2])
    assert {row.loss for row in rows} == VALUE_LOSSES.keys()
    assert slices > 0
    assert max(max(row.of_loss, row.of_gradients) for row in rows) <= aims.POST_TRAINING, rows
    found = equality.scores(layouts, VALUES)
    assert max(apart for _, apart, _ in found) <= aims.POST_TRAINING, found


def mean_of(values: Tensor, fields: dict[str, Tensor]) -> Tensor:
    return (values - values.mean()).square()


def items(rank: int) -> list[dict[str, Any]]:
    return [{name: item[name] for name in ("input_ids", "labels", "returns", "old_values")}
            for item in share(rank, rollouts(), (2, 2))]  # fmt: skip


REFUSED: dict[str, tuple[Callable[[Any, list[dict[str, Any]]], Any], str]] = {
    "a whole step": (lambda engine, own: engine.train_batch(own), "no loss of its own: train it by engine.forward"),
    "no loss": (lambda engine, own: engine.forward_backward(own), "no loss of its own"),
    "an evaluation": (lambda engine, own: engine.evaluate([one["input_ids"] for one in own]), "no loss of its own"),
    "log-probabilities": (lambda engine, own: engine.log_probs(own), "call values()"),
    "a loss of log-probabilities": (lambda engine, own: engine.forward_backward(own, dapo()), "a function of values"),
    "one that mixes": (lambda engine, own: engine.forward_backward(own, GSPO()), "missing 1 required positional"),
    "words": (lambda engine, own: engine.forward_backward(own, Distillation()), "the model gives values alone"),
    "a mean": (lambda engine, own: engine.forward_backward(own, mean_of), "depends on others"),
    "a temperature": (
        lambda engine, own: engine.forward_backward(own, ValueLoss(), temperature=0.5), "a temperature divides logits"
    ),
    "no returns": (
        lambda engine, own: engine.forward_backward([one["input_ids"] for one in own], ValueLoss()), "'returns'"
    ),
}  # fmt: skip


def test_what_a_model_of_values_cannot_do_is_refused_on_all_ranks_and_nothing_changes() -> None:
    def on_rank(rank: int) -> tuple[list[str], bool]:
        engine = small_engine(rank, model=build_model(VALUES, torch.float32), data=None, strategies=["tp2", "2*tp1"])
        calls = [partial(call, engine, items(rank)) for call, _ in REFUSED.values()]
        errors = (ConfigError, KeyError, TypeError)  # of the loss itself: it stays what it is
        return refused_calls(engine, calls, lambda: engine.forward_backward(items(rank), ValueLoss()), errors)

    with shared_source(build_model(VALUES, torch.float32)):
        (told, right), (others, also) = run_ranks(on_rank, 2, timeout=120)
    assert right
    assert also
    assert told == others
    for text, (name, (_, words)) in zip(told, REFUSED.items(), strict=True):
        assert words in text, (name, text)


def test_a_model_of_logits_has_no_values_and_one_of_values_no_loss_of_logits() -> None:
    def on_rank(rank: int) -> None:
        with pytest.raises(ConfigError, match=r"gives logits and no values.*call log_probs\(\)"):
            small_engine(rank, data=None).values([[5, 6, 7]])
        config = small_config(1, strategies=["tp1"])
        model = build_model(VALUES, torch.float32)
        with pytest.raises(ConfigError, match="a value for each token and no logits, which loss_fn is of"):
            ds_hydra.initialize(model=model, config=config, loss_fn=lambda logits, labels: logits.square().sum(dim=-1))

    run_ranks(on_rank, 1)


@pytest.mark.drawn
def test_a_head_of_values_is_checked_with_a_loss_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = build_model(VALUES, torch.float32)
    model.dropout.p = 0.2
    settings = {"keep": False, "loss_given": True, "options": StageOptions(token_sharding=True)}
    assert check(model, "tp2", "sp2", "tp2pp2/v", **settings).objections() == []
    with mock.patch.object(causal_stage, "all_rows", collectives.gather_rows):  # which adds up what all ranks have
        objections = check(model, "tp2", "sp2", **settings).objections()
    assert len(objections) == 1
    assert re.search(r"tp2.* the gradient of .*; tp: use strategies with tp1", objections[0])


def test_a_clip_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="clip must be positive, or None, but is 0"):
        ValueLoss(0)
