"""Losses of the user's own are refused or right; an evaluation knows the loss of each sequence."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain, repeat
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.engine.own_loss import check_token_loss
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.testing import float64_throughout, rank_environment, run_ranks, token_losses
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.case import OWN, by_word
from tests.support.families import build_model, reference_model
from tests.support.small_job import shared_source, small_model

LENGTHS = (9, 70, 5, 33, 1, 12, 40)


def samples() -> list[dict[str, Tensor]]:
    """One without targets, and one that is left out."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for index, length in enumerate(LENGTHS):
        tokens = torch.randint(3, 90, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length if index == 2 else length // 4] = IGNORED
        made.append({"input_ids": tokens, "labels": labels})
    return made


def num_targets(sample: dict[str, Tensor]) -> int:
    return int((sample["labels"][1:] != IGNORED).sum())


def evaluated(rank: int, own: Any) -> list[Any]:
    rank_environment(rank)
    hydra = {
        "tokens_per_step": 60,
        "context_length": 128,
        "strategies": ["tp2 + 2*tp1", "2*pp2", "sp2 + tp2", "2*pp2/v"],
        "self_check": "off",
        "steps_file": None,
        "planner": {"ahead": 0},
        "faults": {"frozen_seconds": 0},
    }
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "hydra": hydra}
    engine = ds_hydra.initialize(model=build_model("llama", torch.float64), config=config, loss_fn=own)[0]
    found = engine.evaluate(samples())
    batch = float(engine.eval_batch(samples()))
    return [found.sums, found.num_targets, found.loss, found.perplexity, found.sequence_losses, batch]


@pytest.mark.drawn
@pytest.mark.parametrize("own", [None, by_word])
def test_an_evaluation_has_the_loss_of_each_sequence(own: Any) -> None:
    model = reference_model("llama", torch.float64)
    with float64_throughout(model):
        data = samples()
        with torch.no_grad():
            sums = [float(token_losses(model, sample, own).sum()) if num_targets(sample) else 0.0 for sample in data]
        counts = [num_targets(sample) for sample in data]
        with shared_source(build_model("llama", torch.float64), own):
            results = run_ranks(evaluated, 4, own)
        for found in results:
            assert np.allclose(found[0], sums, rtol=1e-9)
            assert found[1].tolist() == counts
            assert found[2] == pytest.approx(sum(sums) / sum(counts), rel=1e-9)
            assert found[3] == pytest.approx(np.exp(sum(sums) / sum(counts)), rel=1e-9)
            assert np.flatnonzero(np.isnan(found[4])).tolist() == [2, 4]
            assert found[4][1] == pytest.approx(sums[1] / counts[1], rel=1e-9)
            assert found[5] == pytest.approx(found[2], rel=1e-6)


MODEL = small_model()
WEIGHT = MODEL.get_input_embeddings().weight
VIEW, HEAT = WEIGHT.detach(), torch.ones((), requires_grad=True)
cross_entropy = partial(F.cross_entropy, reduction="none")
CALLS, LAST = [0], deque([0, 0], maxlen=2)
WEIGHTS = chain(repeat(1.0, 1000), repeat(2.0))  # of the calls in turn


class Tempered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heat = torch.nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits / self.heat, labels)


