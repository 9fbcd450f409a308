"""A model's parameters and DeepSpeed's blocks bf16, fp16 and data_types in; the types of a job's tensors out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_hydra.zero_hetero.errors import ConfigError


class DataTypes(NamedTuple):
    """The types of a job's tensors."""

    compute: torch.dtype
    grads: torch.dtype  # of the gradients of micro-batches as they add up on a rank
    masters: torch.dtype
    wire: torch.dtype  # of gradients on their way to the masters [Note: gradients on the wire]

    @classmethod
    def of(cls, compute: torch.dtype, *, grads: str | None, wire: torch.dtype | None) -> DataTypes:
        """`grads`: data_types.grad_accum_dtype; `wire`: communication_data_type; None where the config has none."""
        masters = torch.float64 if compute == torch.float64 else torch.float32
        return cls(compute, choose_grad_dtype(compute, grads), masters, wire or compute)


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


_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_grad_dtype(compute: torch.dtype, asked: str | None) -> torch.dtype:
    """Where the gradients of micro-batches add up: FP32 (FP64 for an FP64 model), or data_types.grad_accum_dtype.

    Raises ConfigError for a type that is neither that nor the one which the model is computed in.
    """
    wide = torch.promote_types(compute, torch.float32)
    if asked is None:
        return wide
    if _NAMES[asked] not in (compute, wide):
        raise ConfigError(
            f'config: data_types.grad_accum_dtype is "{asked}" but the model is computed in '
            f"{str(compute).removeprefix('torch.')}: its gradients add up in that type or in "
            f"{str(wide).removeprefix('torch.')}; give one of these, or leave the key out"
        )
    return _NAMES[asked]
