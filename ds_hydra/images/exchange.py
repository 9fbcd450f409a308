"""Images from a script's batches to the ranks that run their sequences.

Every rank learns by one text which images there are, and the sizes of all messages. Pixels go to the first stage of the
pipeline that runs their sequence, in the type that the model computes in, and nowhere else; positions go to all of its
stages.

[Note: which rows are whose]
Processors put the images of a call into columns, and what is of which image follows from the layout that the seam was
found with. Two images of 640 x 480 and 1,024 x 1,536, and what a row of features takes of them:

  grid     pixel_values (1200 + 3800, 1176), image_grid_thw (2, 3): as many patches as the numbers of its grid multiply
           to, and always as many patches for a row of features
  each     pixel_values (13 + 7, 3, 448, 448): an entry is an image, or a tile of one; all have as many rows
  beside   pixel_values (1, 13 + 7, 3, 364, 364), and a mask: the same, on the axis behind that of the sequences; an
           image that is all zeros fills up
  padded   pixel_values (2, 2520, 768), image_position_ids (2, 2520, 2): an entry is an image, with places for its
           patches and -1 behind the last; always as many patches for a row of features
  strip    pixel_values (1, 3, 14, 14 * (1200 + 3800)), target_sizes (2, 2): all patches stand side by side
  whole    pixel_values (2, 3, 1540, 1036), image_sizes (2, 2): what an image has of the rows cannot be told without
           running its encoder, so the images of a sequence stay together

The images of a batch are those of its sequences, one after the other: each takes as many as its placeholders have rows.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from ds_hydra.costs.loads import Load
from ds_hydra.data.columns import as_array
from ds_hydra.data.sequences import Share, items_of, read_share
from ds_hydra.data.tokens import LeftOut, Limits, Reads, TokenSequence
from ds_hydra.images.content import (
    TOGETHER,
    Columns,
    Images,
    Unit,
    axis_of,
    check_rows,
    columns_of,
    is_clip,
    patches_of,
)
from ds_hydra.images.load import loads_by
from ds_hydra.images.seam import BESIDE_VIDEO, VIDEO, Seam, numbered
from ds_hydra.images.small import clip_columns
from ds_hydra.pipe.placement import Strategy
from ds_hydra.step.delivery import Delivered, runners
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.data.columns import ItemCheck
    from ds_hydra.engine.crew import Crew
    from ds_hydra.images.job import ImageText
    from ds_hydra.plan.step_plan import StepPlan
    from ds_hydra.step.update import Update


_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # which tokens are placeholders, as processors say it
_OTHERS = ("pixel_values_videos", "video_grid_thw")
_OF_VIDEOS = (*VIDEO, BESIDE_VIDEO)
_AHEAD = "one call of the processor for each sequence, and a list of its results"


@dataclass(frozen=True)
class HandedImages:
    """A share without its columns of images, item by item, and the units of each."""

    items: list[Any]
    units: list[tuple[Unit, ...]]


def taken(handed: Any, seam: Seam) -> HandedImages:
    """A share of a step, taken apart. ConfigError where it is not known whose an image is."""
    found = HandedImages([], [])
    for items, units in _parts(handed, seam, 0):
        found.items.extend(items)
        found.units.extend(units)
    return found


def _parts(handed: Any, seam: Seam, first: int) -> Iterator[tuple[list[Any], list[tuple[Unit, ...]]]]:
    if isinstance(handed, Mapping) and "input_ids" in handed:
        yield _of_mapping(handed, seam, first)
    elif isinstance(handed, list | tuple) and any(isinstance(part, Mapping) for part in handed):
        for part in handed:
            for items, units in _parts(part, seam, first):
                first += len(items)
                yield items, units
    else:
        items = list(items_of(handed))
        yield items, [()] * len(items)


def _of_mapping(handed: Mapping[Any, Any], seam: Seam, first: int) -> tuple[list[Any], list[tuple[Unit, ...]]]:
    """A batch, or one item."""
    given = {name: value for name, value in handed.items() if value is not None}
    films = {name: torch.as_tensor(given.pop(name)) for name in _OF_VIDEOS if name in given and seam.video is not None}
    heard = () if seam.audio is None else seam.audio.columns
    clips = {name: torch.as_tensor(given.pop(name)) for name in heard if name in given}
    for name in (*_OTHERS, *clip_columns(tuple(given))):
        if name in given and name not in seam.columns:
            what = "its clips are trained, but no images or videos" if seam.clips_alone else (
                "its images are trained, but no such videos or audio")  # fmt: skip
            raise ConfigError(f"item {first} of the data has {name!r}: {what}{seam.unheard and f' ({seam.unheard})'}")
    columns = {name: torch.as_tensor(given.pop(name)) for name in seam.columns if name in given}
    types = next((given[name] for name in _TOKEN_TYPES if name in given), None)
    rest = {name: value for name, value in given.items() if name not in _TOKEN_TYPES}
    items = list(items_of(rest))
    ids = [as_array(item["input_ids"] if isinstance(item, Mapping) else item) for item in items]
    marks = [one == seam.token for one in ids]
    if seam.seen is not None and columns and types is None:
        raise ConfigError(
            f"item {first} of the data has images and no {' or '.join(_TOKEN_TYPES[::-1])}, without which the model's "
            f"own forward lets no token of an image see those behind it: {TOGETHER}"
        )
    if types is not None and not seam.clips_alone:
        _check_types(as_array(types), marks, seam, first)
    counts = [int(mark.sum()) for mark in marks]
    kinds = list[tuple[int, list[tuple[Unit, ...]]]]()
    if columns:
        kinds.append((seam.token, _pictures(columns, counts, seam, first, len(items))))
    if films:
        assert seam.video is not None, "else there are no columns of videos"
        alone = replace(seam, token=seam.video)
        shown = _one_after_the_other(films, [int((one == seam.video).sum()) for one in ids], alone, first)
        kinds.append((seam.video, shown))
    if clips:
        assert seam.audio is not None, "else there are no columns of clips"
        kinds.append((seam.audio.token, _clips_of(clips, [one == seam.audio.token for one in ids], seam, first)))
    if len(kinds) == 1:
        return items, kinds[0][1]
    return items, [
        _in_order([(token, units[n]) for token, units in kinds], one, first + n) for n, one in enumerate(ids)
    ]


def _pictures(columns: Columns, counts: Sequence[int], seam: Seam, first: int, items: int) -> list[tuple[Unit, ...]]:
    """The images of each item, of which each has so many placeholders."""
    if seam.layout == "beside":
        own = next(iter(columns.values()))
        if len(own) != items:
            raise ConfigError(f"items {first} to {first + items - 1} of the data: the images are of {len(own)} "
                              f"sequences, but there are {items}: give {_AHEAD}")  # fmt: skip
        of_items = ({name: column[i : i + 1] for name, column in columns.items()} for i in range(items))
        found = [_beside(one, count) for one, count in zip(of_items, counts, strict=True)]
        for number, (units, count) in enumerate(zip(found, counts, strict=True), start=first):
            if sum(unit.rows for unit in units) != count or (units and seam.per_row not in (0, units[0].rows)):
                raise ConfigError(_told(f"item {number}", count, len(units), seam))
        return found
    return _one_after_the_other(columns, counts, seam, first)


def _clips_of(clips: Columns, marks: Sequence[Any], seam: Seam, first: int) -> list[tuple[Unit, ...]]:
    """The clips of each item, whose placeholders are marked: each stands for one run of them, or for as many as any
    other. Where that is not so, all clips of an item stay together, and it must be alone."""
    number, runs = len(next(iter(clips.values()))), [_runs(mark) for mark in marks]
    total, counts = sum(map(sum, runs)), [sum(one) for one in runs]
    if sum(map(len, runs)) != number:
        each = total // number
        if not total or total % number or any(count % each for count in counts) or not _equal(clips, seam):
            holders = [n for n, count in enumerate(counts) if count]
            if len(holders) != 1:
                raise ConfigError(
                    f"items {first} to {first + len(marks) - 1} of the data: {sum(map(len, runs))} runs of tokens "
                    f"{seam.audio and seam.audio.token} stand for rows of audio, but there are {number} clips, so that "
                    f"it cannot be told whose each is: give {_AHEAD}"
                )
            return [(Unit(clips, 0, count),) if n in holders else () for n, count in enumerate(counts)]
        runs = [[each] * (count // each) for count in counts]
    at, found = 0, list[tuple[Unit, ...]]()
    for own in runs:
        starts = np.cumsum([0, *own])
        found.append(tuple(
            Unit({name: column[at + n : at + n + 1] for name, column in clips.items()}, int(starts[n]), rows)
            for n, rows in enumerate(own)
        ))  # fmt: skip
        at += len(own)
    return found


def _runs(mark: Any) -> list[int]:
    """How many marked tokens (tokens,) stand side by side, run by run."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mark, [False])).astype(np.int8)))
    return [int(one) for one in edges[1::2] - edges[::2]]