class EqualShares(torch.autograd.Function):
    """Its forward says nothing of what its backward does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / gradients[0].norm()


def hardest(logits: Tensor, labels: Tensor, kept: int) -> Tensor:
    losses = cross_entropy(logits, labels)
    return losses * (losses >= losses.topk(min(kept, len(losses))).values.min())


def counting(logits: Tensor, labels: Tensor) -> Tensor:
    CALLS[0] += 1
    return cross_entropy(logits, labels) * (1 if CALLS[0] < 1000 else 2)


def remembering(logits: Tensor, labels: Tensor) -> Tensor:
    LAST.append(len(LAST) + LAST[-1])
    return cross_entropy(logits, labels) * (1 if LAST[-1] < 1000 else 2)


def in_place(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.div_(2), labels)


def reading(values: Callable[[], Tensor]) -> Any:
    return lambda logits, labels: cross_entropy(logits, labels) + values()[labels].sum(dim=-1)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (F.cross_entropy, r"returned \(\): take its mean"),
        (lambda logits, labels: logits.detach()[:, 0], "no gradient"),
        (lambda logits, labels: cross_entropy(logits, labels) / len(labels), "the loss of one token depends on other"),
        (lambda logits: logits[:, 0], "it raised TypeError"),
        (lambda logits, labels: [][1], r"it raised IndexError: .* in <lambda> \(.*test_own_losses\.py:\d+\)"),
        (lambda logits, labels: [0.0] * 3, "returned list"),
        (lambda x, y: cross_entropy(x, y) / torch.bincount(y)[y], "depends on other tokens"),
        (partial(hardest, kept=8), "depends on other tokens"),
        (partial(hardest, kept=200), "0 beside 16383 others"),
        (partial(hardest, kept=12000), "0 beside 16383 others"),
        (lambda x, y: cross_entropy(x, y) * torch.linspace(1, 2, len(y)), "depends on other tokens"),
        (lambda x, y: cross_entropy(EqualShares.apply(x), y), "the gradient of one token depends on other tokens"),
        (lambda x, y: cross_entropy(x, y) / torch.arange(50)[y], "label 0 .* it gave inf"),
        (lambda x, y: cross_entropy(F.dropout(x, 0.1), y), "draws random numbers"),
        (lambda x, y: cross_entropy(x, y) * (1 + random.random()), "draws random numbers of Python"),
        (counting, r"a call changes the global CALLS\[0\]"),
        (remembering, r"a call changes the global LAST\["),
        (lambda x, y: cross_entropy(x, y) * next(WEIGHTS), "a call changes the global WEIGHTS"),
        (in_place, "changes the logits"),
        (reading(lambda: WEIGHT), r"reads the model's model\.embed_tokens\.weight"),
        (reading(lambda: VIEW**2), r"reads the model's model\.embed_tokens\.weight"),
        (Tempered(), "reads its own parameter heat: no optimizer"),
        (lambda x, y: cross_entropy(x * HEAT, y), "wants a gradient"),
    ],
)
def test_losses_that_are_none_of_single_tokens_are_refused(loss: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_token_loss(loss, 50, model=MODEL)


def test_losses_of_single_tokens_pass() -> None:
    copied = WEIGHT.detach().clone()
    others = (torch.nn.CrossEntropyLoss(reduction="none"), reading(lambda: copied))
    for loss in (*OWN.values(), *others):
        for dtype in (torch.float32, torch.float64):
            check_token_loss(loss, 50, model=MODEL, dtype=dtype)


def of_rank(rank: int) -> str:
    """What it is told that gives another loss on each rank."""
    rank_environment(rank)
    config = {"optimizer": {"type": "AdamW"}, "hydra": {"tokens_per_step": 60, "strategies": ["tp2"]}}
    with pytest.raises(ConfigError) as refused:
        ds_hydra.initialize(
            model=small_model(), config=config, loss_fn=lambda x, y: cross_entropy(x, y) * (1 + dist.get_rank())
        )
    return str(refused.value)


def test_a_loss_that_depends_on_the_rank_is_refused_on_all() -> None:
    with shared_source(small_model()):
        told = run_ranks(of_rank, 2)
    assert told[0] == told[1]
    assert "on rank 0 but" in told[0]


def test_where_there_is_no_place_for_a_loss() -> None:
    with pytest.raises(ConfigError, match="needs a config with a block"):
        ds_hydra.initialize(model=small_model(), config={"train_batch_size": 1}, loss_fn=by_word)


def predicted(rank: int) -> list[Any]:
    """What this rank has of its own sequences: their most likely next tokens, and how likely these are."""
    rank_environment(rank)
    hydra = {"tokens_per_step": 300, "context_length": 128, "self_check": "off", "steps_file": None}
    hydra |= {"strategies": ["tp2pp2", "sp2 + 2*tp1", "2*pp2/v"], "planner": {"ahead": 0}}
    config = {"optimizer": {"type": "AdamW"}, "hydra": hydra | {"faults": {"frozen_seconds": 0}}}
    engine = ds_hydra.initialize(model=build_model("llama", torch.float64), config=config)[0]
    mine = [sample for number, sample in enumerate(samples()) if len(sample["input_ids"]) > 1 and number % 4 == rank]
    loss, found = engine.predict(mine, likely)
    return [float(loss), found, [len(sample["input_ids"]) for sample in mine]]


def likely(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = logits.log_softmax(dim=-1).max(dim=-1)
    return torch.stack((chosen.indices, chosen.values, labels), dim=-1)


def test_predictions_come_back_to_the_rank_that_asked() -> None:
    model = reference_model("llama", torch.float64)
    with float64_throughout(model), torch.no_grad():
        with shared_source(build_model("llama", torch.float64)):
            found = run_ranks(predicted, 4)
        data = [sample for sample in samples() if len(sample["input_ids"]) > 1]
        losses = sum(float(token_losses(model, sample).sum()) for sample in data if num_targets(sample))
        for rank, (loss, values, lengths) in enumerate(found):
            assert loss == pytest.approx(losses / sum(map(num_targets, data)), rel=1e-6)
            own = [s for number, s in enumerate(samples()) if len(s["input_ids"]) > 1 and number % 4 == rank]
            assert [len(sample["input_ids"]) for sample in own] == lengths
            for sample, part in zip(own, values.split(lengths), strict=True):
                logits = model(input_ids=sample["input_ids"][None], use_cache=False).logits
                following = torch.cat((sample["labels"][1:], torch.tensor([IGNORED])))
                torch.testing.assert_close(part, likely(logits, following[None])[0], rtol=1e-9, atol=1e-9)
