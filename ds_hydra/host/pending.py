"""A loss that is handed out before it is computed: arithmetic on it now, its value after the step it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ds_hydra.zero_hetero.errors import ConfigError

_ITSELF = ("detach", "float", "double", "clone", "cpu", "mean", "sum", "to", "squeeze")
"""Methods of a scalar tensor that change nothing of its value as it is read here."""

_ARITHMETIC = (Tensor.add, Tensor.sub, Tensor.mul)


@dataclass(eq=False)
class Collected:
    """A batch that was handed to `engine(batch)`, and what has become of it."""

    batch: Any
    backward: Callable[[PendingLoss], Any] = field(repr=False)  # the engine's
    factor: float | None = None  # what its loss counts; None: there was no backward() yet
    value: float | None = None  # the step's loss, once it has run


class PendingLoss:
    """A scalar made of the losses of collected batches: sum of factor * loss, plus a constant.

    It takes what scripts do with a loss before the step: `loss / n`, `2 * loss`, `loss + other`, `loss.detach()`,
    `loss.backward()`. Its value is known after the `engine.step()` at the gradient accumulation boundary, and then it
    works like a scalar tensor in FP32, in torch's functions too. Each batch's loss is then the loss of the whole step,
    as `train_batch` returns it: the mean over the target tokens of all batches of all ranks. Read earlier, by `.item()`
    or `float()`, it raises RuntimeError, for to compute it all ranks would have to read it. In a text it is "pending".

    It also stands for the output that it came with: `.loss` and `[0]` are itself, and `.logits` is an error that says
    how to train with a loss of one's own.
    """

    requires_grad = True
    shape = torch.Size(())
    ndim = 0

    def __init__(self, terms: Sequence[tuple[Collected, float]], constant: float = 0.0):
        # What is known is added up at once: a script that sums its losses over an epoch keeps no batch alive.
        self._constant = constant + sum(factor * of.value for of, factor in terms if of.value is not None)
        self.terms = tuple((of, factor) for of, factor in terms if of.value is None)

    @property
    def is_known(self) -> bool:
        """Whether the steps that it belongs to have run."""
        return all(of.value is not None for of, _ in self.terms)

    def item(self) -> float:
        """Its value. RuntimeError before the step."""
        if not self.is_known:
            raise RuntimeError(
                "this loss is not computed yet: a step is planned from all its batches at once, and runs in the "
                "engine.step() that ends gradient accumulation. Read the loss after that call, or "
                "engine.last_step.loss; engine.eval() makes engine(batch) compute at once"
            )
        return self._constant + sum(factor * (of.value or 0.0) for of, factor in self.terms)

    def tensor(self) -> Tensor:
        """Its value as a tensor (), FP32. RuntimeError before the step."""
        return torch.tensor(self.item(), dtype=torch.float32)

    def backward(self, *_: Any, **__: Any) -> None:
        """`engine.backward(loss)`."""
        if not self.terms:
            raise RuntimeError("backward() of a loss whose step has run already: call engine(batch) for another one")
        self.terms[0][0].backward(self)

    @property
    def loss(self) -> PendingLoss:
        return self

    @property
    def logits(self) -> NoReturn:
        raise ConfigError(
            "logits are not handed out: the last stage of a pipeline has them, a block at a time, after all batches of "
            "a step were collected. For a loss of your own pass loss_fn(logits, labels) to ds_hydra.initialize(); for "
            "metrics call engine.evaluate(dataset)"
        )

    def __getitem__(self, index: object) -> PendingLoss:
        return self if index in (0, "loss") else self.logits

    def _plus(self, other: Any, sign: float) -> PendingLoss:
        if isinstance(other, PendingLoss):
            return PendingLoss(
                (*self.terms, *((of, sign * factor) for of, factor in other.terms)),
                self._constant + sign * other._constant,
            )
        if isinstance(other, Tensor) and other.requires_grad:
            raise ConfigError(
                "a tensor with a gradient cannot be added to this loss: nothing of the model runs in the script. Pass "
                "loss_fn(logits, labels) to ds_hydra.initialize() for a loss of your own"
            )
        return PendingLoss(self.terms, self._constant + sign * float(other))

    def __add__(self, other: Any) -> PendingLoss:
        return self._plus(other, 1.0)

    __radd__ = __add__

    def __sub__(self, other: Any) -> PendingLoss:
        return self._plus(other, -1.0)

    def __rsub__(self, other: Any) -> PendingLoss:
        return (self * -1.0) + other

    def __mul__(self, factor: Any) -> PendingLoss:
        number = float(factor)
        return PendingLoss([(of, number * own) for of, own in self.terms], number * self._constant)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> PendingLoss:
        return self * (1.0 / float(divisor))

    def __neg__(self) -> PendingLoss:
        return self * -1.0

    def __float__(self) -> float:
        return self.item()

    def __repr__(self) -> str:
        return f"PendingLoss({self.item():.6f})" if self.is_known else "PendingLoss(pending)"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.is_known else "pending"

    def __getattr__(self, name: str) -> Any:
        if name in _ITSELF:
            return lambda *_, **__: self
        if name.startswith("__") or not self.is_known:
            raise AttributeError(f"a loss that is not computed yet has no {name!r}; after engine.step() it has")
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """A known loss in torch's own functions, such as torch.stack(losses)."""
        if function in _ARITHMETIC:
            return NotImplemented  # then Python asks this class: tensor * loss is loss.__rmul__(tensor)
        args, kwargs = tree_map(
            lambda value: value.tensor() if isinstance(value, PendingLoss) else value, (args, kwargs or {})
        )
        return function(*args, **kwargs)