def _equal(clips: Columns, seam: Seam) -> bool:
    """Whether all clips have as many frames that are no padding."""
    assert seam.audio is not None, "there are clips"
    held = [clips[name].reshape(len(clips[name]), -1).sum(-1) for name in seam.audio.columns[1:] if name in clips]
    return all(bool((one == one[0]).all()) for one in held)


def _in_order(kinds: Sequence[tuple[int, tuple[Unit, ...]]], ids: Any, number: int) -> tuple[Unit, ...]:
    """Images, videos and clips of a sequence, in the order of their placeholders among all of them."""
    held = ids[np.isin(ids, [token for token, _ in kinds])]
    found: list[Unit] = []
    for token, units in kinds:
        places = np.flatnonzero(held == token)
        for unit in units:
            first, last = int(places[unit.first]), int(places[unit.first + unit.rows - 1])
            if last - first + 1 != unit.rows:
                raise ConfigError(
                    f"item {number} of the data has images, videos or clips within one another: {TOGETHER}"
                )
            found.append(unit._replace(first=first))
    return tuple(sorted(found, key=lambda unit: unit.first))


def _check_types(types: Any, marks: Sequence[Any], seam: Seam, first: int) -> None:
    """ConfigError where the placeholders are others than what the processor calls an image's tokens."""
    rows = types.reshape(len(marks), -1)
    for number, (row, mark) in enumerate(zip(rows, marks, strict=True)):
        if len(row) == len(mark) and not np.array_equal(row == 1, mark):
            at = int(np.flatnonzero((row == 1) != mark)[0])
            raise ConfigError(
                f"item {first + number} of the data calls token {at} of the type {row[at]}, where 1 is an image's, but "
                f"images stand at the tokens {seam.token}"
            )


