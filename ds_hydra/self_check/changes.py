"""What a user has changed on a model since it was made from its config, so that a small copy gets the same changes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

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
