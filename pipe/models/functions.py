"""A model's modules in; which of them compute what a function of few operators computes too, out [Note: functions].

[Note: functions]
Hugging Face's models write norms, rotary embeddings and gated MLPs out in small operators: a norm of 16 bit rows is
eight of them forward and sixteen backward. `pipe/functions` and `pipe/packed_weights.py` have the same in few, which
keep less for the backward. Where they fit is not told by names of classes, but by trying: a module, or a function that
a module's forward calls, is run on a few random numbers and compared with what it might be. What is not recognised
stays as it is. The self-check compares the whole with the plain model, as it does everything else.

  LlamaRMSNorm, 4 random rows, among them small ones that show eps   -> rms_norm(x, weight, 1e-6)
  apply_rotary_pos_emb(q, k, cos, sin), random tables                -> rotate(q, cos, sin), rotate(k, cos, sin)
  LlamaMLP with linear layers of 6 and 10 features                   -> down(silu(gate) * up), of (gate, up, down)
  a forward of all layers without data                               -> q_proj, k_proj and v_proj read one tensor
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.pipe.functions.gates import Gated
from ds_hydra.pipe.functions.norms import rms_norm
from ds_hydra.pipe.functions.rotary import rotate
from ds_hydra.pipe.models.lone_rank import look
from ds_hydra.pipe.tensor_parallel import style_of

if TYPE_CHECKING:
    from ds_hydra.pipe.models.causal_lm import CausalLM

_NEAR = 1e-5  # rounding of FP32; another eps, offset or order of the features is off by a hundredth and more
_SCALES = (1e-3, 1e-1, 1.0, 30.0)  # of the rows on which norms are tried


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
    asked: str = "off"  # the setting with which they were sought

    def install(self, model: nn.Module) -> None:
        """Replace the forwards of what was recognised in a copy of the model; `packed` is the stage's to do."""
        for path, norm in self.norms.items():
            module = model.get_submodule(path)
            module.forward = _normed(module, norm)  # type: ignore[method-assign]
        made: dict[tuple[Any, str], Any] = {}
        for path, name in self.rotary.items():
            module = model.get_submodule(path)
            forward = type(module).forward
            if (forward, name) not in made:
                made[forward, name] = _calling(forward, name, _turning(forward.__globals__[name]))
            module.forward = types.MethodType(made[forward, name], module)  # type: ignore[method-assign]
        for path, gate in self.gates.items():
            module = model.get_submodule(path)
            module.forward = _gated(module, gate)  # type: ignore[method-assign]


def find_functions(source: CausalLM, asked: str) -> Functions:
    """What can be replaced in a model; gated MLPs, which then compute their products twice, if "recompute" is asked."""
    layers = f"{source.layers_path}."
    norms: dict[str, Norm] = {}
    rotary: dict[str, str] = {}
    mlps: dict[str, Gate] = {}
    for path, module in source.template.named_modules():
        if "forward" in vars(module):
            continue  # a forward of the user's own
        if (norm := _norm_of(module)) is not None:
            norms[path] = norm
        if not path.startswith(layers):
            continue
        if (name := _rotary_of(module)) is not None:
            rotary[path] = name
        if asked == "recompute" and (gate := _gate_of(module)) is not None and _is_plain(source, f"{path}.{gate.down}"):
            mlps[path] = gate
    return Functions(norms, rotary, mlps, tuple(_reading_alike(source)), asked)


def _is_plain(source: CausalLM, down: str) -> bool:
    """Whether nobody but a linear layer meets what enters the last layer of an MLP."""
    module = source.template.get_submodule(down)
    return style_of(source.style_plan, down) in (None, "rowwise") and not module._forward_pre_hooks


def _norm_of(module: nn.Module) -> Norm | None:
    """The norm that a module computes by a chain of operators, if it does."""
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    short = isinstance(module, nn.LayerNorm | nn.RMSNorm) and type(module).forward in (
        nn.LayerNorm.forward, nn.RMSNorm.forward,
    )  # fmt: skip
    if short or "weight" not in names or not names <= {"weight", "bias"} or next(module.children(), None) is not None:
        return None
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1 or weight.shape[0] < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(weight.shape, generator=generator) for name in names}
    x = torch.randn((1, len(_SCALES), weight.shape[0]), generator=generator) * torch.tensor(_SCALES)[:, None]
    out = _tried(_copy_with(module, _parameters=values), x)
    if out is None:
        return None
    sizes = sorted({value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1})
    forms = [
        Norm(eps, offset, centred) for eps in sizes for offset, centred in ((0.0, False), (1.0, False), (0.0, True))
    ]
    same = (form for form in forms if form.centred or "bias" not in names)
    return next((form for form in same if _equal(out, form.of(x, values["weight"], values.get("bias")))), None)


def _equal(out: Tensor, other: Tensor) -> bool:
    """Whether rows are equal up to rounding, small ones too."""
    if out.shape != other.shape:
        return False
    off = (out - other).abs().amax(-1) / other.abs().amax(-1)
    return bool((off <= _NEAR).all())


