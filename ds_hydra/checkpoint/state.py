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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hydra.checkpoint.format import Manifest, SavedBucket, SavedGroup, SavedParam, SavedScalar, owners, rank_file
from ds_hydra.checkpoint.shard_file import ShardReader, Source
from ds_hydra.pipe.stage import from_flat, to_flat
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.zero_hetero.errors import CheckpointError
from ds_hydra.zero_hetero.masters import MasterShards, OptimizerSpan

logger = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, type(None))


def saved_buckets(masters: ModelMasters) -> tuple[SavedBucket, ...]:
    """The masters' buckets as a manifest lists them."""
    return tuple(
        SavedBucket(
            bucket.name,
            bucket.trainable,
            tuple(SavedParam(p.name, tuple(p.shape), p.rule.dim, p.rule.parts) for p in bucket.params),
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
            sources[f"{spec.name}/{key}"] = Source((numel,), dtype, _state_of(optimizer, spans, key, numel, dtype))
    sources["rng/cpu"] = Source.of(torch.get_rng_state())
    if device.type == "cuda":
        sources["rng/cuda"] = Source.of(torch.cuda.get_rng_state(device))
    return sources


def element_wise_states(spans: Iterable[OptimizerSpan], optimizer: Optimizer) -> dict[str, torch.dtype]:
    """Names and types of the state tensors that have one value for each element."""
    keys: dict[str, torch.dtype] = {}
    for span in spans:
        for key, value in optimizer.state.get(span.param, {}).items():
            # Tensors without dimensions, such as Adam's step, are numbers of the whole group: see `_scalars`.
            if isinstance(value, Tensor) and value.dim():
                if value.shape != span.param.shape:
                    raise CheckpointError(
                        f"optimizer {type(optimizer).__name__} keeps a state {key!r} of shape {tuple(value.shape)} for "
                        f"{span.param.numel()} elements, which cannot be resharded: use an element-wise optimizer"
                    )
                keys.setdefault(key, value.dtype)
    return keys


def _state_of(
    optimizer: Optimizer, spans: Sequence[OptimizerSpan], key: str, numel: int, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Fetches one state of one bucket's shard, without a copy where one span is the whole shard."""

    def fetch() -> Tensor:
        # Called when its turn to be written comes, so that there is one copy at a time.
        values = [optimizer.state.get(span.param, {}).get(key) for span in spans]
        if len(spans) == 1 and spans[0].stop - spans[0].start == numel and values[0] is not None:
            return values[0]
        # Several optimizer groups share the shard: their states are put side by side, zero where a group has none.
        whole = torch.zeros(numel, dtype=dtype, device=spans[0].param.device if spans else "cpu")
        for span, value in zip(spans, values, strict=True):
            if value is not None:
                whole[span.start : span.stop] = value
        return whole

    return fetch


def collect_groups(optimizer: Optimizer) -> list[SavedGroup]:
    """Options and shared numbers of each parameter group, as far as this rank has parameters in it."""
    return [
        SavedGroup(
            {key: _plain(value, f"option {key!r}") for key, value in group.items() if key != "params"},
            _scalars(optimizer, group["params"]),
        )
        for group in optimizer.param_groups
    ]


def _plain(value: Any, what: str) -> Any:
    """An option as JSON can hold it; CheckpointError for anything but numbers, text and lists of them."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item, what) for item in value]
    if isinstance(value, _PLAIN):
        return value
    raise CheckpointError(
        f"the optimizer's {what} is a {type(value).__name__}, which a checkpoint cannot hold: use numbers or text"
    )


def _scalars(optimizer: Optimizer, params: Sequence[Any]) -> dict[str, SavedScalar]:
    """Numbers that the optimizer keeps for each parameter; CheckpointError where they differ within the group.

    Parameters here are runs of elements, which are cut elsewhere with another number of ranks. So a number can only be
    kept where all of them have the same.
    """
    found: dict[str, SavedScalar] = {}
    for param in params:
        for key, value in optimizer.state.get(param, {}).items():
            if value is None or (isinstance(value, Tensor) and value.dim()):
                continue
            is_tensor = isinstance(value, Tensor)
            dtype = str(value.dtype).removeprefix("torch.") if is_tensor else None
            scalar = SavedScalar(value.item() if is_tensor else value, dtype)
            if found.setdefault(key, scalar) != scalar:
                raise CheckpointError(
                    f"the optimizer's {key!r} differs within one parameter group ({found[key].value}, {scalar.value}): "
                    "a checkpoint keeps one value for each group, so give their parameters groups of their own"
                )
    return found


def merge_groups(everyone: Sequence[Sequence[SavedGroup]]) -> tuple[SavedGroup, ...]:
    """One list of groups from those of all ranks: a rank without parameters in a group knows no numbers of it."""
    return tuple(
        SavedGroup(own[0].options, next((group.scalars for group in own if group.scalars), {}))
        for own in zip(*everyone, strict=True)
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
    def bytes_read(self) -> int:
        """Bytes that were read from files."""
        return sum(reader.bytes_read for reader in self._readers.values())

    def file(self, rank: int) -> ShardReader:
        """The reader of a rank's file."""
        if rank not in self._readers:
            entry = self._manifest.files[rank]
            self._readers[rank] = ShardReader(
                self._folder / rank_file(rank), entry, self._manifest.block_bytes, self._manifest.save_id
            )
        return self._readers[rank]

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
        found = owners(bucket.numel, self._manifest.num_ranks, at, at + saved.numel)
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
        for rank, first, last in owners(bucket.numel, self._manifest.num_ranks, begin, begin + out.numel()):
            self.file(rank).read(f"{bucket.name}/{key}", first, out[filled : filled + last - first])
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
        raise CheckpointError(
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
                for key, values in loaded.items():
                    values.append(_assemble(reader, mine, key))
    random: dict[str, Tensor] = {}
    if random_rank is not None:
        file = reader.file(random_rank)
        random = {name: file.read_all(name) for name in file.names() if name.startswith("rng/")}
    return LoadedTensors(shards, loaded, random)


def _assemble(reader: RangeReader, mine: Sequence[tuple[SavedParam, int, int]], key: str) -> Tensor:
    """One rank's share of a bucket, in one tensor; zeros where there was no such state."""
    saved = [param.name for param, _, _ in mine if key == "master" or reader.trained(param.name)]
    dtype = reader.dtype(saved[0], key) if saved else torch.float32
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


def install_random(loaded: LoadedTensors, device: torch.device) -> None:
    """Set the random generators to where they were."""
    if "rng/cpu" in loaded.random:
        torch.set_rng_state(loaded.random["rng/cpu"])
    if "rng/cuda" in loaded.random and device.type == "cuda":
        torch.cuda.set_rng_state(loaded.random["rng/cuda"], device)


def install_optimizer(
    masters: MasterShards, optimizer: Optimizer, loaded: LoadedTensors, groups: Sequence[SavedGroup]
) -> None:
    """Give every parameter of the optimizer its state, and every group its options."""
    group_of = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    for span in masters.spans:
        group, saved = optimizer.param_groups[group_of[span.param]], groups[group_of[span.param]]
        state: dict[str, Any] = {}
        for key, scalar in saved.scalars.items():
            state[key] = _scalar(scalar, group, span.param)
        for key, values in loaded.states.items():
            state[key] = values[span.bucket][span.start : span.stop].to(span.param.device)
        if state:
            optimizer.state[span.param] = state
        else:
            optimizer.state.pop(span.param, None)  # saved before the first step: what is here is of another run
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.options.items():
            group[key] = _like(group.get(key), value)


def _scalar(saved: SavedScalar, group: dict[str, Any], param: Tensor) -> Any:
    """The number as the optimizer keeps it: plain, or a tensor of its type where the optimizer expects it."""
    if saved.dtype is None:
        return saved.value
    # torch keeps the step on the host, and on the device only for kernels that read it there.
    on_device = group.get("fused") or group.get("capturable")
    dtype = getattr(torch, saved.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"the checkpoint's optimizer holds a number of unknown type {saved.dtype!r}: load it with the release that "
            "wrote it, or with load_optimizer_states=False"
        )
    return torch.tensor(saved.value, dtype=dtype, device=param.device if on_device else "cpu")


def _like(current: Any, value: Any) -> Any:
    """A saved option as the kind of value it replaces."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    # JSON knows no tuples; Adam's betas were one.
    return tuple(value) if isinstance(value, list) and not isinstance(current, list) else value
