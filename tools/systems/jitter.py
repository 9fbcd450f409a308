"""Noise of machines: times of pipelines in, what their slowest takes longer in the mean out. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

NOISE = 0.03  # standard deviation of a pipeline's time, of the whole of it
_DRAWS, _SEED = 512, 3


@lru_cache(maxsize=64)
def _noise(pipelines: int) -> NDArray[np.float64]:
    """The same draws for every system, so that what two take differs by their times alone."""
    drawn = np.random.default_rng(_SEED).standard_normal((_DRAWS, pipelines))
    return 1.0 + NOISE * (drawn - drawn.mean(axis=0))


def jitter_ms(pipeline_ms: Sequence[float]) -> float:
    """How much longer the last of these is expected to take, if each is longer or shorter by a few percent.

    Sixteen equal ones take 1.77 * 3 % longer, one alone nothing.
    """
    times = np.asarray(pipeline_ms, dtype=np.float64)
    return float((_noise(len(times)) * times).max(axis=1).mean() - times.max())
