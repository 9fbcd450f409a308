"""The images of one sequence, and those of one micro-batch: what the encoder takes, and whose tokens its rows are.

[Note: rows of images]
A model's encoder makes some rows of features of each image, and its text has as many placeholders for them: tokens of
one id, in the order of the images. So a row of features belongs to a token, and goes wherever that token goes: into a
pack, into a slice, to one of the ranks that share a row. With two images of 2 and 3 rows, and a slice that ends behind
the fifth token:

    tokens of a sequence    a  #  #  b  #  #  #  c
    its rows                   0  1     2  3  4
    of the first slice         0  1     2             all of the first image, the first row of the second
    of the second slice                    3  4       the second image is encoded once more, for its other rows

A row of a pack counts its placeholders through, over all of its sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_hydra.costs.loads import Load, dealt
from ds_hydra.data.columns import Int64Array
from ds_hydra.data.tokens import TokenSequence
from ds_hydra.pipe.dropout import sequence_key
from ds_hydra.pipe.rows import MicroBatch, Seen
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.plan.step_plan import Span
from ds_hydra.zero_hetero.errors import ConfigError

TOGETHER = (
    "give the tokens and the images that one call of the processor returns, and none of them truncated "
    "(hydra.too_long, max_length)"
)
CLIP = "clip"  # the layout of audio
Columns = Mapping[str, Tensor]
"""What an encoder takes, by the names of its arguments."""


class Unit(NamedTuple):
    """What the encoder takes at once: an image, or all images of a sequence where they cannot be told apart."""

    columns: Columns
    first: int  # of its rows among those of its sequence
    rows: int
    load: Load = Load(0.0, 0.0)  # by which it is dealt out


class Images(NamedTuple):
    """The images of a sequence; one without any has some, too, in a job that trains images."""

    token: int  # id of the placeholders
    units: tuple[Unit, ...] = ()  # in the order of their placeholders
    positions: Tensor | None = None  # (axes, tokens), where the model counts them on several axes
    seen: Seen | None = None  # in which layers tokens of an image see each other
    video: int | None = None  # id of the placeholders of videos
    audio: int | None = None  # and of clips

    def marks(self, input_ids: Int64Array) -> NDArray[np.bool_]:
        """Which of some tokens (tokens,) are placeholders."""
        return np.isin(input_ids, [one for one in (self.token, self.video, self.audio) if one is not None])

    def attach(
        self, batch: MicroBatch, spans: Sequence[Span], sequences: Sequence[TokenSequence], place: StagePlace
    ) -> MicroBatch:
        """A micro-batch with the images of its row, which has these spans of these sequences."""
        if not any(sequence.images.units for sequence in sequences):
            return batch
        return _Row(batch, tuple(zip(spans, sequences, strict=True)), self).shown(place)


class ShownUnit(NamedTuple):
    """A unit of which a micro-batch has the rows [start, stop); the first of them is its row `at`."""

    unit: Unit
    start: int
    stop: int
    at: int
    owner: int  # which rank of the stage encodes it, by its number there; EVERY: all of them, each some rows
    key: int  # what is drawn for it follows from this


class Shown(NamedTuple):
    """The images of a micro-batch, as a rank sees them."""

    units: tuple[ShownUnit, ...]  # of the whole row
    rows: int  # of the whole row
    own: tuple[int, int]  # which of these rows are of tokens that this rank holds
    places: Tensor  # (own rows,) where their tokens stand among those that this rank holds
    positions: Tensor | None  # (axes, 1, T_local)
    ids: Tensor  # (own rows,) of their placeholders, which tell images, videos and clips


@dataclass(frozen=True)
class ImageBatch(MicroBatch):
    """A micro-batch with images."""

    shown: Shown | None = None


class _Row(NamedTuple):
    """A packed row: spans with their sequences."""

    batch: MicroBatch
    parts: tuple[tuple[Span, TokenSequence], ...]
    kind: Images  # of any of its sequences

    def shown(self, place: StagePlace) -> ImageBatch:
        pack = self.batch.pack
        start, stop = pack.local
        marks = np.zeros(pack.num_tokens, dtype=np.bool_)
        tokens = np.concatenate([sequence.input_ids[span.start : span.stop] for span, sequence in self.parts])
        marks[: len(tokens)] = self.kind.marks(tokens)
        rows = int(marks.sum())
        first = int(marks[:start].sum())
        places = torch.from_numpy(np.flatnonzero(marks[start:stop]))
        positions = self._positions()
        local = None if positions is None else positions[:, None, start:stop].contiguous()
        units = _dealt(list(self._units()), place.stage.tp * place.stage.sp)
        ids = self._ids(tokens)[first : first + len(places)]
        shown = Shown(units, rows, (first, first + len(places)), places, local, ids)
        given = {name: getattr(self.batch, name) for name in self.batch.__dataclass_fields__}
        if self.kind.seen is not None:  # of a clip none does
            marks[: len(tokens)] &= tokens != self.kind.audio
            given["pack"] = replace(pack, seen=self.kind.seen._replace(spans=_runs(marks, pack.offsets)))
        return ImageBatch(**given, shown=shown)

    def _units(self) -> Iterator[ShownUnit]:
        at, keys = 0, self.batch.pack.keys or range(len(self.parts))
        for (span, sequence), key in zip(self.parts, keys, strict=False):  # of padding there is a key, too
            marks = self.kind.marks(sequence.input_ids)
            before, held = int(marks[: span.start].sum()), int(marks[span.start : span.stop].sum())
            for unit in sequence.images.units:
                start, stop = max(unit.first, before), min(unit.first + unit.rows, before + held)
                if start < stop:
                    of_unit = sequence_key(key, unit.first)
                    yield ShownUnit(unit, start - unit.first, stop - unit.first, at + start - before, 0, of_unit)
            at += held

    def _ids(self, tokens: Int64Array) -> Tensor:
        """Of the placeholders among the row's tokens."""
        return torch.from_numpy(tokens[self.kind.marks(tokens)])

    def _positions(self) -> Tensor | None:
        """Of the whole row, (axes, tokens); of text the same on all axes."""
        axes = next((s.images.positions.shape[0] for _, s in self.parts if s.images.positions is not None), 0)
        if not axes:
            return None
        found = torch.zeros(axes, self.batch.pack.num_tokens, dtype=torch.int64)
        starts = accumulate((span.stop - span.start for span, _ in self.parts), initial=0)
        for begin, (span, sequence) in zip(starts, self.parts, strict=False):
            own = sequence.images.positions
            numbers = torch.arange(len(sequence.input_ids)).expand(axes, -1) if own is None else own
            found[:, begin : begin + span.stop - span.start] = numbers[:, span.start : span.stop]
        return found


