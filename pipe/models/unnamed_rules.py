"""How tensor parallel ranks share the parameters that a model's published plan does not name.

Such a plan cuts the linear layers. What lies between two of them (a norm of the queries, an activation with parameters)
computes on a part of the features, and its parameters with it. So one forward is run as a single rank and one as a
rank of several, both without data, and what enters each module is compared. For 6 heads of 8 features under tp=3:

    enters          alone          tp=3           parameter        rule
    norm of layer   (1, T, 48)     (1, T, 48)     weight (48,)     complete: every rank computes the same
    q_norm          (1, T, 6, 8)   (1, T, 2, 8)   weight (8,)      partial: the ranks' gradients add up
    q_norm          (1, T, 6, 8)   (1, T, 2, 8)   weight (6, 8)    cut along dimension 0, in 6 units
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hydra.pipe.model_plan import ShardRule
from ds_hydra.pipe.models.graph import tensors_in
from ds_hydra.pipe.placement import Stage
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.pipe.stage import StageModule, StagePlace

if TYPE_CHECKING:
    from ds_hydra.pipe.models.causal_lm import CausalLM

Shapes = dict[str, tuple[int, ...]]  # module -> shape of the first tensor that entered it

_TOKENS = 11
_ATTEMPTS = 5  # a rule that was found lets the forward run on to the next parameter without one


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

    The obstacle is a sentence for the user. Nothing here proves that sums over ranks come out right: a module that
    takes a mean over features that were cut is found by comparing a small training step, not by shapes.
    """
    tp = _degree(source)
    if tp == 1 or source.plan.no_tp:
        return UnnamedRules()
    alone, error = _shapes(source, 1)
    rules: dict[str, ShardRule] = {}
    for _ in range(_ATTEMPTS):
        cut, error = _shapes(source, tp)
        found = dict(_new_rules(source, alone, cut, rules))
        if not found:
            break
        rules |= found
        source._plan_with(UnnamedRules(dict(rules)))
    if error is None:
        return UnnamedRules(rules)
    return UnnamedRules(
        rules,
        f"one forward of {source.name} as a rank of tp={tp} fails ({type(error).__name__}: {error}): its tensor "
        "parallel plan does not fit it; use strategies with tp1 for this model",
    )


def _degree(source: CausalLM) -> int:
    """The least TP degree above 1 that the model's heads can be cut by; 1 where there is none."""
    heads, kv_heads = source.plan.num_heads, source.plan.num_kv_heads
    fit = (tp for tp in range(2, heads + 1) if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0))
    return next(fit, 1)


def _new_rules(
    source: CausalLM, alone: Shapes, cut: Shapes, known: Mapping[str, ShardRule]
) -> Iterator[tuple[str, ShardRule]]:
    for path, whole in alone.items():
        part = cut.get(path)
        if part is None or part == whole or len(part) != len(whole):
            continue
        # Counted from the right, as broadcasting aligns a parameter with what it meets.
        smaller = [dim - len(whole) for dim in range(len(whole)) if whole[dim] != part[dim]]
        for leaf, parameter in source._template.get_submodule(path).named_parameters(recurse=False):
            name = source.aliases[f"{path}.{leaf}"]
            rule = source.specs[name].rule
            if _generic(name) in known or rule.dim is not None or rule.gradient == "partial":
                continue
            dims = [dim for dim in smaller if -dim <= parameter.dim() and parameter.shape[dim] == whole[dim]]
            if dims:
                yield _generic(name), ShardRule(parameter.dim() + dims[0], units=whole[dims[0]])
            else:
                yield _generic(name), ShardRule(gradient="partial")


def _shapes(source: CausalLM, tp: int) -> tuple[Shapes, Exception | None]:
    """What enters each module with parameters of its own, as rank 0 of `tp`, as far as the forward runs.

    Without data first; with numbers only where the forward depends on data (experts).
    """
    shapes: Shapes = {}
    error: Exception | None = None
    for device in (torch.device("meta"), torch.device("cpu")):
        shapes, error = _run(source, tp, device)
        if error is None:
            break
    return shapes, error


def _run(source: CausalLM, tp: int, device: torch.device) -> tuple[Shapes, Exception | None]:
    shapes: Shapes = {}
    dtype = next(iter(source.values.values())).dtype
    stage = Stage(tuple(range(tp)), 0, source.plan.num_layers, tp)
    place = StagePlace(stage, True, True, 0, 0, _Silent(0, tp) if tp > 1 else None, None)
    try:
        built = source.build(place, device, dtype)
        _install_numbers(source, built, stage, device, dtype)
        for name, module in built.module.named_modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                module.register_forward_pre_hook(_note(name, module, shapes), with_kwargs=True)
        ids = torch.arange(3, 3 + _TOKENS, device=device)
        weights = torch.ones(_TOKENS, dtype=torch.float64, device=device)
        positions = torch.arange(_TOKENS, device=device)[None]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            built.forward(None, MicroBatch(Pack((_TOKENS,)), positions, ids[None], ids, weights))
    except Exception as error:
        return shapes, error
    return shapes, None


def _note(name: str, module: nn.Module, shapes: Shapes) -> Any:
    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        found = next(tensors_in((args, kwargs)), None)
        if found is not None and not isinstance(module, nn.Linear | nn.Embedding):
            shapes.setdefault(name, tuple(found.shape))

    return enter


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
