"""Finds modules that compute what a function of few operators computes too, and runs that instead [Note: functions].

A module, or a function that its forward calls, is run as in training on a few random numbers, and so is the function
that might take its place: what they make of them must be equal, and so must all gradients. Large and small numbers are
among them, so what differs in some range alone (another eps, a limit to what is let through) is told apart too.

  LlamaRMSNorm(1e-6), rows of 1e-5 .. 1e4 and of 16 bit   rms_norm(x, weight, 1e-6): equal; eps 1e-5: off by half
  apply_rotary_pos_emb(q, k, cos, sin), random tables     rotate(q, cos, sin), rotate(k, cos, sin): equal
  LlamaMLP with linear layers of 6 and 10 features        down(silu(gate) * up) of (gate, up, down): equal
  GptOssMLP, which lets at most 7 of gate through         the same: off where x is large

Only code of installed packages is tried [Note: whose code].

[Note: functions]
Hugging Face's models write norms, rotary embeddings and gated MLPs out in small operators: a norm of 16 bit rows is
eight of them forward and sixteen backward. `pipe/functions` and `pipe/weight_gradients.py` have the same in few, which
keep less for the backward. Where they fit is not told by names of classes, but by trying (`recognise`): what computes
the same with the same gradients is replaced, and what is not recognised stays as it is. The self-check compares the
whole with the plain model, as it does everything else.
"""

from __future__ import annotations

import copy
import dis
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import permutations, product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.pipe.fused import Gated, parts_of, rms_norm, rotate
from ds_hydra.pipe.models.token_rules import look
from ds_hydra.pipe.models.whose_code import is_installed, runs_installed_code
from ds_hydra.pipe.tensor_parallel import style_of
from ds_hydra.pipe.wrappers import wrap

