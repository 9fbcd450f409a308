"""Queries and keys in, turned by their positions, as one function for each of them that keeps tables alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., d) turned: of its halves a and b, a cos - b sin and b cos + a sin, by tables that broadcast with x.

    (Su et al. 2021, "RoFormer", eq. 34, with the features of a pair half the size apart, as Hugging Face has them.)
    """
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        (a, b), (sin_a, sin_b) = x.chunk(2, -1), sin.chunk(2, -1)
        out = x * cos
        turned_a, turned_b = out.chunk(2, -1)
        turned_a.addcmul_(b, sin_a, value=-1)
        turned_b.addcmul_(a, sin_b)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        (dy_a, dy_b), (sin_a, sin_b) = dy.chunk(2, -1), sin.chunk(2, -1)
        dx = dy * cos
        dx_a, dx_b = dx.chunk(2, -1)
        dx_a.addcmul_(dy_b, sin_b)
        dx_b.addcmul_(dy_a, sin_a, value=-1)
        return dx, None, None
