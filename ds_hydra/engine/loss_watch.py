"""A loss of the user's own in; what it reads, draws and sends beside what it is given, out."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hydra.zero_hetero.errors import ConfigError

FORM = "loss_fn must be a function of logits (T, V) and labels (T,) that returns the loss of each token, (T,)"
NOT_THERE = (
    "the model's weights are not in the model while it trains, so it would see old values, and no gradient would reach "
    "them; give what the loss needs as logits, or as a copy if it is to stay as it is"
)


class Watch(TorchDispatchMode):
    """Sees all that torch computes within it, and what of that must not be part of a loss."""

    def __init__(self, names: Mapping[int, str], form: str = f"{FORM} made of the token's logits alone"):
        """`form` says, for errors, what the loss is to be."""
        super().__init__()
        self._names, self._form, self._fault = names, form, ""
        self._drawn = _random_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._fault:
            self._fault = self._seen(func, args, kwargs)
        return func(*args, **kwargs)

    def _seen(self, func: Any, args: Any, kwargs: Any) -> str:
        if func.namespace in ("c10d", "_c10d_functional"):
            return f"it talks to other ranks ({func}), which call it at other times and as often as they have tokens"
        if torch.Tag.nondeterministic_seeded in func.tags:
            return f"it draws random numbers ({func}), which would follow the plan: leave dropout and noise out"
        for tensor in _tensors((args, kwargs)):
            if (name := self._names.get(memory_of(tensor))) is not None:
                return f"it reads {name}: {NOT_THERE}"
        return ""

    def refuse(self) -> None:
        """ConfigError for what was seen."""
        if not self._fault and _random_state() != self._drawn:
            self._fault = "it draws random numbers of Python or NumPy: leave noise out"
        if self._fault:
            raise ConfigError(f"{self._form}, but {self._fault}")


def refuse_leaves(losses: Tensor, leaf: Tensor, names: Callable[[], Mapping[int, str]], what: str) -> None:
    """ConfigError if the graph of `losses` ends in other tensors than `leaf` that want a gradient.

    `names` are those of the model's tensors, which are asked for only then; `what` is the loss.
    """
    seen: set[Any] = set()
    left: list[Any] = [losses.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        found = getattr(node, "variable", None)
        if not isinstance(found, Tensor) or found is leaf:
            continue
        read = getattr(found, "_hydra_name", "")  # a copy that a released parameter handed out
        name = f"the model's {read}" if read else names().get(memory_of(found))
        said = name or f"a tensor of shape {tuple(found.shape)} that wants a gradient"
        remedy = NOT_THERE if name and name.startswith("the model's") else (
            "no optimizer of the engine trains that, so it would never change; freeze it by requires_grad_(False)"
        )  # fmt: skip
        raise ConfigError(f"{what} must be made of what it is given alone, but it reads {said}: {remedy}")


def names_of(model: nn.Module | None) -> dict[int, str]:
    """The tensors of a model by where they lie in memory, in words."""
    if model is None:
        return {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    found = {memory_of(tensor): f"the model's {name}" for name, tensor in reversed(named)}
    found.pop(0, None)
    return found


def memory_of(tensor: Tensor) -> int:
    """What all views of a tensor have in common, on the meta device too."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # it has none
        return 0


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _random_state() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state())
