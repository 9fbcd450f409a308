"""A function call in, what it drew at random out, in words; empty for all that is deterministic."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_DROPOUTS = frozenset(
    {F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout}
)
_DRAWS = frozenset(
    {"rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "bernoulli_"}
    | {"uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "multinomial"}
    | {"poisson", "gumbel_softmax", "rrelu"}
)


def random_call(func: Any, args: Any, kwargs: Any, result: Any) -> str:
    """What a call drew: a dropout with its rate, or the name of a function that draws a tensor of numbers.

    A single number (a coin for a whole layer) is left out: models draw it whether they use it or not.
    """
    if func in _DROPOUTS:
        rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        return f"dropout {rate}" if training and rate else ""
    name = getattr(func, "__name__", "")
    if name == "scaled_dot_product_attention":
        rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return f"attention dropout {rate}" if rate else ""
    if name in _DRAWS and isinstance(result, Tensor) and result.dim() > 0:
        return name
    return ""
