"""Queries and keys in, turned by their positions, as one function for each of them that keeps tables alone."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ds_hydra.pipe.fused import kernels_for


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., d) turned: of its halves a and b, a cos - b sin and b cos + a sin, by tables that broadcast with x.

    (Su et al. 2021, "RoFormer", eq. 34, with the features of a pair half the size apart, as Hugging Face has them.)
    """
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        if (kernels := _kernels(x, cos, sin)) is not None:
            return kernels.turned(x, cos, sin, back=False)  # type: ignore[no-any-return]
        (a, b), (sin_a, sin_b) = x.chunk(2, -1), sin.chunk(2, -1)
        out = x * cos
        turned_a, turned_b = out.chunk(2, -1)
        turned_a.addcmul_(b, sin_a, value=-1)
        turned_b.addcmul_(a, sin_b)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        if (kernels := _kernels(dy, cos, sin)) is not None:
            return kernels.turned(dy, cos, sin, back=True), None, None
        (dy_a, dy_b), (sin_a, sin_b) = dy.chunk(2, -1), sin.chunk(2, -1)
        dx = dy * cos
        dx_a, dx_b = dx.chunk(2, -1)
        dx_a.addcmul_(dy_b, sin_b)
        dx_b.addcmul_(dy_a, sin_a, value=-1)
        return dx, None, None


def _kernels(x: Tensor, cos: Tensor, sin: Tensor) -> ModuleType | None:
    """Those for heads (B, heads, T, d) and tables (1 or B, 1, T, d) with whole rows of features."""
    if not x.is_cuda:
        return None
    tables = {(batch, 1, x.shape[-2], x.shape[-1]) for batch in (1, len(x))} if x.dim() == 4 else set()
    plain = cos.shape in tables and sin.shape in tables and all(one.stride(-1) == 1 for one in (x, cos, sin))
    return kernels_for(x, cos, sin) if plain else None