def _runs(marks: NDArray[np.bool_], offsets: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Intervals of marked tokens (tokens,) that stand side by side in one sequence of a row."""
    begins = np.zeros(len(marks) + 1, dtype=np.bool_)
    begins[[*offsets]] = True
    after = np.concatenate((marks, [False]))
    before = np.concatenate(([False], marks))
    starts = np.flatnonzero(after & (~before | begins))
    stops = np.flatnonzero(before & (~after | begins))
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _dealt(units: Sequence[ShownUnit], ranks: int) -> tuple[ShownUnit, ...]:
    """Each unit with the rank that encodes it, by the rule that plans count with [Note: loads]."""
    owners = dealt([one.unit.load for one in units], ranks).owners
    return tuple(unit._replace(owner=owner) for unit, owner in zip(units, owners, strict=True))


def together(units: Sequence[Columns], layout: str) -> dict[str, Tensor]:
    """The columns of several units as one, as a processor puts them; of none there are none."""
    names = units[0] if units else ()
    layout = CLIP if is_clip(names) else layout
    return {name: torch.cat([unit[name] for unit in units], dim=axis_of(name, layout)) for name in names}


def is_video(columns: Columns) -> bool:
    """Whether a unit is a video, by the names of its columns."""
    return any("video" in name for name in columns)


def is_clip(columns: Collection[str]) -> bool:
    """Whether a unit is a clip of audio."""
    return any(name.startswith("input_") or "audio" in name for name in columns)


def columns_of(units: Sequence[Columns], layout: str) -> dict[str, Tensor]:
    """The columns of images, videos and clips as a processor puts them: each kind for itself."""
    kinds: dict[object, list[Columns]] = {}
    for unit in units:
        kinds.setdefault((is_video(unit), is_clip(unit)), []).append(unit)
    return {name: column for own in kinds.values() for name, column in together(own, layout).items()}


def axis_of(name: str, layout: str) -> int:
    """On which axis of a column images stand."""
    return 1 if layout == "beside" else 3 if layout == "strip" and name == "pixel_values" else 0


def patches_of(columns: Columns, layout: str) -> list[int]:
    """Patches of each unit, where the columns tell them; else 0."""
    if layout == "grid":
        return [int(one) for one in next(column for name, column in columns.items() if name.endswith("hw")).prod(-1)]
    if layout == "padded":
        places = columns.get("image_position_ids")
        marks = columns["pixel_attention_mask"] > 0 if places is None else (places >= 0).all(-1)
        return [int(one) for one in marks.sum(-1)]
    if layout == "strip":
        return [int(one) for one in columns["target_sizes"].prod(-1)]
    if layout == CLIP:
        return [0] * len(next(iter(columns.values())))
    return [0] * len(max(columns.values(), key=Tensor.numel))


def check_rows(images: Images, input_ids: Int64Array, place: str) -> None:
    """ConfigError where a sequence has other placeholders than its images have rows."""
    placeholders, rows = int(images.marks(input_ids).sum()), sum(unit.rows for unit in images.units)
    if placeholders != rows:
        raise ConfigError(
            f"{place} has {placeholders} tokens that stand for rows of images or audio, but images and clips of {rows} "
            f"rows: {TOGETHER}"
        )


def shown_of(batch: MicroBatch) -> Shown | None:
    """The images of a micro-batch, if it has any."""
    return batch.shown if isinstance(batch, ImageBatch) else None
