"""Copies a user's model with parameters that take no memory.

The copy is not built from the model's config, but copied: its class, attributes, replaced submodules, hooks,
parametrizations and adapters are the user's. Parameters lie on the meta device, buffers and other tensors keep their
values.

`copy.deepcopy` copies a bound method or a `functools.partial` together with its module, but a plain function by
reference. A hook such as `lambda m, a, out: out + layer.bias.sum()` then keeps reading the original's `layer`: the copy
would train on old values for ever, without an error. So closures and defaults are made anew around the copies, and a
function that reaches the original by a global name is refused: its globals are its script's, and cannot be copied.

`with torch.device("meta"): AutoModelForCausalLM.from_config(config)` makes a model of any size in no memory. What such
a model lacks is made here by the model's own `_init_weights`, which sets whatever the constructor would have.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ds_hydra.pipe.adapters import run_magnitudes, run_stacks, run_tokens
from ds_hydra.pipe.models.whose_code import names_of, slots_of
from ds_hydra.zero_hetero.errors import ConfigError

_DEPTH = 12  # what functions and objects hold, within each other, that is looked into
_TORCHS = frozenset(vars(nn.Module()))
_HOOKS = tuple(key for key in vars(nn.Module()) if key.endswith("_hooks") and not key.startswith("_is"))


def rebind_functions(original: nn.Module, copied: nn.Module) -> None:
    """Make every hook and every function attribute of the copy mean the copy's own modules and tensors.

    Raises ConfigError where one still reaches the original.
    """
    twins = _twins(original, copied)
    for module in copied.modules():
        for hooks in (getattr(module, key) for key in _HOOKS):
            for handle, function in (hooks or {}).items():
                hooks[handle] = _rebound(function, twins)
        for key, value in _own_attributes(module):
            if (new := _rebound(value, twins)) is not value:
                object.__setattr__(module, key, new)
    _refuse_leftovers(original, copied)


def _own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """What was set on a module, but for plain values and what torch keeps there."""
    return [(key, value) for key, value in vars(module).items() if key not in _TORCHS and not _is_plain(value)]


def _is_plain(value: Any) -> bool:
    """Whether it can hold nothing of a model: a number, a text, a tensor, a class, a config."""
    return value is None or isinstance(
        value, bool | int | float | str | bytes | Tensor | type | types.ModuleType | torch.dtype | PretrainedConfig
    )


def _twins(original: nn.Module, copied: nn.Module) -> dict[int, Any]:
    """Identity of each module, parameter and buffer of the original -> its copy."""
    twins: dict[int, Any] = {}
    for old, new in zip(original.modules(), copied.modules(), strict=True):
        twins[id(old)] = new
        for key in ("_parameters", "_buffers"):
            mine, its = getattr(old, key), getattr(new, key)
            twins |= {id(mine[name]): its[name] for name in mine if mine[name] is not None}
    return twins


def _rebound(value: Any, twins: dict[int, Any], depth: int = 0, *, copied: bool = True) -> Any:
    """`value` with everything of the original that it holds replaced; itself where it holds nothing.

    Objects that were `copied` with the model are changed in place. What a function holds was not: objects there are
    the script's own, and stay what they are.
    """
    if id(value) in twins:
        return twins[id(value)]
    if _is_plain(value) or depth > _DEPTH:
        return value
    again = functools.partial(_rebound, twins=twins, depth=depth + 1, copied=copied)
    if isinstance(value, types.MethodType):
        return types.MethodType(again(value.__func__), again(value.__self__))
    if isinstance(value, functools.partial):
        keywords = {key: again(item) for key, item in value.keywords.items()}
        return functools.partial(again(value.func), *map(again, value.args), **keywords)
    if type(value) in (list, tuple, set):
        new = [again(item) for item in value]
        return value if all(a is b for a, b in zip(new, value, strict=True)) else type(value)(new)
    if isinstance(value, types.FunctionType):
        return _rebound_function(value, functools.partial(again, copied=False), twins)
    return _rebound_within(value, again, twins) if copied else value


def _rebound_within(value: Any, again: Callable[[Any], Any], twins: dict[int, Any]) -> Any:
    """A dictionary or an object of a script's, with what it holds replaced in place."""
    twins[id(value)] = value  # it may hold itself
    held = value if isinstance(value, MutableMapping) else getattr(value, "__dict__", {})
    for key, item in list(held.items()):
        if (new := again(item)) is not item:
            if held is value:
                held[key] = new
            else:
                object.__setattr__(value, key, new)
    for key in slots_of(type(value)):
        item = getattr(value, key, None)
        if (new := again(item)) is not item:
            object.__setattr__(value, key, new)
    return value


