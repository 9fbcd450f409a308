"""Megatron-style tensor parallelism by a model's published plan: shard rules and forwards of each style.

The model's own forward stays; only the forwards of the modules that its plan names are wrapped with the
collectives of their style. Styles are Hugging Face's (`model.tp_plan`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hydra.pipe.adapters import class_path, is_lora, linear_of, linear_path, share_magnitudes, trained_copy
from ds_hydra.pipe.collectives import Group, copy_to_ranks, gather_last_dim, split_last_dim, sum_over_ranks
from ds_hydra.pipe.model_plan import ParamSpec, ShardRule
from ds_hydra.pipe.weight_gradients import Linear, linear
from ds_hydra.pipe.wrappers import wrap
from ds_hydra.zero_hetero.errors import ConfigError

# Style of a module -> rule of its parameters, by name within the module ("" stands for any other name).
_LINEAR_RULES: dict[str, dict[str, ShardRule]] = {
    "colwise": {"": ShardRule(dim=0)},
    "colwise_gather_output": {"": ShardRule(dim=0)},
    "packed_colwise": {"": ShardRule(dim=0, parts=2)},
    "rowwise": {"weight": ShardRule(dim=1), "": ShardRule()},
    "rowwise_split_input": {"weight": ShardRule(dim=1), "": ShardRule()},
    "embedding_rowwise": {"": ShardRule(dim=0)},
    "replicated_with_grad_allreduce": {"": ShardRule(gradient="partial")},
}
# The same of experts in one parameter: (experts, out, in); or (experts, in, out), where "rowwise" cuts what comes out.
_STACKED_RULES: dict[str, ShardRule] = {
    "colwise": ShardRule(dim=1),
    "packed_colwise": ShardRule(dim=1, parts=2),
    "rowwise": ShardRule(dim=2),
    "packed_rowwise": ShardRule(dim=2, parts=2),
}
_GATHERED = "colwise_gather_output"
COLUMN_STYLES = frozenset({"colwise", _GATHERED})
_ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
# "local_params" says how bare parameters of a module are read, which have styles of their own.
_NOT_WRAPPED = frozenset({"replicate", "replicated_with_grad_allreduce", "packed_colwise", "local_params"})
_REPLICATED = frozenset(
    {"replicate", "moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj", "all_reduce", "local_params"}
)


def style_of(plan: Mapping[str, str], name: str) -> str | None:
    """The style a plan gives a module or parameter; `*` in the plan stands for a number."""
    style = plan.get(name) or plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
    return _ALIASES.get(style, style) if style else None


def shard_rule(plan: Mapping[str, str], name: str, shape: tuple[int, ...], units: Mapping[str, int]) -> ShardRule:
    """Rule of the parameter `name` under a plan.

    `units` gives head counts by the last part of a module's name (q_proj, k_proj, ...), so that heads are
    never cut in two. Raises ConfigError on a style that is not implemented.
    """
    own = style_of(plan, name)  # a bare parameter, such as stacked experts
    module, _, leaf = name.rpartition(".")
    style = own or style_of(plan, module)
    if style is None or style in _REPLICATED:
        return ShardRule()
    if own and len(shape) == 3 and style in _STACKED_RULES:
        return _STACKED_RULES[style]
    if style not in _LINEAR_RULES:
        raise ConfigError(
            f"{name}: the tensor parallel style {style!r} of the model's plan is not implemented; "
            f"use strategies with tp1, or one of {', '.join(sorted(_LINEAR_RULES))}"
        )
    rules = _LINEAR_RULES[style]
    rule = rules.get(leaf, rules[""])
    heads = units.get(module.rpartition(".")[2])
    if rule.dim is not None and heads and style in ("colwise", "rowwise"):
        return ShardRule(rule.dim, rule.parts, heads, rule.gradient)
    return rule


def with_sums(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan that says of each module whose stacked experts it cuts that ranks sum what they make.

    Plans of Llama 4 before transformers 5.16 cut such stacks and say nothing of their module, nor of one around it.
    """
    found = dict(plan)
    for path, module in model.named_modules():
        stacks = [
            name for name, parameter in module._parameters.items() if parameter is not None and parameter.dim() == 3
        ]
        cut = any(style_of(plan, f"{path}.{name}") in _STACKED_RULES for name in stacks)
        if cut and not any(style_of(plan, around) for around in (path, *_prefixes(path))):
            found[path] = "moe_tp_experts"
    return found


_USUAL = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise", "gate_proj": "colwise",
          "up_proj": "colwise", "down_proj": "rowwise"}  # fmt: skip
_HEAD_NORMS = ("q_norm", "k_norm")


