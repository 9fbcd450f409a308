"""Masters, optimizer and random generators in, named flat tensors and plain numbers out, and back: a rank's part of it.

Tensors of a rank file: "BUCKET/master" and "BUCKET/STATE" for each element-wise optimizer state, each the rank's even
share of the bucket in the masters' flat order; "rng/cpu" and "rng/DEVICE" for the random generators.

[Note: loading on other ranks] A rank's share of a bucket is an interval of its flat order, with any number of ranks. So
loading asks for intervals of parameters and does not care who saved them. A bucket of 12 elements saved by 2 ranks lies
in their files as [0, 6) and [6, 12). Of 3 ranks that load it, rank 1 owns [4, 8): it reads elements 4 and 5 at the end
of rank 0's tensor and elements 0 and 1 of rank 1's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hydra.checkpoint.format import (
    Manifest,
    OtherJobError,
    SavedBucket,
    SavedParam,
    rank_file,
    shards_of,
)
from ds_hydra.checkpoint.optimizer_state import element_wise_states, state_source
from ds_hydra.checkpoint.shard_file import ShardReader, Source
from ds_hydra.pipe.stage import from_flat, to_flat
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.zero_hetero.errors import CheckpointError
from ds_hydra.zero_hetero.layout import even_layout

logger = logging.getLogger(__name__)

_RANDOM = ("rng/cpu", "rng/cuda")


def saved_buckets(masters: ModelMasters) -> tuple[SavedBucket, ...]:
    """The masters' buckets as a manifest lists them."""
    return tuple(
        SavedBucket(
            bucket.name,
            bucket.trainable,
            tuple(SavedParam(p.name, tuple(p.shape), p.rule.dim, p.rule.parts) for p in bucket.params),
            bucket.owners,
        )
        for bucket in masters.buckets
    )


def collect_tensors(
    masters: ModelMasters, optimizer: Optimizer, device: torch.device, *, with_frozen: bool = True
) -> dict[str, Source]:
    """What this rank writes, in the order of its file. Raises CheckpointError for state that cannot be resharded."""
    sources: dict[str, Source] = {}
    for shards in (masters.trained, masters.frozen) if with_frozen else (masters.trained,):
        for spec, shard in zip(shards.buckets, shards.shards, strict=True):
            sources[f"{spec.name}/master"] = Source.of(shard)
    keys = element_wise_states(masters.trained.spans, optimizer)
    for index, spec in enumerate(masters.trained.buckets):
        spans = [span for span in masters.trained.spans if span.bucket == index]
        numel = masters.trained.shards[index].numel()
        for key, dtype in keys.items():
            sources[f"{spec.name}/{key}"] = Source((numel,), dtype, state_source(optimizer, spans, key, numel, dtype))
    sources["rng/cpu"] = Source.of(torch.get_rng_state())
    if device.type == "cuda":
        sources["rng/cuda"] = Source.of(torch.cuda.get_rng_state(device))
    return sources


def check_masters(masters: ModelMasters) -> None:
    """CheckpointError for NaN in what is trained: the checkpoints before are better to go on from."""
    for spec, shard in zip(masters.trained.buckets, masters.trained.shards, strict=True):
        _check_numbers(spec.name, shard)


def _check_numbers(name: str, values: Tensor) -> None:
    if values.numel() and bool(values.amax().isnan()):  # which NaN alone makes NaN, and which takes no memory
        raise CheckpointError(
            f"{int(values.isnan().sum())} of {values.numel()} masters in {name!r} are NaN: go on from a checkpoint of "
            "before, by its tag"
        )


@dataclass
class LoadedTensors:
    """This rank's part of a checkpoint, verified, before any of it is installed."""

    shards: list[tuple[Tensor, Tensor]]  # (master shard, its new values)
    states: dict[str, list[Tensor]]  # per key and trained bucket
    random: dict[str, Tensor]