def _rebound_function(value: types.FunctionType, again: Callable[[Any], Any], twins: dict[int, Any]) -> Any:
    twins[id(value)] = value  # a function may hold itself
    cells = tuple(_cell(cell, again) for cell in value.__closure__ or ())
    defaults = None if value.__defaults__ is None else tuple(again(item) for item in value.__defaults__)
    keywords = {key: again(item) for key, item in (value.__kwdefaults__ or {}).items()}
    held = [*cells, *(defaults or ()), *keywords.values()]
    before = [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if all(a is b for a, b in zip(held, before, strict=True)):
        return value
    new = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
    new.__kwdefaults__ = keywords or None
    new.__dict__.update(value.__dict__)
    twins[id(value)] = new
    return new


def _cell(cell: types.CellType, again: Callable[[Any], Any]) -> types.CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # not filled yet
        return cell
    new = again(held)
    return cell if new is held else types.CellType(new)


def _refuse_leftovers(original: nn.Module, copied: nn.Module) -> None:
    names: dict[int, str] = {id(tensor): name for name, tensor in original.named_parameters()}
    names |= {id(module): name or type(original).__name__ for name, module in original.named_modules()}
    for path, module in copied.named_modules():
        for kind, function in _functions(module):
            found = next((names[id(held)] for held in _held(function, set()) if id(held) in names), None)
            if found is not None:
                what = getattr(function, "__qualname__", type(function).__name__)
                raise ConfigError(
                    f"the {kind} {what!r} of {path or type(original).__name__} refers to {found} of the model by a "
                    "global name, which a stage that is copied from the model cannot follow: use the module that the "
                    "hook is given, or bind it as a default argument or in a closure"
                )


def _functions(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key in _HOOKS:
        for function in (getattr(module, key) or {}).values():
            yield key.strip("_").removesuffix("s").replace("_", " "), function
    yield from (("attribute", value) for _, value in _own_attributes(module))


def _held(value: Any, seen: set[int], depth: int = 0) -> Iterator[Any]:
    """Modules and tensors that a callable can reach: by closure, defaults, arguments, or the globals that it names."""
    if id(value) in seen or depth > _DEPTH:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module | Tensor):
        yield value
        return
    parts: list[Any] = []
    if isinstance(value, types.MethodType):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.FunctionType):
        cells = (_contents(cell) for cell in value.__closure__ or ())
        parts = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        parts += [value.__globals__[name] for name in names_of(value.__code__) if name in value.__globals__]
    elif isinstance(value, list | tuple | set):
        parts = list(value)
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif not _is_plain(value):
        parts = [
            *getattr(value, "__dict__", {}).values(),
            *(getattr(value, key, None) for key in slots_of(type(value))),
        ]
    for part in parts:
        yield from _held(part, seen, depth + 1)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def unset_buffers(model: nn.Module) -> list[str]:
    """Names of the buffers on the meta device."""
    return [name for name, buffer in model.named_buffers() if buffer.is_meta]


def set_buffers(model: Any, stored: Mapping[str, Tensor]) -> None:
    """Give buffers on the meta device their values: the `stored` ones, else what the model's `_init_weights` sets.

    Raises ConfigError with the name of a buffer that neither tells.
    """
    for name in unset_buffers(model):
        owner, leaf = _owner(model, name)
        buffer = owner._buffers[leaf]
        assert buffer is not None
        if name in stored:
            owner._buffers[leaf] = stored[name].to(buffer.dtype)
            continue
        # What is set whatever was there before is what comes out twice alike, from zeros and from ones.
        found = []
        for fill in (torch.zeros_like, torch.ones_like):
            owner._buffers[leaf] = fill(buffer, device="cpu")
            _initialize(model, name, seed=0)
            found.append(owner._buffers[leaf])
        if not _equal(*found):
            owner._buffers[leaf] = buffer
            raise ConfigError(
                f"the buffer {name} of the model is on the meta device, and {type(model).__name__}._init_weights does "
                "not set it: build the model with real buffers (accelerate's init_empty_weights keeps them)"
            )


