"""A gate and what it lets through in, the last product of an MLP out, whose input is computed again in the backward.

An MLP down(act(gate) * up) keeps gate, act(gate), up and their product, each as wide as the MLP. Gate and up are
enough: one more activation and one more multiplication make the others again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.pipe.fused import kernels_for

Activation = Callable[[Tensor], Tensor]
_SILU = F.silu


class Gated:
    """act(gate) * up, which nothing has computed yet: a linear layer that is handed it does so."""

    def __init__(self, gate: Tensor, up: Tensor, act: Activation):
        self.gate, self.up, self.act = gate, up, act

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        """`torch.nn.functional.linear` of it; nothing else is defined."""
        if func is not F.linear:
            return NotImplemented
        return _linear(*args, **(kwargs or {}))

    @property
    def requires_grad(self) -> bool:
        """False: a queue of weights' gradients would keep what is not to be kept."""
        return False


def _linear(input: Gated, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _GatedLinear.apply(input.gate, input.up, weight, bias, input.act)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, act: Activation) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.act = act
        kernels = _kernels(gate, up, act)
        return F.linear(act(gate) * up if kernels is None else kernels.silu_product(gate, up), weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        gate, up, weight = ctx.saved_tensors
        rows, trained = dy.flatten(0, -2), ctx.needs_input_grad[2]
        dproduct = dy @ weight
        if (kernels := _kernels(gate, up, ctx.act)) is not None:
            dgate, dup = kernels.silu_gradients(gate, up, dproduct, product=trained)
            product = dproduct if trained else None
        else:
            with torch.enable_grad():
                entered = gate.detach().requires_grad_()
                active = ctx.act(entered)
            dup = dproduct * active.detach()
            (dgate,) = torch.autograd.grad(active, entered, dproduct.mul_(up))
            product = active.detach() * up if trained else None
        dweight = None if product is None else rows.t() @ product.flatten(0, -2)
        dbias = rows.sum(0) if ctx.needs_input_grad[3] else None
        return dgate, dup, dweight, dbias, None


def _kernels(gate: Tensor, up: Tensor, act: Activation) -> ModuleType | None:
    """Those for this gate, if it is torch's SiLU and its features lie side by side."""
    if not gate.is_cuda:
        return None
    silu = F.silu is _SILU and (act is _SILU or type(act) is nn.SiLU)
    return kernels_for(gate, up) if silu and gate.stride(-1) == up.stride(-1) == 1 else None
