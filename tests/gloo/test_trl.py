"""TRL's trainers of preferences and policies on two ranks of the engine, against TRL's own in one process."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset, load_from_disk
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PrinterCallback

from ds_hydra.hugging_face import reward, scores
from ds_hydra.hugging_face.scores import HydraGRPOTrainer
from ds_hydra.testing import rank_environment, run_ranks
from tests.support.families import build_model
from tests.support.small_job import QUIET
from tests.support.trainers import word_tokenizer
from tools import aims

STEPS, WORDS = 3, 90
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 1},
    "hydra": QUIET | {"tokens_per_step": 512, "strategies": ["tp2", "2*tp1"]},
}
# Name -> trainer, and what its config has beside the sizes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO, reference": ("GRPO", {"beta": 0.1, "loss_type": "grpo"}),
    "GRPO, DAPO": ("GRPO", {"loss_type": "dapo", "top_entropy_quantile": 0.5, "gradient_accumulation_steps": 1}),
    "GRPO, CISPO, older policy": ("GRPO", {"loss_type": "cispo", "num_iterations": 2}),
    "RLOO": ("RLOO", {}),
    "DPO": ("DPO", {"max_length": 32}),
    "DPO, reference before": ("DPO", {"max_length": 32, "precompute_ref_log_probs": True, "loss_type": "ipo"}),
    "DPO, adapters": ("DPO", {"max_length": 32}),
    "DPO, adapted before": ("DPO", {"max_length": 32}),
    "GRPO, adapters": ("GRPO", {"beta": 0.1}),
    "Reward": ("Reward", {"center_rewards_coefficient": 0.01}),
    "Reward, adapters": ("Reward", {}),
}
ADAPTERS = {"Reward, adapters": LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="SEQ_CLS")}
ADAPTERS |= dict.fromkeys(["DPO, adapters", "GRPO, adapters"], LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
QUICK = ["GRPO, CISPO, older policy", "DPO", "DPO, adapters"]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.drawn if case in QUICK else pytest.mark.long) for case in CASES]
)
def test_a_trainer_on_two_ranks_is_trls_own_in_one_process(case: str, tmp_path: Path) -> None:
    model = build_model("llama", torch.float64)
    model.save_pretrained(tmp_path)
    _pairs().save_to_disk(f"{tmp_path}/pairs")
    (losses, found), (expected, plain) = (
        run_ranks(_train, ranks, case, str(tmp_path), f"{tmp_path}/{ranks}", ranks, timeout=300)[0] for ranks in (2, 1)
    )
    plain = {name: value for name, value in plain.items() if ".ref." not in name}  # TRL's copy of an adapter
    begun = model.state_dict() | {name: torch.zeros(()) for name in plain if "lora_B" in name}
    moved = max(float((plain[name] - begun[name]).abs().max()) for name in plain.keys() & begun.keys())
    apart = max(float((found[name] - plain[name]).abs().max()) for name in plain)
    assert apart <= aims.TRL_TRAINERS * moved
    assert losses == pytest.approx(expected, abs=aims.TRL_TRAINERS)


def _train(
    rank: int, case: str, model: str, folder: str, num_ranks: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses that are logged, and the parameters at the end."""
    rank_environment(rank)
    if num_ranks == 1:
        del os.environ["LOCAL_RANK"]  # by which Accelerate tells a job of several processes
    kind, own = CASES[case]
    policy, rewarded = kind not in ("DPO", "Reward"), kind == "Reward"
    settings = {
        "max_steps": STEPS, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8 // num_ranks,
        "optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.1, "warmup_steps": 1, "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "output_dir": folder,
    }  # fmt: skip
    if num_ranks > 1:
        settings["deepspeed"] = CONFIG
    if policy:
        settings |= {"num_generations": 4, "max_completion_length": 16}
    of = (reward if rewarded else scores) if num_ranks > 1 else trl
    torch.manual_seed(0)  # of a head of rewards, which a language model's folder has not
    classes: Any = AutoModelForSequenceClassification if rewarded else AutoModelForCausalLM
    own_head = {"num_labels": 1, "pad_token_id": 0} if rewarded else {}
    given = classes.from_pretrained(model, dtype=torch.float64, **own_head)
    if "before" in case and kind == "DPO" and "reference" not in case:
        given = get_peft_model(given, ADAPTERS["DPO, adapters"])
    trainer: Any = getattr(of, f"Hydra{kind}Trainer" if num_ranks > 1 else f"{kind}Trainer")(
        given,
        args=getattr(trl, f"{kind}Config")(**settings | own),
        train_dataset=prompts() if policy else load_from_disk(f"{model}/pairs"),
        processing_class=word_tokenizer(),
        **({"reward_funcs": _reward} if policy else {"peft_config": ADAPTERS.get(case)}),
    )
    if policy:
        trainer._generate_single_turn = _answers if kind == "RLOO" else lambda *given: (_answers(*given), None)
    trainer.train()
    values = trainer.deepspeed.fp32_state_dict() if num_ranks > 1 else trainer.model.state_dict()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: value.detach().clone() for name, value in values.items()}


