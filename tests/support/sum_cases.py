"""Rows of training with LAMB and Adafactor, and what they are compared with: the originals, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from deepspeed.ops.lamb import FusedLamb, fused_lamb
from torch import Tensor, nn
from transformers.optimization import Adafactor

from tests.support import equivalence
from tests.support.case import CHANGING, CHANGING_8, CHANGING_WITHOUT_TP, FLOAT32, Case
from tests.support.families import ADAPTED_STACKS, LAYER_LIST

LAMB = {"lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.99]}
OF_TORCH = {"lr": 0.02, "weight_decay": 0.1}
OF_TRAINER = {"lr": 0.005, "scale_parameter": False, "relative_step": False}


class Kernel:
    """DeepSpeed's, in torch (`csrc/lamb/fused_lamb_cuda_kernel.cu`): line by line, of a whole parameter."""

    def load(self) -> Kernel:
        return self

    def lamb(
        self, p: Tensor, out: Tensor, m: Tensor, v: Tensor, g: Tensor, lr: float, beta1: float, beta2: float,
        max_coeff: float, min_coeff: float, eps: float, grad_scale: float, step: int, mode: int, bias_correction: int,
        decay: float,
    ) -> Tensor:  # fmt: skip
        step_size = lr
        if bias_correction == 1:
            step_size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        scaled_grad = g / grad_scale
        m.copy_(beta1 * m + (1 - beta1) * scaled_grad)
        v.copy_(beta2 * v + (1 - beta2) * scaled_grad * scaled_grad)
        denom = (v + eps).sqrt() if mode == 0 else v.sqrt() + eps
        update = m / denom + decay * p
        reg_w, reg_u = (p * p).sum().sqrt(), (update * update).sum().sqrt()
        lamb_coeff = torch.tensor(1.0)
        if reg_w != 0 and reg_u != 0:
            lamb_coeff = torch.clamp(reg_w / reg_u, min_coeff, max_coeff)
        p.sub_(step_size * lamb_coeff * update)
        return lamb_coeff


def of_deepspeed(**own: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """DeepSpeed's own class, with its kernel in torch."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        with mock.patch.object(fused_lamb, "FusedLambBuilder", Kernel):
            made: torch.optim.Optimizer = FusedLamb(equivalence.decay_groups(model), **own)
        return made

    return make


def of_trainer(**own: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """transformers'."""
    return lambda model: Adafactor(equivalence.decay_groups(model), **own)


equivalence.OTHERS |= {
    "LAMB": ({"type": "Lamb", "params": LAMB}, of_deepspeed(**LAMB)),
    "LAMB, by an object": (None, of_deepspeed(lr=0.01, eps_inside_sqrt=True, max_coeff=0.5, bias_correction=False)),
    "LAMB, rounded": ({"type": "Lamb", "params": LAMB | {"eps": 1e-3}}, of_deepspeed(**LAMB, eps=1e-3)),
    "Adafactor": (
        {"type": "Adafactor", "params": OF_TORCH},
        lambda model: torch.optim.Adafactor(equivalence.decay_groups(model), **OF_TORCH),  # type: ignore[arg-type]
    ),
    "Adafactor of Trainer": (None, of_trainer(**OF_TRAINER)),
    "Adafactor, its own rate": (None, of_trainer()),
    "Adafactor, momentum": (None, of_trainer(**OF_TRAINER, beta1=0.9, weight_decay=0.1)),
    # Biases of keys have gradients of rounding alone.
    "Adafactor, biases": (None, of_trainer(**OF_TRAINER | {"eps": (1e-12, 1e-3)})),
    "Adafactor, rounded": (None, of_trainer(**OF_TRAINER | {"eps": (1e-6, 1e-3)})),
}  # fmt: skip


def _rows() -> Iterator[Case]:
    base = Case("", "llama", CHANGING, optimizer="LAMB")
    yield base.row("LAMB", quick=True)
    yield base.row("LAMB, by an object", optimizer="LAMB, by an object")
    yield base.row("LAMB, 8 ranks", *CHANGING_8)
    yield base.row("LAMB, experts", family="mixtral")
    yield base.row("LAMB, fused, biases", *CHANGING_WITHOUT_TP, family="gpt2")
    yield base.row("LAMB, lora", family="lora", quick=True)
    yield base.row("LAMB, tied", family="llama_tied")
    yield base.row("LAMB, slices, V", "tp2pp2/v", "sp2 + pp2/list", slices=True, recompute=True, steps=4)
    yield base.row("LAMB, no clipping", clip=0.0)
    yield base.row("LAMB, fp32", optimizer="LAMB, rounded", dtype=FLOAT32, steps=2)
    torchs, base = base.row("", optimizer="Adafactor"), base.row("", optimizer="Adafactor of Trainer")
    yield torchs.row("torch's")
    yield torchs.row("torch's, experts", family="mixtral", quick=True)
    yield torchs.row("torch's, one rank", "tp1")
    yield torchs.row("torch's, two ranks", "tp2", "2*tp1", "pp2")
    yield torchs.row("torch's, lora of stacks", "tp2pp2", "sp2 + 2*tp1", family=next(iter(ADAPTED_STACKS)), steps=3)
    yield base.row("transformers'", quick=True)
    yield base.row("its own rate", optimizer="Adafactor, its own rate", quick=True)
    yield base.row("momentum", optimizer="Adafactor, momentum")
    yield base.row("on 7 ranks", "7*tp1", "tp2 + 5*tp1", steps=3)
    yield base.row("on 8 ranks", *CHANGING_8)
    yield base.row("one key head", family="llama_1_key_head")
    yield base.row("fused", family="phi3", quick=True)
    yield base.row("experts, spread", "tp4ep4", "tp2sp2ep4", "sp2ep2 + 2*tp1", family="mixtral", steps=3)
    yield base.row("tied", family="llama_tied")
    yield base.row("layer list", family=LAYER_LIST, optimizer="Adafactor, biases")
    yield base.row("lora", family="lora")
    yield base.row("slices, V", "tp2pp2/v", "sp2 + pp2/list", slices=True, recompute=True, steps=4)
    yield base.row("phases", "4*tp1 then 2*tp2 then tp4", "4*tp1 then 2*pp2", steps=4)
    yield base.row("latent", family="deepseek_v3", steps=3)
    yield base.row("linear attention", "pp2", "2*tp1", family="qwen3_next", steps=2)
    yield base.row("frozen", frozen=("embed_tokens", "layers.0.", "layers.1."))
    yield base.row("fp32", optimizer="Adafactor, rounded", dtype=FLOAT32, steps=2)


CASES = tuple(_rows())