class RangeReader:
    """Reads intervals of parameters from the files of any number of ranks, opening only those that hold them."""

    def __init__(self, manifest: Manifest, folder: Path):
        self._manifest, self._folder = manifest, folder
        self._readers: dict[int, ShardReader] = {}
        self._places: dict[str, tuple[SavedBucket, SavedParam, int]] = {}
        for bucket in manifest.buckets:
            at = 0
            for param in bucket.params:
                self._places[param.name] = (bucket, param, at)
                at += param.numel

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()

    @property
    def by_engine(self) -> bool:
        """Whether an engine has saved it; what was converted lacks some of an engine's state."""
        return bool(self._manifest.optimizer)

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from files."""
        return sum(reader.bytes_read for reader in self._readers.values())

    def file(self, rank: int) -> ShardReader:
        """The reader of a rank's file."""
        if rank not in self._readers:
            entry, path = self._manifest.files[rank], self._folder / rank_file(rank)
            reader = ShardReader(path, entry, self._manifest.block_bytes, self._manifest.save_id)
            self._readers[rank] = reader  # before it is checked, so that it is closed whatever comes
            self._check_tensors(reader, rank, path)
        return self._readers[rank]

    def _check_tensors(self, reader: ShardReader, rank: int, path: Path) -> None:
        """CheckpointError unless a rank's file holds what the manifest says, each tensor with the rank's share."""
        manifest, sizes = self._manifest, {}
        for bucket in manifest.buckets:
            share = even_layout(bucket.numel, manifest.num_ranks, bucket.owners).sizes[rank]
            for key in ("master", *(manifest.states if bucket.trainable else ())):
                sizes[f"{bucket.name}/{key}"] = share
        for name in reader.names():
            numel, dtype = reader.numel(name), reader.dtype(name)
            known = dtype == torch.uint8 if name in _RANDOM else sizes.get(name) == numel
            if not known or (name.endswith("/master") and not dtype.is_floating_point):
                raise CheckpointError(
                    f"{path} is damaged: it holds {name[:80]!r} with {numel} elements of {dtype}, which the manifest "
                    "does not know; use another tag"
                )

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a parameter."""
        return name in self._places

    def trained(self, name: str) -> bool:
        """Whether a parameter was trained, and so has optimizer state."""
        return self._places[name][0].trainable

    def dtype(self, name: str, key: str) -> torch.dtype:
        """Type that a parameter, or its state, was saved in."""
        bucket, saved, at = self._places[name]
        # The same in every file, so the first that holds an element will do; an empty parameter has no file at all.
        found = shards_of(bucket, self._manifest.num_ranks, at, at + saved.numel)
        return self.file(found[0][0]).dtype(f"{bucket.name}/{key}") if found else torch.float32

    def read_all(self, param: SavedParam, key: str) -> Tensor:
        """A whole parameter or its state, in the flat order of `param`."""
        out = torch.empty(param.numel, dtype=self.dtype(param.name, key))
        self.read(param, key, 0, out)
        return out

    def read(self, param: SavedParam, key: str, start: int, out: Tensor) -> None:
        """Fill `out` with the elements of a parameter or of its state from `start` on, in the flat order of `param`."""
        bucket, saved, at = self._places[param.name]
        # Saved in another flat order (by a job whose model is cut along another dimension): an interval here lies
        # scattered there, so the parameter is read whole and turned.
        if (saved.dim, saved.parts) != (param.dim, param.parts):
            value = from_flat(self.read_all(saved, key), saved.shape, saved.dim, saved.parts)
            out.copy_(to_flat(value, param.dim, param.parts)[start : start + out.numel()])
            return
        begin, filled = at + start, 0
        dtype, name = self.dtype(param.name, key), f"{bucket.name}/{key}"
        for rank, first, last in shards_of(bucket, self._manifest.num_ranks, begin, begin + out.numel()):
            if self.file(rank).dtype(name) != dtype:
                raise CheckpointError(
                    f"{self._folder / rank_file(rank)} is damaged: {name!r} is of {self.file(rank).dtype(name)}, in "
                    f"another rank's file of {dtype}; use another tag"
                )
            self.file(rank).read(name, first, out[filled : filled + last - first])
            filled += last - first


def check_params(masters: ModelMasters, reader: RangeReader, manifest: Manifest, place: str) -> None:
    """CheckpointError unless the checkpoint holds exactly this model's parameters; frozen ones may be left out."""
    here = {p.name: tuple(p.shape) for b in masters.buckets for p in b.params if b.trainable or reader.has(p.name)}
    saved = {p.name: p.shape for bucket in manifest.buckets for p in bucket.params}
    shapes = [f"{n!r} {saved[n]} there, {here[n]} here" for n in here if n in saved and saved[n] != here[n]]
    lists = [f"only {where}: {', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''}"
             for where, names in (("in the model", [n for n in here if n not in saved]),
                                  ("in the checkpoint", [n for n in saved if n not in here])) if names]  # fmt: skip
    if shapes or lists:
        raise OtherJobError(
            f"{place} is of another model: {'; '.join([*lists, *shapes[:5]])}. Build the model that was saved"
        )