def drawn_parameter(model: Any, name: str, seed: int) -> Tensor:
    """A parameter on the meta device as the model initialises it, in FP32: the same whoever asks, and in any order.

    Only this parameter takes memory. The numbers follow from `seed` and the name. Raises ConfigError if
    `_init_weights` does not set it.
    """
    owner, leaf = _owner(model, name)
    hollow = owner._parameters[leaf]
    assert hollow is not None
    assert hollow.is_meta, f"{name} has a value"
    value = torch.full(hollow.shape, float("nan"))
    owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    try:
        _initialize(model, name, seed)
    finally:
        owner._parameters[leaf] = hollow
    if value.sum().isnan():
        raise ConfigError(
            f"{type(model).__name__}._init_weights does not set all of the parameter {name}: give a folder of weights "
            "in hydra.initial_weights, or build the model with real parameters"
        )
    return value


def stand_in_values(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name; those on the meta device as numbers that take next to no memory, no two rows of them alike.

    For a forward of which only the structure counts, such as how tokens are numbered.
    """
    values = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta and parameter.is_floating_point():
            # Row i of an embedding is the window of one random line that begins at i.
            generator = torch.Generator().manual_seed(_number(0, name))
            line = torch.randn(sum(parameter.shape) + 1, generator=generator)
            # Of matrices as small as usual: of scores of attention that are large each token sees but one other.
            line *= parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
            line = line.to(parameter.dtype)
            values[name] = line.as_strided(parameter.shape, (1,) * parameter.dim())
        else:
            values[name] = parameter.detach()
    return values


def _initialize(model: Any, name: str, seed: int) -> None:
    """Let the modules around a tensor set it: its own first, then those that hold it, as a whole model does.

    GPT-2's attention, for one, sets the weight of a linear layer inside of it anew. What stays on the meta device takes
    neither memory nor time.
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    holders = list(_holders(model, name.split(".")[:-1]))
    assert holders[-1][1] is owner
    with torch.no_grad(), _random_numbers(_number(seed, name)):
        for at, (path, module) in reversed(list(enumerate(holders))):
            # A model within a model, as of a vision tower, initialises its own modules.
            held_by = (holder for _, holder in reversed(holders[: at + 1]))
            by: Any = next((holder for holder in held_by if hasattr(holder, "_init_weights")), None)
            if by is None:
                raise ConfigError(
                    f"{type(model).__name__} has no _init_weights to draw {name} by: give a folder of weights in "
                    "hydra.initial_weights, or build the model with real parameters"
                )
            try:
                by._init_weights(module)
            except Exception as error:
                raise ConfigError(
                    f"{type(by).__name__}._init_weights cannot initialise {path or 'the model'} on the meta device "
                    f"({type(error).__name__}: {error}): build the model with real parameters"
                ) from error


def _holders(model: nn.Module, path: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules on the way to a path, the whole model first."""
    for depth in range(len(path) + 1):
        name = ".".join(path[:depth])
        yield name, model.get_submodule(name)


@contextmanager
def _random_numbers(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _number(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and not one.is_meta and torch.equal(one, other)


# Parameters of a model that is run with numbers at once. Without them torch computes shapes in Python, which takes up
# to a hundred times as long as to compute a few numbers, and as long for a tiny model as for a large one. With 2**21
# what such runs leave until it is collected took 60 MB, on the rank that looks at the model.
FEW_PARAMETERS = 2**19


def copy_to_meta(model: Any) -> Any:
    """A copy of a module with every parameter on the meta device; tied parameters stay tied.

    Hooks of parameters are not copied, as torch never copies them: see `parameter_hooks`. Raises ConfigError for
    what cannot be copied, naming it.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        hollow = torch.empty_like(parameter, device="meta", requires_grad=False)
        memo[id(parameter)] = nn.Parameter(hollow, requires_grad=parameter.requires_grad)
    # Tensors with a history, such as what an old `weight_norm` leaves as `weight`, are not copied by Python's rules.
    memo |= {id(value): value.detach().clone() for module in model.modules() for value in vars(module).values()
             if isinstance(value, Tensor) and not value.is_leaf}  # fmt: skip
    # Most of a module's attributes are empty dictionaries of hooks, on which copying would spend most of its time.
    memo |= {id(value): OrderedDict() for module in model.modules() for value in vars(module).values()
             if type(value) is OrderedDict and not value}  # fmt: skip
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise ConfigError(_what_cannot_be_copied(model, memo, error)) from error
    rebind_functions(model, copied)
    return copied


def replace_parameters(model: nn.Module, made_of: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put `made_of(name in its module, parameter)` in place of each parameter; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = made_of(name, parameter)
            module._parameters[name] = made[id(parameter)]


def in_place_of(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter with another value, trained or not as the first one, and its gradient hooks."""
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for hook in (parameter._backward_hooks or {}).values():
        new.register_hook(hook)
    return new


def _what_cannot_be_copied(model: nn.Module, memo: dict[int, Any], error: Exception) -> str:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_modules", "_parameters"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception as cause:
                where = f"{name}.{key}" if name else key
                return (
                    f"the attribute {where} of the model (a {type(value).__name__}) cannot be copied: {cause}. Stages "
                    "are copies of the model: keep such an object outside of it, or give it a __deepcopy__"
                )
    return f"{type(model).__name__} cannot be copied: {error}"


def parameter_hooks(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Gradient hooks that the user registered on parameters, by name. ConfigError for hooks that wait until a gradient
    has been accumulated: stages sum gradients elsewhere."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"{name} has a hook of register_post_accumulate_grad_hook, which would not run: ranks sum gradients "
                "elsewhere. Change the gradient by register_hook, or the parameter by the optimizer"
            )
    return {
        name: tuple(parameter._backward_hooks.values())
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks
    }


def kept_in_fp32(model: Any, dtype: torch.dtype) -> frozenset[str]:
    """The parameters that a model of transformers keeps in FP32 where it is loaded in `dtype`, by name."""
    # transformers looks for its patterns anywhere in a name, too.
    patterns = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype.itemsize == 2 else set()
    if dtype == torch.float16:
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)))
    return frozenset(name for name, _ in model.named_parameters() if patterns and kept.search(name))


def place_on(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Move what a copy holds beside its parameters to a device; give floating parameters a dtype, still on meta."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)
        for key, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                object.__setattr__(module, key, value.to(device))
    if dtype is not None:
        replace_parameters(model, lambda _, parameter: _of_dtype(parameter, dtype))


def _of_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if not parameter.is_floating_point():
        return parameter
    data = torch.empty(parameter.shape, dtype=dtype, device="meta")
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def ready_to_run(model: nn.Module) -> None:
    """Let a copy run by the code that its stages run."""
    model.apply(checkpoint_nothing)
    if getattr(model, "peft_config", None):
        run_stacks(model)
        run_magnitudes(model)
        run_tokens(model)


def run_experts_one_by_one(model: nn.Module) -> None:
    """Let experts run as their own source says: fused kernels refuse parameters that are one repeated number."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # type: ignore[union-attr]


def are_few(parameters: Iterable[Tensor]) -> bool:
    """Whether a run with numbers takes less time than one without."""
    return sum(parameter.numel() for parameter in parameters) <= FEW_PARAMETERS


def devices_to_run_on(model: nn.Module) -> tuple[torch.device, torch.device]:
    """Where a run that needs no values is tried, and tried again: with no numbers, which takes no memory, and then with
    one repeated number for each parameter, since experts choose by the numbers; small models have numbers at once, and
    the second time what their code has kept of the first."""
    numbers = torch.device("cpu")
    return (numbers if are_few(model.parameters()) else torch.device("meta")), numbers


def give_values(model: nn.Module, values: Mapping[str, Tensor] | None, device: torch.device) -> None:
    """Give a copy's parameters values that share memory with `values`, or one repeated number for each."""
    given: dict[int, nn.Parameter] = {}
    few = are_few(model.parameters())
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in given:
            number = torch.full((), 0.01 if parameter.is_floating_point() else 1, dtype=parameter.dtype, device=device)
            data = repeated(number, parameter.shape, few=few) if values is None else values[name].detach()
            given[id(parameter)] = nn.Parameter(data, requires_grad=parameter.is_floating_point())
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = given[id(parameter)]


def repeated(number: Tensor, shape: Sequence[int], *, few: bool) -> Tensor:
    """A tensor of one repeated number: of `few`, or of no value, one that can be written to; else in no memory."""
    return number.new_full(shape, number.item()) if few and not number.is_meta else number.expand(tuple(shape))


def checkpoint_nothing(module: Any) -> None:
    """Let a module of a copy, not those in it, compute nothing again by itself: its stage does."""
    if getattr(module, "gradient_checkpointing", False):
        module.gradient_checkpointing = False
