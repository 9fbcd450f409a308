"""Norms of features as functions that keep their input and nothing else of its size for the backward.

Written out in torch's operators, a norm of 16 bit rows keeps an FP32 copy of them and the normalised rows too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0) -> Tensor:
    """x (..., n) over the root of the mean of its squares and `eps`, times (weight (n,) + offset), in x's type.

    (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.) All is computed in FP32, or wider.
    """
    if x.is_cuda and not offset:
        return F.rms_norm(x, x.shape[-1:], weight, eps)  # one kernel forward, and it keeps as little
    return _RmsNorm.apply(x, weight, eps, offset)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
        rows, wide = x, weight
        if weight is not None and offset:  # 1 + 0.001 is 1 in 16 bit
            rows, wide = x.to(_wide(x)), weight.to(_wide(x)) + offset
        # What `F.rms_norm` calls; it returns the inverse root (..., 1) of each row, too, in FP32 or wider.
        out, root = torch._fused_rms_norm(rows, x.shape[-1:], wide, eps)
        ctx.save_for_backward(x, root, weight)
        ctx.offset = offset
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # type: ignore[override]
        # With y = w u, u = x r and r = (mean of x² + eps)^-1/2, and g = dy w:
        #   dw = sum over rows of dy u          dx = r (g - u mean(g u))
        x, root, weight = ctx.saved_tensors
        r, size, wide = root.view(*x.shape[:-1], 1), x.shape[-1], root.dtype
        u = x * r
        dyu, dw = dy * u, None
        if weight is None:
            g, mean = dy.to(wide, copy=True), dyu.sum(-1, keepdim=True)
        else:
            w = weight.to(wide) + ctx.offset if ctx.offset else weight.to(wide)
            g, mean = dy * w, (dyu @ w).unsqueeze(-1)
            dw = dyu.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        g.addcmul_(u, mean, value=-1 / size)
        return torch.mul(g, r, out=torch.empty_like(x)), dw, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
