"""A model's parameters and DeepSpeed's blocks bf16 and fp16 in; the type that the model is computed in out."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_hydra.zero_hetero.errors import ConfigError


def choose_dtype(model: nn.Module, *, fp16: bool, bf16: bool) -> torch.dtype:
    """BF16 or FP16 if its block is enabled, else the model's own: FP32, or FP64 if all of it is FP64.

    Raises ConfigError if the device cannot compute in that type, or if a 16 bit model comes without its block.
    """
    accelerator = get_accelerator()
    if fp16:
        # On CPU the accelerator knows of fast kernels only; torch computes without them.
        if accelerator.device_name() != "cpu" and not accelerator.is_fp16_supported():
            raise ConfigError("config: fp16 is enabled but this device does not support it; disable it, or use bf16")
        return torch.float16
    if bf16:
        if not accelerator.is_bf16_supported():
            raise ConfigError("config: bf16 is enabled but this device does not support it; disable it")
        return torch.bfloat16
    types = {parameter.dtype for parameter in model.parameters()}
    if types == {torch.float64}:
        return torch.float64
    if types & {torch.bfloat16, torch.float16}:
        raise ConfigError(
            f"the model's parameters are {', '.join(sorted(map(str, types)))} but the block bf16 is not enabled: "
            'set "bf16": {"enabled": true}, or load the model in float32'
        )
    return torch.float32
