"""Losses of pairs of sequences, trained under changing strategies, against one process; and what is refused."""

from __future__ import annotations

import re
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.engine.losses import weigh
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.testing import float64_throughout, run_ranks, token_losses
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.equivalence import ADAMW
from tests.support.families import build_model, reference_model
from tests.support.small_job import rank_environment, shared_source, small_model

MODEL = small_model()
STEPS, NUM_RANKS = 3, 4
PAIRS = (2, 0, 3, 1)  # of each rank


def samples(step: int) -> list[dict[str, Tensor]]:
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
    rank_environment(rank)
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
        engine.train_batch(samples(step)[own], sequence_loss=lambda found, before=before: preference(found, before))
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
            data = samples(step)
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
    rank_environment(rank)
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
    for share, function, error in (
        (good, broken if rank else torch.sin, KeyError if rank else RuntimeError),
        ([[5]] if rank else good, torch.sin, ConfigError),
        (good, lambda losses: losses * weight.sum(), ConfigError),
        (None, torch.sin, ConfigError),
    ):
        with pytest.raises(error) as caught:
            engine.train_batch(share, sequence_loss=function)
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
