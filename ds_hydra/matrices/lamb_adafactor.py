"""LAMB (You et al. 2020) and Adafactor (Shazeer and Stern 2018) by sums over whole parameters, on parts of them.

LAMB is as DeepSpeed's config has it: Adam's step times a ratio of norms of the whole parameter. Numbers and meaning are
those of DeepSpeed's `FusedLamb` and of its kernel (`csrc/lamb/fused_lamb_cuda_kernel.cu`): u = m / (sqrt(v) + eps) +
decay p, and p <- p - rate min(max(|p| / |u|, min_coeff), max_coeff) u, where the rate is corrected for the moments'
beginning. A parameter or step of norm 0 has the ratio 1.

Adafactor is as torch and transformers have it. Both estimate a matrix's second moment by V_ij = r_i c_j / mean(r) of
its rows' and columns' means, and clip a step by its root mean square over the parameter. transformers' (Trainer's
`optim="adafactor"`) adds eps to squares, and may set its own rate; `torch.optim.Adafactor` (a DeepSpeed config's
"Adafactor") bounds the mean and V from below.

[Note: one state for rows and columns] V itself is what is kept, on the even masters. Its rows have the means r and its
columns c, since both have one mean; so the new means are those of beta V + (1 - beta) G^2, whose sums each rank can
form of its elements. That takes 4 bytes of state a matrix's element on 1 of N ranks, where one process keeps less.

[Note: a box] The elements of a part, with zeros around them, as a block of three axes. In flat order, as
`pipe.model_plan` has it, a parameter is (rows, columns), (columns, rows), a stack (matrices, rows, columns), or one
that is cut within its matrices (rows, matrices, columns). Sums run along its last axis, and across the others.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hydra.matrices.owners import MatrixParam
from ds_hydra.matrices.sums import Group, OfSums, Part, Totals, Values, squares


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


class Box(NamedTuple):
    """How a parameter of two or more dimensions lies [Note: a box]."""

    matrices: int
    outer: int  # rows or columns, whichever comes first in flat order
    inner: int  # the others
    within: bool  # a stack is cut within its matrices, so that `outer` comes before them

    @classmethod
    def of(cls, param: MatrixParam) -> Box:
        *leading, rows, columns = param.shape
        matrices, last = math.prod(leading), len(param.shape) - 1
        turned = param.dim == last
        outer, inner = (columns, rows) if turned else (rows, columns)
        return cls(matrices, outer, inner, matrices == 1 or param.dim in (last - 1, last))

    @property
    def sums(self) -> int:
        return self.matrices * (self.outer + self.inner)

    def around(self, part: Part, values: Tensor) -> tuple[Tensor, slice]:
        """A part's values as a box, and which of the first axis it has."""
        shape = (self.matrices, self.inner) if self.within else (self.outer, self.inner)
        unit = math.prod(shape)
        first, last = part.start // unit, -(-part.stop // unit)
        flat = values.new_zeros((last - first) * unit)
        flat[part.start - first * unit : part.stop - first * unit] = values
        return flat.view(last - first, *shape), slice(first, last)

    def inside(self, part: Part, box: Tensor, of: slice) -> Tensor:
        """The part's values of a box, (elements,)."""
        before = part.start - of.start * (box.shape[1] * box.shape[2])
        return box.reshape(-1)[before : before + part.stop - part.start]

    def tables(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Sums across a box's outer axis, (matrices, inner), and along its inner one, with the axes that it has."""
        across, along = sums.split([self.matrices * self.inner, self.matrices * self.outer])
        along = along.view(self.outer, self.matrices) if self.within else along.view(self.matrices, self.outer)
        return across.view(self.matrices, self.inner), along

    def add_up(self, part: Part, values: Tensor) -> Tensor:
        """What a part adds to the sums of its parameter, (sums,) in FP64."""
        box, of = self.around(part, values)
        found = torch.zeros(self.sums, dtype=torch.float64, device=values.device)
        across, along = self.tables(found)
        along[of] = box.sum(2, dtype=torch.float64)
        if self.within:
            across += box.sum(0, dtype=torch.float64)
        else:
            across[of] = box.sum(1, dtype=torch.float64)
        return found

    def second_moment(self, part: Part, sums: Tensor, dtype: torch.dtype, least: float) -> Tensor:
        """V of a part, (elements,), where the mean is `least` at least."""
        across, along = self.tables(sums)
        across, along = across / self.outer, along / self.inner
        mean = along.mean(0 if self.within else 1, keepdim=True).clamp(min=max(least, torch.finfo(torch.float64).tiny))
        unit = self.inner * (self.matrices if self.within else self.outer)
        of = slice(part.start // unit, -(-part.stop // unit))
        near = (along / mean).to(dtype)[of].unsqueeze(2)
        far = across.to(dtype).unsqueeze(0) if self.within else across.to(dtype)[of].unsqueeze(1)
        return self.inside(part, near * far, of)


class Rule(NamedTuple):
    """Numbers of one step, whose names differ between the two."""

    fresh: float  # the weight of new squares
    added: float  # to each of them
    least_mean: float  # of a matrix's squares
    least: float  # second moment
    threshold: float  # of a step's root mean square


class Factored(OfSums):
    """What both have; the first round sums the parameter's squares, and rows and columns, the second the step's."""

    @abstractmethod
    def rule(self, own: Values) -> Rule:
        """The numbers of a step."""

    @abstractmethod
    def rates(self, own: Values, size: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """What a step is multiplied by, and the share that decay takes; `size`: the parameter's root mean square."""

    def names(self, group: Group) -> tuple[str, ...]:
        # Not as Adam's, which mean something else.
        return ("factored_sq",) if group.get("beta1") is None else ("factored_sq", "step_avg")

    def sizes(self, param: MatrixParam) -> Sequence[int]:
        return 1 + (Box.of(param).sums if len(param.shape) > 1 else 0), 1

    def sums(self, own: Values, totals: Totals) -> Tensor:
        if totals:
            return squares(self._step_of(own, totals)[0])
        found = squares(own.param)
        param = own.part.param
        if len(param.shape) > 1:
            found = torch.cat((found, Box.of(param).add_up(own.part, self._mixed(own))))
        return found

    def update(self, own: Values, totals: Totals) -> None:
        towards, second = self._step_of(own, totals)
        numel, threshold = own.part.param.numel, self.rule(own).threshold
        size, length = ((total[0] / numel).sqrt() for total in totals)
        rate, decay = self.rates(own, size)
        towards.mul_((rate / (length / threshold).clamp(min=1.0)).to(towards.dtype))
        own.state["factored_sq"].copy_(second)
        if own.group.get("beta1") is not None:
            towards = own.state["step_avg"].mul_(own.group["beta1"]).add_(towards, alpha=1.0 - own.group["beta1"])
        if own.group["weight_decay"]:
            own.param.mul_(1.0 - decay)
        own.param.sub_(towards)

    def _mixed(self, own: Values) -> Tensor:
        """beta V + (1 - beta) G^2."""
        rule = self.rule(own)
        return own.held("factored_sq").mul(1.0 - rule.fresh).add_(own.grad.square().add_(rule.added), alpha=rule.fresh)

    def _step_of(self, own: Values, totals: Totals) -> tuple[Tensor, Tensor]:
        """A part's step before it is clipped and has a rate, and its second moment."""
        param, rule = own.part.param, self.rule(own)
        if len(param.shape) > 1:
            box, sums = Box.of(param), totals[0][1:]
            second = box.second_moment(own.part, sums, own.grad.dtype, 0.0)
            bounded = box.second_moment(own.part, sums, own.grad.dtype, rule.least_mean) if rule.least_mean else second
        else:
            second = bounded = self._mixed(own)
        grad = -own.grad if own.group.get("maximize") else own.grad
        return bounded.clamp(min=rule.least).rsqrt_().mul_(grad), second


def _root_mean_square(value: Tensor) -> float:
    return float(value.square().mean().sqrt())


class Adafactor(Factored):
    """transformers'. Where it sets its own rate, its groups' `lr` is that rate, before it is scaled by a parameter."""

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        *,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        settings = {"lr": lr, "eps": tuple(eps), "clip_threshold": clip_threshold, "decay_rate": decay_rate,
                    "beta1": beta1, "weight_decay": weight_decay, "scale_parameter": scale_parameter,
                    "relative_step": relative_step, "warmup_init": warmup_init}  # fmt: skip
        super().__init__(params, settings)
        for group in self.param_groups:
            if group["relative_step"]:
                group["lr"] = _relative(group, 1)
            elif group["lr"] is None:
                raise ValueError("lr is None, and relative_step is off: one of them sets the rate")

    @staticmethod
    def in_one_process(value: Tensor, grads: Sequence[Tensor], group: Group) -> Tensor:
        rows = columns = vector = average = torch.zeros((), dtype=value.dtype)
        for step, grad in enumerate(grads, 1):
            beta, squared = 1.0 - step ** group["decay_rate"], grad**2 + group["eps"][0]
            if value.dim() > 1:
                rows = beta * rows + (1 - beta) * squared.mean(-1, keepdim=True)
                columns = beta * columns + (1 - beta) * squared.mean(-2, keepdim=True)
                towards = grad / (rows * columns / rows.mean(-2, keepdim=True)) ** 0.5
            else:
                vector = beta * vector + (1 - beta) * squared
                towards = grad / vector**0.5
            rate = _relative(group, step) if group["relative_step"] else group["lr"]
            rate *= max(group["eps"][1], _root_mean_square(value)) if group["scale_parameter"] else 1.0
            towards = rate * towards / max(1.0, _root_mean_square(towards) / group["clip_threshold"])
            if group["beta1"] is not None:
                towards = average = group["beta1"] * average + (1 - group["beta1"]) * towards
            value = value - group["weight_decay"] * rate * value - towards
        return value

    def begin(self, group: dict[str, Any]) -> None:
        if group["relative_step"]:
            done = next((self.state[p].get("step", 0) for p in group["params"] if p in self.state), None)
            group["lr"] = group["lr"] if done is None else _relative(group, done + 1)

    def rule(self, own: Values) -> Rule:
        group = own.group
        return Rule(own.step ** group["decay_rate"], group["eps"][0], 0.0, 0.0, group["clip_threshold"])

    def rates(self, own: Values, size: Tensor) -> tuple[Tensor | float, Tensor | float]:
        group = own.group
        rate = _relative(group, own.step) if group["relative_step"] else group["lr"]
        rate = size.clamp(min=group["eps"][1]) * rate if group["scale_parameter"] else rate
        return rate, rate * group["weight_decay"]


def _relative(group: Mapping[str, Any], step: int) -> float:
    return float(min(1e-6 * step if group["warmup_init"] else 1e-2, step**-0.5))


class TorchAdafactor(Factored):
    """torch's."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        *,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        # What torch refuses is refused by it.
        made = torch.optim.Adafactor([torch.zeros(1)], lr, beta2_decay, tuple(eps), d, weight_decay,  # type: ignore[arg-type]
                                     foreach=foreach, maximize=maximize)  # fmt: skip
        super().__init__(params, dict(made.defaults))

    @staticmethod
    def in_one_process(value: Tensor, grads: Sequence[Tensor], group: Group) -> Tensor:
        rows = columns = vector = torch.zeros((), dtype=value.dtype)
        least = torch.finfo(value.dtype).eps if group["eps"][0] is None else group["eps"][0]
        for step, given in enumerate(grads, 1):
            grad, fresh = -given if group["maximize"] else given, step ** group["beta2_decay"]
            if value.dim() > 1:
                rows = rows + fresh * ((grad**2).mean(-1, keepdim=True) - rows)
                columns = columns + fresh * ((grad**2).mean(-2, keepdim=True) - columns)
                second = rows * columns / rows.mean(-2, keepdim=True).clamp(min=least)
            else:
                second = vector = vector + fresh * (grad**2 - vector)
            towards = grad / second.clamp(min=least**2) ** 0.5
            rate = max(group["eps"][1], _root_mean_square(value)) * min(group["lr"], step**-0.5)
            clipped = max(1.0, _root_mean_square(towards) / group["d"])
            value = value * (1 - group["lr"] * group["weight_decay"]) - rate / clipped * towards
        return value

    def rule(self, own: Values) -> Rule:
        least = own.group["eps"][0]
        least = torch.finfo(own.param.dtype).eps if least is None else least
        return Rule(own.step ** own.group["beta2_decay"], 0.0, least, least * least, own.group["d"])

    def rates(self, own: Values, size: Tensor) -> tuple[Tensor | float, Tensor | float]:
        group = own.group
        rate = float(group["lr"])
        return size.clamp(min=group["eps"][1]) * min(rate, own.step**-0.5), rate * group["weight_decay"]
