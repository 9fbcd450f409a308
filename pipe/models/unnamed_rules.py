"""How tensor parallel ranks share the parameters that a model's published plan does not name.

Such a plan cuts the linear layers. What lies between two of them (a norm of the queries, an activation with parameters)
computes on a part of the features, and its parameters with it. So one forward is run as a single rank and one as a
rank of several, both without data, and what enters each module is compared. For 6 heads of 8 features under tp=3:

    enters          alone          tp=3           parameter        rule
    norm of layer   (1, T, 48)     (1, T, 48)     weight (48,)     complete: every rank computes the same
    q_norm          (1, T, 6, 8)   (1, T, 2, 8)   weight (8,)      partial: the ranks' gradients add up
    q_norm          (1, T, 6, 8)   (1, T, 2, 8)   weight (6, 8)    cut along dimension 0, in 6 units

Latent attention is cut by heads where the plan has no word of it, as the plans of other models have it: keys and values
of all heads come from one latent, which every rank computes whole. Where one forward does not run so, it is left whole.

A mean, a norm or another statistic over features of which each rank has only a part is another number than alone. Who
takes one is told by the sizes that its functions reduce: a module of a layer is then computed whole by every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from ds_hydra.pipe.model_plan import ShardRule
from ds_hydra.pipe.models.lone_rank import Seen, look
from ds_hydra.pipe.tensor_parallel import style_of

if TYPE_CHECKING:
    from ds_hydra.pipe.models.causal_lm import CausalLM

# Projections of latent attention, by the names that they have in all models of transformers (DeepSeek-V2's plan).
_LATENT = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_a_proj_with_mqa": "mla_kv_a_proj", "kv_b_proj": "colwise",
           "o_proj": "rowwise"}  # fmt: skip
_LATENT_ALL = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_ATTEMPTS = 5  # a rule that was found lets the forward run on to the next parameter without one


@dataclass(frozen=True)
class UnnamedRules:
    """Rules by the parameter's name with `*` for layer numbers, and why tensor parallelism is impossible, if it is.

    Modules in `whole`, by their paths, with `*` again, are computed by each rank as if it were alone, whatever the plan
    says. `latent`: the plan is `latent_styles` too.
    """

    rules: Mapping[str, ShardRule] = field(default_factory=dict)
    obstacle: str = ""
    whole: frozenset[str] = frozenset()
    latent: bool = False

    def rule(self, name: str) -> ShardRule | None:
        """The rule of a parameter, if it has one."""
        return self.rules.get(_generic(name))


def without(plan: Mapping[str, str], modules: Iterable[str]) -> dict[str, str]:
    """A plan of styles without what it says of modules, by their paths, and of what is in them."""
    inside = tuple(_generic(f"{path}.") for path in modules)
    return {key: style for key, style in plan.items() if not _generic(f"{key}.").startswith(inside)}


def derive(source: CausalLM) -> UnnamedRules:
    """Rules of all parameters that need one. The obstacle is a sentence for the user."""
    tp = least_degree(source)
    if tp == 1 or source.plan.no_tp:
        return UnnamedRules()
    if source.latent:
        found = _derived(source, tp, UnnamedRules(latent=True))
        if not found.obstacle:
            return found
    return _derived(source, tp, UnnamedRules())


def latent_styles(model: nn.Module, plan: Mapping[str, str], boxes: Iterable[str]) -> dict[str, str]:
    """Styles by which tensor parallel ranks share the heads of latent attention, by the paths of its projections: of
    modules of which the plan has no word, and that are in no box."""
    found: dict[str, str] = {}
    inside = tuple(f"{path}." for path in boxes)
    for path, module in model.named_modules():
        children = {name for name, _ in module.named_children()}
        if not children.issuperset(_LATENT_ALL) or f"{path}.".startswith(inside):
            continue
        own = {f"{path}.{name}": style for name, style in _LATENT.items() if name in children}
        if not any(style_of(plan, name) for name in own):
            found |= own
    return found


def _derived(source: CausalLM, tp: int, known: UnnamedRules) -> UnnamedRules:
    """Rules of all parameters that need one beside what is known."""
    alone = look(source, 1)
    if known.latent:
        source = source.planned(known, source.tokens)
    for _ in range(_ATTEMPTS):
        cut = look(source, tp)
        rules = dict(_new_rules(source, alone, cut, known.rules))
        part = _of_a_part(alone, cut)
        inside = part is not None and re.match(rf"{re.escape(source.layers_path)}\.\d+\.", part.module)
        if rules:
            known = replace(known, rules={**known.rules, **rules})
        elif part is not None and inside and cut.error is None:
            known = replace(known, whole=known.whole | {_generic(f"{part.module}.").rstrip(".")})
        else:
            break
        source = source.planned(known, source.tokens)
    return replace(known, obstacle=_obstacle(source, tp, alone, cut))


class _Part(NamedTuple):
    """A module that takes a mean or its like over features, of which a rank has only some."""

    module: str
    function: str
    sizes: tuple[object, object]


def _of_a_part(alone: Seen, cut: Seen) -> _Part | None:
    """The first of them."""
    for (module, function), sizes in alone.reduced.items():
        parts = cut.reduced.get((module, function), [])
        if len(parts) == len(sizes) and parts != sizes:
            return _Part(module, function, next(pair for pair in zip(sizes, parts, strict=True) if pair[0] != pair[1]))
    return None


def _obstacle(source: CausalLM, tp: int, alone: Seen, cut: Seen) -> str:
    remedy = "use strategies with tp1 for this model"
    if cut.error is not None:
        return (
            f"one forward of {source.name} as a rank of tp={tp} fails ({type(cut.error).__name__}: {cut.error}): its "
            f"tensor parallel plan does not fit it; {remedy}"
        )
    if (part := _of_a_part(alone, cut)) is None:
        return ""
    whole, some = part.sizes
    return f"{part.module} takes a {part.function} over {whole}, of which a rank of tp={tp} has only {some}; {remedy}"


def least_degree(source: CausalLM) -> int:
    """The least TP degree above 1 that the model's heads can be cut by; 1 where there is none."""
    heads, kv_heads = source.plan.num_heads, source.plan.num_kv_heads
    if not heads and source.boxes:  # no rank has a part of the heads: any degree is as good
        return 2
    fit = (tp for tp in range(2, heads + 1) if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0))
    return next(fit, 1)


def _new_rules(
    source: CausalLM, alone: Seen, cut: Seen, known: Mapping[str, ShardRule]
) -> Iterator[tuple[str, ShardRule]]:
    for name, (whole, *_) in alone.met.items():
        part, spec = next(iter(cut.met.get(name, [])), whole), source.specs[name]
        if part == whole or len(part) != len(whole):
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


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
