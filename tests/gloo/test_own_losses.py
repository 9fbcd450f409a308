"""Losses of the user's own, of pairs of sequences and of critics: refused or right, and known in evaluation."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product, repeat
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.engine.losses import weigh
from ds_hydra.engine.own_loss import check_token_loss
from ds_hydra.losses import DPO, GSPO, Distillation, ValueLoss, dapo, grpo
from ds_hydra.pipe import collectives
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.models import causal_stage
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.testing import float64_throughout, rank_environment, run_ranks, token_losses
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError
from tests.support import post_training
from tests.support.case import OWN, by_word
from tests.support.checks import check
from tests.support.equivalence import ADAMW
from tests.support.families import build_model, reference_model
from tests.support.post_training import LAYOUTS, VALUE_LOSSES, rollouts, share
from tests.support.small_job import rank_environment as rank_environment_sequence_loss
from tests.support.small_job import (
    refused_calls,
    same,
    shared_source,
    small_config,
    small_engine,
    small_model,
    whole_state,
)
from tools import aims

# --- Losses of the user's own are refused or right; an evaluation knows the loss of each sequence.
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


# --- Losses of pairs of sequences, trained under changing strategies, against one process; and what is refused.
STEPS, NUM_RANKS = 3, 4
PAIRS = (2, 0, 3, 1)  # of each rank


def pair_samples(step: int) -> list[dict[str, Tensor]]:
    """Pairs with a prompt that is not learnt; the preferred one first. The second of the step weighs half."""
    generator = torch.Generator().manual_seed(step)
    made: list[dict[str, Tensor]] = []
    for _ in range(2 * sum(PAIRS)):
        tokens = torch.randint(3, 97, (int(torch.randint(6, 60, (), generator=generator)),), generator=generator)
        labels = tokens.clone()
        labels[:3] = IGNORED
        made.append({"input_ids": tokens, "labels": labels, "sequence_weight": torch.tensor(1.0)})
    made[1]["sequence_weight"] = torch.tensor(0.5)
    return made


def reference_losses(step: int) -> Tensor:
    """Of the pairs' sequences by another model, as DPO has them."""
    return torch.linspace(30.0, 90.0, 2 * sum(PAIRS), dtype=torch.float64).roll(step)


def preference(losses: Tensor, before: Tensor) -> Tensor:
    """DPO (arXiv 2305.18290, eq. 7) of pairs, from the losses of their sequences by two models."""
    better, worse = (losses - before).view(-1, 2).unbind(dim=1)
    return F.softplus(0.1 * (better - worse))


def pairs(rank: int) -> tuple[list[float], dict[str, Tensor]]:
    rank_environment_sequence_loss(rank)
    hydra = {
        "tokens_per_step": 600,
        "context_length": 128,
        "strategies": ["tp2 + 2*tp1", "2*pp2/v", "sp2 + tp2"],
        "choose": "cycle",
        "self_check": "off",
        "steps_file": None,
        "planner": {"ahead": 0},
        "faults": {"frozen_seconds": 0},
    }
    config = {"optimizer": {"type": "AdamW", "params": ADAMW | {"torch_adam": True}}, "hydra": hydra}
    config["gradient_clipping"] = 0.0
    engine = ds_hydra.initialize(model=build_model("llama", torch.float64), config=config)[0]
    own = slice(2 * sum(PAIRS[:rank]), 2 * sum(PAIRS[: rank + 1]))
    losses = []
    for step in range(STEPS):
        before = reference_losses(step)[own]
        engine.train_batch(
            pair_samples(step)[own], sequence_loss=lambda found, before=before: preference(found, before)
        )
        losses.append(engine.last_step.loss)
    return losses, engine.fp32_state_dict()


