"""What an encoder takes for an image, estimated and measured: patches to milliseconds and bytes of one rank.

[Note: price of an image]
Encoding p patches, of which each attends to q, takes a * p * q + b * p, forward and backward: of a still image q is p,
of a video the patches of a frame. Where nothing was measured, b is 6 FLOPs for a patch and each weight, or for a row of
features and each weight behind the layers, and a is 14 FLOPs for a layer and each feature of its width, as no part is
masked; a frozen encoder runs forward alone, at 2 and 4, and one that is frozen but for adapters computes no weights'
gradients, at 4 and 14. A device does as many of them in a second as the cost table says that it does of the text's.

Of a clip p is what the encoder's layers see: of Whisper's one token for two frames, padding included.

An example: 0.45e9 weights in 27 layers of width 1,152 at 150 TFLOP/s take a picture of 1,024 tokens, which is 4,096
patches, 18e-3 * 4096 + 2.9e-6 * 4096^2 = 74 + 49 ms.

[Note: price of sharing]
Where ranks share an image [Note: rows of a large image], each takes an even part of that and besides, whatever their
number: what stands before and behind the layers, for all patches; two messages for each layer and way, of queries, keys
and values, and of what attention makes of them, of which a quarter of all rows at most passes a rank, as two ranks
send each other half of their halves; and one message for each layer behind which the rows come together. Messages
inside a node take what the table says, or what is assumed where it says nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_hydra.costs.analytic import model_shape
from ds_hydra.costs.cost_table import TableFile
from ds_hydra.costs.loads import Load
from ds_hydra.costs.memory import JobMemory
from ds_hydra.images.content import Columns, Unit, is_clip
from ds_hydra.images.seam import Audio, count_of, encoded
from ds_hydra.images.small import audio_config, clips, makers, number_of, vision_config
from ds_hydra.pipe.model_plan import ParamSpec
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.profiling.stage_timer import StageTimer
from ds_hydra.simulate.links import LinkModel
from ds_hydra.zero_hetero.clock import Clock, clock_of
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.images.job import ImageText

_LAYERS = ("num_hidden_layers", "depth", "num_layers", "n_layers", "vt_num_hidden_layers", "encoder_layers")
_WIDTHS = ("embed_dim", "hidden_size", "vt_hidden_size", "width", "d_model")
_HEADS = ("num_attention_heads", "num_heads", "vt_num_attention_heads")


class Size(NamedTuple):
    """What an encoder's time follows from."""

    patches: int
    squares: int  # sum over patches of those that each attends to


class Price(NamedTuple):
    """Of the patches of a unit, on one rank, forward and backward."""

    a: float  # ms for each patch and patch that it attends to
    b: float  # ms for a patch
    keep: float  # bytes that a patch keeps for the backward

    def us(self, size: Size) -> int:
        """Whole microseconds of a unit, at least 1."""
        return max(1, round(1e3 * (self.a * size.squares + self.b * size.patches)))


class Sharing(NamedTuple):
    """What each of several ranks takes for an image that they share, besides an even part [Note: price of sharing]."""

    once: float  # ms
    each: float  # ms for a patch


