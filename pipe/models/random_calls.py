"""A function call in; what it draws at random out, in words, and how random numbers become what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hydra.pipe.dropout import normal_from

DROPOUTS = frozenset({F.dropout, torch.dropout, torch.dropout_})
_DROPOUTS_WITHOUT_RULE = frozenset(
    {F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.alpha_dropout}
    | {torch.feature_dropout, torch.feature_alpha_dropout}
)

# Numbers in (0, 1) and a call's arguments -> what a function of this name draws.
FROM_UNIFORM: Mapping[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "rand": lambda u, args, kwargs: u,
    "rand_like": lambda u, args, kwargs: u,
    "uniform_": lambda u, args, kwargs: _between(u, *_two(args, kwargs, "from", "to", (0.0, 1.0))),
    "randn": lambda u, args, kwargs: normal_from(u),
    "randn_like": lambda u, args, kwargs: normal_from(u),
    "normal_": lambda u, args, kwargs: _scaled(u, *_two(args, kwargs, "mean", "std", (0.0, 1.0))),
    "exponential_": lambda u, args, kwargs: -u.log() / _argument(args, kwargs, 1, "lambd", 1.0),
    "bernoulli_": lambda u, args, kwargs: u < _argument(args, kwargs, 1, "p", 0.5),
    "bernoulli": lambda u, args, kwargs: u < _argument(args, kwargs, 1, "p", args[0] if args else None),
}
_WITHOUT_RULE = frozenset(
    {"randint", "randint_like", "randperm", "cauchy_", "log_normal_", "geometric_", "random_", "multinomial"}
    | {"poisson", "gumbel_softmax", "rrelu", "normal"}
)


def dropout_of(args: Any, kwargs: Any) -> tuple[Tensor, float, bool]:
    """A dropout's input, its rate (0 out of training), and whether it changes the input in place."""
    rate = _argument(args, kwargs, 1, "p", 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    x = args[0] if args else kwargs["input"]
    return x, float(rate) if training else 0.0, bool(_argument(args, kwargs, 3, "inplace", False))


def random_call(func: Any, args: Any, kwargs: Any) -> str:
    """What a call draws: a dropout with its rate, or the name of a function; empty where it is deterministic."""
    if func in DROPOUTS or func in _DROPOUTS_WITHOUT_RULE:
        rate = dropout_of(args, kwargs)[1]
        return f"{func.__name__} {rate}" if rate else ""
    name = getattr(func, "__name__", "")
    if name == "scaled_dot_product_attention":
        rate = _argument(args, kwargs, 4, "dropout_p", 0.0)
        return f"attention dropout {rate} of torch's own attention" if rate else ""
    return name if name in FROM_UNIFORM or name in _WITHOUT_RULE else ""


def has_rule(func: Any) -> bool:
    """Whether what a function draws can be drawn by place."""
    return func in DROPOUTS or (getattr(func, "__name__", "") in FROM_UNIFORM and func not in _DROPOUTS_WITHOUT_RULE)


def _argument(args: Any, kwargs: Any, index: int, name: str, default: Any) -> Any:
    return kwargs.get(name, args[index] if len(args) > index else default)


def _two(args: Any, kwargs: Any, first: str, second: str, default: tuple[float, float]) -> tuple[Any, Any]:
    return _argument(args, kwargs, 1, first, default[0]), _argument(args, kwargs, 2, second, default[1])


def _between(u: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * u


def _scaled(u: Tensor, mean: float, std: float) -> Tensor:
    return mean + std * normal_from(u)
