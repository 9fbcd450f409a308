"""A model's head and its forward in; whether logits are one product with the head's weight, and nothing else, out.

Models do other things behind their layers: they scale logits, cap them, add a bias, drop parts of what enters the head.
No attribute tells of all that. So the model's own forward runs with one token in front of a head that computes nothing
and hands out a stand-in for logits. If the head was called once, with the very values that entered the forward, and the
stand-in has come out without any operation on it, then nothing else is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.models.whose_code import HOOKS
from ds_hydra.pipe.tensor_parallel import is_linear


class PlainHead:
    """A linear layer without a bias, whose calls nobody watches."""

    def __init__(self, head: nn.Linear):
        self._head = head

    @classmethod
    def of(cls, model: nn.Module, head: nn.Module) -> PlainHead | None:
        """Of a head as the user has written it, before anything is installed in the model; None if it is another."""
        watched = any(getattr(module, key) for module in (model, head) for key in HOOKS)
        if watched or not isinstance(head, nn.Linear) or not is_linear(head) or head.bias is not None:
            return None
        return cls(head)

    @property
    def weight(self) -> Tensor:
        """(V_local, H)"""
        return self._head.weight

    def is_all(self, hidden: Tensor, run: Callable[[], Tensor]) -> bool:
        """Whether `run`, the model's forward behind its layers with hidden states (1, 1, H), is the head alone."""
        entered: list[Tensor] = []
        made = _StandIn.of(hidden, len(self.weight))

        def head(x: Tensor) -> Tensor:
            entered.append(x)
            return made

        before = self._head.__dict__.get("forward")
        self._head.forward = head  # type: ignore[method-assign,assignment]
        version = hidden._version
        try:
            out = run()
        finally:
            del self._head.forward
            if before is not None:
                self._head.forward = before  # type: ignore[method-assign]
        same = len(entered) == 1 and _place(entered[0]) == _place(hidden) and hidden._version == version
        return same and out is made and not made.touched


class _StandIn(Tensor):
    """Logits (1, 1, V_local) of any values, which note that something was computed with them."""

    touched: bool

    @staticmethod
    def of(hidden: Tensor, vocabulary: int) -> _StandIn:
        made = hidden.new_empty((1, 1, vocabulary)).as_subclass(_StandIn)
        made.touched = False
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # attributes such as shape, dtype and device
            for one in args:
                if isinstance(one, _StandIn):
                    one.touched = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Which bytes a tensor is made of, and how."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
