"""Sequences with images from the ranks that hand them in to those that run them.

Every rank learns the sizes of all columns by one text, so both ends of every message know what it holds. Pixels go to
the first stage of the pipeline that runs their sequence, in the type that the model computes in, and nowhere else;
positions go to all of its stages.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hydra.costs.loads import Load
from ds_hydra.data.sequences import Share, read_share
from ds_hydra.data.tokens import LeftOut, Limits, Reads, TokenSequence
from ds_hydra.images.content import TOGETHER, Images, Unit, check_rows, columns_of, is_clip
from ds_hydra.images.load import loads_by
from ds_hydra.images.seam import Seam, numbered
from ds_hydra.images.source import ImageText
from ds_hydra.images.units import taken
from ds_hydra.pipe.placement import Strategy
from ds_hydra.step.delivery import Delivered, runners
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    from ds_hydra.data.columns import ItemCheck
    from ds_hydra.engine.crew import Crew
    from ds_hydra.plan.step_plan import StepPlan
    from ds_hydra.step.update import Update

logger = logging.getLogger(__name__)

_TYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64,
                                          torch.int32, torch.uint8, torch.bool)}  # fmt: skip


class ImageExchange:
    """Of one crew. Every rank must call the same methods."""

    def __init__(self, crew: Crew):
        source = crew.job.source
        assert isinstance(source, ImageText), "the job trains images"
        self._crew, self._source = crew, source
        self._load = loads_by(source, crew.prepared.found, crew.job.types.compute.itemsize)
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
        crew, channel = self._crew, self._crew.world.channel
        told = {position: _described(sequence.images) for position, sequence in mine.items() if sequence.images.units}
        described: dict[int, list[Any]] = {}
        for text in channel.texts(json.dumps(told, separators=(",", ":"))):
            described |= {int(position): value for position, value in json.loads(text).items()}
        units = [columns for value in described.values() for *_, columns in value[0]]
        self._tell(crew.update, images=not all(map(is_clip, units)), clips=any(map(is_clip, units)))
        strategies = crew.strategies_of(plan)
        ranks, encoding = runners(plan, strategies), _encoders(plan, strategies)
        outgoing: dict[int, list[Tensor]] = {}
        incoming: dict[int, list[int]] = {}
        found: dict[int, Images] = {}
        for position, value in sorted(described.items()):
            owner = owners[position]
            for receiver in sorted(ranks[position] - {owner}):
                if owner == channel.rank:
                    outgoing.setdefault(receiver, []).append(
                        _bytes(mine[position].images, pixels=receiver in encoding[position])
                    )
                elif receiver == channel.rank:
                    incoming.setdefault(owner, []).append(position)
            if owner == channel.rank:
                found[position] = mine[position].images
            assert value, "a sequence with images has units"
        parcels = {receiver: _parcel(parts) for receiver, parts in outgoing.items()}
        parcels = {receiver: parcel for receiver, parcel in parcels.items() if len(parcel)}
        sizes = {
            owner: -(-sum(_size(described[at], pixels=channel.rank in encoding[at]) for at in positions) // 8)
            for owner, positions in incoming.items()
        }
        came = channel.exchange(parcels, {owner: size for owner, size in sizes.items() if size})
        for owner, positions in incoming.items():
            data, begin = came[owner].view(torch.uint8) if owner in came else torch.zeros(0, dtype=torch.uint8), 0
            for position in positions:
                pixels = channel.rank in encoding[position]
                size = _size(described[position], pixels=pixels)
                part = data[begin : begin + size]
                found[position] = _images(described[position], part, self._source.seam, pixels=pixels)
                begin += size
        none = self._source.seam.images()
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
    """Shapes and types of a sequence's images: units with their loads, and axes and tokens of positions."""
    units = [[one.first, one.rows, one.load, {n: [list(c.shape), str(c.dtype)] for n, c in sorted(one.columns.items())}]
             for one in images.units]  # fmt: skip
    return [units, None if images.positions is None else list(images.positions.shape)]


def _size(described: Sequence[Any], *, pixels: bool) -> int:
    """Bytes of what was described; of a rank that encodes with its `pixels`."""
    units, shape = described
    size = 0 if shape is None else 8 * shape[0] * shape[1]
    columns = [column for *_, columns in units for column in columns.values()] if pixels else []
    return size + sum(torch.Size(shape).numel() * _TYPES[dtype].itemsize for shape, dtype in columns)


def _bytes(images: Images, *, pixels: bool) -> Tensor:
    parts = [] if images.positions is None else [images.positions]
    if pixels:
        parts += [column for unit in images.units for _, column in sorted(unit.columns.items())]
    return torch.cat([torch.zeros(0, dtype=torch.uint8), *(p.contiguous().view(-1).view(torch.uint8) for p in parts)])


def _parcel(parts: Sequence[Tensor]) -> Tensor:
    data = torch.cat(list(parts))
    return torch.nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64)


def _images(described: Sequence[Any], data: Tensor, seam: Seam, *, pixels: bool) -> Images:
    units, shape = described
    begin = 0

    def next_of(size: Sequence[int], dtype: torch.dtype) -> Tensor:
        nonlocal begin
        end = begin + torch.Size(size).numel() * dtype.itemsize
        part, begin = data[begin:end].clone(), end
        return part.view(dtype).view(*size)

    positions = None if shape is None else next_of(shape, torch.int64)
    made = [
        Unit({n: next_of(size, _TYPES[dtype]) for n, (size, dtype) in columns.items()} if pixels else {}, first, rows,
             Load(*load))
        for first, rows, load, columns in units
    ]  # fmt: skip
    return seam.images(made, positions)
