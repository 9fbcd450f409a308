"""Trainers of a small job, plain or on the engine, and what they log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TrainingArguments

from tests.support.small_job import QUIET, padded, sequences, small_model

STEPS = 4


def collate(items: list[Tensor]) -> dict[str, Tensor]:
    batch = padded(items)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def config(**hydra: Any) -> dict[str, Any]:
    block = QUIET | {"tokens_per_step": 250, "strategies": ["tp2", "pp2"], "choose": "cycle"} | hydra
    return {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}, "hydra": block}


def settings(folder: Path, num_ranks: int, engine: Any, **more: Any) -> TrainingArguments:
    """Of an update of 8 sequences, on however many ranks."""
    batches = {"per_device_train_batch_size": 4 // num_ranks, "per_device_eval_batch_size": 4 // num_ranks}
    often = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    fixed = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "weight_decay": 0.1}
    still = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "deepspeed": engine}
    settings: dict[str, Any] = batches | often | fixed | still | more
    return TrainingArguments(str(folder), **settings)


def adapted() -> Any:
    """With adapters in training inside a model in evaluation, as from_pretrained and PEFT make it."""
    model = small_model(tied=False).eval()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"]))


def trainer_of(kind: Any, arguments: TrainingArguments, model: Any = None, **more: Any) -> Any:
    return kind(
        model or small_model(),
        arguments,
        data_collator=collate,
        train_dataset=sequences()[:28],  # the last update of an epoch is of one batch, and not of two
        eval_dataset=sequences()[:8],
        **more,
    )


def logged(trainer: Any) -> list[list[float]]:
    """Loss, gradient norm and rate of each update; loss of each evaluation."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    found = [[entry[name] for name in names if name in entry] for entry in trainer.state.log_history]
    return [entry for entry in found if entry]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each id."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w0")
