"""What was recognised in a model in; forwards of few operators in a copy of it, out.

[Note: functions]
Hugging Face's models write norms, rotary embeddings and gated MLPs out in small operators: a norm of 16 bit rows is
eight of them forward and sixteen backward. `pipe/functions` and `pipe/packed_weights.py` have the same in few, which
keep less for the backward. Where they fit is not told by names of classes, but by trying (`recognise`): what computes
the same with the same gradients is replaced, and what is not recognised stays as it is. The self-check compares the
whole with the plain model, as it does everything else.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.pipe.functions.gates import Gated
from ds_hydra.pipe.functions.norms import rms_norm
from ds_hydra.pipe.functions.rotary import rotate
from ds_hydra.pipe.wrappers import wrap


class Norm(NamedTuple):
    """A norm of features: of their squares, or of their distance from the mean."""

    eps: float
    offset: float = 0.0  # added to the weight
    centred: bool = False

    def of(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The norm of x (..., features)."""
        if self.centred:
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        return rms_norm(x, weight, self.eps, offset=self.offset)


class Gate(NamedTuple):
    """Names of the children of an MLP down(act(gate(x)) * up(x))."""

    gate: str
    up: str
    down: str
    act: str


@dataclass(frozen=True)
class Functions:
    """What was recognised, by the paths of modules."""

    norms: Mapping[str, Norm] = field(default_factory=dict)
    rotary: Mapping[str, str] = field(default_factory=dict)  # -> the name of a function that the forward calls
    gates: Mapping[str, Gate] = field(default_factory=dict)
    packed: tuple[tuple[str, ...], ...] = ()  # linear layers that read the same rows
    obstacle: str = ""  # why nothing is replaced though it was asked for

    def __str__(self) -> str:
        counts = {"norms": len(self.norms), "attentions' rotary embeddings": len(self.rotary),
                  "gated MLPs": len(self.gates), "groups of linear layers": len(self.packed)}  # fmt: skip
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if self.obstacle or not found:
            return f"all is computed as the model's code says: {self.obstacle or 'nothing that it has is recognised'}"
        return f"computed in fewer operators than the model's code has: {found}"

    def moved(self, to: Callable[[str], str | None]) -> Functions:
        """The same of modules at other paths, by their paths here; None: a module that is not there."""

        def within(found: Mapping[str, Any]) -> dict[str, Any]:
            return {path: one for name, one in found.items() if (path := to(name)) is not None}

        groups = (tuple(path for name in group if (path := to(name)) is not None) for group in self.packed)
        packed = tuple(group for group in groups if group)
        return Functions(within(self.norms), within(self.rotary), within(self.gates), packed, self.obstacle)

    def install(self, model: nn.Module) -> None:
        """Replace the forwards of what was recognised in a copy of the model; `packed` is the stage's to do."""
        for path, norm in self.norms.items():
            module = model.get_submodule(path)
            wrap(module, _normed(module, norm), "function", "norm")
        made: dict[tuple[Any, str], Any] = {}
        for path, name in self.rotary.items():
            module = model.get_submodule(path)
            forward = type(module).forward
            if (forward, name) not in made:
                made[forward, name] = _calling(forward, name)
            wrap(module, types.MethodType(made[forward, name], module), "function", "rotary")
        for path, gate in self.gates.items():
            module = model.get_submodule(path)
            wrap(module, _gated(module, gate), "function", "gated MLP")


def _normed(module: Any, norm: Norm) -> Callable[..., Any]:
    forward = module.forward

    @wraps(forward)
    def normed(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or x.dtype != module.weight.dtype:
            return forward(*args, **kwargs)
        return norm.of(x, module.weight, module._parameters.get("bias"))

    return normed


def _turning(space: dict[str, Any], name: str) -> Callable[..., Any]:
    function = space[name]

    @wraps(function)
    def turning(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        plain = q.dtype == k.dtype == cos.dtype and q.shape[-1] == k.shape[-1] == cos.shape[-1]
        if space[name] is not function or rest or more or not plain or cos.requires_grad:
            return space[name](q, k, cos, sin, *rest, **more)
        return rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)), rotate(k, cos.unsqueeze(1), sin.unsqueeze(1))

    return turning


def calls_by_name(forward: types.FunctionType, name: str) -> bool:
    """Whether a function's code has a name for a global alone, and not for an attribute as well."""
    used = {one.opname for one in dis.get_instructions(forward) if one.argval == name}
    return used == {"LOAD_GLOBAL"}


def _calling(forward: Any, name: str) -> Callable[..., Any]:
    """A method that calls what turns in place of the global function `name`, and is the forward in all else.

    The globals stay those of its module, under which the other function has a name of its own: whoever changes one of
    them changes it for this method too.
    """
    other, space = f"_hydra_{name}", forward.__globals__
    space.setdefault(other, _turning(space, name))
    code = forward.__code__
    code = code.replace(co_names=tuple(other if one == name else one for one in code.co_names))
    made = types.FunctionType(code, space, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return wraps(forward)(made)


def _gated(module: Any, gate: Gate) -> Callable[..., Any]:
    forward = module.forward

    @wraps(forward)
    def gated(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        entered, up = getattr(module, gate.gate)(args[0]), getattr(module, gate.up)(args[0])
        return getattr(module, gate.down)(Gated(entered, up, getattr(module, gate.act)))

    return gated
