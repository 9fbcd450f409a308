"""The user's model after `initialize`: whether a script has changed what the stages are copies of.

Stages compute with copies of the model, and its values are the masters. So what a script does to the model afterwards
has no effect on what is trained. Whether a parameter requires a gradient is asked anew in every step; any other change
is told by its name before the next update, so that nobody trains for days on what he thinks that he has changed.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from ds_hydra.pipe.models.refusals import attention_functions
from ds_hydra.pipe.models.whose_code import (
    GLOBAL_HOOKS,
    HOOKS,
    Bound,
    bound_in,
    called_by,
    own_functions,
    run_by,
    slots_of,
)
from ds_hydra.step.update import ModelNow

Parts = dict[str, Any]  # what a module consists of, by name
Modules = Sequence[tuple[str, nn.Module]]  # all of a model, each with its path
_TORCHS = frozenset(vars(nn.Module()))
_MODE = "its mode of training"
_DEPTH = 6  # lists and objects in each other that are compared
_SMALL = 1 << 14  # bytes of tensors and arrays that are compared by their numbers
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# What scripts and trainers set though no forward of a training step reads it, or that changes no number.
_HARMLESS = frozenset(
    {
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "generate",
        "generation_config",
        "warnings_issued",
        "hf_device_map",
    }
    | {"gradient_checkpointing", "_gradient_checkpointing_func", "model_tags", "is_parallelizable", "model_parallel"}
    | {"architectures", "dtype", "torch_dtype", "auto_map", "id2label", "label2id", "hf_device_map"}
    | {"_require_grads_hook", "_require_grads_hooks", "make_inputs_require_grads"}
    | {"_is_hf_initialized", "name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "_hf_hook"}
    | {"_flat_weights", "_flat_weight_refs"}  # of torch's recurrent modules: their parameters once more
    | {"output_attentions", "output_hidden_states", "return_dict", "_use_cache", "gradient_checkpointing_kwargs"}
)
_REMEDY = (
    "Stages are copies of the model, so this would have no effect. Change it before ds_hydra.initialize(); in the "
    "middle of a run save a checkpoint, make the engine of the changed model, and load"
)


class KeptModel:
    """Compares a model with what it was when this was made."""

    def __init__(self, model: nn.Module, names: Mapping[str, str], *, steps_differ: Callable[[], bool]):
        """`names`: of each path of a parameter its name among the masters. `steps_differ`: whether the optimizer counts
        steps for each parameter, which one that was frozen for a while has made fewer of."""
        self._model, self._names, self._steps_differ = model, names, steps_differ
        modules = list(model.named_modules())
        self._before, self._code = self._all(modules), _code_of(model)
        self._trained = self._trained_now(modules)
        self._frozen: frozenset[str] = frozenset()  # since when this was made

    def moved(self, layers: str) -> dict[str, Tensor]:
        """Buffers below the path of the layers that a script has written to since this was asked last, by path: stages
        take them over, and they count as changes no more."""
        found = {}
        for path, module in self._model.get_submodule(layers).named_modules(prefix=layers):
            parts = self._before.get(path, {})
            for key, buffer in module._buffers.items():
                before, now = parts.get(f"the buffer {key}"), _of_tensor(buffer)
                if buffer is not None and before and before != now and before[4:7] == now[4:7]:  # alike but in value
                    parts[f"the buffer {key}"] = now
                    found[f"{path}.{key}"] = buffer
        return found

    def now(self) -> ModelNow:
        """What has changed since, and which trained parameters require no gradient any more."""
        modules = list(self._model.named_modules())
        now = self._all(modules)
        self._forget_harmless(now)
        problem = next(_differences(self._before, now), "") or self._replaced()
        trained = self._trained_now(modules)
        thawed = sorted(trained - self._trained)
        if thawed and not problem:
            problem = f"{thawed[0]} requires a gradient, but was frozen when the engine was made. {_REMEDY}"
        frozen = frozenset(self._trained - trained)
        again = sorted(self._frozen - frozen)
        if again and not problem and self._steps_differ():
            problem = (
                f"{again[0]} was frozen for some steps, and the optimizer counts steps for all parameters together: it "
                "would go on with the others' count. Keep it frozen, or use an optimizer without such a count, as SGD"
            )
        self._frozen = frozen
        return ModelNow(problem, frozen)

    def _replaced(self) -> str:
        """A function, method or class that the model's code calls by a name which means another one now."""
        found = next(((path, one.key) for path, one in self._code if one.is_changed), None)
        if found is None:
            return ""
        where = f"{found[0]} of the model" if found[0] else "the model"
        return f"{found[1]} in the code of {where} was changed after the engine was made. {_REMEDY}"

    def _forget_harmless(self, now: dict[str, Parts]) -> None:
        """Leave out new attributes of a name that no code of the model has: scripts note down what they count. Nor is
        it a change where a part is in the model's mode again, as stages always are: adapters of a pretrained model are
        made in training inside a model in evaluation, until the first `train()`."""
        for path, parts in now.items():
            before = self._before.get(path, parts)
            if parts == before:
                continue
            if _MODE in before:
                parts.setdefault(_MODE, before[_MODE])
            module = self._model.get_submodule(path)
            for key in [key for key in parts if key not in before]:
                name = key.removeprefix("its attribute ")
                if name != key and not hasattr(type(module), name) and name not in self._named():
                    del parts[key]

    @functools.cache  # noqa: B019  (one for each engine)
    def _named(self) -> frozenset[str]:
        """Names and texts in the code of the model's classes, and of functions that stand in its modules."""
        classes = {kind for module in self._model.modules() for kind in type(module).__mro__}
        held = [value for kind in classes for value in vars(kind).values()]
        held += [value for module in self._model.modules() for value in vars(module).values()]
        codes = [code for value in held if (code := getattr(inspect.unwrap(value), "__code__", None)) is not None]
        found: set[str] = set()
        while codes:
            code = codes.pop()
            found |= {*code.co_names, *(text for text in code.co_consts if isinstance(text, str))}
            codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        return frozenset(found)

    def _trained_now(self, modules: Modules) -> set[str]:
        """The masters of parameters that require a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            own = ((path, *one) for path, module in modules for one in module._parameters.items())
            trained = (
                f"{path}.{key}" if path else key for path, key, one in own if one is not None and one.requires_grad
            )
            return {self._names[name] for name in trained if name in self._names}

    def _all(self, modules: Modules) -> dict[str, Parts]:
        seen: dict[Any, Any] = {}
        with torch._C.DisableTorchFunctionSubclass():  # released parameters would each call Python
            found = {path: _parts(module, seen) for path, module in modules}
        for path, module in modules:
            if module.training != self._model.training:  # as a whole it is switched by whoever trains or evaluates it
                found[path][_MODE] = module.training
        of_torch = vars(nn.modules.module)
        for key in GLOBAL_HOOKS:  # profilers have some of their own
            own = {handle: hook for handle, hook in of_torch[key].items() if own_functions(hook)}
            found[""][_in_words(key)] = _of_hooks(own)
        return found


def _parts(module: nn.Module, seen: dict[Any, Any]) -> Parts:
    """Everything of one module, but for its children, in a form that can be compared and holds on to what it names.

    `seen`: what modules have in common, their attention and their configs.
    """
    kind = type(module)
    found: Parts = {"its class": kind}
    found |= {f"the parameter {name}": _of_tensor(p) for name, p in module._parameters.items()}
    found |= {f"the buffer {name}": _of_tensor(buffer) for name, buffer in module._buffers.items()}
    found |= {f"the module {name}": _Same(child) for name, child in module._modules.items()}
    for key, words in _HOOKS.items():
        if (hooks := getattr(module, key)) and (tokens := _of_hooks(hooks)):
            found[words] = tokens
    for key, value in vars(module).items():
        if key in _TORCHS or key in _HARMLESS:
            continue
        if not isinstance(value, PretrainedConfig):
            found[f"its attribute {key}"] = _token(value, 0, {})
        elif id(value) not in seen:  # most modules have the same one
            seen[id(value)] = value
            settings = ((name, one) for name, one in vars(value).items() if name not in _HARMLESS)
            found |= {f"the setting {name} in the {key}": _token(one, 0, {}) for name, one in settings}
    if (implementation := _implementation(module)) is not None:
        known = kind, implementation
        if known not in seen:
            seen[known] = tuple(map(_Same, attention_functions(module, implementation)))
        found["its attention function"] = seen[known]
    return found


def _implementation(module: nn.Module) -> Any:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _code_of(model: nn.Module) -> list[tuple[str, Bound]]:
    """What the code of a model's classes and of their attention calls by names, each with the module that it is of."""
    kinds: dict[Any, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules():
        kinds.setdefault((type(module), _implementation(module)), (path, module))
    found: dict[tuple[Any, ...], tuple[str, Bound]] = {}
    known: set[int] = set()
    for (kind, implementation), (path, module) in kinds.items():
        attention = [] if implementation is None else attention_functions(module, implementation)
        called = [function for one in attention if id(one) not in known for function in run_by(one)]
        known |= set(map(id, attention))
        for one in (*bound_in(called_by(module), kind), *bound_in(called)):
            found.setdefault((*map(id, one.spaces), one.key), (path, one))
    return [*found.values()]


def _of_hooks(hooks: Mapping[int, Any]) -> list[Any]:
    return [_token(hook, 0, {}) for hook in hooks.values() if getattr(hook, "__name__", "") not in _HARMLESS]


def _in_words(key: str) -> str:
    return "its " + key.strip("_").replace("_", " ")


_HOOKS = {key: _in_words(key) for key in HOOKS}


class _Same:
    """An object that is equal to itself alone."""

    __slots__ = ("held",)

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def _of_tensor(tensor: Tensor | None) -> Any:
    """A tensor by its identity, its memory and how often it was written to; a small one by its numbers too, since what
    is written to its `data` is not counted."""
    if tensor is None:
        return None
    hooks = [*(tensor._backward_hooks or {}).values()]
    hooks += [*(getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()]
    return (
        _Same(tensor),
        tensor._version,
        tensor.data_ptr(),
        tensor.device,
        tensor.shape,
        tensor.dtype,
        tuple(map(_Same, hooks)),
        _numbers(tensor) if tensor.device.type == "cpu" and tensor.nbytes <= _SMALL else None,
    )


def _numbers(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())  # of types that NumPy has not, too


def _token(value: Any, depth: int, seen: dict[int, Any]) -> Any:
    """What of an attribute's value a script may change: numbers, the contents of lists and objects, whose functions."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if id(value) in seen or depth > _DEPTH or isinstance(value, nn.Module | type | types.ModuleType | GenerationConfig):
        return _Same(value)
    seen[id(value)] = value
    again = functools.partial(_token, depth=depth + 1, seen=seen)
    if isinstance(value, Mapping):
        return [(key if isinstance(key, _PLAIN) else _Same(key), again(item)) for key, item in value.items()
                if key not in _HARMLESS]  # fmt: skip
    if isinstance(value, Sequence | Set):
        return [again(item) for item in value]
    if isinstance(value, np.ndarray):
        return _Same(value), value.shape, value.tobytes() if value.nbytes <= _SMALL else None
    # Stages share functions with the script, but have copies of the objects that methods and partials hold.
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return _Same(value)
    if isinstance(value, types.MethodType):
        return _Same(value.__func__), again(value.__self__)
    if isinstance(value, functools.partial):
        return again(value.func), again(value.args), again(value.keywords)
    held = {**getattr(value, "__dict__", {})}
    held |= {key: getattr(value, key) for key in slots_of(type(value)) if hasattr(value, key)}
    return [_Same(type(value)), [(key, again(item)) for key, item in held.items() if key not in _HARMLESS]]


def _differences(before: Mapping[str, Parts], now: Mapping[str, Parts]) -> Iterator[str]:
    for path in [*before, *(path for path in now if path not in before)]:
        where = f"{path} of the model" if path else "the model"
        if path not in now or path not in before:
            yield f"{where} was {'removed' if path in before else 'added'} after the engine was made. {_REMEDY}"
            continue
        one, other = before[path], now[path]
        if one != other:
            changed = next(key for key in [*one, *other] if one.get(key, _differences) != other.get(key, _differences))
            yield f"{changed.removeprefix('its ')} of {where} was changed after the engine was made. {_REMEDY}"
