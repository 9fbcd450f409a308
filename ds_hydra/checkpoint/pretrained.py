"""Hugging Face folders: the model out as one that `from_pretrained` loads, and such a folder into the masters.

Of a PEFT model the adapters go out alone, or merged into their layers. What an adapter adds to a weight is PEFT's own
`get_delta_weight`. It reads the adapter's parameters as any script does, so all ranks call it together, and each gets
the values of one bucket at a time.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ds_hydra.checkpoint.folder import fsync_path, remove
from ds_hydra.checkpoint.format import MAX_MANIFEST_BYTES, parse_json
from ds_hydra.pipe.adapters import LORA_EMBEDDING, LORA_LINEAR, SAVED_WHOLE, TOKENS, class_path
from ds_hydra.pipe.model_plan import Bucket, ParamSpec
from ds_hydra.pipe.stage import to_flat
from ds_hydra.ranks.world import World
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.zero_hetero.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json"),
    *("*.model", "chat_template*"),
)


def stored_weights(
    masters: ModelMasters,
    group: dist.ProcessGroup | None,
    dtype_in: Callable[[Bucket], torch.dtype],
    model: Any,
    ranks: Sequence[int] | None = None,
    merge: Callable[[Collection[str], dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """What a folder of the model holds, by the names it has there, one bucket at a time: weights that the model has
    stacked (of experts, say) as `from_pretrained` found them. Tied parameters come once.

    All ranks take the same buckets in step; those that are not in `ranks` (None: all) get none of them. `merge` makes
    of the names of a bucket's parameters and their values those of `model`.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    whole = masters.whole_buckets(group, dtype_in, ranks)
    for bucket in masters.buckets:
        values = next(whole)  # a `zip` would keep them until the next ones are there
        if merge is not None:
            values = merge([param.name for param in bucket.params], values)
        if values and isinstance(model, PreTrainedModel):
            with torch._C.DisableTorchFunctionSubclass():  # it reads no value of the model's own parameters
                values = revert_weight_conversion(model, values)
        # Copies, so that who keeps the last one does not keep the bucket, which is gone before the next one comes.
        while values:
            name = next(iter(values))
            yield name, values.pop(name).clone(memory_format=torch.contiguous_format)


