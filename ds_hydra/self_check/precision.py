"""What a model computes in FP32 in, the same in FP64 out: then two right runs agree but for the rounding of FP64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Tensors = Tensor | Sequence[Tensor]
_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})


class Doubles(TorchFunctionMode):
    """Within it, a function that is asked for FP32 returns FP64.

    Hugging Face's norms, routers and softmaxes go down to FP32 in a model of any dtype, by `x.float()`,
    `x.to(torch.float32)` or `dtype=torch.float32`. Rounded so, two right runs differ by 1e-7, and errors below that
    could not be told from rounding. `exact` is False once a function returned a narrower number all the same (a model
    may ask for BF16). A thread of its own must enter the same mode by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exact = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.backward, torch.autograd.backward):
            return self._backward(*args, **kwargs)
        if func is Tensor.float:
            func = Tensor.double
        if any(value is torch.float32 for value in (*args, *kwargs.values())):
            args = tuple(_wide(value) for value in args)
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dtype in _NARROW:
            self.exact = False
        return result

    def _backward(self, tensors: Tensors, given: Tensors | None = None, **kwargs: Any) -> None:
        """A mode is off while it handles a call; but in this one layers may be recomputed, and must find it on."""
        gradient = next((kwargs[key] for key in ("gradient", "grad_tensors") if kwargs.get(key) is not None), given)
        outs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        grads = (gradient,) * len(outs) if gradient is None or isinstance(gradient, Tensor) else tuple(gradient)
        grads = tuple(torch.ones_like(o) if g is None else g for o, g in zip(outs, grads, strict=True))
        with self:
            torch.autograd.Variable._execution_engine.run_backward(
                outs, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
            )


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def doubled() -> Iterator[Doubles]:
    """Within it, this thread computes in FP64, and tensors of no given dtype are made in FP64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Doubles() as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)