def _beside(columns: Columns, rows: int) -> tuple[Unit, ...]:
    """The images of one sequence on the axis behind."""
    pixels = max(columns.values(), key=Tensor.numel)
    some = [i for i in range(pixels.shape[1]) if bool(pixels[0, i].any())]
    if not some:
        return ()
    each = rows // len(some)
    return tuple(
        Unit({name: column[:, i : i + 1] for name, column in columns.items()}, each * n, each)
        for n, i in enumerate(some)
    )


def _one_after_the_other(columns: Columns, counts: Sequence[int], seam: Seam, first: int) -> list[tuple[Unit, ...]]:
    if seam.layout == "whole":
        holders = [number for number, count in enumerate(counts) if count]
        if len(holders) > 1:
            raise ConfigError(
                f"items {first} to {first + len(counts) - 1} of the data are one batch, in which it cannot be told "
                f"whose an image is: give {_AHEAD}"
            )
        return [(Unit(columns, 0, count),) if number in holders else () for number, count in enumerate(counts)]
    sizes = _sizes(columns, counts, seam)
    units, found = 0, list[tuple[Unit, ...]]()
    starts = np.concatenate(([0], np.cumsum([patches for patches, _ in sizes])))
    for count in counts:
        own, held = list[Unit](), 0
        while held < count and units < len(sizes):
            part = {name: _share(column, len(sizes), starts, units, axis_of(name, seam.layout))
                    for name, column in columns.items()}  # fmt: skip
            own.append(Unit(part, held, sizes[units][1]))
            held, units = held + sizes[units][1], units + 1
        found.append(tuple(own))
    rows = [sum(unit.rows for unit in own) for own in found]
    if units < len(sizes) or rows != list(counts):
        where = f"items {first} to {first + len(counts) - 1}" if len(counts) > 1 else f"item {first}"
        raise ConfigError(_told(where, sum(counts), len(sizes), seam, sum(rows for _, rows in sizes)))
    return found


def _told(where: str, tokens: int, images: int, seam: Seam, rows: int = 0) -> str:
    what = "images" if seam.token != seam.video else "videos"
    of = f" of {rows or images * seam.per_row} rows" if rows or seam.per_row else ""
    return (
        f"{where} of the data: {tokens} tokens {seam.token} stand for rows of {what}, but there are {images} {what}"
        f"{of}: {TOGETHER}"
    )


