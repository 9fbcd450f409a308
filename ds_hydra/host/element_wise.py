"""An optimizer in; whether it updates each element by that element alone, found by trying, out.

A script may say of an optimizer that is not known here that it may be used ("zero_allow_untested_optimizer"), and
transformers' Trainer says so of any. Whoever divides by a norm of the whole weight, or needs it as a matrix, shows in a
small one that is updated once as it is, and once in pieces as ranks own them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_ROWS, _COLUMNS, _STEPS = 6, 8, 3
_PIECES = (13, 22, 13)  # elements
_NEAR = 1e-4  # of the largest update; sums of single precision are all that right ones differ by


def is_element_wise(optimizer: Optimizer) -> bool | None:
    """Whether an optimizer of this class with these options is; None where none can be made or run to try it."""
    taken = inspect.signature(type(optimizer)).parameters
    free = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    defaults = {key: value for key, value in optimizer.defaults.items() if free or key in taken}
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(_ROWS, _COLUMNS, generator=draw)
    sizes = torch.logspace(-3, 3, _ROWS * _COLUMNS).view_as(weight)  # so that pieces have norms of their own
    gradients = [torch.randn(_ROWS, _COLUMNS, generator=draw) * sizes for _ in range(_STEPS)]
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
        try:
            whole, cut = (
                _updated(type(optimizer), options, defaults, weight, gradients, pieces)
                for pieces in ((weight.numel(),), _PIECES)
            )
        except Exception:  # of an optimizer that runs on GPUs alone, say
            return None
        if not float((whole - cut).abs().max()) <= _NEAR * float((whole - weight.flatten()).abs().max()):
            return False
    return True


def _updated(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    weight: Tensor,
    gradients: list[Tensor],
    pieces: tuple[int, ...],
) -> Tensor:
    """The weight (elements,) after some updates, as one matrix where there is one piece."""

    def cut(values: Tensor) -> list[Tensor]:
        return [values] if len(pieces) == 1 else list(values.flatten().split(pieces))

    parameters = [nn.Parameter(piece.clone()) for piece in cut(weight)]
    make: Any = kind  # each has arguments of its own
    # Each piece has an optimizer of its own, as on the rank that owns it: one that clips by all it has differs, too.
    optimizers: list[Any] = [make([{"params": [parameter], **options}], **defaults) for parameter in parameters]
    for optimizer in optimizers:
        if hasattr(optimizer, "train"):  # as those without a schedule have
            optimizer.train()
    for gradient in gradients:
        for optimizer, parameter, piece in zip(optimizers, parameters, cut(gradient), strict=True):
            parameter.grad = piece.clone()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])
