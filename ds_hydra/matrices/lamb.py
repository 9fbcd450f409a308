"""LAMB (You et al. 2020) as DeepSpeed's config has it: Adam's step times a ratio of norms of the whole parameter.

Numbers and meaning are those of DeepSpeed's `FusedLamb` and of its kernel (`csrc/lamb/fused_lamb_cuda_kernel.cu`):
u = m / (sqrt(v) + eps) + decay p, and p <- p - rate min(max(|p| / |u|, min_coeff), max_coeff) u, where the rate is
corrected for the moments' beginning. A parameter or step of norm 0 has the ratio 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hydra.matrices.of_sums import OfSums
from ds_hydra.matrices.owners import MatrixParam
from ds_hydra.matrices.sums import Group, Totals, Values, squares


class Lamb(OfSums):
    """Its sums are the squares of a parameter and of its step."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        settings = {"lr": lr, "bias_correction": bias_correction, "betas": tuple(betas), "eps": eps,
                    "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay,
                    "max_coeff": max_coeff, "min_coeff": min_coeff}  # fmt: skip
        super().__init__(params, settings)
        if amsgrad:
            raise ValueError("amsgrad is not LAMB's: leave it out")
        for group in self.param_groups:
            if max_grad_norm or group.pop("max_grad_norm", 0.0):
                raise ValueError("max_grad_norm: clip by the config's gradient_clipping")
            _check(group)

    @staticmethod
    def in_one_process(value: Tensor, grads: Sequence[Tensor], group: Group) -> Tensor:
        one, two = group["betas"]
        first, second = torch.zeros_like(value), torch.zeros_like(value)
        for step, grad in enumerate(grads, 1):
            first, second = one * first + (1 - one) * grad, two * second + (1 - two) * grad**2
            below = (second + group["eps"]) ** 0.5 if group["eps_inside_sqrt"] else second**0.5 + group["eps"]
            towards = first / below + group["weight_decay"] * value
            norms = float(value.norm()), float(towards.norm())
            scale = min(max(norms[0] / norms[1], group["min_coeff"]), group["max_coeff"]) if all(norms) else 1.0
            corrected = (1 - two**step) ** 0.5 / (1 - one**step) if group["bias_correction"] else 1.0
            value = value - group["lr"] * corrected * scale * towards
        return value

    def names(self, group: Group) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def sizes(self, param: MatrixParam) -> Sequence[int]:
        return (2,)

    def sums(self, own: Values, totals: Totals) -> Tensor:
        return torch.cat((squares(own.param), squares(_step_of(own, *_moments(own)))))

    def update(self, own: Values, totals: Totals) -> None:
        group, moments = own.group, _moments(own)
        towards = _step_of(own, *moments)
        for key, new in zip(self.names(group), moments, strict=True):
            own.state[key].copy_(new)
        rate = group["lr"]
        if group["bias_correction"]:
            first, second = (1.0 - beta**own.step for beta in group["betas"])
            rate = rate * second**0.5 / first
        own.param.sub_(towards.mul_((ratio(totals[0], group) * rate).to(towards.dtype)))


def ratio(norms: Tensor, group: Group) -> Tensor:
    """What a step is multiplied by: of the squares of a parameter and of its step, (2,)."""
    weight, step = norms.sqrt().unbind()
    found = (weight / step).clamp(group["min_coeff"], group["max_coeff"])
    return torch.where((weight != 0) & (step != 0), found, torch.ones_like(found))


def _moments(own: Values) -> tuple[Tensor, Tensor]:
    """Both, with the coming gradient."""
    one, two = own.group["betas"]
    return (own.held("exp_avg").mul(one).add_(own.grad, alpha=1.0 - one),
            own.held("exp_avg_sq").mul(two).addcmul_(own.grad, own.grad, value=1.0 - two))  # fmt: skip


def _step_of(own: Values, first: Tensor, second: Tensor) -> Tensor:
    """A part's step before it has a ratio and a rate."""
    eps = own.group["eps"]
    below = second.add(eps).sqrt_() if own.group["eps_inside_sqrt"] else second.sqrt().add_(eps)
    return (first / below).add_(own.param, alpha=own.group["weight_decay"])


def _check(group: Mapping[str, Any]) -> None:
    """ValueError for settings that no step can follow."""
    if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ValueError(f"betas are {group['betas']!r}; each is at least 0 and below 1")
    for key in ("lr", "eps", "weight_decay", "min_coeff"):
        if not group[key] >= 0.0:
            raise ValueError(f"{key} is {group[key]!r}; it is at least 0")
    if not group["max_coeff"] >= group["min_coeff"]:
        raise ValueError(f"max_coeff is {group['max_coeff']!r}, below min_coeff {group['min_coeff']!r}")