@pytest.mark.drawn
def test_pairs_are_trained_as_in_one_process() -> None:
    model = reference_model("llama", torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)  # type: ignore[arg-type]
    with float64_throughout(model):
        with shared_source(build_model("llama", torch.float64)):
            found = run_ranks(pairs, NUM_RANKS, timeout=200)
        expected = []
        for step in range(STEPS):
            data = pair_samples(step)
            sums = torch.stack([token_losses(model, one).sum() * one["sequence_weight"] for one in data])
            loss = preference(sums, reference_losses(step)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(float(loss.detach()))
    assert all(losses == found[0][0] for losses, _ in found)
    assert found[0][0] == pytest.approx(expected, rel=1e-9)
    for name, value in model.named_parameters():
        apart = (found[1][1][name] - value).detach().abs().max()
        assert apart <= 1e-9 * value.detach().abs().max(), name


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda losses: losses.mean(), r"returned shape \(\): leave their mean"),
        (lambda losses: losses.tolist(), "returned list"),
        (lambda losses: losses.detach(), "no gradient"),
        (lambda losses: losses * MODEL.lm_head.weight.sum(), r"reads the model's model\.embed_tokens\.weight"),
        (lambda losses: losses * torch.ones((), requires_grad=True), r"shape \(\) that wants a gradient"),
    ],
)
def test_what_is_no_loss_of_groups_is_refused(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        weigh(function, torch.ones(4, dtype=torch.float64), MODEL)


def refused(rank: int) -> list[str]:
    rank_environment_sequence_loss(rank)
    texts = []

    def broken(losses: Tensor) -> Tensor:
        raise KeyError("margin")

    good = [[5, 6, 7, 8]] * 2

    def engine_of(**hydra: Any) -> Any:
        block = {"tokens_per_step": 60, "strategies": ["2*tp1"], "self_check": "off", "steps_file": None}
        quiet = {"faults": {"frozen_seconds": 0}, "planner": {"ahead": 0}}
        config = {"optimizer": {"type": "AdamW"}, "hydra": block | quiet | hydra}
        return ds_hydra.initialize(model=build_model("llama", torch.float32), config=config)[0]

    engine = engine_of()
    weight = engine.module.lm_head.weight
    # An error of the function's own stays what it is on its rank, with the script's traceback.
    for handed, function, error in (
        (good, broken if rank else torch.sin, KeyError if rank else RuntimeError),
        ([[5]] if rank else good, torch.sin, ConfigError),
        (good, lambda losses: losses * weight.sum(), ConfigError),
        (None, torch.sin, ConfigError),
    ):
        with pytest.raises(error) as caught:
            engine.train_batch(handed, sequence_loss=function)
        texts.append(str(caught.value))
    engine.train_batch(good, sequence_loss=torch.sin)
    return [*texts, str(engine.global_steps)]


def test_errors_reach_all_ranks_and_training_goes_on() -> None:
    first, second = run_ranks(refused, 2)
    assert first[1:] == second[1:]
    assert "the sequence_loss of step 1 failed on rank 1: KeyError: 'margin'" in first[0]
    assert second[0] == "'margin'"
    assert (
        "failed on rank 1: a sequence_loss is of all sequences that are handed in, but 1 of fewer than two" in first[1]
    )
    assert re.search(r"reads the model's (lm_head|model\.embed_tokens)\.weight: the model's weights are not", first[2])
    assert "pass them to train_batch() too" in first[3]
    assert first[4] == "1"


# --- Critics on ranks: a head of one output for each token, its values, and losses of them.
VALUES = "llama, values"


@pytest.mark.parametrize(
    ("family", "layouts", "each"),
    [pytest.param(VALUES, (LAYOUTS[5], LAYOUTS[7]), 2, marks=pytest.mark.drawn)]
    + [pytest.param(f"{name}, values", LAYOUTS, 1, marks=pytest.mark.long) for name in ("llama", "qwen3_moe", "gpt2")],
)
def test_losses_of_values_are_those_of_one_process(family: str, layouts: Sequence[Any], each: int) -> None:
    rows, slices = post_training.compare(family, list(product(layouts, VALUE_LOSSES))[::each])
    assert {row.loss for row in rows} == VALUE_LOSSES.keys()
    assert slices > 0
    assert max(max(row.of_loss, row.of_gradients) for row in rows) <= aims.POST_TRAINING, rows
    found = post_training.scores(layouts, family)
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


# ---- Fields and losses that cannot be trained on are refused on all ranks with rank and item. ----

Change = Callable[[dict[str, Any]], dict[str, Any]]


class Refusal(NamedTuple):
    """What rank 1 does to its second item, the loss, and the words that both ranks must be told."""

    name: str
    change: Change
    words: tuple[str, ...]
    loss: Any = dapo()
    arguments: dict[str, Any] = {}  # noqa: RUF012  (of forward_backward, on rank 1)


def _with(**columns: Any) -> Change:
    return lambda item: item | columns


def _without(name: str) -> Change:
    return lambda item: {key: value for key, value in item.items() if key != name}


def _same(item: dict[str, Any]) -> dict[str, Any]:
    return item


def _unnamed(item: dict[Any, Any]) -> dict[Any, Any]:
    return item | {7: 1.0}


def normalised(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss that looks at other tokens and does not say so."""
    return -(fields["advantages"] - fields["advantages"].mean()) * log_probs


def noisy(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss that draws."""
    return -torch.rand_like(log_probs) * log_probs


def averaged(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss that is no number for each token."""
    return -log_probs.mean()


def unreachable(log_probs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """A loss without a gradient."""
    return -log_probs.detach()


ITEM = "item 1 of the data"
REFUSALS = (
    Refusal("field too short", _with(advantages=[0.5] * 5), ("rank 1", ITEM, "6 input_ids", "'advantages'", "(5,)")),
    Refusal("field with NaN", _with(advantages=[0.1, 0.2, float("nan"), 0, 0, 0]), ("rank 1", ITEM, "nan at token 2")),
    Refusal("infinite scalar", _with(advantages=float("inf")), ("rank 1", ITEM, "'advantages' holds inf")),
    Refusal("field of text", _with(source="web"), ("rank 1", ITEM, "source holds no numbers")),
    Refusal("field missing in an item", _without("old_log_probs"), ("rank 1", ITEM, "has the fields advantages,")),
    Refusal("field of one item", _with(margin=1.0), ("rank 1", ITEM, "margin")),
    Refusal("wider field", _with(advantages=[[1.0, 2.0]] * 6), ("rank 1", ITEM, "advantages (2 a token)")),
    Refusal("taken name", _with(num_targets=3), ("rank 1", ITEM, "'num_targets'", "rename it")),
    Refusal("a column without a name", _unnamed, ("rank 1", ITEM, "a column 7", "called by its name")),
    Refusal("mixes_tokens of text", _same, ("rank 1", "True or False, not 'no'"), dapo(), {"mixes_tokens": "no"}),
    Refusal("temperature of 0", _with(temperature=0.0), ("rank 1", ITEM, "temperature must be a positive number")),
    Refusal("temperature twice", _with(temperature=1.0), ("rank 1", ITEM, "as an argument too"), dapo(),
            {"temperature": 0.5}),
    Refusal("a loss that mixes tokens", _same, ("rank 0", "depends on others", "mixes_tokens=True"), normalised),
    Refusal("a loss that draws", _same, ("rank 0", "draws random numbers"), noisy),
    Refusal("a loss of all tokens", _same, ("rank 0", "returned ()"), averaged),
    Refusal("a loss without a gradient", _same, ("rank 0", "no gradient"), unreachable),
    Refusal("no loss", _same, ("rank 0", "but is a str"), "dapo"),
    Refusal("a field that the loss lacks", _same, ("reference_log_probs",), DPO()),
    Refusal("a field that a loss of tokens lacks", _same, ("rank 0", "KeyError: 'reference_log_probs'"), grpo()),
    Refusal("candidates that are not there", _same, ("rank 0", "'teacher_ids'"), Distillation()),
    Refusal("normaliser of 0", _same, ("rank 1", "normaliser must be a positive number"), dapo(), {"normaliser": 0}),
    Refusal("another normaliser", _same, ("rank 0 asked for", "rank 1 for", "over 7.0"), dapo(), {"normaliser": 7}),
    Refusal("too short a sequence", _with(input_ids=[5], advantages=0.0, old_log_probs=0.0),
            ("rank 1", "1 of fewer than two tokens"), GSPO()),
)  # fmt: skip


def alike(rank: int) -> list[dict[str, Any]]:
    """Three of each rank, all alike but for their tokens."""
    return [
        {"input_ids": [5 + rank, 6, 7 + number, 8, 9, 10], "advantages": [0.0, 0.1, -0.2, 0.3, 0.5 * number, 1.0],
         "old_log_probs": [-4.0] * 6}
        for number in range(3)
    ]  # fmt: skip


def test_what_cannot_be_trained_on_is_refused_on_all_ranks_and_nothing_changes() -> None:
    """One case after the other, with gradients of an earlier call waiting."""
    with shared_source(build_model("llama", torch.float32)):
        by_rank = run_ranks(_on_rank, 2, timeout=300)
    cases = [(case.name, case.words) for case in REFUSALS]
    cases += [(name, ("1 forward_backward() calls wait",)) for name in ("a checkpoint", "a whole step")]
    for (name, words), ((told, unchanged), (other, also)) in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert told == other, name
        assert unchanged and also, name  # noqa: PT018
        assert all(one in told for one in words), (name, told)


def _on_rank(rank: int) -> list[tuple[str, bool]]:
    engine = small_engine(rank, model=build_model("llama", torch.float32), data=None, strategies=["2*tp1", "tp2"])
    engine.forward_backward(alike(rank), dapo())
    before, found = _state(engine), []
    for case in REFUSALS:
        own = alike(rank)
        if rank == 1:
            own[1] = case.change(own[1])
        given = partial(engine.forward_backward, own, case.loss, **(case.arguments if rank == 1 else {}))
        found.append((_told(given), same(before, _state(engine)) and engine.steps.parts.count == 1))
    for call in (lambda: engine.save_checkpoint("nowhere"), lambda: engine.train_batch(alike(rank))):
        found.append((_told(call), same(before, _state(engine))))
    engine.optimizer_step()
    assert not same(before, _state(engine)), "the step that was waiting moves the parameters"
    return found


def _told(call: Callable[[], Any]) -> str:
    try:
        call()
    except (CheckpointError, ConfigError, KeyError) as error:  # of the loss itself: it stays what it is
        return str(error)
    return "done"


def _state(engine: Any) -> dict[str, Tensor]:
    """Masters, moments and gradients."""
    masters = engine.crew.masters.trained
    gradients = masters.gather_full(engine.crew.world.group, source=masters.grads)
    return whole_state(engine) | {f"{name}/grad": value for name, value in gradients.items()}
