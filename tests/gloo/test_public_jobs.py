"""Configs of ZeRO 2 and 3, offloaded and otherwise as people have them, train as the same settings of ZeRO 1 alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
import torch.distributed as dist

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.config.deepspeed_settings import BATCH_KEYS
from ds_hydra.testing import run_ranks
from tests.support.pages import printed_block
from tests.support.printed_hosts import FIRST_LOSS, SMALL, TRAINER, one_step, save_model
from tests.support.public_configs import CONFIGS
from tests.support.small_job import find_before_forks, sequences, small_config, small_engine, small_source

BY_CALLS = ("DeepSpeed-Chat", "ZeRO++", "cifar", "bing_bert")
BY_STEPS = ("GPT-NeoX", "BLOOM", "HelloDeepSpeed")
BY_TRAINER = ("transformers ZeRO-3, offloaded", "LLaMA-Factory z2_autotp", "transformers with Ulysses")
OF_UPDATES = ("optimizer", "scheduler", "bf16", "gradient_clipping")  # what is trained hangs on these alone
STEPS = 2


def job(name: str, num_ranks: int) -> dict[str, Any]:
    """The config with a block, for as many sequences as there are here; in BF16, as CPUs have no FP16."""
    config = dict(CONFIGS[name].config)
    for key in (*BATCH_KEYS, "fp16"):
        config.pop(key, None)
    optimizer = config.get("optimizer") or {"type": "AdamW", "params": {"lr": 1e-2}}
    updates = {"optimizer": optimizer, "bf16": config.get("bfloat16") or {"enabled": name != "cifar"}}
    return {**config, **updates, "hydra": small_config(num_ranks)["hydra"]}


def losses(rank: int, config: dict[str, Any], by_calls: bool) -> list[float]:
    engine = small_engine(rank, config=config, data=None if by_calls else ...)
    found, data = [], sequences()
    for step in range(STEPS):
        if by_calls:
            tokens = torch.stack([data[0][:3], data[step + 2][:3]]) + rank
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        else:
            engine.train_batch()
        found.append(engine.last_step.loss)
    engine.destroy()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", [*BY_CALLS, *BY_STEPS])
def test_it_trains_as_with_zero_1(name: str, num_ranks: int) -> None:
    find_before_forks()
    small_source()
    config = job(name, num_ranks)
    alone = {key: value for key, value in config.items() if key in (*OF_UPDATES, "hydra")}
    alone["zero_optimization"] = {"stage": 1}

    def run(rank: int) -> tuple[list[float], list[float]]:
        assert dist.get_world_size() == num_ranks
        return losses(rank, config, name in BY_CALLS), losses(rank, alone, name in BY_CALLS)

    for found, expected in run_ranks(run, num_ranks):
        assert len(set(found)) == STEPS, "the update changed nothing"
        assert found == expected


@pytest.mark.drawn
@pytest.mark.parametrize(
    "name", ["transformers ZeRO-3, offloaded", "LLaMA-Factory z2_autotp", "transformers with Ulysses"]
)
def test_a_trainer_makes_an_update_with_it(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", **SMALL)
    config = {**CONFIGS[name].config, **printed_block(), "activation_checkpointing": {"number_checkpoints": "auto"}}
    for found in run_ranks(one_step, 2, TRAINER, config, "model", str(tmp_path), timeout=300):
        assert found.logged["loss"] == pytest.approx(FIRST_LOSS[TRAINER], abs=0.05)
        assert found.steps == 1