def _copy_with(module: nn.Module, **attributes: Any) -> Any:
    """A shallow copy of a module with other attributes; the module keeps its own."""
    copied = copy.copy(module)
    copied.__dict__.update(attributes)
    return copied


def _tried(module: Any, x: Tensor) -> Tensor | None:
    """What a module's forward makes of one input; None where it does not run, or returns anything else."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = module.forward(x.clone())
    except Exception:  # of a module that wants something else: whatever it is, it is not what is sought
        return None
    return out if isinstance(out, Tensor) else None


def _rotary_of(module: nn.Module) -> str | None:
    """The name of a function that turns queries and keys and that a module's forward calls."""
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType):
        return None
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if isinstance(function, types.FunctionType) and _turns(function):
            return name
    return None


def _turns(function: types.FunctionType) -> bool:
    """Whether it turns q (1, heads, T, d) and k by cos and sin (1, T, d), a half of the features against the other."""
    if function.__code__.co_argcount < 4 or function.__code__.co_varnames[:2] != ("q", "k"):
        return False
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 2, 5, 8), (1, 1, 5, 8), (1, 5, 8), (1, 5, 8))
    q, k, cos, sin = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    try:
        out = function(q, k, cos, sin)
    except Exception:  # of a function that is something else
        return False
    if not isinstance(out, tuple) or len(out) != 2 or not all(isinstance(each, Tensor) for each in out):
        return False
    return all(
        each.dtype == x.dtype and torch.allclose(each, rotate(x, cos[:, None], sin[:, None]), rtol=0.0, atol=1e-12)
        for each, x in zip(out, (q, k), strict=True)
    )


def _gate_of(module: nn.Module) -> Gate | None:
    """The names of the parts of a gated MLP, if a module is one."""
    linear = [name for name, child in module.named_children() if type(child) is nn.Linear]
    others = [name for name, child in module.named_children() if name not in linear]
    if len(linear) != 3 or len(others) > 1:
        return None
    calls = others or [name for name, value in vars(module).items() if isinstance(value, types.FunctionType)]
    if len(calls) != 1 or (others and next(module.get_submodule(others[0]).parameters(), None) is not None):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, 3, 6), generator=generator, dtype=torch.float64)
    act = getattr(module, calls[0])
    for gate, up, down in permutations(linear):
        small = {gate: _small(6, 10), up: _small(6, 10), down: _small(10, 6)}
        out = _tried(_copy_with(module, _modules={**module._modules, **small}), x)
        if out is not None and torch.allclose(out, small[down](act(small[gate](x)) * small[up](x)), atol=1e-12):
            return Gate(gate, up, down, calls[0])
    return None


def _small(features: int, width: int) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        return nn.Linear(features, width, bias=False, dtype=torch.float64)


def _reading_alike(source: CausalLM) -> Iterator[tuple[str, ...]]:
    """Linear layers without biases, children of one module, that one tensor enters when the model runs."""
    template = source.template
    entered: dict[str, list[int]] = {}
    kept: list[Tensor] = []  # a number of an object that is gone is given to another

    def watch(model: nn.Module) -> None:
        for path, module in model.named_modules():
            if type(template.get_submodule(path)) is nn.Linear and template.get_submodule(path).bias is None:
                module.register_forward_pre_hook(lambda _, args, path=path: note(path, args))

    def note(path: str, args: tuple[Any, ...]) -> None:
        kept.extend(args[:1])
        entered.setdefault(path, []).append(id(args[0]) if args else 0)

    if look(source, 1, prepare=watch).error is not None:
        return
    alone = {path for path, name in source.aliases.items() if name in source.flow.readers or name in source.hooks}
    groups: dict[tuple[str, str | None, int], list[str]] = {}
    for path, inputs in entered.items():
        if len(inputs) == 1 and inputs[0] and f"{path}.weight" not in alone:
            parent = path.rpartition(".")[0]
            groups.setdefault((parent, style_of(source.style_plan, path), inputs[0]), []).append(path)
    for found in groups.values():
        if len(found) > 1:
            yield tuple(found)


def _normed(module: Any, norm: Norm) -> Callable[..., Any]:
    forward = module.forward

    @wraps(forward)
    def normed(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or x.dtype != module.weight.dtype:
            return forward(*args, **kwargs)
        return norm.of(x, module.weight, module._parameters.get("bias"))

    return normed


def _turning(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def turning(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        plain = q.dtype == k.dtype == cos.dtype and q.shape[-1] == k.shape[-1] == cos.shape[-1]
        if rest or more or not plain or cos.requires_grad:
            return function(q, k, cos, sin, *rest, **more)
        return rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)), rotate(k, cos.unsqueeze(1), sin.unsqueeze(1))

    return turning


def _calling(forward: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls `function` where it called the global function `name`; the module of its own keeps that."""
    made = types.FunctionType(
        forward.__code__, {**forward.__globals__, name: function}, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
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
