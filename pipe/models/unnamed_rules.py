"""How tensor parallel ranks share the parameters that a model's published plan does not name.

Such a plan cuts the linear layers. What lies between two of them (a norm of the queries, an activation with parameters)
computes on a part of the features, and its parameters with it. So one forward is run as a single rank and one as a
rank of several, both without data, and what enters each module is compared. For 6 heads of 8 features under tp=3:

    enters          alone          tp=3           parameter        rule
    norm of layer   (1, T, 48)     (1, T, 48)     weight (48,)     complete: every rank computes the same
    q_norm          (1, T, 6, 8)   (1, T, 2, 8)   weight (8,)      partial: the ranks' gradients add up
    q_norm          (1, T, 6, 8)   (1, T, 2, 8)   weight (6, 8)    cut along dimension 0, in 6 units

A mean, a norm or another statistic over features of which each rank has only a part is another number than alone: a
layer that takes one cannot be cut, and is told by the sizes that its functions reduce.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ds_hydra.pipe.model_plan import ShardRule
from ds_hydra.pipe.models.flow import keep_stack
from ds_hydra.pipe.models.graph import tensors_in
from ds_hydra.pipe.models.meta_copy import run_experts_one_by_one
from ds_hydra.pipe.placement import Pipeline, Stage
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.pipe.stage import StageModule, StagePlace

if TYPE_CHECKING:
    from ds_hydra.pipe.models.causal_lm import CausalLM

_STATISTICS = frozenset(
    {"mean", "std", "var", "std_mean", "var_mean", "sum", "norm", "vector_norm", "softmax", "log_softmax", "logsumexp"}
    | {"amax", "amin", "argmax", "argmin", "topk", "sort", "argsort", "kthvalue", "median", "quantile", "cumsum"}
)
_NORMS = frozenset({"layer_norm", "rms_norm"})

_TOKENS = 11
_ATTEMPTS = 5  # a rule that was found lets the forward run on to the next parameter without one


Shape = tuple[int, ...]


@dataclass
class _Seen:
    """What one forward did, as far as it ran."""

    met: dict[str, Shape]  # parameter -> shape of the first tensor that it meets
    reduced: dict[tuple[str, str], list[Shape]]  # module and function -> sizes it reduces, call by call
    error: Exception | None = None


@dataclass(frozen=True)
class UnnamedRules:
    """Rules by the parameter's name with `*` for layer numbers, and why tensor parallelism is impossible, if it is."""

    rules: Mapping[str, ShardRule] = field(default_factory=dict)
    obstacle: str = ""

    def rule(self, name: str) -> ShardRule | None:
        """The rule of a parameter, if it has one."""
        return self.rules.get(_generic(name))


def derive(source: CausalLM) -> UnnamedRules:
    """Rules of all parameters that need one; leaves the source planned with some of them.

    The obstacle is a sentence for the user.
    """
    tp = _degree(source)
    if tp == 1 or source.plan.no_tp:
        return UnnamedRules()
    alone = _look(source, 1)
    rules: dict[str, ShardRule] = {}
    for _ in range(_ATTEMPTS):
        cut = _look(source, tp)
        found = dict(_new_rules(source, alone, cut, rules))
        if not found:
            break
        rules |= found
        source.plan_with(UnnamedRules(dict(rules)))
    return UnnamedRules(rules, _obstacle(source, tp, alone, cut))


def _obstacle(source: CausalLM, tp: int, alone: _Seen, cut: _Seen) -> str:
    remedy = "use strategies with tp1 for this model"
    if cut.error is not None:
        return (
            f"one forward of {source.name} as a rank of tp={tp} fails ({type(cut.error).__name__}: {cut.error}): its "
            f"tensor parallel plan does not fit it; {remedy}"
        )
    for (module, function), sizes in alone.reduced.items():
        parts = cut.reduced.get((module, function), [])
        if len(parts) == len(sizes) and parts != sizes:
            whole, part = next(pair for pair in zip(sizes, parts, strict=True) if pair[0] != pair[1])
            return f"{module} takes a {function} over {whole}, of which a rank of tp={tp} has only {part}; {remedy}"
    return ""


def _degree(source: CausalLM) -> int:
    """The least TP degree above 1 that the model's heads can be cut by; 1 where there is none."""
    heads, kv_heads = source.plan.num_heads, source.plan.num_kv_heads
    fit = (tp for tp in range(2, heads + 1) if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0))
    return next(fit, 1)


def _new_rules(
    source: CausalLM, alone: _Seen, cut: _Seen, known: Mapping[str, ShardRule]
) -> Iterator[tuple[str, ShardRule]]:
    for name, whole in alone.met.items():
        part, spec = cut.met.get(name), source.specs[name]
        if part is None or part == whole or len(part) != len(whole):
            continue
        if _generic(name) in known or spec.rule.dim is not None or spec.rule.gradient == "partial":
            continue
        # Counted from the right, as broadcasting aligns a parameter with what it meets.
        smaller = [dim - len(whole) for dim in range(len(whole)) if whole[dim] != part[dim]]
        dims = [dim for dim in smaller if -dim <= len(spec.shape) and spec.shape[dim] == whole[dim]]
        if dims:
            yield _generic(name), ShardRule(len(spec.shape) + dims[0], units=whole[dims[0]])
        else:
            yield _generic(name), ShardRule(gradient="partial")


