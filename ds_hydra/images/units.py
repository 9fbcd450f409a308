"""What scripts hand in, with columns of images: tokens without them, and the images of each item.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_hydra.data.columns import as_array
from ds_hydra.data.sequences import items_of
from ds_hydra.images.content import TOGETHER, Columns, Unit, axis_of, patches_of
from ds_hydra.images.seam import BESIDE_VIDEO, VIDEO, Seam
from ds_hydra.images.small import clip_columns
from ds_hydra.zero_hetero.errors import ConfigError

_TYPES = ("mm_token_type_ids", "token_type_ids")  # which tokens are placeholders, as processors say it
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
    types = next((given[name] for name in _TYPES if name in given), None)
    rest = {name: value for name, value in given.items() if name not in _TYPES}
    items = list(items_of(rest))
    ids = [as_array(item["input_ids"] if isinstance(item, Mapping) else item) for item in items]
    marks = [one == seam.token for one in ids]
    if seam.seen is not None and columns and types is None:
        raise ConfigError(
            f"item {first} of the data has images and no {' or '.join(_TYPES[::-1])}, without which the model's own "
            f"forward lets no token of an image see those behind it: {TOGETHER}"
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
