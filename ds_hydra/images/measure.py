"""The price of an image, measured: made-up images of growing size through the encoder of a stage, forward and backward.

An encoder that takes images of one size has one point, and what its patches take by attention is in b.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_hydra.images.audio import count_of
from ds_hydra.images.content import Columns, Unit
from ds_hydra.images.load import Price, Size, Tower
from ds_hydra.images.seam import encoded
from ds_hydra.images.small import clips, makers
from ds_hydra.images.source import ImageText
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.profiling.stage_timer import StageTimer
from ds_hydra.zero_hetero.clock import Clock, clock_of
from ds_hydra.zero_hetero.errors import ConfigError

_SIZES = (0, 1, 3, 7, 15, 31, 63, 127)  # which images, each about twice the one before; then two large ones
_ROWS = 4096  # at most, of a clip
_REPEATS, _LEAST = 3, 0.01  # b is no less than this share of what the largest image takes for a patch


class Point(NamedTuple):
    """An image, what it took, and what it kept for the backward."""

    size: Size
    ms: float
    kept: int  # bytes


def measured(source: ImageText, device: torch.device, dtype: torch.dtype, *, seconds: float = 10.0) -> Price:
    """The price of an image on this device, by images up to a size at which one takes a tenth of so many seconds.
    ConfigError where no image that is made up suits the encoder."""
    points = _points(source, device, dtype, seconds)
    sizes = np.array([(one.size.squares, one.size.patches, 1.0) for one in points], dtype=np.float64)
    ms = np.array([one.ms for one in points])
    keep = max(one.kept / one.size.patches for one in points)
    if len({one.size for one in points}) < 4:
        return Price(0.0, points[-1].ms / points[-1].size.patches, keep)
    # Relative errors count alike; what a launch takes, whatever the patches, is left out of the price.
    a, b, _ = _least_squares(sizes / ms[:, None], np.ones(len(ms)))
    if b <= 0.0:  # launches have all of it
        a, b, *_ = _least_squares(sizes[:, :2] / ms[:, None], np.ones(len(ms)))
    return Price(a, max(b, _LEAST * points[-1].ms / points[-1].size.patches), keep)


def _least_squares(rows: Any, right: Any) -> list[float]:
    """Coefficients of at least 0 that come nearest: those that would be below are left out, one after the other."""
    left = list(range(rows.shape[1]))
    while True:
        found = np.linalg.lstsq(rows[:, left], right, rcond=None)[0]
        worst = int(found.argmin())
        if found[worst] >= 0.0 or len(left) == 1:
            return [max(0.0, float(found[left.index(at)])) if at in left else 0.0 for at in range(rows.shape[1])]
        del left[worst]


def _points(source: ImageText, device: torch.device, dtype: torch.dtype, seconds: float) -> list[Point]:
    stages = 1 if source.plan.no_pp else source.plan.num_layers
    stage = StageTimer(source, ParallelScheme(1, stages), 0, device, dtype).module
    tower, clock, tried = Tower.of(source), clock_of(device), ""
    parameters = list(stage.parameters.values())
    seam = source.seam
    heard = seam.audio if seam.clips_alone else None
    for maker in makers(source.config, seam.columns) if heard is None else clips(source.config, heard.columns):
        if maker.layout != source.seam.layout:
            continue
        found = list[Point]()
        try:
            for which in _SIZES:
                columns = {name: column.to(device, dtype if column.is_floating_point() else None)
                           for name, column in maker.make(which).items()}  # fmt: skip
                size = tower.size(Unit(columns, 0, 1))
                if found and size == found[-1].size:
                    break
                rows = 0 if heard is None else count_of(stage.module, heard, columns, _ROWS)
                kept, _ = _once(stage.module, source, columns, parameters, clock, rows)
                spent = time.perf_counter()
                times = [_once(stage.module, source, columns, parameters, clock, rows)[1] for _ in range(_REPEATS)]
                found.append(Point(size, statistics.median(times), kept))
                if time.perf_counter() - spent > seconds / 10:
                    break
        except torch.OutOfMemoryError:
            if found:
                return found
            raise
        except Exception as error:
            tried = f"{type(error).__name__}: {error}"
            continue
        return found
    raise ConfigError(f"hydra.images: no image that is made up suits the encoder of {source.name} ({tried[:200]}), so "
                      "that its time cannot be measured: it is estimated where the table says nothing")  # fmt: skip


def _once(
    model: Any, source: ImageText, columns: Columns, parameters: Sequence[Tensor], clock: Clock, count: int
) -> tuple[int, float]:
    """Bytes that one image keeps for the backward, and its milliseconds."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*parameters, *columns.values())}
    kept: dict[int, int] = {}
    alive: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(storage)  # an address is not given out twice
        return tensor

    clock.wait()
    began = clock.now()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rows = torch.cat([leaf.flatten() for leaf in encoded(model, source.seam, columns, count)])
    if rows.requires_grad:
        rows.backward(torch.ones_like(rows))
    ended = clock.now()
    clock.wait()
    return sum(kept.values()), 1e3 * clock.seconds(began, ended)