def _answers(prompts: list[list[int]], *_: Any) -> list[list[int]]:
    """An answer to each prompt, one of four; they depend on nothing that a number of ranks changes."""
    found = []
    for number, prompt in enumerate(prompts):
        drawn = sum(prompt) + 17 * (number % 4)
        length = drawn % 11 + 2
        found.append([(3 * length + 5 * token + drawn) % WORDS + 3 for token in range(length)] + [1])
    return found


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(words) + sum(len(word) for word in words) % 5) for words in map(str.split, completions)]


def prompts() -> Dataset:
    """Prompts of 3 to 7 words."""
    return Dataset.from_list([{"prompt": _text(number, 3 + number % 5)} for number in range(24)])


def _pairs() -> Dataset:
    chosen = [{"chosen": " " + _text(number + 5, 2 + number % 7)} for number in range(24)]
    rejected = [{"rejected": " " + _text(number + 9, 1 + number % 4)} for number in range(24)]
    return Dataset.from_list([a | b | c for a, b, c in zip(prompts(), chosen, rejected, strict=True)])


def _text(of: int, length: int) -> str:
    return " ".join(f"w{(7 * of + 3 * token * (of + 1)) % WORDS + 3}" for token in range(length))


RANKS, UPDATES, LAST = 2, 24, 4
UPPER = 48  # words from here on are rewarded, of 96


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.long) for seed in range(3)])
def test_the_reward_of_a_model_that_generates_rises(seed: int, tmp_path: Path) -> None:
    """The share of an answer's words that are of the upper half of the vocabulary: 0.5 at first, as a new model's words
    are drawn evenly, and 1.0 at best."""
    rewards = run_ranks(_learn, RANKS, seed, str(tmp_path), timeout=600)[0]
    assert statistics.fmean(rewards[-LAST:]) >= aims.LIVE_REWARD


def _learn(rank: int, seed: int, folder: str) -> list[float]:
    """The mean reward of each update."""
    rank_environment(rank)
    trainer = HydraGRPOTrainer(
        build_model("llama", torch.float32),
        args=trl.GRPOConfig(
            max_steps=UPDATES, per_device_train_batch_size=16, num_generations=8, max_completion_length=12,
            learning_rate=2e-2, warmup_steps=0, lr_scheduler_type="constant", max_grad_norm=1.0, logging_steps=1,
            seed=seed, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
            gradient_checkpointing=False, output_dir=folder, deepspeed=CONFIG,
        ),
        train_dataset=prompts(), processing_class=word_tokenizer(), reward_funcs=_upper,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # of every update, on standard output
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def _upper(completions: list[str], **_: Any) -> list[float]:
    """The share of an answer's words that are of the upper half; none of an empty one."""
    return [
        statistics.fmean([int(word[1:]) >= UPPER for word in words]) if words else 0.0
        for words in map(str.split, completions)
    ]
