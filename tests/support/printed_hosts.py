"""One step of a tiny job through each host that a config may be for; what the engine then has in force, and what the
host logs, out."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainingArguments,
)
from trl import DPOConfig, GRPOConfig, RewardConfig, RLOOConfig, SFTConfig

import ds_hydra
from ds_hydra.config.checks import read_config
from ds_hydra.hugging_face import HydraAccelerator, HydraTrainer
from ds_hydra.hugging_face.reward import HydraRewardTrainer
from ds_hydra.hugging_face.scores import HydraDPOTrainer, HydraGRPOTrainer, HydraRLOOTrainer
from ds_hydra.hugging_face.sft import HydraSFTTrainer
from ds_hydra.testing import rank_environment
from tests.support.trainers import collate

CALLS, DATA, TRAINER, SFT = "three calls", "train_batch", "Trainer", "SFTTrainer"
DPO, GRPO, RLOO, REWARD = "DPOTrainer", "GRPOTrainer", "RLOOTrainer", "RewardTrainer"
ACCELERATE = "Accelerate"
WORDS, POSITIONS = 97, 32768
ROWS = 2  # of a batch of a rank
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48}
LENGTHS = (3, 60, 17, 9, 33, 5, 12, 48, 700)


def save_model(folder: Path, **more: Any) -> None:
    """A language model that every printed context fits, with fixed random weights, and its tokenizer."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}
    given = {"vocab_size": WORDS, "num_key_value_heads": 8, "max_position_embeddings": POSITIONS, **sizes, **more}
    torch.manual_seed(0)
    kind = given.pop("model_type", "llama")
    config = AutoConfig.for_model(kind, bos_token_id=1, eos_token_id=2, pad_token_id=0, **given)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w0"
    ).save_pretrained(folder)


def sequences(tokens: int = 2000) -> list[Tensor]:
    """Token ids of very different lengths, so many in all, or some more."""
    generator = torch.Generator().manual_seed(1)
    lengths = LENGTHS * math.ceil(tokens / sum(LENGTHS))
    return [torch.randint(3, WORDS, (length,), generator=generator) for length in lengths]


def _text(of: int, length: int) -> str:
    return " ".join(f"w{(7 * of + 3 * token * (of + 1)) % (WORDS - 3) + 3}" for token in range(length))


def load_model(folder: str) -> Any:
    """In FP32, as scripts load one."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


Logged = dict[str, float]


def _calls(config: Any, folder: str) -> tuple[Any, Logged]:
    ds_hydra.init_distributed()
    model = load_model(folder)
    engine = ds_hydra.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    loss = torch.zeros(())
    for batch in DataLoader(sequences(), batch_size=ROWS, collate_fn=collate):  # type: ignore[arg-type]
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        if engine.global_steps:
            break
    return engine, {"loss": float(loss)}


def _data(config: Any, folder: str) -> tuple[Any, Logged]:
    data = sequences(2 * int(read_config(config=config)["hydra"]["tokens_per_step"]))
    engine = ds_hydra.initialize(model=load_model(folder), training_data=data, config=config)[0]
    return engine, {"loss": float(engine.train_batch())}


def _settings(config: Any, **own: Any) -> dict[str, Any]:
    whole = {} if config is None else read_config(config=config)
    return {
        "output_dir": "trained", "deepspeed": config, "max_steps": 1, "per_device_train_batch_size": ROWS,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1,
        "bf16": (whole.get("bf16") or {}).get("enabled") is True, **own,
    }  # fmt: skip


def _trained(trainer: Any) -> tuple[Any, Logged]:
    trainer.train()
    return trainer.deepspeed, trainer.state.log_history[0]


def _trainer(config: Any, folder: str) -> tuple[Any, Logged]:
    arguments = TrainingArguments(**_settings(config))
    return _trained(HydraTrainer(load_model(folder), arguments, data_collator=collate, train_dataset=sequences()))  # type: ignore[arg-type]


def _of_trl(config: Any, **own: Any) -> dict[str, Any]:
    return _settings(config, gradient_checkpointing=False, **own)


def _sft(config: Any, folder: str) -> tuple[Any, Logged]:
    data = Dataset.from_list([{"text": _text(number, LENGTHS[number % 8])} for number in range(36)])
    return _trained(HydraSFTTrainer(folder, SFTConfig(**_of_trl(config)), train_dataset=data))


def _pairs() -> Dataset:
    return Dataset.from_list([
        {"prompt": _text(n, 3 + n % 5), "chosen": " " + _text(n + 5, 2 + n % 7), "rejected": " " + _text(n + 9, 3)}
        for n in range(24)
    ])  # fmt: skip


def _dpo(config: Any, folder: str) -> tuple[Any, Logged]:
    return _trained(HydraDPOTrainer(folder, args=DPOConfig(**_of_trl(config)), train_dataset=_pairs()))


def _reward_model(config: Any, folder: str) -> tuple[Any, Logged]:
    torch.manual_seed(0)  # of the head, which the folder has not
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    own = RewardConfig(**_of_trl(config))
    return _trained(HydraRewardTrainer(model, args=own, train_dataset=_pairs(), processing_class=tokenizer))


def _by_policy(trainer: Any, settings: Any, config: Any, folder: str) -> tuple[Any, Logged]:
    data = Dataset.from_list([{"prompt": _text(number, 3 + number % 5)} for number in range(24)])
    own = {"num_generations": 2, "max_completion_length": 4}
    return _trained(trainer(folder, _rewards, settings(**_of_trl(config, **own)), train_dataset=data))


def _rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(len(words)) for words in completions]


def _accelerate(config: Any, folder: str) -> tuple[Any, Logged]:
    """Without a config by the one that its launcher names in the environment."""
    cpu = not torch.accelerator.is_available()
    accelerator = HydraAccelerator(cpu=cpu, **{} if config is None else {"deepspeed_plugin": DeepSpeedPlugin(config)})
    model = load_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(sequences(), batch_size=ROWS, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss = torch.zeros(())
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            break
    return model, {"loss": float(loss)}


HOSTS: dict[str, Callable[[Any, str], tuple[Any, Logged]]] = {
    CALLS: _calls, DATA: _data, TRAINER: _trainer, SFT: _sft, DPO: _dpo,
    GRPO: partial(_by_policy, HydraGRPOTrainer, GRPOConfig), RLOO: partial(_by_policy, HydraRLOOTrainer, RLOOConfig),
    REWARD: _reward_model, ACCELERATE: _accelerate,
}  # fmt: skip
BY_TRAINER = (TRAINER, SFT, DPO, GRPO, RLOO, REWARD)

FIRST_LOSS = {
    **dict.fromkeys((TRAINER, SFT, ACCELERATE), math.log(WORDS)),
    **dict.fromkeys((DPO, REWARD), math.log(2)),  # the model is its own reference; new heads rate all alike
    **dict.fromkeys((GRPO, RLOO), 0.0),  # advantages of a group have the mean 0
}
"""What the first update logs of random weights, to about 0.05."""


def one_step(rank: int, host: str, config: Any, model: str, folder: str) -> SimpleNamespace:
    """On a forked rank whose folder of work is `folder`: the settings of the engine's block, its steps, what the host
    logs."""
    rank_environment(rank)
    os.chdir(folder)
    engine, logged = HOSTS[host](config, model)
    return SimpleNamespace(block=engine.hydra_config, steps=engine.global_steps, logged=logged)


if __name__ == "__main__":
    # One write, which other ranks' lines do not cut.
    sys.stdout.write(f"LOSS {HOSTS[sys.argv[1]](None, sys.argv[2])[1]['loss']}\n")
