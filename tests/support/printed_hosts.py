"""One step of a tiny job through each host that a config may be for; what the engine then has in force, out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from trl import DPOConfig, GRPOConfig, SFTConfig

import ds_hydra
from ds_hydra.config.read import read_config
from ds_hydra.hugging_face import HydraAccelerator, HydraTrainer
from ds_hydra.hugging_face.scores import HydraDPOTrainer, HydraGRPOTrainer
from ds_hydra.hugging_face.sft import HydraSFTTrainer
from ds_hydra.testing import rank_environment
from tests.support.trainers import collate

CALLS, DATA, TRAINER, SFT = "three calls", "train_batch", "Trainer", "SFTTrainer"
DPO, GRPO, ACCELERATE = "DPOTrainer", "GRPOTrainer", "Accelerate"
WORDS, POSITIONS = 97, 32768
ROWS = 2  # of a batch of a rank
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


def _calls(config: str, folder: str) -> tuple[Any, float]:
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
    return engine, float(loss)


def _data(config: str, folder: str) -> tuple[Any, float]:
    data = sequences(2 * int(read_config(config=config)["hydra"]["tokens_per_step"]))
    engine = ds_hydra.initialize(model=load_model(folder), training_data=data, config=config)[0]
    return engine, float(engine.train_batch())


def _settings(config: str, **own: Any) -> dict[str, Any]:
    return {
        "output_dir": "trained", "deepspeed": config, "max_steps": 1, "per_device_train_batch_size": ROWS,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1,
        "bf16": (read_config(config=config).get("bf16") or {}).get("enabled") is True, **own,
    }  # fmt: skip


def _trained(trainer: Any) -> tuple[Any, float]:
    found = trainer.train().training_loss
    return trainer.deepspeed, found


def _trainer(config: str, folder: str) -> tuple[Any, float]:
    arguments = TrainingArguments(**_settings(config))
    return _trained(HydraTrainer(load_model(folder), arguments, data_collator=collate, train_dataset=sequences()))  # type: ignore[arg-type]


def _of_trl(config: str, **own: Any) -> dict[str, Any]:
    return _settings(config, gradient_checkpointing=False, **own)


def _sft(config: str, folder: str) -> tuple[Any, float]:
    data = Dataset.from_list([{"text": _text(number, LENGTHS[number % 8])} for number in range(36)])
    return _trained(HydraSFTTrainer(folder, SFTConfig(**_of_trl(config)), train_dataset=data))


def _dpo(config: str, folder: str) -> tuple[Any, float]:
    data = Dataset.from_list([
        {"prompt": _text(n, 3 + n % 5), "chosen": " " + _text(n + 5, 2 + n % 7), "rejected": " " + _text(n + 9, 3)}
        for n in range(24)
    ])  # fmt: skip
    return _trained(HydraDPOTrainer(folder, args=DPOConfig(**_of_trl(config)), train_dataset=data))


def _grpo(config: str, folder: str) -> tuple[Any, float]:
    data = Dataset.from_list([{"prompt": _text(number, 3 + number % 5)} for number in range(24)])
    own = {"num_generations": 2, "max_completion_length": 4}
    return _trained(HydraGRPOTrainer(folder, _reward, GRPOConfig(**_of_trl(config, **own)), train_dataset=data))


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(words)) for words in completions]


def _accelerate(config: str, folder: str) -> tuple[Any, float]:
    cpu = not torch.accelerator.is_available()
    accelerator = HydraAccelerator(cpu=cpu, deepspeed_plugin=DeepSpeedPlugin(config))
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
    return model, float(loss)


HOSTS: dict[str, Callable[[str, str], tuple[Any, float]]] = {
    CALLS: _calls, DATA: _data, TRAINER: _trainer, SFT: _sft, DPO: _dpo, GRPO: _grpo, ACCELERATE: _accelerate,
}  # fmt: skip


def one_step(rank: int, host: str, config: str, model: str, folder: str) -> SimpleNamespace:
    """On a forked rank whose folder of work is `folder`: the settings of the engine's block, its steps, its loss."""
    rank_environment(rank)
    os.chdir(folder)
    engine, loss = HOSTS[host](config, model)
    return SimpleNamespace(block=engine.hydra_config, steps=engine.global_steps, loss=loss)
