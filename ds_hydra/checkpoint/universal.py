"""DeepSpeed's universal checkpoints from ours, and ours from them: weights, optimizer state, step, schedule.

A universal checkpoint is a folder of torch files, which are pickles. Reading them uses torch's restricted loader and
a short list of DeepSpeed's own plain classes; still, read only what you trust. Both directions hold one tensor at a
time in memory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hydra.checkpoint import folder as folders
from ds_hydra.checkpoint.folder import other_checkpoint
from ds_hydra.checkpoint.format import (
    Manifest,
    SavedBucket,
    SavedGroup,
    SavedParam,
    SavedScalar,
    check_client_state,
    check_name,
    check_tag,
)
from ds_hydra.checkpoint.loading import RangeReader
from ds_hydra.checkpoint.shard_file import Source
from ds_hydra.checkpoint.write import Saving, Writer
from ds_hydra.pipe.models.adapted import NAMES_OF_PEFT
from ds_hydra.pipe.stage import from_flat
from ds_hydra.ranks.channel import Channel
from ds_hydra.zero_hetero.errors import CheckpointError

logger = logging.getLogger(__name__)

_OPTIONS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "amsgrad", "bias_correction",
            "max_coeff", "min_coeff")  # fmt: skip
_MODEL_STATES, _OPTIMIZER_STATE, _LATEST = "mp_rank_00_model_states.pt", "optimizer_state.pt", "latest_universal"
_OF_DEEPSPEED = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info", "num_experts",
))  # fmt: skip
"""What DeepSpeed itself writes into its model states, beside the client_state."""
_OLDEST_TORCH = (2, 10)  # older restricted loaders have known holes


def to_universal(folder: Path, tag: str | None, target: Path, target_tag: str | None = None) -> Path:
    """Write a checkpoint of ours as a universal one, below `target`; its folder.

    Plain DeepSpeed (ZeRO 1 to 3, "checkpoint": {"load_universal": true}) loads it and goes on.
    """
    import deepspeed

    found = check_tag(tag) if tag is not None else folders.find_tag(folder)
    if found is None:
        raise CheckpointError(f"{folder} holds no checkpoint to convert: give the folder that save_checkpoint() wrote")
    manifest = folders.open_manifest(folder, found)
    out = target / check_tag(target_tag or f"{found}_universal")
    if out.exists():
        raise CheckpointError(f"{out} exists already: remove it or choose another tag")
    zero = out / "zero"
    zero.mkdir(parents=True)
    frozen = _write_parameters(manifest, folders.place_of(folder, found), zero)
    groups = [
        {key: tuple(v) if isinstance(v, list) else v for key, v in group.options.items() if key in _OPTIONS}
        | {"params": [index]}
        for index, group in enumerate(manifest.groups)
    ]
    torch.save({"param_groups": groups, "ds_version": deepspeed.__version__}, zero / _OPTIMIZER_STATE)
    shapes = {p.name: torch.Size(p.shape) for b in manifest.buckets for p in b.params if b.trainable}
    torch.save(
        {
            "module": frozen,
            "optimizer": None,
            "lr_scheduler": manifest.lr_scheduler,
            "param_shapes": [shapes],
            "global_steps": manifest.step,
            "global_samples": manifest.counters.get("global_samples", 0),
            "skipped_steps": manifest.counters.get("skipped_steps", 0),
            "dp_world_size": manifest.num_ranks,
            "mp_world_size": 1,
            "ds_version": deepspeed.__version__,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        },
        out / _MODEL_STATES,
    )
    folders.set_latest(target / _LATEST, out.name)
    return out


def _write_parameters(manifest: Manifest, source: Path, zero: Path) -> dict[str, Tensor]:
    """DeepSpeed's layout: a folder for each trained parameter with its value and each of its states in a file. Returns
    the frozen ones, which stand in the model states."""
    reader = RangeReader(manifest, source)
    frozen: dict[str, Tensor] = {}
    for bucket in manifest.buckets:
        for param in bucket.params:
            whole = reader.read_all(param, "master")
            # Cloned: a view would be saved with all the memory that it is a view of.
            value = from_flat(whole, param.shape, param.dim, param.parts).clone()
            if not bucket.trainable:
                frozen[param.name] = value
                continue
            place = zero / _plain_name(param.name)
            place.mkdir()
            torch.save({"param": value, "cat_dim": 0}, place / "fp32.pt")
            for key in manifest.states:
                flat = reader.read_all(param, key)
                state = from_flat(flat, param.shape, param.dim, param.parts).clone()
                torch.save({"param": state, "cat_dim": 0}, place / f"{_plain_name(key)}.pt")
            step = next((group.scalars["step"] for group in manifest.groups if "step" in group.scalars), None)
            if step is not None:
                torch.save(_number(step), place / "step.pt")
    reader.close()
    return frozen


def from_deepspeed(source: Path, target: Path, tag: str, *, step: int | None = None) -> Path:
    """Write a checkpoint of DeepSpeed's ZeRO 1 to 3 (its tag's folder) as one of ours, below `target`.

    DeepSpeed makes a universal one of it first, beside the target, which goes again. It reads its files without torch's
    restricted loader: only convert what you trust. CheckpointError for what DeepSpeed cannot convert.
    """
    from deepspeed.checkpoint.ds_to_universal import main

    check_tag(tag)
    found = other_checkpoint(source)
    if found is None or not any(source.glob("*zero_pp_rank_*_optim_states.pt")):
        what = (
            f"is {found}" if found else "holds no *_optim_states.pt: give the tag's folder, such as RUN/global_step100"
        )
        raise CheckpointError(f"{source} {what}")
    target.mkdir(parents=True, exist_ok=True)
    # Beside the target, not in it, where what an earlier save has left behind is taken away.
    with tempfile.TemporaryDirectory(prefix=folders.TEMPORARY, dir=target.resolve().parent) as between:
        asked = Namespace(
            input_folder=str(source), output_folder=between, num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )  # fmt: skip
        try:
            with contextlib.redirect_stdout(sys.stderr):
                main(asked)
        except Exception as error:
            raise CheckpointError(
                f"{source} cannot be converted by DeepSpeed: {type(error).__name__}: {error}. Its weights alone are "
                "loaded by load_checkpoint(load_module_only=True), where each rank had whole ones"
            ) from error
        return from_universal(Path(between), target, tag, step=step)


def from_universal(source: Path, target: Path, tag: str, *, step: int | None = None) -> Path:
    """Write a universal checkpoint (its tag's folder, with `zero` in it) as one of ours, below `target`.

    `step` is needed where the model states cannot be read without running what they contain. Raises CheckpointError
    naming the file for whatever is missing or more than tensors and plain values.
    """
    _require_torch()
    check_tag(tag)
    zero = source / "zero"
    names = sorted(path.parent.relative_to(zero).as_posix() for path in zero.rglob("fp32.pt")) if zero.is_dir() else []
    if not names:
        raise CheckpointError(
            f"{zero} holds no fp32.pt: give the folder that deepspeed.checkpoint.ds_to_universal wrote, with zero in it"
        )
    states = read_plain(_model_states(source), optional=step is not None)
    if step is None:
        step = int(states["global_steps"])
    # Each parameter becomes a bucket of its own, saved by one rank: any job can load that, with any buckets and ranks.
    buckets, tensors, keys, count = [], {}, [], None
    shapes = {name: tuple(shape) for group in states.get("param_shapes") or () for name, shape in group.items()}
    for name in names:
        place = zero / _plain_name(name)
        shape = tuple(_param(place / "fp32.pt").shape)
        if math.prod(shape) == math.prod(shapes.get(name, ())):  # of ZeRO 3 they are flat
            shape = shapes[name]
        buckets.append(SavedBucket(name, True, (SavedParam(name, shape),)))
        tensors[f"{name}/master"] = _source(place / "fp32.pt", shape)
        for path in sorted(place.glob("*.pt")):
            if path.stem == "step":
                count = read_plain(path)
            elif path.stem != "fp32":
                tensors[f"{name}/{path.stem}"] = _source(path, shape)
                keys += [path.stem] if path.stem not in keys else []
    if count is None and keys:  # ZeRO 3 keeps it elsewhere: each step that was not skipped has made an update
        count = step - int(states.get("skipped_steps", 0))
    scalars = {}
    if count is not None:
        scalars["step"] = SavedScalar(float(count), "float32")
    schedule = states.get("lr_scheduler")
    manifest = Manifest(
        tag=tag,
        save_id="",
        step=step,
        num_ranks=1,
        buckets=tuple(buckets),
        files=(),
        lr_scheduler=schedule if isinstance(schedule, dict) else None,
        counters={
            "global_samples": int(states.get("global_samples", 0)),
            "skipped_steps": int(states.get("skipped_steps", 0)),
        },
    )
    groups = list(_groups(zero / _OPTIMIZER_STATE, scalars))
    writer = Writer(Channel(None, 0, 1))
    try:
        writer.save(Saving(target, manifest, tensors, groups, tuple(keys)))
    finally:
        writer.close()
    return target / tag


def _model_states(source: Path) -> Path:
    """The file of rank 0 with step and schedule: of ZeRO 3 each rank has one."""
    path = source / _MODEL_STATES
    return (
        path if path.is_file() else next(iter(sorted(source.glob("zero_pp_rank_0_mp_rank_00_model_states.pt"))), path)
    )


def weights_of_deepspeed(path: Path, aliases: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Whole weights by master name, and the client_state as far as it is plain, of a file of DeepSpeed's model states.

    `aliases`: every path of a parameter in the model -> its name. CheckpointError for a weight that the model has not.
    """
    states = read_plain(path)
    module = {name.removeprefix(NAMES_OF_PEFT): value for name, value in states["module"].items()}
    buffers = {name.removeprefix(NAMES_OF_PEFT) for name in states.get("buffer_names") or ()}
    if unknown := sorted(module.keys() - aliases.keys() - buffers):
        raise CheckpointError(
            f"{path} has weights that the model has not, such as {unknown[0]!r}: load it into the model that was saved"
        )
    client_state: dict[str, Any] = {}
    for key in states.keys() - _OF_DEEPSPEED:
        with contextlib.suppress(CheckpointError):
            client_state |= check_client_state({key: states[key]})
    return {aliases[name]: value for name, value in module.items() if name in aliases}, client_state


def _plain_name(name: str) -> str:
    """A name that is one file's or folder's, wherever it came from; CheckpointError for any other."""
    try:
        return check_name(name)
    except ValueError as error:
        raise CheckpointError(f"{error}: it cannot be converted; rename the parameter") from None


def _number(scalar: SavedScalar) -> Any:
    """The number as it was before it was saved: plain, or a tensor without dimensions."""
    return scalar.value if scalar.dtype is None else torch.tensor(scalar.value, dtype=getattr(torch, scalar.dtype))


def _groups(path: Path, scalars: dict[str, SavedScalar]) -> tuple[SavedGroup, ...]:
    """Options of the parameter groups as far as they are plain; one group for all where they cannot be read."""
    found = read_plain(path, optional=True).get("param_groups", [])
    options = [{k: _plain(v) for k, v in group.items() if k in _OPTIONS} for group in found if isinstance(group, dict)]
    return tuple(SavedGroup(option, scalars) for option in options or [{}])


def _plain(value: Any) -> Any:
    """An option of DeepSpeed's as JSON can hold it."""
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _source(path: Path, shape: tuple[int, ...]) -> Source:
    """A tensor that is read from its file when it is written."""

    def fetch() -> Tensor:
        value = _param(path)
        if tuple(value.shape) not in (shape, (math.prod(shape),)):
            raise CheckpointError(f"{path} has shape {tuple(value.shape)}, its parameter {shape}; convert again")
        return value.float().reshape(-1)

    return Source((math.prod(shape),), torch.float32, fetch)


def _param(path: Path) -> Tensor:
    """The tensor in one of the universal checkpoint's files."""
    record = read_plain(path)
    value = record.get("param") if isinstance(record, dict) else record  # of ZeRO 3 the tensor itself
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"{path} holds no tensor under 'param': it is no universal checkpoint's file; convert again"
        )
    return value


def read_plain(path: Path, *, optional: bool = False) -> Any:
    """What a torch file of DeepSpeed holds, by the restricted loader; with `optional`, {} for one that it refuses."""
    try:
        with torch.serialization.safe_globals(list(_plain_classes())):
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        if optional:
            return {}
        raise CheckpointError(f"{path} is missing: convert the DeepSpeed checkpoint again") from None
    except Exception as error:
        if optional:
            logger.warning("%s was left out: it holds more than tensors and plain values", path)
            return {}
        hint = "; give the step yourself (--step)" if path.name == _MODEL_STATES else ""
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors and plain values, and is not read{hint} "
            f"({str(error).splitlines()[0][:300]})"
        ) from None


def _plain_classes() -> Iterator[Any]:
    """Classes of DeepSpeed that hold numbers and nothing else."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    yield from (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)


def _require_torch() -> None:
    """CheckpointError under a torch whose restricted loader cannot be trusted."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        raise CheckpointError(
            f"reading .pt files needs torch {'.'.join(map(str, _OLDEST_TORCH))} or newer, not {torch.__version__}: the "
            "restricted loader of older ones can be made to run code"
        )
