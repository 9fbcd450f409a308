"""Makes a copy of the user's model in FP64 that is small enough to run in a second, with what the user changed in it.

Small widths where its config makes it. What a user made of a model in ways that cannot be repeated in small (adapters,
parametrizations, classes with arguments of their own, patched methods) is copied in its own widths, in a few layers and
with a part of its vocabulary; a DeepSpeed `PipelineModule` with fewer of its repeated layers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.adapters import head_of
from ds_hydra.pipe.models.adapted import adapt_alike
from ds_hydra.pipe.models.layer_list import LayerList
from ds_hydra.pipe.models.meta_copy import copy_to_meta, in_place_of, parameter_hooks, replace_parameters
from ds_hydra.pipe.models.refusals import find_layers, known_tokens
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.self_check.layer_kinds import enough_layers, has_all_kinds, kept_layers
from ds_hydra.self_check.schemes import copies_at_once, head_divisor, num_layers, spread_over
from ds_hydra.self_check.shrink import FEW_POSITIONS, POSITIONS, shrunk_config


class NoCopyError(Exception):
    """There is no small copy of a model; the text says why."""


@dataclass(frozen=True)
class SmallCopy:
    """A model to compare with: no user's value is in it, and its parameters are drawn so that errors show."""

    model: Any
    num_layers: int


def small_copy(
    model: Any,
    schemes: Iterable[PipelineShape],
    memory_bytes: float,
    *,
    positions: int = POSITIONS,
) -> SmallCopy:
    """A copy of a Hugging Face model on which `schemes` can be run; only the model's structure is read.

    Small widths, four layers or more, and what the user changed since the config made it. Where that cannot be, its own
    widths in few layers, if that can be trained in `memory_bytes`. It knows sequences of `positions` tokens if the
    model does, and the first tokens of the vocabulary. Raises NoCopyError.
    """
    schemes = list(schemes)
    try:
        return _small_widths(model, schemes, positions)
    except NoCopyError as error:
        try:
            return SmallCopy(*copy_in_few_layers(model, schemes, memory_bytes))
        except Exception as other:
            raise NoCopyError(f"{error}; nor in few layers: {other}") from other


def _small_widths(model: Any, schemes: Sequence[PipelineShape], positions: int) -> SmallCopy:
    text = model.config.get_text_config()
    try:
        heads = int(text.num_attention_heads)
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        fewer = head_divisor(heads, kv_heads, schemes)
        changes = changes_since(model, _made_by(model, model.config, torch.device("meta")))
        if changes is None:
            raise NoCopyError("it is not made in small: its parameters or methods are not those that its config makes")
        path = find_layers(model)
        whole: Any = model.get_submodule(path)
        for layers in enough_layers(model, whole, num_layers(schemes)):
            config = shrunk_config(model.config, layers, fewer, positions, spread_experts=spread_over(schemes))
            small = _made_by(model, config, torch.device("cpu"))
            changes.apply(small, partial(_in_few_layers, layers_path=path, layers=layers))
            if has_all_kinds(small.get_submodule(path), whole):
                _draw_parameters(small)
                return SmallCopy(small, layers)
        raise NoCopyError("it is not made in small: its layers are of more kinds than its config makes")
    except NoCopyError:
        raise
    except Exception as error:
        raise NoCopyError(f"it cannot be made in small ({type(error).__name__}: {error})") from error


def _made_by(model: Any, config: Any, device: torch.device) -> Any:
    """A model of the class of `model` and a config, in FP64, with the attention that defines what it computes, and with
    the same kind of adapters."""
    config = copy.deepcopy(config)
    extra = {"experts_implementation": "eager"} if hasattr(config, "_experts_implementation") else {}
    with device:
        made = type(model)._from_config(config, attn_implementation="eager", dtype=torch.float64, **extra)
        adapt_alike(made, model)
        return made.double()


def _in_few_layers(name: str, layers_path: str, layers: int) -> str:
    """The path in a copy with `layers` layers for one in the whole model: of layer i there, layer i % layers here."""
    prefix = f"{layers_path}."
    if not name.startswith(prefix):
        return name
    index, dot, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{int(index) % layers}{dot}{rest}"