def plan_of(model: Any, layers_path: str) -> dict[str, str]:
    """The style of modules and parameters as the model publishes it, or as its layers are built (`usual_plan`)."""
    published, text = model.tp_plan or {}, model.config.get_text_config()
    if not any("*" in name for name in (*published, *(getattr(text, "base_model_tp_plan", None) or ()))):
        published = {**usual_plan(model, layers_path), **published}
    return with_sums(model, published)


def usual_plan(model: Any, layers_path: str) -> dict[str, str]:
    """The plan of a model of transformers that publishes none for its layers, though each consists of the linear layers
    of a Llama and of norms, as Qwen3-VL's text does; empty for any other."""
    config, kinds = model.config.get_text_config(), []
    hidden, heads = getattr(config, "hidden_size", 0), getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or (hidden // heads if heads and isinstance(heads, int) else 0)
    for layer in model.get_submodule(layers_path).children():
        own = {path: module for path, module in layer.named_modules() if _own_parameters(module)}
        norms = {path: path.rpartition(".")[2] in _HEAD_NORMS for path, module in own.items() if not is_linear(module)}
        plain = type(layer).__module__.startswith("transformers.") and all(
            [p.shape for p in own[path].parameters()] == [(head_dim,) if of_heads else (hidden,)]
            for path, of_heads in norms.items()
        )
        linear = sorted(path.rpartition(".")[2] for path in own if path not in norms)
        if not plain or linear != sorted(_USUAL):
            return {}
        styles = {path: _USUAL.get(path.rpartition(".")[2], "replicated_with_grad_allreduce") for path in own}
        kinds.append({path: style for path, style in styles.items() if norms.get(path, True)})
    same = kinds and all(one == kinds[0] for one in kinds)
    return {f"{layers_path}.*.{path}": style for path, style in kinds[0].items()} if same else {}


def gate_beside_up(model: nn.Module, name: str, rule: ShardRule) -> ShardRule:
    """The rule of stacked experts' first matrix, where a plan cuts it as one though it holds gates and what these are
    multiplied by: it has twice the rows (experts, 2 inner, in) that the last one has columns (experts, out, inner)."""
    path, _, leaf = name.rpartition(".")
    beside = [p for key, p in model.get_submodule(path)._parameters.items() if p is not None and key != leaf]
    whole = model.get_parameter(name).shape
    twice = any(p.dim() == 3 and len(whole) == 3 and whole[1] == 2 * p.shape[2] for p in beside)
    return replace(rule, parts=2) if rule.dim == 1 and rule.parts == 1 and twice else rule


class TensorParallel:
    """Wraps the forwards of one stage's modules for one tensor parallel rank.

    `widths` of a gathered or split dimension follow from the parameters' own shard rules, so that uneven
    shards work wherever the model's forward allows them.
    """

    def __init__(
        self,
        plan: Mapping[str, str],
        specs: Mapping[str, ParamSpec],
        tp_rank: int,
        tp: int,
        group: Group,
        *,
        linear: Linear = linear,
    ):
        """`specs` by every path of a parameter, so that a tied weight is found under both; `linear` computes what a
        row-parallel module has to."""
        self.plan, self.specs, self.tp_rank, self.tp, self.group = plan, specs, tp_rank, tp, group
        self._linear = linear

    def install(self, model: nn.Module, embedding: nn.Module, head: nn.Module, needed: Collection[str]) -> None:
        """Wrap every module the plan names that holds a parameter of `needed`; others are not run here.

        `embedding` and `head` become vocabulary parallel whatever the plan says; a head that is not cut stays as it is.
        """
        if self.tp == 1:
            return
        names = {module: name for name, module in model.named_modules()}
        parents = {child: parent for parent in model.modules() for child in parent.children()}
        here = {prefix for path in needed for prefix in _prefixes(path)}
        for module, name in names.items():
            if trained_copy(module) in (embedding, head) or (name not in here and _holds_any(module)):
                continue
            style = style_of(self.plan, name)
            if style is not None and style not in _NOT_WRAPPED:
                self._wrap(style, name, module, parents[module])
            elif style == "packed_colwise" and isinstance(linear_of(module), nn.Linear):
                self._wrap("colwise", name, module, parents[module])
        if names[embedding] in here:
            self._vocab_parallel(embedding, names[embedding])
        if names[head] in here and self.specs[f"{names[head]}.weight"].rule.dim is not None:
            TensorParallel._column(self, "colwise", names[head], head, parents[head])  # all ranks hold all tokens here

    def _wrap(self, style: str, name: str, module: nn.Module, parent: nn.Module) -> None:
        if style in COLUMN_STYLES:
            self._column(style, name, module, parent)
        elif style in ("rowwise", "rowwise_split_input"):
            self._row(style, name, module)
        elif style == "moe_tp_experts":
            self._experts(module)
        else:
            self._other(style, name, module, parent)

    def _column(self, style: str, name: str, module: nn.Module, parent: nn.Module) -> None:
        forward: Callable[..., Any] = module.forward
        shared, widths = _shared_copy(parent, self.group), self._widths(name, module, 0)

        def column(x: Tensor) -> Tensor:
            out = forward(shared(x))
            return gather_last_dim(out, widths, self.tp_rank, self.group) if style == _GATHERED else out

        wrap(module, column, "tensor parallel", "column")

    def _row(self, style: str, name: str, module: nn.Module) -> None:
        widths, inner = self._widths(name, module, 1), linear_of(module)

        def part(x: Tensor) -> Tensor:
            return self._linear(inner, x, None)

        if inner is not module:  # what stands beside it adds its own part
            forward = module.forward
            wrap(inner, part, "tensor parallel", "part of a row")
            share_magnitudes(module, added=partial(_added, group=self.group))
            part = forward

        def row(x: Tensor) -> Tensor:
            if style != "rowwise":
                x = split_last_dim(x, widths, self.tp_rank, self.group)
            out = self._summed(part, x)
            bias = getattr(inner, "bias", None)  # once, not once a rank
            return out if bias is None else out + bias

        wrap(module, row, "tensor parallel", "row")

    def _summed(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What leaves a row-parallel layer, of which each rank computes a part of the sum."""
        return sum_over_ranks(part(x), self.group)

    def _experts(self, module: nn.Module) -> None:
        forward, group = module.forward, self.group

        def experts(
            hidden: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None, *rest: Any
        ) -> Tensor:
            hidden = copy_to_ranks(hidden, group)
            if top_k_index is None or top_k_weights is None:  # what comes in is sorted by expert, and weighted
                return sum_over_ranks(forward(hidden), group)
            return sum_over_ranks(forward(hidden, top_k_index, copy_to_ranks(top_k_weights, group), *rest), group)

        wrap(module, experts, "tensor parallel", "experts")

    def _other(self, style: str, name: str, module: nn.Module, parent: nn.Module) -> None:
        forward, group = module.forward, self.group
        if style == "moe_identity_expert":
            wrap(module, lambda x, *rest: forward(x / self.tp, *rest), "tensor parallel", style)
        elif style == "all_reduce":
            # Layers within it take care of what enters them; parameters of its own read it as it comes.
            entered = partial(_copied, group=group) if _own_parameters(module) else lambda value: value

            def summed(*args: Any, **kwargs: Any) -> Tensor:
                named = {key: entered(value) for key, value in kwargs.items()}
                return sum_over_ranks(forward(*map(entered, args), **named), group)

            wrap(module, summed, "tensor parallel", style)
        elif style == "mla_kv_a_proj":
            rope_dim = module.config.qk_rope_head_dim if hasattr(module, "config") else parent.config.qk_rope_head_dim  # type: ignore[union-attr]

            def kv_a_proj(x: Tensor) -> Tensor:
                out = forward(x)
                latent, rope = out.split([out.shape[-1] - rope_dim, rope_dim], dim=-1)  # type: ignore[list-item,operator]
                return torch.cat([latent, copy_to_ranks(rope, group)], dim=-1)

            wrap(module, kv_a_proj, "tensor parallel", style)
        else:
            raise ConfigError(
                f"{name}: the tensor parallel style {style!r} of the model's plan is not implemented; "
                "use strategies with tp1 for this model"
            )

    def _vocab_parallel(self, embedding: nn.Module, name: str) -> None:
        forward: Callable[[Tensor], Tensor] = embedding.forward
        start, stop = self.specs[name + ".weight"].shard_rows(self.tp_rank, self.tp)
        padding = getattr(embedding, "padding_idx", None)
        if padding is not None:  # the row without a gradient, counted in this rank's rows
            embedding.padding_idx = padding - start if start <= padding < stop else None  # type: ignore[assignment]

        def lookup(token_ids: Tensor) -> Tensor:
            elsewhere = (token_ids < start) | (token_ids >= stop)
            out = forward((token_ids - start).masked_fill(elsewhere, 0))
            return sum_over_ranks(out.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)

        wrap(embedding, lookup, "tensor parallel", "vocabulary")

    def _widths(self, name: str, module: nn.Module, dim: int) -> tuple[int, ...]:
        spec = self.specs[linear_path(name, module) + ".weight"]
        return tuple(spec.shard_shape(rank, self.tp)[dim] for rank in range(self.tp))


def tensor_parallel_obstacle(model: nn.Module, plan: Mapping[str, str], ends: Sequence[nn.Module]) -> str:
    """Why a model cannot be cut by its plan, in a sentence for the user; empty where it can.

    `ends` are the embedding and the head. A module that is cut must compute what `nn.Linear` computes, or be PEFT's
    LoRA around one: any other adapter or parametrization has parameters of which the plan says nothing.
    """
    remedy = "use strategies with tp1 for this model"
    stacked = {name for name, parameter in model.named_parameters() if parameter.dim() == 3}
    for name in (*(name for name, _ in model.named_modules()), *(name for name, _ in model.named_parameters())):
        style = style_of(plan, name)
        known = style in _LINEAR_RULES or style in _REPLICATED or (name in stacked and style in _STACKED_RULES)
        if style is not None and not known:
            return f"{name}: the tensor parallel style {style!r} of the model's plan is not implemented; {remedy}"
    for name, module in model.named_modules():
        style = style_of(plan, name)
        if trained_copy(module) in ends or style is None:
            continue
        if style == "all_reduce" and any(style_of(plan, f"{name}.{own}") is None for own in _own_parameters(module)):
            return f"the plan sums over ranks what {name} makes of parameters that no layer of its own holds; {remedy}"
        cut = style in _LINEAR_RULES and _LINEAR_RULES[style] != _LINEAR_RULES["replicated_with_grad_allreduce"]
        if cut and is_lora(module) and _summed_bias(style, module):
            return f"{name} sums over ranks what its adapter makes, and with it the bias of its lora_B; {remedy}"
        if cut and list(module.parameters()) and not is_linear(linear_of(module)):
            kind = class_path(linear_of(module))
            return f"the plan cuts {name} as a linear layer, but its weight is wrapped or computed ({kind}); {remedy}"
    embedding, head = ends
    paths = {id(module): name for name, module in model.named_modules()}
    if ".token_adapter." in paths[id(head)]:
        return f"some rows of the head are trained by themselves (trainable_token_indices); {remedy}"
    for end, plain in ((embedding, isinstance(embedding, nn.Embedding)), (head, is_linear(head))):
        if not plain or "weight" not in end._parameters:
            return f"{paths[id(end)]} is a {type(end).__name__}, whose rows cannot be told apart; {remedy}"
    return ""


def unread_plan(model: Any, plan: Mapping[str, str], ends: Sequence[nn.Module]) -> str:
    """Why a plan cannot be what the model means, in a sentence for the user: the model or its config publishes one for
    its layers, of which no word names anything between the ends. Every rank would compute the whole of it."""
    paths = {module: path for path, module in model.named_modules()}
    last = {paths[end].rpartition(".")[2] for end in ends}
    published = {**(getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}), **plan}
    said = [name for name in published if name.rpartition(".")[2] not in last]
    inside = (name for name in (*paths.values(), *(name for name, _ in model.named_parameters())) if name)
    if not said or any(style_of(plan, name) for name in inside if not last & set(name.split("."))):
        return ""
    return (
        f"the tensor parallel plan of {type(model).__name__} names nothing in its layers ({len(said)} names, the first "
        f"{said[0]!r}), so every rank would hold and compute them whole; use strategies with tp1 for this model"
    )


def _added(numbers: Tensor, group: Group) -> Tensor:
    """The sum over ranks, without a gradient."""
    dist.all_reduce(numbers, group=group)
    return numbers


def _own_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters that the module holds itself."""
    return [name for name, parameter in module._parameters.items() if parameter is not None]


def _copied(value: Any, group: Group) -> Any:
    """What every rank reads whole, and of whose gradient each has a part."""
    return copy_to_ranks(value, group) if isinstance(value, Tensor) and value.is_floating_point() else value


def _summed_bias(style: str, module: Any) -> bool:
    return style.startswith("rowwise") and any(up.bias is not None for up in module.lora_B.values())


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what `nn.Linear` does, with a weight of its own."""
    own = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
    return own and "weight" in module._parameters


def _holds_any(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _prefixes(path: str) -> Iterator[str]:
    """Paths of the modules around a parameter."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _shared_copy(parent: nn.Module, group: Group) -> Callable[[Tensor], Tensor]:
    """`copy_to_ranks` once for all column-parallel children that read the same tensor: one backward all-reduce."""
    shared: Callable[[Tensor], Tensor] | None = getattr(parent, "_hydra_shared_copy", None)
    if shared is not None:
        return shared
    memo: list[tuple[Tensor, Tensor]] = []

    def copy(x: Tensor) -> Tensor:
        if memo and memo[0][0] is x:
            return memo[0][1]
        memo[:] = [(x, copy_to_ranks(x, group))]
        return memo[0][1]

    forward: Callable[..., Any] = parent.forward

    def forget(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        finally:
            memo.clear()  # holds an activation

    wrap(parent, forget, "tensor parallel", "one copy for its columns")
    object.__setattr__(parent, "_hydra_shared_copy", copy)
    return copy
