"""Steps in parts, fields, and losses of log-probabilities on ranks: what a public loop of GRPO asks of an engine."""

from __future__ import annotations

from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.losses import grpo
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.families import build_model
from tests.support.ranks import run_ranks
from tests.support.small_job import same, small_engine, whole_state
from tools import aims
from tools.post_training import equality, refusals
from tools.post_training.equality import Layout
from tools.post_training.rollouts import rollouts, share

STEPS = 3


@pytest.mark.parametrize(
    ("family", "layouts", "losses"),
    [
        ("llama", [equality.LAYOUTS[5], equality.LAYOUTS[7]], ["GRPO", "GSPO", "DPO", "distillation", "own, mixing"]),
        ("lora", [equality.LAYOUTS[4]], ["PPO", "DPO"]),
    ],
)
def test_losses_are_those_of_one_process(family: str, layouts: list[Layout], losses: list[str]) -> None:
    rows, slices = equality.compare(family, layouts, losses)
    assert len(rows) == len(layouts) * len(losses)
    assert slices > 0 or family == "lora"
    assert max(max(row.of_loss, row.of_gradients) for row in rows) <= aims.POST_TRAINING, rows


def test_a_step_may_be_split_into_any_calls_with_evaluations_between_them() -> None:
    rows = equality.splits([equality.LAYOUTS[1]])
    assert max(max(by_one, against) for _, _, by_one, against in rows) <= aims.POST_TRAINING, rows


def test_what_cannot_be_trained_on_is_refused_on_all_ranks_and_nothing_changes() -> None:
    wrong = [one for one in refusals.refused() if not one.right]
    assert not wrong, wrong


def whole_and_in_parts(rank: int) -> list[Any]:
    """A job by `train_batch` and the same by its parts, with the schedule moved by hand; at last a dropped gradient."""

    def sequences(step: int) -> list[Any]:
        return [{"input_ids": item["input_ids"], "labels": item["labels"]} for item in share(rank, rollouts(step))]

    states, records = [], []
    for in_parts in (False, True):
        engine = small_engine(rank, data=None)
        for step in range(STEPS):
            if not in_parts:
                engine.train_batch(sequences(step))
            else:
                engine.forward_backward([[5, 6, 7]] * 2)
                (engine.zero_grad if step % 2 else engine.optimizer.zero_grad)()
                loss = engine.forward_backward(sequences(step))
                norm = engine.optimizer_step()
                engine.lr_scheduler.step()
                record = engine.last_step
                assert (float(loss), norm) == (pytest.approx(record.loss, rel=1e-6), record.grad_norm)
        states.append(whole_state(engine))
        record = engine.last_step
        records.append(
            (record.step, record.loss, record.grad_norm, record.learning_rate, record.num_targets, record.plan)
        )
        engine.destroy()
    return [same(*states), *records]


def test_the_parts_of_a_step_make_the_step_to_the_bit() -> None:
    for equal, whole, parts in run_ranks(whole_and_in_parts, 4, timeout=200):
        assert equal
        assert whole == parts


def loop(rank: int) -> tuple[list[float], Tensor]:
    """The update of a public GRPO loop, written by somebody who knows only the four calls: two mini-batches, and two
    epochs over what was drawn."""
    engine = small_engine(rank, model=build_model("llama", torch.float32), data=None, strategies=["2*tp1", "tp2"])
    draw = torch.Generator().manual_seed(rank)
    prompts = [torch.randint(3, 97, (4,), generator=draw) for _ in range(2)]
    answers = [torch.cat((prompt, torch.randint(3, 97, (6 + 9 * n,), generator=draw)))
               for prompt in prompts for n in range(3)]  # fmt: skip
    items: list[dict[str, Any]] = []
    for tokens in answers:
        mask = torch.ones_like(tokens)
        mask[:4] = 0
        items.append(
            {"input_ids": tokens, "completion_mask": mask, "advantages": float((tokens[4:] > 50).float().mean() - 0.5)}
        )
    before = engine.log_probs(items, entropy=True, temperature=0.9)
    for item, one in zip(items, before.log_probs, strict=True):
        item["old_log_probs"] = item["reference_log_probs"] = one
    losses = []
    for _ in range(2):
        for part in (slice(0, 3), slice(3, 6)):
            losses.append(float(engine.forward_backward(items[part], grpo(kl=0.05), temperature=0.9)))
            engine.optimizer_step()
            engine.lr_scheduler.step()
    after = engine.log_probs(items, temperature=0.9).log_probs
    gains = torch.stack(
        [item["advantages"] * (b - a).mean() for item, a, b in zip(items, before.log_probs, after, strict=True)]
    )
    assert before.entropy is not None
    assert all(entropy.shape == one.shape == item["input_ids"].shape and float(one[:4].abs().sum()) == 0
               for entropy, one, item in zip(before.entropy, before.log_probs, items, strict=True))  # fmt: skip
    return losses, gains


def test_a_loop_of_grpo_runs_and_learns() -> None:
    (losses, gains), (others, more) = run_ranks(loop, 2, timeout=200)
    assert losses == others
    assert len(losses) == 4
    assert float(gains.sum() + more.sum()) > 0, "answers with an advantage become more likely"


def test_optimizer_step_needs_gradients() -> None:
    def refused(rank: int) -> str:
        engine = small_engine(rank, data=None)
        with pytest.raises(ConfigError) as caught:
            engine.optimizer_step()
        return str(caught.value)

    assert "has no gradients to apply" in run_ranks(refused, 1)[0]
