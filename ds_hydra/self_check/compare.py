"""Two outcomes of one step in, how far they are apart and where out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ds_hydra.self_check.runs import Outcome

# Hugging Face's norms and attention round to FP32 in a model of any dtype: two right runs differ by up to 2e-6 of a
# gradient's largest entry. A gradient that is zero but for rounding differs by 2e-8 of the largest gradient of all.
OF_ITSELF, OF_LARGEST = 1e-5, 1e-6


class Difference(NamedTuple):
    """The worst deviation, relative to the largest entry, and the first thing that differs (None: nothing does)."""

    worst: float
    what: str | None
    in_forward: bool = False


def compare(right: Outcome, other: Outcome) -> Difference:
    """What of `other` is not what `right` says: the losses first, then gradients in the order of the parameters."""
    worst, found = 0.0, None
    for what, a, b in (("loss", right.loss, other.loss), ("loss of an evaluation", right.eval_loss, other.eval_loss)):
        off = abs(a - b) / max(abs(a), 1e-12)
        worst = _larger(worst, off)
        if found is None and not off <= OF_ITSELF:
            found = f"the {what} is {off:.1e} off"
    in_forward = found is not None
    largest = max((_peak(gradient) for gradient in right.gradients.values()), default=0.0)
    differing: list[str] = []
    for name, gradient in right.gradients.items():
        off = _deviation(gradient, other.gradients.get(name), largest)
        worst = _larger(worst, off)
        if not off <= OF_ITSELF:
            differing.append(f"the gradient of {name} is {off:.1e} off")
    if found is None and differing:
        more = f" (and those of {len(differing) - 1} more)" if len(differing) > 1 else ""
        found = differing[0] + more
    return Difference(worst, found, in_forward)


def _deviation(right: Tensor, other: Tensor | None, largest: float) -> float:
    """Largest deviation over the largest entry; entries that are zero but for rounding do not count."""
    if other is None or other.shape != right.shape:
        return float("inf")
    apart = float((right - other).abs().max()) if right.numel() else 0.0
    if apart <= OF_LARGEST * largest and not apart <= OF_ITSELF * _peak(right):
        return 0.0
    return apart / max(_peak(right), 1e-300)


def _peak(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _larger(a: float, b: float) -> float:
    return b if b != b or b > a else a  # not a number counts as largest


def finite(outcome: Outcome) -> bool:
    """Whether an outcome can be compared at all."""
    numbers = [torch.tensor([outcome.loss, outcome.eval_loss]), *outcome.gradients.values()]
    return all(bool(torch.isfinite(values).all()) for values in numbers)
