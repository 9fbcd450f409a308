"""Matrices in, nearly orthogonal ones out: the quintic iteration of Muon, in the three forms that users know.

  standard, gram   DeepSpeed's (`deepspeed/runtime/zero/muon/original_muon.py`): the matrix over its norm plus eps. The
                   Gram form iterates on the square of the smaller side and restarts once (Dao 2026, "Gram
                   Newton-Schulz"); of square matrices it is the standard one.
  torch            `torch.optim.Muon`'s: over its norm, which is eps at least.

[Note: types of the iteration] Each form has the type that its origin has: 16 bit where the device can, and FP64 of
matrices in FP64, as attention has it in the self-check. "standard" and "torch" round the matrix to it first of all, so
that matrices may travel to their owners in it and nothing is lost; "gram" scales first. A square matrix and its
transpose differ after an iteration in 16 bit (1 % of the update), so it is always the user's own that is iterated on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hydra.matrices.owners import FEW_STEPS, Kind

Coefficients = tuple[float, float, float]
COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
_RESTART = 2  # the iteration before which the Gram form begins with the matrix again


class Method(NamedTuple):
    """Which iteration, how often, by which numbers."""

    kind: Kind = "gram"
    steps: int = FEW_STEPS
    coefficients: Coefficients = COEFFICIENTS
    eps: float = EPS

    def computed_in(self, given: torch.dtype) -> torch.dtype:
        """The iteration's type for matrices of a type [Note: types of the iteration]."""
        if given == torch.float64 or self.kind == "torch":
            return given if given == torch.float64 else torch.bfloat16
        device = get_accelerator()
        if self.kind == "gram":
            return torch.float16 if device.is_fp16_supported() else torch.float32
        return torch.bfloat16 if device.is_bf16_supported() else torch.float32

    def travels_in(self, given: torch.dtype) -> torch.dtype:
        """The type in which matrices of another may come to their owners."""
        return given if self.kind == "gram" else self.computed_in(given)


def orthogonalized(matrices: Tensor, method: Method, given: torch.dtype) -> Tensor:
    """Each of `matrices`, (rows, columns) or (count, rows, columns), nearly orthogonal, in the type of the iteration
    for matrices that were of the type `given`."""
    computed = method.computed_in(given)
    turned = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if turned else matrices
    if method.kind == "gram":
        x = (x / (x.norm(dim=(-2, -1), keepdim=True) + method.eps)).to(computed)
        if x.size(-1) > x.size(-2):
            return _gram(x, method, turned=turned)
        x = _standard(x, method)
    elif method.kind == "standard":
        x = x.to(computed)
        x = _standard(x / (x.norm(dim=(-2, -1), keepdim=True) + method.eps), method)
    else:
        x = x.to(computed)
        x = _standard(x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=method.eps), method)
    return x.mT if turned else x


def _standard(x: Tensor, method: Method) -> Tensor:
    """X <- a X + (b A + c A A) X of A = X X^T, so many times."""
    a, b, c = method.coefficients
    for _ in range(method.steps):
        square = x @ x.mT
        if method.kind == "torch":
            multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
            x = multiply(x, multiply(square, square, square, beta=b, alpha=c), x, beta=a)
        else:
            x = a * x + (b * square + c * square @ square) @ x
    return x


def _gram(x: Tensor, method: Method, *, turned: bool) -> Tensor:
    """The same of matrices (.., n, m) with m > n, on R = X X^T (n, n): X is multiplied by what the steps amount to, and
    turned back, if it was, in the order that DeepSpeed has: the other one rounds otherwise on some processors."""
    a, b, c = method.coefficients
    square, factor = x @ x.mT, None
    for step in range(method.steps):
        if step == _RESTART and factor is not None:
            x = factor @ x
            square, factor = x @ x.mT, None
        z = b * square + c * square @ square
        if factor is None:
            factor = z.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            factor = a * factor + z @ factor
        if step < method.steps - 1 and step + 1 != _RESTART:
            product = a * square + z @ square
            square = a * product + z @ product
    if factor is None:
        return x.mT if turned else x
    return x.mT @ factor.mT if turned else factor @ x