def read_tensors(
    masters: ModelMasters, reader: RangeReader, states: Sequence[str], *, random_rank: int | None
) -> LoadedTensors:
    """Read this rank's share of every parameter, and of its optimizer states `states`."""
    shards: list[tuple[Tensor, Tensor]] = []
    loaded: dict[str, list[Tensor]] = {key: [] for key in states}
    specs = {
        p.name: SavedParam(p.name, tuple(p.shape), p.rule.dim, p.rule.parts) for b in masters.buckets for p in b.params
    }
    for own in (masters.trained, masters.frozen):
        pieces = list(own.pieces())
        for index, shard in enumerate(own.shards):
            mine = [(specs[p.name], p.start, p.stop) for p in pieces if p.bucket == index]
            # Frozen parameters may have been left out of the checkpoint; then the model's own values stay.
            if all(reader.has(param.name) for param, _, _ in mine):
                shards.append((shard, _assemble(reader, mine, "master")))
                if own is masters.trained:
                    _check_numbers(masters.trained.buckets[index].name, shards[-1][1])
            if own is masters.trained:
                for key, values in loaded.items():
                    values.append(_assemble(reader, mine, key))
    random: dict[str, Tensor] = {}
    if random_rank is not None:
        file = reader.file(random_rank)
        random = {name: file.read_all(name) for name in file.names() if name in _RANDOM}
        if reader.by_engine and "rng/cpu" not in random:
            raise CheckpointError(f"the file of rank {random_rank} holds no 'rng/cpu'; use another tag")
    return LoadedTensors(shards, loaded, random)


def _assemble(reader: RangeReader, mine: Sequence[tuple[SavedParam, int, int]], key: str) -> Tensor:
    """One rank's share of a bucket, in one tensor; zeros where there was no such state."""
    saved = [param.name for param, _, _ in mine if key == "master" or reader.trained(param.name)]
    # Parameters that were frozen, in fewer bits, may lie beside others: the type must hold all of them.
    dtype = reduce(torch.promote_types, (reader.dtype(name, key) for name in saved)) if saved else torch.float32
    whole = torch.empty(sum(stop - start for _, start, stop in mine), dtype=dtype)
    at = 0
    for param, start, stop in mine:
        part = whole[at : at + stop - start]
        if param.name in saved:
            reader.read(param, key, start, part)
        else:
            logger.warning("%s was frozen when it was saved: its optimizer state %s begins at zero", param.name, key)
            part.zero_()
        at += stop - start
    return whole


def install_masters(loaded: LoadedTensors, masters: ModelMasters) -> None:
    """Copy the values that were read into the shards of the masters."""
    masters.revision += 1
    with torch.no_grad():
        for shard, values in loaded.shards:
            shard.copy_(values)


def check_random(loaded: LoadedTensors, device: torch.device) -> None:
    """CheckpointError for a random generator's state that it would refuse, or that is of another size."""
    for name, values in loaded.random.items():
        if name == "rng/cuda" and device.type != "cuda":
            continue
        try:
            torch.Generator(device if name == "rng/cuda" else "cpu").set_state(values)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"the random generator's state {name!r} with {values.numel()} bytes is damaged "
                f"({str(error).splitlines()[0][:200]}); use another tag"
            ) from None


def install_random(loaded: LoadedTensors, device: torch.device) -> None:
    """Set the random generators to where they were."""
    if "rng/cpu" in loaded.random:
        torch.set_rng_state(loaded.random["rng/cpu"])
    if "rng/cuda" in loaded.random and device.type == "cuda":
        torch.cuda.set_rng_state(loaded.random["rng/cuda"], device)