def _look(source: CausalLM, tp: int) -> _Seen:
    """What rank 0 of `tp` does. Without data first; with numbers only where the forward depends on data (experts)."""
    seen = _run(source, tp, torch.device("meta"))
    return seen if seen.error is None else _run(source, tp, torch.device("cpu"))


def _run(source: CausalLM, tp: int, device: torch.device) -> _Seen:
    dtype = source.dtype
    stage = Stage(tuple(range(tp)), 0, source.plan.num_layers, tp)
    place = StagePlace(Pipeline((stage,)), 0, 0, 0, _Silent(0, tp) if tp > 1 else None, None)
    watch = _Watch(source.layers_path)
    seen = _Seen(watch.met, watch.reduced)
    try:
        built = source.build(place, device, dtype)
        _install_numbers(source, built, stage, device, dtype)
        run_experts_one_by_one(built.module)
        keep_stack(built.module, watch.stack)
        watch.follow(built)
        ids = torch.arange(3, 3 + _TOKENS, device=device)
        weights = torch.ones(_TOKENS, dtype=torch.float64, device=device)
        positions = torch.arange(_TOKENS, device=device)[None]
        with torch.no_grad(), torch.random.fork_rng(devices=[]), watch:
            built.forward(None, MicroBatch(Pack((_TOKENS,)), positions, ids[None], ids, weights))
    except Exception as error:  # of the model's own forward: whatever it is, it is told to the user
        seen.error = error
    return seen


class _Watch(TorchFunctionMode):
    """Notes what parameters meet, and the sizes of the dimensions that functions within layers reduce.

    What enters a module meets its parameters; a bare parameter of a module with others inside meets what a function is
    handed together with it.
    """

    def __init__(self, layers_path: str):
        super().__init__()
        self.stack: list[str] = []
        self.met: dict[str, Shape] = {}
        self.reduced: dict[tuple[str, str], list[Shape]] = {}
        self._prefix = layers_path + "."
        self._bare: dict[int, str] = {}

    def follow(self, built: StageModule) -> None:
        names = {id(parameter): name for name, parameter in built.parameters.items()}
        for module in built.module.modules():
            own = {id(p): names[id(p)] for p in module._parameters.values() if p is not None and id(p) in names}
            if isinstance(module, nn.Linear | nn.Embedding) or not own:
                continue
            if next(module.children(), None) is not None:
                self._bare |= own
            else:
                module.register_forward_pre_hook(self._enters(tuple(own.values())), with_kwargs=True)

    def _enters(self, parameters: Sequence[str]) -> Any:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            found = next(tensors_in((args, kwargs)), None)
            for name in parameters if found is not None else ():
                self.met.setdefault(name, tuple(found.shape))  # type: ignore[union-attr]

        return enter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").removeprefix("linalg_")
        if self.stack and self.stack[-1].startswith(self._prefix):
            if name in _STATISTICS or name in _NORMS:
                self.reduced.setdefault((self.stack[-1], name), []).append(_reduced_sizes(name, args, kwargs))
            if self._bare:
                self._meet([value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)])
        return func(*args, **kwargs)

    def _meet(self, handed: Sequence[Tensor]) -> None:
        others = [tuple(value.shape) for value in handed if id(value) not in self._bare]
        for value in handed if others else ():
            if id(value) in self._bare:
                self.met.setdefault(self._bare[id(value)], max(others, key=len))


def _reduced_sizes(name: str, args: Any, kwargs: Any) -> Shape:
    values = args[0] if args else kwargs.get("input")
    if not isinstance(values, Tensor):
        return ()
    if name in _NORMS:
        return tuple(args[1] if len(args) > 1 else kwargs["normalized_shape"])
    dims = kwargs.get("dim", next((arg for arg in args[1:] if isinstance(arg, int | tuple | list)), None))
    if name in ("topk", "kthvalue", "quantile"):  # the number that comes first is no dimension
        dims = kwargs.get("dim", args[2] if len(args) > 2 else -1)
    dims = tuple(range(values.dim())) if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    return tuple(values.shape[dim] for dim in dims)


def _install_numbers(
    source: CausalLM, built: StageModule, stage: Stage, device: torch.device, dtype: torch.dtype
) -> None:
    """One repeated number for every parameter: it takes no memory, whatever the size of the model."""
    number = torch.full((), 0.01, dtype=dtype, device=device)
    for bucket in source.plan.buckets:
        slots = source.plan.slots(bucket, stage, 0)
        for slot in slots:
            built.install(slot, number.expand(slots[-1].offset + slots[-1].numel))


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _Silent(dist.ProcessGroup):
    """A group in which nobody answers: right in shapes, not in values."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)  # type: ignore[call-arg]

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        return _Done()

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Done:
        for parts, mine in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(mine)
        return _Done()


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
