"""One update of a tiny model by each host that the engine stands in for, from a config as a page prints it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hjson
import torch
import trl
from accelerate import DeepSpeedPlugin
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

from ds_hydra.hugging_face import HydraAccelerator, HydraTrainer, scores
from ds_hydra.hugging_face.sft import HydraSFTTrainer
from ds_hydra.testing import rank_environment
from tests.support.pages import blocks
from tests.support.small_job import sequences
from tests.support.trainers import collate

WORDS = 97


def printed_block(page: str = "README.md") -> dict[str, Any]:
    """The first block "hydra" that a page prints, with its key."""
    found = next(block.text for block in blocks() if block.page == page and block.text.startswith('"hydra"'))
    return dict(hjson.loads("{" + found + "}"))


def save_tiny_model(folder: Path) -> None:
    """Write a Llama with as many positions as README's block has, where `job` reads it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=16384, **sizes)).save_pretrained(
        folder / "model"
    )


def _model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def _settings(kind: Any, folder: Path, config: Any, **more: Any) -> Any:
    still = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "save_strategy": "no"}
    once = {"max_steps": 1, "per_device_train_batch_size": 4, "logging_steps": 1, "gradient_checkpointing": False}
    return kind(output_dir=str(folder), deepspeed=config, **still | once | more)


def _trained(trainer: Any) -> dict[str, Any]:
    trainer.train()
    return dict(trainer.state.log_history[0])


def by_trainer(config: Any, folder: Path) -> dict[str, Any]:
    arguments = _settings(TrainingArguments, folder, config)
    return _trained(HydraTrainer(_model(folder), arguments, data_collator=collate, train_dataset=sequences()))


def _tokenizer() -> Any:
    from tools.post_training.trl_trainers import word_tokenizer

    return word_tokenizer()


def by_sft(config: Any, folder: Path) -> dict[str, Any]:
    data = Dataset.from_list([{"input_ids": one.tolist()} for one in sequences()])
    arguments = _settings(trl.SFTConfig, folder, config)
    return _trained(HydraSFTTrainer(_model(folder), arguments, train_dataset=data, processing_class=_tokenizer()))


def by_dpo(config: Any, folder: Path) -> dict[str, Any]:
    data = Dataset.from_list([{"prompt": "w3 w4 w5", "chosen": " w7 w8", "rejected": " w9"}] * 16)
    arguments = _settings(trl.DPOConfig, folder, config)
    return _trained(
        scores.HydraDPOTrainer(_model(folder), args=arguments, train_dataset=data, processing_class=_tokenizer())
    )


def _by_policy(kind: str, config: Any, folder: Path) -> dict[str, Any]:
    own = {"num_generations": 2, "max_completion_length": 6}
    arguments = _settings(getattr(trl, f"{kind}Config"), folder, config, **own)
    trainer = getattr(scores, f"Hydra{kind}Trainer")(
        _model(folder), args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "w3 w4 w5"}] * 16), processing_class=_tokenizer(),
        reward_funcs=lambda completions, **_: [float(len(words)) for words in completions],
    )  # fmt: skip
    return _trained(trainer)


def by_grpo(config: Any, folder: Path) -> dict[str, Any]:
    return _by_policy("GRPO", config, folder)


def by_rloo(config: Any, folder: Path) -> dict[str, Any]:
    return _by_policy("RLOO", config, folder)


def by_accelerate(config: Any, folder: Path) -> dict[str, Any]:
    """A loop of Accelerate; without a config the one that its launcher names in the environment."""
    accelerator = HydraAccelerator(**{} if config is None else {"deepspeed_plugin": DeepSpeedPlugin(config)})
    model = _model(folder)
    loader: Any = DataLoader(sequences()[:8], batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    loss = model(**next(iter(loader))).loss
    accelerator.backward(loss)
    optimizer.step()
    return {"loss": float(loss)}


HOSTS: Mapping[str, Callable[[Any, Path], dict[str, Any]]] = {
    "Trainer": by_trainer,
    "SFTTrainer": by_sft,
    "DPOTrainer": by_dpo,
    "GRPOTrainer": by_grpo,
    "RLOOTrainer": by_rloo,
    "Accelerator": by_accelerate,
}

FIRST_LOSS = {
    "Trainer": math.log(WORDS),
    "SFTTrainer": math.log(WORDS),
    "DPOTrainer": math.log(2),  # the model is its own reference
    "GRPOTrainer": 0.0,  # advantages of a group have the mean 0
    "RLOOTrainer": 0.0,
    "Accelerator": math.log(WORDS),
}


def job(rank: int, host: str, config: Any, folder: Path) -> tuple[dict[str, Any], int]:
    """What one rank logs of one update, and the updates that the engine has made."""
    from ds_hydra.engine.engine import HydraEngine

    rank_environment(rank)
    made: list[Any] = []
    begin = HydraEngine.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(self)

    HydraEngine.__init__ = noted  # type: ignore[method-assign]
    logged = HOSTS[host](config, folder)
    return logged, made[0].global_steps


if __name__ == "__main__":
    # One write, which other ranks' lines do not cut.
    sys.stdout.write(f"LOSS {HOSTS[sys.argv[1]](None, Path(sys.argv[2]))['loss']}\n")