if TYPE_CHECKING:
    from ds_hydra.pipe.models.causal_lm import CausalLM


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
    """Names of the children of an MLP down(act(gate(x)) * up(x)); gate and up may be the halves of one, `gate` first or
    last."""

    gate: str
    up: str
    down: str
    act: str
    twice: bool = False  # whether the backward computes what enters `down` again
    last: bool = False  # of the halves of one linear layer, the gate's

    def enters(self, of: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """What enters the gate and what it lets through, `of` the children by name."""
        if self.gate != self.up:
            return of(self.gate), of(self.up)
        both = of(self.gate)
        one, other = parts_of(both, 2 * [both.shape[-1] // 2])
        return (other, one) if self.last else (one, other)


@dataclass(frozen=True)
class Functions:
    """What was recognised, by the paths of modules."""

    norms: Mapping[str, Norm] = field(default_factory=dict)
    rotary: Mapping[str, str] = field(default_factory=dict)  # -> the name of a function that the forward calls
    gates: Mapping[str, Gate] = field(default_factory=dict)
    packed: tuple[tuple[str, ...], ...] = ()  # linear layers that read the same rows
    by_rows: tuple[str, ...] = ()  # MLPs, which look at no other token
    obstacle: str = ""  # why nothing is replaced though it was asked for

    def __str__(self) -> str:
        counts = {"norms": len(self.norms), "attentions' rotary embeddings": len(self.rotary),
                  "gated MLPs": len(self.gates), "groups of linear layers": len(self.packed)}  # fmt: skip
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if self.obstacle or not found:
            return f"all is computed as the model's code says: {self.obstacle or 'nothing that it has is recognised'}"
        return f"computed in fewer operators than the model's code has: {found}"

    @property
    def of_gates(self) -> int:
        """Tensors that an MLP keeps between its linear layers: gate, up, their product, what the activation made."""
        return min((2 if gate.twice else 3 for gate in self.gates.values()), default=4)

    def moved(self, to: Callable[[str], str | None]) -> Functions:
        """The same of modules at other paths, by their paths here; None: a module that is not there."""

        def within(found: Mapping[str, Any]) -> dict[str, Any]:
            return {path: one for name, one in found.items() if (path := to(name)) is not None}

        groups = (tuple(path for name in group if (path := to(name)) is not None) for group in self.packed)
        packed = tuple(group for group in groups if group)
        by_rows = tuple(within(dict.fromkeys(self.by_rows)))
        return Functions(within(self.norms), within(self.rotary), within(self.gates), packed, by_rows, self.obstacle)

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
    tables = {torch.float32} if _keeps_type(function) else set[torch.dtype]()  # beside those of the queries' own type

    @wraps(function)
    def turning(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> Any:
        plain = q.dtype == k.dtype and q.shape[-1] == k.shape[-1] == cos.shape[-1]
        plain = plain and cos.dtype == sin.dtype and cos.dtype in {q.dtype, *tables}
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
        entered, up = gate.enters(lambda name: getattr(module, name)(args[0]))
        product = Gated(entered, up, getattr(module, gate.act))
        return getattr(module, gate.down)(product if gate.twice else product.computed())

    return gated


_SCALES = torch.tensor((1e-5, 1e-3, 1e-1, 1.0, 30.0, 1e4))  # of the rows that are tried
# Rounding, of a row over its largest number: norms of any model compute in FP32, the others in the FP64 of the trial.
_NEAR = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}
_CPU = torch.device("cpu")


def find_functions(source: CausalLM, asked: str) -> Functions:
    """What can be replaced in a model; gated MLPs compute their products twice if "recompute" is asked. "off" asks for
    nothing but what looks at no other token."""
    layers = f"{source.layers_path}."
    norms: dict[str, Norm] = {}
    rotary: dict[str, str] = {}
    mlps: dict[str, Gate] = {}
    by_rows: list[str] = []
    drawing = tuple(place.module for place in source.flow.draws)
    model = source.skeleton(_CPU, torch.float32)  # as it is trained: what drops or draws then is something else
    for path, module in model.named_modules():
        if "forward" in vars(module) or not runs_installed_code(module):
            continue  # of the user's own [Note: whose code]
        if (
            path.startswith(layers)
            and not any(f"{one}.".startswith(f"{path}.") for one in drawing)
            and _by_rows(module)
        ):
            by_rows.append(path)
        if asked == "off":
            continue
        if (norm := _norm_of(module)) is not None:
            norms[path] = norm
        if not path.startswith(layers):
            continue
        if (name := _rotary_of(module)) is not None:
            rotary[path] = name
        twice = asked == "recompute"
        if (gate := _gate_of(module)) is not None and (not twice or _is_alone(source, f"{path}.{gate.down}")):
            mlps[path] = gate._replace(twice=twice)
    packed = () if asked == "off" else tuple(_reading_alike(source))
    return Functions(norms, rotary, mlps, packed, tuple(by_rows))


def _is_alone(source: CausalLM, down: str) -> bool:
    """Whether nobody but a linear layer meets what enters the last layer of an MLP."""
    module: Any = source.template.get_submodule(down)
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return _is_linear(module) and style_of(source.style_plan, down) in (None, "rowwise") and not any(hooks)


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and "forward" not in vars(module) and "weight" in module._parameters


def _norm_of(module: nn.Module) -> Norm | None:
    """The norm that a module computes by a chain of operators, if it does."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    short = isinstance(module, nn.LayerNorm | nn.RMSNorm) and type(module).forward in (
        nn.LayerNorm.forward, nn.RMSNorm.forward,
    )  # fmt: skip
    if short or sorted(names) not in (["weight"], ["bias", "weight"]) or next(module.children(), None) is not None:
        return None
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1 or weight.shape[0] < 2:
        return None
    size = weight.shape[0]
    values = _random((size,), *[(size,)] * (len(names) - 1), dtype=torch.float32)
    rows = _random((1, len(_SCALES), size), dtype=torch.float32)[0] * _SCALES[:, None]
    sizes = sorted({value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1})
    forms = [Norm(eps, offset) for eps in sizes for offset in (0.0, 1.0) if "bias" not in names]
    forms += [Norm(eps, centred=True) for eps in sizes]

    def own(x: Tensor, *given: Tensor) -> Any:
        return _copy_with(module, _parameters=dict(zip(names, given, strict=True))).forward(x)

    def fits(norm: Norm, x: Tensor, dtype: torch.dtype) -> bool:
        def other(x: Tensor, *given: Tensor) -> Tensor:
            by_name = dict(zip(names, given, strict=True))
            return norm.of(x, by_name["weight"], by_name.get("bias"))

        return _same(own, other, [each.to(dtype) for each in (x, *values)])

    trials = ((rows, torch.float32), (rows[None], torch.float32), (rows, torch.bfloat16))  # heads have a dimension more
    return next((norm for norm in forms if all(fits(norm, *trial) for trial in trials)), None)


def _rotary_of(module: nn.Module) -> str | None:
    """The name of a function that turns queries and keys and that a module's forward calls."""
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType):
        return None
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if isinstance(function, types.FunctionType) and calls_by_name(forward, name) and _turns(function):
            return name
    return None


def _turns(function: types.FunctionType) -> bool:
    """Whether it turns q (1, heads, T, d) and k by cos and sin (1, T, d), a half of the features against the other."""
    if function.__code__.co_argcount < 4 or function.__code__.co_varnames[:2] != ("q", "k"):
        return False
    q, k, cos, sin = _random((1, 2, 6, 8), (1, 1, 6, 8), (1, 6, 8), (1, 6, 8))

    def other(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])

    return _same(lambda q, k: function(q, k, cos, sin), other, [x * _SCALES[:, None] for x in (q, k)])


def _keeps_type(function: types.FunctionType) -> bool:
    """Whether what turns queries by tables in FP32 hands them on in their own type, rounded once."""
    q, k, cos, sin = (one.float() for one in _random((1, 2, 6, 8), (1, 1, 6, 8), (1, 6, 8), (1, 6, 8)))
    try:
        found = function(q.bfloat16(), k.bfloat16(), cos, sin)[0]
    except Exception:  # as `_same`
        return False
    return torch.equal(found, rotate(q.bfloat16(), cos[:, None], sin[:, None]))


def _gate_of(module: nn.Module) -> Gate | None:
    """The names of the parts of a gated MLP, if a module is one."""
    linear = [name for name, child in module.named_children() if type(child) is nn.Linear]
    others = [name for name, child in module.named_children() if name not in linear]
    if len(linear) not in (2, 3) or len(others) > 1:
        return None
    calls = others or [name for name, value in vars(module).items() if isinstance(value, types.FunctionType)]
    if len(calls) != 1 or (others and next(module.get_submodule(others[0]).parameters(), None) is not None):
        return None
    act = getattr(module, calls[0])
    if not (runs_installed_code(act) if isinstance(act, nn.Module) else is_installed(act)):
        return None
    apart = len(linear) == 3
    x, *weights = _random((1, len(_SCALES), 6), *([(10, 6)] * 2 if apart else [(20, 6)]), (6, 10))
    x = x * _SCALES[:, None]
    for (*names, down), last in product(permutations(linear), (False,) if apart else (False, True)):
        gate = Gate(names[0], names[-1], down, calls[0], last=last)

        def own(x: Tensor, *given: Tensor, names: Sequence[str] = (*names, down)) -> Any:
            small = {name: _linear_with(weight) for name, weight in zip(names, given, strict=True)}
            return _copy_with(module, _modules={**module._modules, **small}).forward(x)

        def other(x: Tensor, *given: Tensor, names: Sequence[str] = names, gate: Gate = gate) -> Tensor:
            by_name = dict(zip(names, given, strict=False))
            entered = Gated(*gate.enters(lambda name: F.linear(x, by_name[name])), act)
            return entered.linear(given[-1])

        if _same(own, other, [x, *weights]):
            return gate
    return None


def _linear_with(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer._parameters |= {"weight": weight, "bias": bias}  # type: ignore[dict-item]
    return layer


_FEATURES = 6  # of a row that is tried


def _by_rows(module: nn.Module) -> bool:
    """Whether a module is an MLP, of two or three linear layers that are its children, and computes each row (.., H) by
    itself: a few rows together and apart come to the same."""
    linear = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    own = [id(parameter) for child in linear.values() for parameter in child.parameters()]
    if len(linear) not in (2, 3) or {*map(id, module.parameters())} != {*own}:
        return False
    width = next(iter(linear.values())).in_features
    inner = {size for child in linear.values() for size in (child.in_features, child.out_features)} - {width}
    small = {width: _FEATURES} | {size: (place + 1) * 10 for place, size in enumerate(sorted(inner))}
    sizes = [(small[one.out_features], small[one.in_features]) for one in linear.values()]
    x, *values = _random((1, len(_SCALES), _FEATURES), *(shape for size in sizes for shape in (size, size[:1])))
    x = x * _SCALES[:, None]

    def whole(x: Tensor, *given: Tensor) -> Any:
        children = {
            name: _linear_with(weight, bias if child.bias is not None else None)
            for (name, child), weight, bias in zip(linear.items(), given[::2], given[1::2], strict=True)
        }
        out = _copy_with(module, _modules={**module._modules, **children}).forward(x)
        return out + sum(bias.sum() for bias in given[1::2])  # each has a gradient

    def apart(x: Tensor, *given: Tensor) -> Tensor:
        rows = [whole(row, *given) for row in x.split(1, 1)]
        return torch.cat(rows, 1)

    try:
        fits = whole(x, *values).shape == x.shape
    except Exception:  # as `_same`
        return False
    return fits and _same(whole, apart, [x, *values])


def _reading_alike(source: CausalLM) -> Iterator[tuple[str, ...]]:
    """Linear layers without biases, children of one module, that one tensor enters when the model runs."""
    template = source.template
    entered: dict[str, list[int]] = {}
    kept: list[Tensor] = []  # a number of an object that is gone is given to another

    def watch(model: nn.Module) -> None:
        entered.clear()  # of a look that has failed
        for path, module in model.named_modules():
            own: Any = template.get_submodule(path)
            if _is_linear(own) and own.bias is None:
                module.register_forward_pre_hook(lambda _, args, path=path: note(path, args))

    def note(path: str, args: tuple[Any, ...]) -> None:
        kept.extend(args[:1])
        entered.setdefault(path, []).append(id(args[0]) if args else 0)

    if look(source, 1, prepare=watch).error is not None:
        return
    paths = Counter(source.aliases.values())
    alone = {path for path, name in source.aliases.items()
             if name in source.flow.readers or name in source.hooks or paths[name] > 1}  # fmt: skip
    groups: dict[tuple[str, str | None, int], list[str]] = {}
    for path, inputs in entered.items():
        if len(inputs) == 1 and inputs[0] and f"{path}.weight" not in alone:
            parent = path.rpartition(".")[0]
            groups.setdefault((parent, style_of(source.style_plan, path), inputs[0]), []).append(path)
    for (parent, _, _), found in groups.items():
        # A container does not run: nothing would tell its layers' outputs of one row from those of the next.
        if len(found) > 1 and not isinstance(template.get_submodule(parent), nn.ModuleDict | nn.ModuleList):
            yield tuple(found)


def _random(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def _copy_with(module: nn.Module, **attributes: Any) -> Any:
    """A shallow copy of a module with other attributes; the module keeps its own."""
    copied = copy.copy(module)
    copied.__dict__.update(attributes)
    return copied


def _same(own: Callable[..., Any], other: Callable[..., Any], inputs: Sequence[Tensor]) -> bool:
    """Whether two functions make the same of their inputs, and the same gradients of them all."""
    try:
        found = _outcome(own, inputs)
    except Exception:  # of something that wants something else: whatever it is, it is not what is sought
        return False
    expected, near = _outcome(other, inputs), _NEAR[inputs[0].dtype]
    return len(found) == len(expected) and all(
        one.shape == another.shape and one.dtype == another.dtype and _equal(one, another, near)
        for one, another in zip(found, expected, strict=True)
    )


def _outcome(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What a function makes of inputs, and their gradients by random gradients of that."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        out = function(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        dys = _random(*(each.shape for each in outs), dtype=inputs[0].dtype)
        return [*(each.detach() for each in outs), *torch.autograd.grad(outs, leaves, dys)]


def _equal(one: Tensor, another: Tensor, near: float) -> bool:
    """Whether rows are equal up to rounding, small ones too."""
    off = (one.double() - another.double()).abs().amax(-1) / another.double().abs().amax(-1)
    return bool((off <= near).all())