def _draw_parameters(model: nn.Module) -> None:
    """Random values whose gradients are all felt: norms are not 1, biases not 0, attention looks somewhere."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            scale = 0.1 if parameter.dim() < 2 else 0.7 * parameter.shape[-1] ** -0.5
            parameter.add_(noise, alpha=scale)


# ---- What a user has changed in a model since its config made it. ----

_OWN_KEYS = frozenset(vars(nn.Module())) | {
    # Noted by Hugging Face; recomputing activations is asked of the stages and not of the plain model.
    "_is_hf_initialized",
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_require_grads_hook",
    "_require_grads_hooks",
}
_HOOKS = tuple(key for key in vars(nn.Module()) if key.startswith(("_forward_", "_backward_")))  # dicts by handle
_PLAIN = (bool, int, float, str, type(None), torch.dtype)

Rename = Callable[[str], str]  # path in the model -> path in its copy


@dataclass
class Changes:
    """What can be carried over to a model of other sizes, by path of the module or name of the parameter."""

    attributes: list[tuple[str, str, Any]] = field(default_factory=list)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)  # replacements without parameters
    hooks: list[tuple[str, nn.Module]] = field(default_factory=list)
    parameters: list[tuple[str, bool, list[Any]]] = field(default_factory=list)  # requires_grad and gradient hooks

    def apply(self, model: nn.Module, rename: Rename) -> None:
        """Do to `model` what was done to the model that these changes were found in.

        Raises ValueError where two of its layers have one copy, and what was done to one would undo the other's.
        """
        done: dict[tuple[str, str], Any] = {}
        for path, key, value in (*self.attributes, *((path, "", module) for path, module in self.modules)):
            if done.setdefault((rename(path), key), value) != value and not _same_module(
                done[rename(path), key], value
            ):
                raise ValueError(f"{key or 'what is put in place'} of {path} is another one than in other layers")
        for path, module in self.modules:
            model.set_submodule(rename(path), copy.deepcopy(module))
        for path, key, value in self.attributes:
            setattr(model.get_submodule(rename(path)), key, value)
        for path, module in self.hooks:
            twin = model.get_submodule(rename(path))
            for key in _HOOKS:
                getattr(twin, key).update(getattr(module, key))
            twin._is_full_backward_hook = module._is_full_backward_hook
        for name, trained, hooks in self.parameters:
            parameter = model.get_parameter(rename(name))
            parameter.requires_grad_(trained)
            for hook in hooks:
                parameter.register_hook(hook)


def changes_since(model: nn.Module, fresh: nn.Module) -> Changes | None:
    """What distinguishes a model from one that its config makes.

    None where that cannot be carried over to other sizes: other parameters, functions set on a module, hooks that hold
    something of this model.
    """
    mine, others = dict(model.named_parameters()), dict(fresh.named_parameters())
    if {n: p.shape for n, p in mine.items()} != {n: p.shape for n, p in others.items()}:
        return None
    found = Changes()
    for name, parameter in mine.items():
        hooks = list((parameter._backward_hooks or {}).values())
        if not all(_holds_nothing(hook) for hook in hooks):
            return None
        if hooks or not parameter.requires_grad:
            found.parameters.append((name, parameter.requires_grad, hooks))
    twins = dict(fresh.named_modules())
    replaced: list[str] = []
    for path, module in model.named_modules():
        twin = twins.get(path)
        if any(path.startswith(f"{above}.") for above in replaced):
            continue
        if twin is None or type(twin) is not type(module):
            if not path or any(True for _ in module.parameters()):
                return None
            replaced.append(path)
            found.modules.append((path, module))
            continue
        if any(len(getattr(module, key)) > len(getattr(twin, key)) for key in _HOOKS):
            if not all(_holds_nothing(hook) for key in _HOOKS for hook in getattr(module, key).values()):
                return None
            found.hooks.append((path, module))
        if not _compare(path, module, twin, found):
            return None
    return found


def _compare(path: str, module: nn.Module, twin: nn.Module, found: Changes) -> bool:
    """Note the plain attributes that differ; False where something else does."""
    mine, others = vars(module), vars(twin)
    for key in mine.keys() - _OWN_KEYS:
        value = mine[key]
        if _is_plain(value):
            if key not in others or not _is_plain(others[key]) or others[key] != value:
                found.attributes.append((path, key, value))
        elif key not in others or not _same_kind(value, others[key]):
            return False
    return True


def _same_kind(value: Any, other: Any) -> bool:
    """Of one type, and one function if they are functions; what is inside is not compared."""
    return type(value) is type(other) and getattr(value, "__qualname__", "") == getattr(other, "__qualname__", "")


def _same_module(one: Any, other: Any) -> bool:
    """Whether two modules without parameters say the same of themselves."""
    return isinstance(one, nn.Module) and type(one) is type(other) and repr(one) == repr(other)


def _holds_nothing(hook: Any) -> bool:
    """Whether a hook is a function that works with what it is handed; the dicts of hooks hold flags beside them."""
    if isinstance(hook, bool):
        return True
    bound = getattr(hook, "__closure__", None) or getattr(hook, "__defaults__", None)
    return inspect.isfunction(hook) and not bound


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


# ---- A copy in its own widths, in few layers. ----

_ROWS = 512  # of the vocabulary


def copy_in_few_layers(model: Any, schemes: Sequence[PipelineShape], memory_bytes: float) -> tuple[Any, int]:
    """The copy, in FP64 with values drawn anew, and its number of layers. Raises MemoryError where it is too large.

    It knows the first tokens of the model's.
    """
    path = find_layers(model)
    layers: Any = model.get_submodule(path)
    kept, kinds = kept_layers(model, layers, max(2, *(scheme.parts * scheme.pp for scheme in schemes)))
    small = with_layers(model, path, kept)
    rows = _cut_vocabulary(small)
    for config in _configs(small):
        _shorten(config, rows)
    bytes_needed = 8 * copies_at_once(schemes) * sum(parameter.numel() for parameter in small.parameters())
    if bytes_needed > memory_bytes:
        raise MemoryError(
            f"{len(kept)} layers of {kinds} kinds take {bytes_needed / 2**30:.1f} GiB of {memory_bytes / 2**30:.1f} GiB"
        )
    _draw(small)
    return small.to("cpu", torch.float64), len(kept)  # buffers of a model on a GPU are still there


def with_layers(model: Any, path: str, kept: Sequence[int]) -> Any:
    """A copy on the meta device with the layers `kept` of those at `path`, and the gradient hooks of parameters."""
    small, layers = copy_to_meta(model), model.get_submodule(path)
    for name, hooks in parameter_hooks(model).items():
        for hook in hooks:
            small.get_parameter(name).register_hook(hook)
    few: Any = small.get_submodule(path)
    for index in sorted(set(range(len(layers))) - set(kept), reverse=True):
        del few[index]
    for index, layer in enumerate(few):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                module.layer_idx = index
    for config in _configs(small):
        values = vars(config)
        for key, value in list(values.items()):
            if isinstance(value, list | tuple) and len(value) == len(layers):
                values[key] = type(value)(value[index] for index in kept)
            elif isinstance(value, int) and value == len(layers) and "layer" in key:
                values[key] = len(kept)
    return small


def _configs(model: Any) -> list[Any]:
    return list({id(c): c for c in (model.config, model.config.get_text_config())}.values())


def _cut_vocabulary(model: Any) -> int:
    """Leave the first rows of the embeddings and of the head, which stay tied if they are; the number of rows."""
    vocabulary, ends = known_tokens(model), (model.get_input_embeddings(), head_of(model))
    if not all("weight" in module._parameters for module in ends):  # wrapped: what their rows are is not known
        return vocabulary
    rows = min(vocabulary, _ROWS)
    cut: dict[int, nn.Parameter] = {}
    for module in ends:
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.shape[:1] != (vocabulary,):
                continue
            if id(parameter) not in cut:
                cut[id(parameter)] = in_place_of(parameter, parameter.data[:rows])
            module._parameters[name] = cut[id(parameter)]
        for key in ("num_embeddings", "out_features"):
            if vars(module).get(key) == vocabulary:
                setattr(module, key, rows)
        if getattr(module, "padding_idx", None) is not None:
            module.padding_idx = min(module.padding_idx, rows - 1)
    return rows


def _shorten(config: Any, rows: int) -> None:
    values = vars(config)
    for key, value in list(values.items()):
        if isinstance(value, dict) and "original_max_position_embeddings" in value:
            values[key] = value | {"original_max_position_embeddings": FEW_POSITIONS}
    if "vocab_size" in values:
        values["vocab_size"] = rows
    config._attn_implementation = "eager"
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"


def _draw(model: nn.Module) -> None:
    """Random FP64 values in place of what is on the meta device; tied parameters stay tied."""
    generator = torch.Generator().manual_seed(1)

    def drawn(name: str, parameter: nn.Parameter) -> nn.Parameter:
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        value *= 0.1 if value.dim() < 2 else value.shape[-1] ** -0.5
        if value.dim() < 2 and name == "weight":  # of a norm
            value += 1.0
        return in_place_of(parameter, value)

    replace_parameters(model, drawn)


# ---- A copy of a DeepSpeed `PipelineModule`. ----

_REPEATED = 3  # of equal layers that follow each other, so many are kept, or as many as a pipeline has ranges


class _Shorter:
    """What `LayerList` reads of a PipelineModule, for some of its layers; buffers in FP64 if they are `doubled`."""

    def __init__(self, model: Any, repeated: int, *, doubled: bool = True):
        self._model, self._doubled, specs = model, doubled, list(model._layer_specs)
        self._kept = [i for i in range(len(specs)) if i < repeated or not _same(specs[i - repeated : i + 1])]
        self._layer_specs = [specs[index] for index in self._kept]
        self.loss_fn = model.loss_fn

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.renamed(self._model.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self.renamed(self._model.named_buffers()):
            yield name, buffer.double() if self._doubled and buffer.is_floating_point() else buffer

    def renamed(self, named: Any) -> Iterator[tuple[str, Any]]:
        """Names begin with a layer's number, but for tied ones."""
        numbers = {str(old): str(new) for new, old in enumerate(self._kept)}
        for name, value in named:
            number, dot, rest = name.partition(".")
            if number in numbers or not number.isdigit():
                yield numbers.get(number, number) + dot + rest, value


