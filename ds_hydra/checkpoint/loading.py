"""What a checkpoint has of an engine and its tensors: collected for a save; read and checked for a load, then assigned.

[Note: all or nothing] Whatever may fail is done here on copies: the schedule is loaded into a copy of itself, the
optimizer's state is tried with one element, the random generators' states are given to other generators, counts are
read as counts, the place in the data is checked against the data. When that went well on all ranks, `install` assigns.

Tensors of a rank file: "BUCKET/master" and "BUCKET/STATE" for each element-wise optimizer state, each the rank's even
share of the bucket in the masters' flat order; "rng/cpu" and "rng/DEVICE" for the random generators.

[Note: loading on other ranks] A rank's share of a bucket is an interval of its flat order, with any number of ranks. So
loading asks for intervals of parameters and does not care who saved them. A bucket of 12 elements saved by 2 ranks lies
in their files as [0, 6) and [6, 12). Of 3 ranks that load it, rank 1 owns [4, 8): it reads elements 4 and 5 at the end
of rank 0's tensor and elements 0 and 1 of rank 1's.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hydra.checkpoint import optimizer_state
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
from ds_hydra.data.sampler import RESUME_WEIGHTS, Order
from ds_hydra.pipe.stage import from_flat, to_flat
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.step.update import LossScale
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError
from ds_hydra.zero_hetero.layout import even_layout

_COUNTS = ("last_epoch", "last_batch_iteration", "_step_count")  # of schedules; they begin at -1 or 0


class TrainingState(Protocol):
    """The attributes of an engine that a checkpoint keeps besides its masters; loading sets the counters."""

    config: dict[str, Any]
    device: torch.device
    optimizer: Optimizer | None
    lr_scheduler: Any
    sampler: Order | None
    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int


@dataclass(frozen=True)
class PartsToLoad:
    """Which parts of a checkpoint are loaded besides the model's parameters."""

    optimizer: bool = True
    lr_scheduler: bool = True
    progress: bool = True  # steps, samples, the place in the data; without it only the model is loaded


@dataclass(frozen=True)
class Loading:
    """One rank's part of a checkpoint, read, verified and turned into what the engine holds."""

    manifest: Manifest
    parts: PartsToLoad
    tensors: LoadedTensors
    optimizer: optimizer_state.NewState | None
    schedule: dict[str, Any] | None

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        place: Path,
        parts: PartsToLoad,
        engine: TrainingState,
        masters: ModelMasters,
        loss_scale: LossScale,
    ) -> Loading:
        """Read and build all that `install` assigns; the engine stays as it is.

        Raises CheckpointError for what is damaged or cannot be gone on from, OtherJobError for what is of another job.
        """
        rank, num_ranks = masters.trained.rank, masters.trained.num_ranks
        with_optimizer = parts.optimizer and parts.progress and engine.optimizer is not None
        schedule = None
        # Everything that may refuse at little cost comes before the first tensor is read.
        if with_optimizer:
            _check_optimizer(manifest, place, engine.optimizer)
        if parts.progress:
            if manifest.data is not None and engine.sampler is not None:
                _check_data(engine.sampler, manifest.data, place)
            if parts.lr_scheduler and manifest.lr_scheduler is not None and engine.lr_scheduler is not None:
                schedule = _checked_schedule(engine, manifest.lr_scheduler, place)
            loss_scale.check_state(manifest.loss_scale)
        reader = RangeReader(manifest, place)
        try:
            check_params(masters, reader, manifest, str(place))
            # Random generators belong to a rank. With another number of ranks there is nobody whose they are, so they
            # stay as the job seeded them.
            same_world = manifest.num_ranks == num_ranks
            tensors = read_tensors(
                masters,
                reader,
                manifest.states if with_optimizer else (),
                random_rank=rank if same_world and parts.progress else None,
            )
        finally:
            reader.close()
        check_random(tensors, engine.device)
        new = None
        if with_optimizer and manifest.groups and engine.optimizer is not None:
            # `_check_optimizer` lets fewer groups pass only for one converted group, which stands for all.
            groups = manifest.groups
            if len(groups) < len(engine.optimizer.param_groups):
                groups = groups * len(engine.optimizer.param_groups)
            try:
                new = optimizer_state.build_state(masters.trained, engine.optimizer, tensors.states, groups)
            except OtherJobError as error:
                raise OtherJobError(
                    f"{place}: {error}. Use the optimizer that was saved, or {RESUME_WEIGHTS}"
                ) from None
            except CheckpointError as error:
                raise CheckpointError(f"{place} is damaged: {error}; use another tag") from None
        return cls(manifest, parts, tensors, new, schedule)

    def install(self, engine: TrainingState, masters: ModelMasters, loss_scale: LossScale) -> None:
        """Assign what was built [Note: all or nothing]; other ranks are assigning theirs, so nothing here may fail."""
        install_masters(self.tensors, masters)
        if not self.parts.progress:
            return
        manifest = self.manifest
        install_random(self.tensors, engine.device)
        if self.optimizer is not None and engine.optimizer is not None:
            optimizer_state.install_optimizer(engine.optimizer, self.optimizer)
        if self.schedule is not None:
            engine.lr_scheduler.load_state_dict(self.schedule)
        if manifest.loss_scale is not None:
            loss_scale.load_state_dict(manifest.loss_scale)
        engine.global_steps = manifest.step
        engine.global_samples = manifest.counters.get("global_samples", 0)
        engine.micro_steps = manifest.counters.get("micro_steps", 0)
        engine.skipped_steps = manifest.counters.get("skipped_steps", 0)
        if engine.sampler is not None:
            if manifest.data is None:  # converted, or of sequences that were handed in
                engine.sampler.begin_at(manifest.step)
            else:
                engine.sampler.restore(manifest.data)


