"""One GPU rank trains in BF16: the loss falls and stays close to the same steps in FP32."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.gpu


def losses(bf16: bool, steps: int) -> list[float]:
    import ds_hydra

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(0, 64, (int(n),), generator=generator) for n in torch.randint(3, 700, (64,))]
    settings: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": bf16},
        "hydra": {"tokens_per_step": 4000, "strategies": ["tp1"], "steps_file": None},
    }
    engine, *_ = ds_hydra.initialize(model=model, training_data=data, config=settings)
    result = [float(engine.train_batch()) for _ in range(steps)]
    engine.destroy()
    return result


def test_bf16_follows_fp32() -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    wide, narrow = losses(False, 12), losses(True, 12)
    dist.destroy_process_group()
    assert wide[-1] < wide[0] - 0.5
    assert max(abs(a - b) for a, b in zip(wide, narrow, strict=True)) < 0.05 * wide[0]
