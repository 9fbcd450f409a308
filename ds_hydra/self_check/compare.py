"""Two outcomes of one step in, how far they are apart and where out."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ds_hydra.self_check.runs import Outcome


class Tolerance(NamedTuple):
    """Largest deviations that count as rounding."""

    of_itself: float  # of a loss, or of a gradient by its largest entry
    of_largest: float  # of a gradient by the largest of all: one may be zero but for rounding


# Two right runs in FP64 differ by 1e-12 at most. Where a model asks for BF16 or an FP32 that cannot be widened, they
# differ by up to 2e-6 of a gradient's largest entry, and a gradient that is zero by 2e-8 of the largest gradient.
EXACT, ROUNDED = Tolerance(1e-9, 1e-12), Tolerance(1e-5, 1e-6)


class Difference(NamedTuple):
    """The worst deviation, relative to the largest entry, and the first thing that differs (None: nothing does)."""

    worst: float
    what: str | None
    forward: Literal["training", "evaluation"] | None = None  # whose forward differs already
    tolerance: float = EXACT.of_itself  # what it was held to


def compare(right: Outcome, other: Outcome) -> Difference:
    """What of `other` is not what `right` says: the losses first, then gradients in the order of the parameters."""
    allowed = EXACT if right.exact and other.exact else ROUNDED
    training, evaluation = _relative(right.loss, other.loss), _relative(right.eval_loss, other.eval_loss)
    largest = max((_peak(gradient) for gradient in right.gradients.values()), default=0.0)
    gradients = {n: _deviation(g, other.gradients.get(n), largest, allowed) for n, g in right.gradients.items()}
    worst = 0.0
    for off in (training, evaluation, *gradients.values()):
        worst = off if off != off or off > worst else worst  # not a number counts as largest
    found = partial(Difference, worst, tolerance=allowed.of_itself)
    if training != training and right.loss == right.loss:
        return found("the loss is not a number, as where a parameter is read before the stage waits for it", "training")
    if not training <= allowed.of_itself:
        return found(f"the loss is {training:.1e} off", "training")
    if not evaluation <= allowed.of_itself:
        return found(f"the loss of an evaluation is {evaluation:.1e} off", "evaluation")
    differing = [name for name, off in gradients.items() if not off <= allowed.of_itself]
    if not differing:
        return found(None)
    more = f" (and those of {len(differing) - 1} more)" if len(differing) > 1 else ""
    return found(f"the gradient of {differing[0]} is {gradients[differing[0]]:.1e} off{more}")


def _relative(right: float, other: float) -> float:
    return abs(right - other) / max(abs(right), 1e-300)


def _deviation(right: Tensor, other: Tensor | None, largest: float, allowed: Tolerance) -> float:
    """Largest deviation over the largest entry; entries that are zero but for rounding do not count."""
    if other is None or other.shape != right.shape:
        return float("inf")
    apart = float((right - other).abs().max()) if right.numel() else 0.0
    if apart <= allowed.of_largest * largest and not apart <= allowed.of_itself * _peak(right):
        return 0.0
    return apart / max(_peak(right), 1e-300)


def _peak(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def finite(outcome: Outcome) -> bool:
    """Whether an outcome can be compared at all."""
    numbers = [torch.tensor([outcome.loss, outcome.eval_loss]), *outcome.gradients.values()]
    return all(bool(torch.isfinite(values).all()) for values in numbers)