def as_json(value: Any, what: str) -> dict[str, Any]:
    """The value as JSON gives it back, so that what is saved and what is loaded are the same kind of thing."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} cannot be saved as JSON ({error}): use a schedule of the config") from None


def _check_optimizer(manifest: Manifest, place: Path, optimizer: Optimizer | None) -> None:
    """OtherJobError unless the saved state is of this optimizer, with as many parameter groups."""
    name, count = type(optimizer).__name__, len(optimizer.param_groups) if optimizer else 0
    if not manifest.optimizer and len(manifest.groups) == 1:  # converted: one group stands for all
        return
    if (manifest.groups or manifest.optimizer) and (manifest.optimizer or name, len(manifest.groups)) != (name, count):
        raise OtherJobError(
            f"{place} holds the state of {manifest.optimizer} with {len(manifest.groups)} parameter groups, this "
            f"job has {name} with {count}: use the optimizer that was saved, or {RESUME_WEIGHTS}"
        )


def _check_data(sampler: Order, saved: Mapping[str, Any], place: Path) -> None:
    """OtherJobError for a place in other data, CheckpointError for one that cannot be."""
    try:
        sampler.check_saved(saved)
    except ConfigError as error:
        raise OtherJobError(f"{place}: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from None


def _checked_schedule(engine: TrainingState, saved: dict[str, Any], place: Path) -> dict[str, Any]:
    """The saved state of the LR scheduler, after a copy of it has taken it."""
    own = as_json(engine.lr_scheduler.state_dict(), "the LR scheduler's state")
    name = type(engine.lr_scheduler).__name__
    wrong = _differs(saved, own, "")
    if wrong:
        raise OtherJobError(
            f"{place} holds the state of another LR scheduler than this job's {name}: {wrong}. Use the scheduler that "
            f"was saved, load_checkpoint(load_lr_scheduler_states=False), or {RESUME_WEIGHTS}"
        )
    try:
        trial = copy.deepcopy(engine.lr_scheduler, {id(engine.optimizer): engine.optimizer})
    except Exception:  # a scheduler of the user's own that cannot be copied: its state was compared at least
        return saved
    try:
        trial.load_state_dict(copy.deepcopy(saved))
    except Exception as error:
        raise CheckpointError(
            f"{place} holds a state that the LR scheduler {name} does not take ({type(error).__name__}: {error}); use "
            "another tag"
        ) from None
    return saved


def _differs(saved: Any, own: Any, place: str) -> str:
    """The first difference in kind between a saved state and the present one; "" where there is none."""
    if own is None:
        return ""
    if isinstance(own, dict):
        if not isinstance(saved, dict) or saved.keys() != own.keys():
            keys = sorted(set(saved) ^ set(own)) if isinstance(saved, dict) else sorted(own)
            return f"the keys {', '.join(map(repr, keys))[:200]} {place and 'of ' + place} are in one of them only"
        return next(filter(None, (_differs(saved[key], own[key], key) for key in own)), "")
    if isinstance(own, list):
        if not isinstance(saved, list) or len(saved) != len(own):
            return f"{place} is {str(saved)[:80]} and no list of {len(own)}"
        return next(filter(None, (_differs(then, now, place) for then, now in zip(saved, own, strict=True))), "")
    if isinstance(own, (bool, str)):
        return "" if type(saved) is type(own) else f"{place} is {str(saved)[:80]}, here {own!r}"
    number = isinstance(saved, (int, float)) and not isinstance(saved, bool) and abs(saved) < 2**62
    if not number:
        return f"{place} is {str(saved)[:80]}, here {own}"
    if place in _COUNTS and not (isinstance(saved, int) and saved >= -1):
        return f"{place} is {saved}, which is no count"
    return ""


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