def _same(specs: list[Any]) -> bool:
    """Whether all layers are made alike."""
    return len({_made(spec) for spec in specs}) == 1


def _made(spec: Any) -> str:
    if isinstance(spec, nn.Module):
        return repr((type(spec), str(spec), [tuple(p.shape) for p in spec.parameters()]))
    if not hasattr(spec, "build"):
        return repr(id(spec))  # a function
    parts = (spec.typename, spec.module_args, sorted(spec.module_kwargs.items()), getattr(spec, "key", None))
    return repr((*parts, id(getattr(spec, "forward_fn", None))))


def short_layer_list(
    model: Any, schemes: Sequence[PipelineShape], memory_bytes: float, options: StageOptions = AS_WRITTEN
) -> LayerList:
    """The source, with values drawn anew. Raises MemoryError where it is too large, ConfigError as `LayerList` does."""
    repeated = max([_REPEATED, *(scheme.parts * scheme.pp for scheme in schemes)])
    source = LayerList(_Shorter(model, repeated), options)
    params = [param for bucket in source.plan.buckets for param in bucket.params]
    bytes_needed = 8 * copies_at_once(schemes) * sum(param.numel for param in params)
    if bytes_needed > memory_bytes:
        layers = source.plan.num_layers
        raise MemoryError(f"{layers} layers take {bytes_needed / 2**30:.1f} GiB of {memory_bytes / 2**30:.1f} GiB")
    generator = torch.Generator().manual_seed(1)
    values: dict[str, Tensor] = {}
    for param in params:
        value = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        values[param.name] = value * (0.3 if value.dim() < 2 else value.shape[-1] ** -0.5)
    source.values = values
    return source


def few_entries(model: Any, options: StageOptions) -> tuple[LayerList, dict[str, str]]:
    """The source of a list with two of each run of equal layers, and of each of its parameters the name in the whole
    list."""
    few = _Shorter(model, 2, doubled=False)
    return LayerList(few, options), dict(few.renamed((name, name) for name, _ in model.named_parameters()))