def write_pretrained(
    folder: Path,
    model: Any,
    weights: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    dtype: torch.dtype,
    *,
    max_shard_size: str = "5GB",
    tokenizer: Any = None,
) -> None:
    """Write safetensors shards, config and tokenizer; files appear in `folder` only when all are complete.

    `aliases` maps the model's names to those of `weights`, which are in `dtype`, some perhaps in FP32. Of PEFT's models
    their own `save_pretrained` writes the adapters; a model that has none gets its weights in one file. The tokenizer
    is the one given, or that of the folder which the model was loaded from.
    """
    temporary = folder.with_name(f".new-{folder.name}")  # not as in a folder of checkpoints, whose next save tidies up
    remove(temporary)
    temporary.mkdir(parents=True)
    try:
        if hasattr(model, "save_pretrained"):
            # A tied parameter has several paths in the model; here too all of them lead to one tensor.
            state = {path: weights[name] for path, name in aliases.items()}
            # The config is saved beside the weights and names their type; the model in training keeps its own.
            before, model.config.dtype = model.config.dtype, dtype
            try:
                with torch._C.DisableTorchFunctionSubclass():  # it reads no value of the model's own parameters
                    model.save_pretrained(temporary, state_dict=state, max_shard_size=max_shard_size)
            finally:
                model.config.dtype = before
        else:
            save_file({name: value.clone() for name, value in weights.items()}, temporary / _SINGLE, {"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        else:
            _copy_tokenizer(Path(getattr(model, "name_or_path", "") or "/nowhere"), temporary)
        _move_into(temporary, folder)
    finally:
        remove(temporary)


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, if `source` is a folder on this machine, except those that are there already."""
    for pattern in _TOKENIZER if source.is_dir() else ():
        for path in source.glob(pattern):
            if path.is_file() and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)


def _move_into(temporary: Path, folder: Path) -> None:
    """Put the files in place, the weights' index last; weights of an earlier save in other pieces are removed.

    A folder that exists cannot be replaced by one rename, and may hold files that are not ours. So each file is
    replaced by itself, and the index, without which no loader looks at pieces, comes when all of them are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for inner in [path for path in temporary.iterdir() if path.is_dir()]:  # of an adapter with a name of its own
        _move_into(inner, folder / inner.name)
        inner.rmdir()
    card = folder / "README.md"  # PEFT writes one that says little: not in place of a user's
    fresh = sorted(temporary.iterdir(), key=lambda path: path.name == _INDEX)
    fresh = [path for path in fresh if path.name != card.name or not card.exists()]
    for path in fresh:
        fsync_path(path)
    for path in fresh:
        os.replace(path, folder / path.name)
    names = {path.name for path in fresh}
    if names & {_INDEX, _SINGLE}:  # and not adapters, which may lie beside the model that they are of
        for old in [*folder.glob("model-*-of-*.safetensors"), folder / _INDEX, folder / _SINGLE]:
            if old.name not in names:
                remove(old)
    fsync_path(folder)


def load_pretrained(masters: ModelMasters, folder: Path, aliases: Mapping[str, str], model: Any, world: World) -> None:
    """Fill the masters from a Hugging Face folder: each rank reads only what it owns of each parameter.

    Where the folder's names are not the model's, rank 0 loads it by `from_pretrained` and shares it, one parameter at
    a time. Raises CheckpointError on all ranks.
    """
    masters.revision += 1
    places: dict[str, tuple[Path, str]] = {}
    error: Exception | None = None
    try:
        places = _find_all(folder, masters, aliases)
        _refuse_other_buffers(folder, model)
    except (CheckpointError, OSError) as raised:
        error = raised
    world.channel.settle(error, f"loading {str(folder)!r}")
    if all(p.name in places for bucket in masters.buckets for p in bucket.params):
        try:
            for shard, flat in _own_pieces(masters, places):
                shard.copy_(flat)
        except (CheckpointError, OSError) as raised:
            error = raised
        world.channel.settle(error, f"loading {str(folder)!r}")
        return
    if not hasattr(model, "from_pretrained"):
        missing = [p.name for bucket in masters.buckets for p in bucket.params if p.name not in places]
        raise CheckpointError(
            f"{folder} lacks {missing[0]!r} and {len(missing) - 1} more parameters of this model: give a folder of the "
            "same model, or build the one that its config.json describes"
        )
    values: dict[str, Tensor] = {}
    if world.rank == 0:
        try:
            loaded = type(model).from_pretrained(folder, config=model.config)
            values = {name: p.detach() for name, p in loaded.named_parameters()}
        except Exception as raised:
            error = raised
    world.channel.settle(error, f"loading {str(folder)!r}")
    masters.load(values, world.group)


def _find_all(folder: Path, masters: ModelMasters, aliases: Mapping[str, str]) -> dict[str, tuple[Path, str]]:
    """File and key of each parameter, by any of its paths in the model."""
    files = _files(folder)
    found = {}
    for path, name in aliases.items():
        if path in files:
            found[name] = (files[path], path)
    for bucket in masters.buckets:
        for param in bucket.params:
            if param.name in files:
                found[param.name] = (files[param.name], param.name)
    return found


def _files(folder: Path) -> dict[str, Path]:
    """Key -> file of a folder's weights."""
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        if index.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{index} has more than {MAX_MANIFEST_BYTES} bytes; it is no index of weights: download it again"
            )
        record = parse_json(index.read_bytes(), str(index))
        names = record.get("weight_map") if isinstance(record, dict) else None
        if not isinstance(names, dict) or not all(isinstance(n, str) and n == Path(n).name for n in names.values()):
            raise CheckpointError(f"{index} maps no weights to files beside it; download the folder again")
        return {key: folder / name for key, name in names.items()}
    if single.is_file():
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    raise CheckpointError(
        f"{folder} holds neither {_INDEX} nor {_SINGLE}: give a folder with safetensors weights, as save_pretrained "
        "writes it (pickled weights are not read)"
    )


def stored_buffers(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of a model's buffers that a folder holds. CheckpointError if it holds no weights."""
    files = _files(folder)
    return {name: _open(files[name]).get_tensor(name).clone() for name in names if name in files}


def _refuse_other_buffers(folder: Path, model: nn.Module) -> None:
    """Buffers belong to the stages, which are built before weights are loaded: other values would not reach them."""
    for name, value in stored_buffers(folder, [name for name, _ in model.named_buffers()]).items():
        own = model.get_buffer(name)
        if not torch.equal(own.cpu(), value.to(own.dtype)):
            raise CheckpointError(
                f"{folder} holds other values of the buffer {name!r} than the model has: build the model on the meta "
                "device, and set hydra.initial_weights to this folder"
            )


def _own_pieces(masters: ModelMasters, places: Mapping[str, tuple[Path, str]]) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's shard of each parameter and the values for it, in flat order."""
    params = {p.name: p for bucket in masters.buckets for p in bucket.params}
    for shards in (masters.trained, masters.frozen):
        for piece in shards.pieces():
            path, key = places[piece.name]
            # Slices are read from the file as they are asked for, so that a rank reads only what it owns. Each time
            # the file is opened anew: what an open one has read counts as this process's memory.
            yield piece.shard.detach(), _piece(_open(path), key, params[piece.name], piece.start, piece.stop, path)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt").__enter__()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download it again") from error


def _piece(file: Any, key: str, param: ParamSpec, start: int, stop: int, path: Path) -> Tensor:
    """Elements [start, stop) of a parameter in its flat order, from a file that holds it in its own shape."""
    view = file.get_slice(key)
    shape = tuple(view.get_shape())
    if shape != tuple(param.shape):
        raise CheckpointError(
            f"{path}: {key!r} has shape {shape}, the model's {param.name!r} {tuple(param.shape)}: build the model that "
            "the folder's config.json describes"
        )
    rule = param.rule
    if rule.dim is None or (rule.dim == 0 and rule.parts == 1):
        # The flat order is the file's: rows lie one after the other. The file can be cut between rows only, so whole
        # rows are read and trimmed: of rows of 4, elements 6 to 9 are rows 1 and 2 without the first 2 and last 2.
        row = max(1, param.numel // shape[0]) if shape else 1
        first, last = start // row, -(-stop // row)
        rows = view[first:last] if shape else file.get_tensor(key)
        return rows.reshape(-1)[start - first * row : stop - first * row]
    # Another dimension is outermost: any interval of the flat order is spread over the whole tensor.
    return to_flat(file.get_tensor(key), rule.dim, rule.parts)[start:stop]


_OF_ADAPTER = re.compile(r"\.lora_((embedding_)?[AB]|magnitude_vector)\.")
_SAVED = re.compile(r"\.(original_module|modules_to_save\.(?P<adapter>[^.]+))(?=\.)")
_WITHIN = re.compile(r"\.base_layer(?=\.(weight|bias)$)")


class Merged:
    """Merges the active adapters of a model, one bucket of its weights after the other.

    `base` is the model inside the adapters, `aliases` its names of each parameter. ConfigError for adapters that have
    no merged form.
    """

    def __init__(self, base: Any, aliases: Mapping[str, str]):
        self._modules = dict(base.named_modules())
        if any(class_path(module) == TOKENS for module in self._modules.values()):
            raise ConfigError('rows that are trained by themselves are not merged here: take adapters "alone"')
        for path, module in self._modules.items():
            if any(getattr(module, "lora_bias", {}).values()) and module.get_base_layer().bias is None:
                raise ConfigError(
                    f"the adapter of {path} has a bias and the layer none, so it cannot be merged: take adapters "
                    '"alone"'
                )
        within = {bool(_WITHIN.search(path)): set[str]() for path in ("", ".base_layer.weight")}
        for path, name in aliases.items():
            within[bool(_WITHIN.search(path))].add(name)
        if tied := sorted(within[True] & within[False]):
            raise ConfigError(
                f"{tied[0]} is tied to a layer without its adapter, so the two differ when it is merged: take adapters "
                '"alone", or untie them before initialize()'
            )

    def __call__(self, names: Collection[str], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a bucket by the names that they have without adapters; none where `values` are not given. All
        ranks must call it with the same names."""
        found: dict[str, Tensor] = {}
        for name in names:
            added = self._added(name)
            if (own := self._own_name(name)) is not None and name in values:
                value = values[name]
                for one, magnitude in added:
                    value = value + one.to(value.dtype)
                    if magnitude is not None:
                        value = value * (magnitude.to(value) / value.norm(dim=magnitude.shape.index(1), keepdim=True))
                found[own] = value
        return found

    def _own_name(self, name: str) -> str | None:
        """A parameter's name in the model without adapters; None for one that has no place there."""
        if _OF_ADAPTER.search(name):
            return None
        if saved := _SAVED.search(name):
            wrapper: Any = self._modules[name[: saved.start()]]
            assert class_path(wrapper) == SAVED_WHOLE, "others are refused"
            if saved["adapter"] not in wrapper.active_adapters:
                return None
            return name[: saved.start()] + name[saved.end() :]
        return _WITHIN.sub("", name)

    def _added(self, name: str) -> list[tuple[Tensor, Tensor | None]]:
        """What the active adapters add to a parameter, and the norms that the sum is to have, if any: (rows, 1), or
        (1, columns) of a transposed one."""
        inside = _WITHIN.search(name)
        module: Any = self._modules[name[: inside.start()]] if inside else None
        if inside is None or class_path(module) not in {LORA_LINEAR, LORA_EMBEDDING}:
            return []
        active = [one for one in module.active_adapters if one in module.scaling]
        if inside[1] == "weight":
            magnitudes = getattr(module, "lora_magnitude_vector", {})
            dim = 0 if module.fan_in_fan_out else 1
            norms = [magnitudes[one].weight.detach().unsqueeze(dim) if one in magnitudes else None for one in active]
            return [(module.get_delta_weight(one), norm) for one, norm in zip(active, norms, strict=True)]
        return [(module.lora_B[one].bias * module.scaling[one], None) for one in active if module.lora_bias[one]]


def adapters_alone(
    model: Any, values: Mapping[str, Tensor], aliases: Mapping[str, str], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """What `save_pretrained` of a PEFT model writes, by its names there; `aliases` as `names_with_adapters`. Nothing
    without values."""
    from peft import get_peft_model_state_dict  # it is there: it has made the model

    if not values:
        return
    state = {path: values[name] for path, name in aliases.items()}
    with torch._C.DisableTorchFunctionSubclass():  # it reads no value of the model's own parameters
        found = get_peft_model_state_dict(model, state_dict=state, adapter_name=model.active_adapter)
    for name, value in found.items():
        yield name, value.to(device, dtype)