class Tower(NamedTuple):
    """An encoder, as its time and memory follow from it."""

    flops: float  # for a patch, besides attention
    attention_flops: float  # for each patch, and each that it attends to
    patch: int  # pixels of a patch's side; 0: it is not known
    width: int
    layers: int
    learns: bool  # whether anything in it is trained
    of_row: float  # patches of a row of features; 0: not known
    outside: float  # the share of `flops` that is not of its list of layers
    audio: Audio | None = None

    @classmethod
    def of(cls, source: ImageText, *, clips: bool = False) -> Tower:
        """Of a model with images or audio; of both that of images, or of `clips`."""
        clips = clips or source.seam.clips_alone
        config = audio_config(source.config) if clips else vision_config(source.config)
        width, layers = number_of(config, _WIDTHS) or 1, number_of(config, _LAYERS) or 1
        roots: dict[str, list[ParamSpec]] = {}
        for param in (p for bucket in source.plan.buckets for p in bucket.params):
            for root in source.seam.roots_of(clips=clips):
                if param.name == root or param.name.startswith(f"{root}."):
                    roots.setdefault(root, []).append(param)
        weights = {root: sum(p.numel for p in params if len(p.shape) > 1) for root, params in roots.items()}
        trained = {root: any(p.trainable for p in params) for root, params in roots.items()}
        largest = max(weights, key=lambda root: weights[root])
        adapted = [root for root, params in roots.items() if trained[root] and not all(p.trainable for p in params)]
        each = {root: (2.0 if not trained[root] else 4.0 if root in adapted else 6.0) for root in roots}
        attention = (14.0 if trained[largest] else 4.0) * width * layers
        patch = number_of(config, ("patch_size",))
        seam = source.seam
        of_row = float(seam.per_row)
        if seam.layout not in ("grid", "padded", "strip") and not clips:
            side = number_of(config, ("image_size",)) // patch if patch else 0
            of_row = side * side / seam.per_row if seam.per_row else 0.0
        within, inside, beside = "" if seam.cut is None or clips else f"{seam.cut.layers}.", 0.0, 0.0
        for root, param in ((root, p) for root, params in roots.items() for p in params if len(p.shape) > 1):
            if not within or param.name.startswith(within):
                inside += each[root] * param.numel
            else:  # linear layers behind the others run for rows of features
                beside += each[root] * param.numel / (max(1.0, of_row) if len(param.shape) == 2 else 1.0)
        flops, outside = inside + beside, beside / max(1.0, inside + beside)
        return cls(flops, attention, patch, width, layers, trained[largest], of_row, outside, seam.audio)

    def kept(self, itemsize: int) -> float:
        """Bytes that a patch keeps for the backward: 17 elements of the width in each layer, as of a usual layer with
        fused attention; nothing where none of it is trained."""
        return 17.0 * itemsize * self.width * self.layers if self.learns else 0.0

    def size(self, unit: Unit) -> Size:
        """Of a unit [Note: price of an image]."""
        columns, squares = unit.columns, 0
        if self.audio is not None and is_clip(columns):
            tokens = self.audio.tokens_of(columns)
            return Size(sum(tokens), sum(one * one for one in tokens))
        grid = next((column for name, column in columns.items() if name.endswith("hw")), None)
        if grid is not None:
            for row in grid.reshape(-1, grid.shape[-1]).tolist():
                frame = int(row[-2] * row[-1])
                squares += int(row[0] if len(row) > 2 else 1) * frame * frame
            return Size(int(grid.prod(-1).sum()), squares)
        each, count = self._entries(columns) if columns else (unit.rows, 1)
        return Size(count * each, count * each * each)

    def _entries(self, columns: Mapping[str, Tensor]) -> tuple[int, int]:
        """Patches of an image or tile in the largest column, and how many there are."""
        pixels = max(columns.values(), key=Tensor.numel)
        if pixels.dim() > 3 and self.patch:
            *_, channels, height, width = pixels.shape
            return max(1, height * width // self.patch**2), pixels.numel() // (channels * height * width)
        *_, patches, features = pixels.shape
        return patches, max(1, pixels.numel() // (patches * features))


def price_of(source: ImageText, found: TableFile, itemsize: int, *, clips: bool = False) -> Price:
    """The price that a table has, or that of devices as fast as it says the text is; `itemsize`: bytes of an element
    that is computed with. Of `clips` beside images a table has none."""
    if found.images is not None and not clips:
        return Price(**found.images)
    table = found.table
    shape = model_shape(source.plan, source.text_config.hidden_size, source.vocab_size, source.text_config)
    flops_ms = max(6.0 * max(1, shape.active) / (cost.b * cost.scheme.num_ranks) for cost in table.costs if cost.b)
    tower = Tower.of(source, clips=clips)
    return Price(tower.attention_flops / flops_ms, tower.flops / flops_ms, tower.kept(itemsize))


def loads_by(source: ImageText, found: TableFile, itemsize: int) -> Callable[[Unit], Load]:
    """Units in, their loads by the price and what it takes to share them out; arguments as of `price_of`."""
    price, tower = price_of(source, found, itemsize), Tower.of(source)
    sharing, ear, of_clip = sharing_of(source, found, tower, price, itemsize), tower, price
    if source.seam.audio is not None and not source.seam.clips_alone:
        ear, of_clip = Tower.of(source, clips=True), price_of(source, found, itemsize, clips=True)

    def load(unit: Unit) -> Load:
        if is_clip(unit.columns):
            return Load.whole(of_clip.us(ear.size(unit)))
        size = tower.size(unit)
        us = price.us(size)
        more = us if sharing is None else round(1e3 * (sharing.once + sharing.each * size.patches))
        return Load(us, min(us, more))

    return load


def sharing_of(source: ImageText, found: TableFile, tower: Tower, price: Price, itemsize: int) -> Sharing | None:
    """What it takes to share an image; None where that cannot be."""
    if (cut := source.seam.cut) is None:
        return None
    latency_s, rate = LinkModel.of_table(found.links, 1).inside
    ways, gathers = 2 if tower.learns else 1, len(cut.read) + 1
    moved = ways * (tower.layers + gathers) * tower.width * itemsize  # layers: a quarter of four tensors
    seconds = ways * (2 * tower.layers + gathers) * latency_s
    return Sharing(1e3 * seconds, tower.outside * price.b + 1e3 * moved / rate)


def with_room(source: ImageText, found: TableFile, memory: JobMemory, itemsize: int) -> TableFile:
    """The table with what loads keep in a first stage's memory, in tokens [Note: loads]: of the rank with the most of
    a micro-batch's images, as much as b says that it has patches."""
    price = price_of(source, found, itemsize)
    of_us = price.keep / (1e3 * price.b)  # bytes; of large images, whose time grows with their square, more than are
    costs = []
    for cost in found.table.costs:
        needs = memory.needs(cost.scheme, 0)
        token = needs.per_token / needs.alive
        holds = max(cost.max_length, memory.max_length(cost.scheme))
        costs.append(replace(cost, beside=of_us / token, holds=holds) if token else cost)
    return replace(found, table=replace(found.table, costs=tuple(costs)))


def image_tokens(source: ImageText, memory: JobMemory, scheme: ParallelScheme, itemsize: int) -> int:
    """MaxLen of a micro-batch whose tokens all stand for rows of images, which the ranks of the first stage share."""
    tower, needs = Tower.of(source), memory.needs(scheme, 0)
    token = needs.per_token / needs.alive
    kept = tower.kept(itemsize) * tower.of_row / (scheme.tp * scheme.sp)
    return int(memory.max_length(scheme) / (1.0 + kept / token)) if token else memory.max_length(scheme)


def heads_of(config: Any) -> int:
    """Heads of a model's encoder; 0: its config does not say it."""
    return number_of(vision_config(config), _HEADS)


_SIZES = (0, 1, 3, 7, 15, 31, 63, 127)  # which images, each about twice the one before; then two large ones
_ROWS = 4096  # at most, of a clip
_REPEATS, _LEAST = 3, 0.01  # b is no less than this share of what the largest image takes for a patch


class MeasuredImage(NamedTuple):
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


def _points(source: ImageText, device: torch.device, dtype: torch.dtype, seconds: float) -> list[MeasuredImage]:
    stages = 1 if source.plan.no_pp else source.plan.num_layers
    stage = StageTimer(source, ParallelScheme(1, stages), 0, device, dtype).module
    tower, clock, tried = Tower.of(source), clock_of(device), ""
    parameters = list(stage.parameters.values())
    seam = source.seam
    heard = seam.audio if seam.clips_alone else None
    for maker in makers(source.config, seam.columns) if heard is None else clips(source.config, heard.columns):
        if maker.layout != source.seam.layout:
            continue
        found = list[MeasuredImage]()
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
                found.append(MeasuredImage(size, statistics.median(times), kept))
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