def _sizes(columns: Columns, counts: Sequence[int], seam: Seam) -> list[tuple[int, int]]:
    """Of each image its entries in the largest column, and its rows of features."""
    patches = patches_of(columns, seam.layout)
    if patches and patches[0]:
        return [(1 if seam.layout == "padded" else one, one // seam.per_row) for one in patches]
    return [(1, seam.per_row or sum(counts) // len(patches))] * len(patches)


def _share(column: Tensor, number: int, starts: Any, unit: int, axis: int) -> Tensor:
    """What an image has of a column: one entry, or its patches."""
    if column.shape[axis] == number:
        return column.narrow(axis, unit, 1)
    each = 1 if axis == 0 else column.shape[axis] // int(starts[-1])  # pixels of a patch along a strip
    return column.narrow(axis, each * int(starts[unit]), each * int(starts[unit + 1] - starts[unit]))


logger = logging.getLogger(__name__)


class ImageExchange:
    """Of one crew. Every rank must call the same methods."""

    def __init__(self, crew: Crew):
        self._crew, self._source = crew, cast("ImageText", crew.job.source)
        self._load = loads_by(self._source, crew.prepared.found, crew.job.types.compute.itemsize)
        self._some = {"images": False, "clips": False}  # whether a part of the coming update has some
        self._told = False

    def read(self, handed: Any, limits: Limits, *, first: int, check: ItemCheck, fields: Reads | None) -> Share:
        """As `read_share`, of items that may have images."""
        found = taken(handed, self._source.seam)
        shares = [
            self._read_one(item, units, limits, first + number, check, fields)
            for number, (item, units) in enumerate(zip(found.items, found.units, strict=True))
        ]
        return Share(
            tuple(sequence for share in shares for sequence in share.sequences),
            sum((share.left_out for share in shares), LeftOut()),
            len(shares),
            tuple(note for share in shares for note in share.notes),
            next((share.layout for share in shares if share.layout is not None), None),
        )

    def _read_one(
        self, item: Any, units: Sequence[Unit], limits: Limits, number: int, check: ItemCheck, fields: Reads | None
    ) -> Share:
        share = read_share([item], limits, first=number, check=check, fields=fields)
        place = f"item {number} of the data"
        if units and len(share.sequences) != 1:
            raise ConfigError(
                f"{place} has images and holds {len(share.sequences)} sequences that are trained: an item with images "
                "must be one sequence, neither packed nor left out as too long"
            )
        sequences = []
        for sequence in share.sequences:
            tokens = torch.from_numpy(sequence.input_ids)
            seam, columns = self._source.seam, columns_of([unit.columns for unit in units], self._source.seam.layout)
            check_rows(seam.images(units), sequence.input_ids, place)
            self._check_clips(units, place)
            positions = numbered(self._crew.job.model, seam, tokens, columns) if units else None
            typed = [_typed(unit, self._crew.job.types.compute)._replace(load=self._load(unit)) for unit in units]
            sequences.append(sequence._replace(images=seam.images(typed, positions)))
        return share._replace(sequences=tuple(sequences))

    def _check_clips(self, units: Sequence[Unit], place: str) -> None:
        """ConfigError where a clip has other placeholders than rows."""
        if (ear := self._source.ear) is None:
            return
        for unit in (one for one in units if is_clip(one.columns)):
            if why := ear.misfit(unit.columns, unit.rows):
                raise ConfigError(
                    f"{place} has {unit.rows} tokens that stand for a clip, of which the model's encoder makes "
                    f"{why}: {TOGETHER}"
                )

    def loads(self, sequences: Sequence[TokenSequence]) -> list[list[Load]]:
        """What encoding the images of each of them takes [Note: price of an image]."""
        return [[unit.load for unit in one.images.units] for one in sequences]

    def deliver(
        self, plan: StepPlan, owners: Sequence[int], mine: Mapping[int, TokenSequence], delivered: Delivered
    ) -> Delivered:
        """The delivered sequences of a plan with their images; arguments as of `deliver`."""
        crew, channel, seam = self._crew, self._crew.world.channel, self._source.seam
        strategies = crew.strategies_of(plan)
        ranks, encoding = runners(plan, strategies), _encoders(plan, strategies)
        found = {position: sequence.images for position, sequence in mine.items() if sequence.images.units}
        outgoing: dict[int, dict[int, _Tensors]] = {}
        for position, images in sorted(found.items()):
            for receiver in ranks[position] - {channel.rank}:
                if receiver in encoding[position] or images.positions is not None:
                    tensors = _tensors(images, pixels=receiver in encoding[position])
                    outgoing.setdefault(receiver, {})[position] = tensors
        parcels = {receiver: _packed(tensors) for receiver, tensors in outgoing.items()}
        told = [{position: _described(images) for position, images in found.items()},
                {receiver: len(parcel) for receiver, parcel in parcels.items()}]  # fmt: skip
        units, sizes = dict[int, list[Any]](), dict[int, int]()
        for owner, text in enumerate(channel.texts(json.dumps(told, separators=(",", ":")))):
            of_owner, lengths = json.loads(text)
            units |= {int(position): described for position, described in of_owner.items()}
            if str(channel.rank) in lengths:
                sizes[owner] = lengths[str(channel.rank)]
        clips = [clip for described in units.values() for *_, clip in described]
        self._tell(crew.update, images=not all(clips), clips=any(clips))
        came: dict[int, _Tensors] = {}
        for parcel in channel.exchange(parcels, sizes).values():
            came |= _unpacked(parcel)
        for position in units.keys() - found.keys():
            columns, positions = came.get(position, ([], None))
            each = zip(columns or [{}] * len(units[position]), units[position], strict=True)
            made = [Unit(own, first, rows, Load(*load)) for own, (first, rows, load, _) in each]
            found[position] = seam.images(made, positions)
        none = seam.images()
        places = {number: position for position, number in enumerate(plan.sequence_ids)}
        shown = {
            number: sequence._replace(images=found.get(places[number], none))
            for number, sequence in delivered.sequences.items()
        }
        return Delivered(shown)

    def _tell(self, update: Update, **some: bool) -> None:
        """Whether the coming update has images and clips: without any no encoder has a gradient, and none is
        touched."""
        self._some = {kind: some[kind] or (had and bool(self._crew.waiting)) for kind, had in self._some.items()}
        update.unread = self._source.plan.unread - self._source.learning(**self._some)
        if not any(self._some.values()) and not self._told and self._crew.world.rank == 0 and update.counts_steps:
            self._told = True
            logger.warning(
                "no sequence of this step has an image: its encoder is left alone, but the optimizer counts the step "
                "for all parameters together, where in plain training it counts for the others alone (told once)"
            )


def _encoders(plan: StepPlan, strategies: Sequence[Strategy]) -> list[set[int]]:
    """For each sequence the ranks of the stage that begins the pipelines that run it."""
    found: list[set[int]] = [set() for _ in plan.lengths]
    for phase, strategy in zip(plan.phases, strategies, strict=True):
        for planned, placed in zip(phase.pipelines, strategy.pipelines, strict=True):
            for batch in planned.microbatches:
                for span in batch.spans:
                    found[span.sequence].update(placed.stages[0].ranks)
    return found


def _typed(unit: Unit, dtype: torch.dtype) -> Unit:
    columns = {n: c.detach().cpu().to(dtype if c.is_floating_point() else c.dtype) for n, c in unit.columns.items()}
    return unit._replace(columns=columns)


def _described(images: Images) -> list[Any]:
    """Of each unit of a sequence its rows and load, and whether it is a clip."""
    return [[one.first, one.rows, one.load, is_clip(one.columns)] for one in images.units]


_Tensors = tuple[list[dict[str, Tensor]], Tensor | None]  # columns of each unit, where a rank encodes; positions


def _tensors(images: Images, *, pixels: bool) -> _Tensors:
    # Copies: of a part of a batch torch would save the whole of it.
    columns = [{name: c.clone() for name, c in unit.columns.items()} for unit in images.units] if pixels else []
    return columns, images.positions


def _packed(tensors: Mapping[int, _Tensors]) -> Tensor:
    """Tensors of sequences as one message, (numbers,) of int64."""
    torch.save(dict(tensors), buffer := io.BytesIO(), _use_new_zipfile_serialization=False)  # which may be followed
    data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    return torch.nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64)


def _unpacked(parcel: Tensor) -> dict[int, _Tensors]:
    found: dict[int, _Tensors] = torch.load(io.BytesIO(parcel.numpy().tobytes()), weights_only=True)
    return found
