"""Steps and their times in, TFLOP/s of each GPU out: what tells costs that cannot be true. Pure: no torch.

A rival and ours that are priced by one wrong row are wrong together, and their ratio looks sane.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from tools.systems.cells import Cell
from tools.systems.devices import split


def model_flops(model: str, lengths: Iterable[int]) -> float:
    """Operations that the model needs for sequences of these lengths, as `analytic.flops_of` counts them: what is
    computed again is not in it."""
    found, _ = split(model)
    return sum(length * found.flops(length) for length in lengths)


def tflops(cell: Cell, batches: Sequence[Sequence[int]], step_ms: float) -> float:
    """10^12 of the model's operations in a second on each GPU, where steps of these batches take `step_ms`."""
    return statistics.fmean(model_flops(cell.model, batch) for batch in batches) / cell.gpus / (1e9 * step_ms)


def peak_tflops(model: str) -> float:
    """What a GPU of the model's table computes at most."""
    return split(model)[1].peak
