"""A model in, the stacks of experts that can be spread over ranks as whole ones out [Note: whole experts]."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_hydra.pipe.adapters import plain_name
from ds_hydra.pipe.expert_parallel import num_experts
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.tensor_parallel import style_of

if TYPE_CHECKING:
    from ds_hydra.pipe.models.causal_lm import CausalLM

STYLE = "moe_tp_experts"
"""Style of a module whose ranks each make a part of the sum of its experts."""
_STACK = "grouped_gemm"  # of a stack in a model's own plan for expert parallelism


@dataclass(frozen=True)
class Experts:
    """Paths of the modules of stacks, names of the stacks, the different numbers of experts that they have; or why
    experts cannot be spread, a clause for the user."""

    modules: tuple[str, ...] = ()
    stacks: frozenset[str] = frozenset()
    counts: tuple[int, ...] = ()
    obstacle: str = ""


def find_experts(model: Any) -> Experts:
    """The stacks that the model's own plan for expert parallelism (`ep_plan`) cuts by experts."""
    plan = dict(getattr(model, "ep_plan", None) or {})
    stacks = {name for name, _ in model.named_parameters() if style_of(plan, plain_name(name)) == _STACK}
    modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in sorted(stacks)))
    if not modules:
        routes = "experts" in " ".join(name for name, _ in model.named_modules()).lower()
        what = "publishes no plan (ep_plan) of stacks of whole experts" if routes else "has no experts to spread"
        return Experts(obstacle=f"{type(model).__name__} {what}; use strategies without ep")
    beside = {
        f"{path}.{name}" for path in modules for name, _ in model.get_submodule(path).named_parameters()
    } - stacks  # fmt: skip
    if beside:
        return Experts(
            obstacle=f"{min(beside)} is in the same module as stacks of experts, and of all of them; use strategies "
            "without ep"
        )
    counts = sorted({num_experts(model.get_submodule(path)) for path in modules})
    return Experts(modules, frozenset(stacks), tuple(counts))


def spreading_experts(source: CausalLM) -> CausalLM:
    """The same model, whose experts are spread as whole ones where stages have an `ep`, and never cut by width."""
    other = copy.copy(source)
    boxes = source.boxes.paths(source.layers_path)
    other.experts = outside_of(find_experts(source.template), boxes, source.template)
    return other.planned(source.unnamed, source.tokens)


def for_strategies(source: CausalLM, strategies: Iterable[StrategyShape]) -> CausalLM:
    """The source of a job with these strategies: one that spreads experts if any of them has an `ep`."""
    stages = (stage for strategy in strategies for pipeline in strategy.pipelines for stage in pipeline.stages)
    return spreading_experts(source) if any(stage.ep > 1 for stage in stages) else source


def outside_of(experts: Experts, boxes: Collection[str], model: nn.Module) -> Experts:
    """The same; not of experts within modules that run once for each sequence, where every rank computes all."""
    inside = [path for path in experts.modules if any(f"{path}.".startswith(f"{box}.") for box in boxes)]
    if not inside:
        return experts
    return Experts(
        obstacle=f"{inside[0]} of {type(model).__name__} is in a module in which tokens meet, which every rank "
        "computes as a whole; use strategies without ep"
    )
