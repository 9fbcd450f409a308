"""TRL's GRPO with a real reward: the model generates on CPU, two ranks of the engine train, and the reward rises.

The reward of an answer is the share of its words that are of the upper half of the vocabulary: 0.5 at first, as the
model's words are drawn evenly, and 1.0 at best.
"""

from __future__ import annotations

import statistics
import tempfile
from typing import Any, NamedTuple

import torch
from transformers import PrinterCallback
from trl import GRPOConfig

from ds_hydra.hugging_face.scores import HydraGRPOTrainer
from ds_hydra.testing import rank_environment, run_ranks
from tests.support.families import build_model
from tools.post_training.trl_trainers import CONFIG, prompts, word_tokenizer

RANKS, UPDATES, LAST = 2, 24, 4
UPPER = 48  # words from here on are rewarded, of 96


class Learnt(NamedTuple):
    """Mean rewards of a run's answers."""

    seed: int
    first: float  # of the first update
    last: float  # of the last ones, in the mean


def learnt(seed: int) -> Learnt:
    """One run, from this seed of what is drawn."""
    with tempfile.TemporaryDirectory() as folder:
        rewards = run_ranks(_train, RANKS, seed, folder, timeout=600)[0]
    return Learnt(seed, rewards[0], statistics.fmean(rewards[-LAST:]))


def _train(rank: int, seed: int, folder: str) -> list[float]:
    """The mean reward of each update."""
    rank_environment(rank)
    trainer = HydraGRPOTrainer(
        build_model("llama", torch.float32),
        args=GRPOConfig(
            max_steps=UPDATES, per_device_train_batch_size=16, num_generations=8, max_completion_length=12,
            learning_rate=2e-2, warmup_steps=0, lr_scheduler_type="constant", max_grad_norm=1.0, logging_steps=1,
            seed=seed, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
            gradient_checkpointing=False, output_dir=folder, deepspeed=CONFIG,
        ),
        train_dataset=prompts(), processing_class=word_tokenizer(), reward_funcs=_reward,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # of every update, on standard output
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def _reward(completions: list[str], **_: Any) -> list[float]:
    """The share of an answer's words that are of the upper half; none of an empty one."""
    return [
        statistics.fmean([int(word[1:]) >= UPPER for word in words]) if words else 0.0
        for words in map(str.split, completions)
    ]
