"""Stages of a Hugging Face causal language model, copied from the user's own model and cut by its own forward.

What a stage computes is the user's: class, attributes, hooks, replaced submodules, adapters. It is cut out by running
the model's own forward, see [Note: cutting by the forward]. Which parameters a stage needs is found by a trace, as
said in [Note: the trace]. How tensor parallel ranks share them is told by the model's published plan, and where that
is silent by what their use asks for.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_hydra.pipe.adapters import adapter_rule, ends_of, linear_of, plain_name
from ds_hydra.pipe.attention import interface as attention
from ds_hydra.pipe.loss import TokenLoss
from ds_hydra.pipe.model_plan import ModelPlan, ParamSpec, ShardRule, make_buckets
from ds_hydra.pipe.models.balancing import Balancing, asks_for_balance, find_balancing
from ds_hydra.pipe.models.causal_stage import CausalStage
from ds_hydra.pipe.models.cut import hand_on
from ds_hydra.pipe.models.facts import ModelFacts
from ds_hydra.pipe.models.flow import Flow, trace
from ds_hydra.pipe.models.functions import Functions
from ds_hydra.pipe.models.kinds import find_kinds
from ds_hydra.pipe.models.lone_rank import look
from ds_hydra.pipe.models.meta_copy import (
    copy_to_meta,
    give_values,
    parameter_hooks,
    place_on,
    run_experts_one_by_one,
)
from ds_hydra.pipe.models.positions import counts_padding, first_position, refuse_dynamic_rotary, uncounted_tokens
from ds_hydra.pipe.models.recognise import find_functions
from ds_hydra.pipe.models.refusals import find_layers, known_tokens, refuse_parts_in_evaluation, refuse_unsupported
from ds_hydra.pipe.models.state import refuse_reading, refuse_state
from ds_hydra.pipe.models.token_rules import TokenRules, share_tokens
from ds_hydra.pipe.models.unnamed_rules import UnnamedRules, derive
from ds_hydra.pipe.models.unset import stand_in_values
from ds_hydra.pipe.rows import AT_ONCE, Overlap
from ds_hydra.pipe.stage import StageModule, StagePlace
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.pipe.tensor_parallel import shard_rule, style_of, tensor_parallel_obstacle
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

_QUERY_MODULES = ("q_proj", "q_b_proj", "kv_b_proj", "o_proj", "out_proj", "dense", "query_key_value")
_KEY_VALUE_MODULES = ("k_proj", "v_proj")
_META = torch.device("meta")
_Found = TypeVar("_Found")
_Rules = TypeVar("_Rules", UnnamedRules, TokenRules)
_ALL_TOKENS = TokenRules(obstacle='"token_sharding" is not in hydra.fast_paths')


class CausalLM:
    """A Hugging Face `PreTrainedModel` for causal language modelling as a source of stages."""

    def __init__(
        self,
        model: Any,
        options: StageOptions = AS_WRITTEN,
        *,
        token_loss: TokenLoss | None = None,
        by_one_rank: bool = False,
        facts: ModelFacts | None = None,
    ):
        """Copies what the model is but for its values, traces it, and refuses what cannot be packed or cut.

        `token_loss` is trained on in place of the cross entropy. `by_one_rank`: stages of one rank alone are built, for
        which nothing is found out about tensor parallelism. With `facts` that were found of the same model, its layers
        are not run again. Raises ConfigError for models with recurrent state,
        with attention or positions that packing would change, and for attributes or hooks that cannot be copied.
        """
        refuse_unsupported(model)
        attention.register()
        self.token_loss = token_loss
        self.overlap = Overlap() if options.sp_overlap else AT_ONCE
        self.model_class, self.name = type(model), type(model).__name__
        asked = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        self.options = replace(options, activation_checkpointing=options.activation_checkpointing or asked)
        self.values: Mapping[str, Tensor] = {n: p.detach() for n, p in model.named_parameters() if not p.is_meta}
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.hooks = parameter_hooks(model)
        self.aliases: Mapping[str, str] = _aliases(model)
        self.template = copy_to_meta(model)
        balances = asks_for_balance(self.template)
        attention.use_in(self.template)
        self.config = self.template.config
        self.text_config = self.config.get_text_config()
        self.layers_path = find_layers(model, self.text_config.num_hidden_layers)
        self.vocab_size: int | None = known_tokens(model)
        self.style_plan: Mapping[str, str] = dict(model.tp_plan or {})
        refuse_dynamic_rotary(model)
        values = stand_in_values(model)
        device = next(iter(values.values())).device
        runs = self.copy_to_run(device, values)
        self.first_position = first_position(runs, self.layers_path)
        self.counts_padding = counts_padding(runs, self.layers_path, self.first_position)
        self.uncounted = uncounted_tokens(runs, self.layers_path, self.first_position)
        self.flow = self._trace(model) if facts is None else facts.flow
        refuse_parts_in_evaluation(model, [place.module for place in self.flow.draws])
        self.balancing: Balancing | None = find_balancing(self) if balances else None
        self.balances = self.balancing is not None
        self.notes = _notes(self.flow, self.balancing)
        if facts is None:
            self._examine(model, by_one_rank=by_one_rank)
        else:
            self.unnamed, self.tokens, self.functions = facts.unnamed, facts.tokens, facts.functions
        self._plan()
        self.options = replace(self.options, token_sharding=self.plan.token_sharding)

    @property
    def facts(self) -> ModelFacts:
        """What was found by running parts of it."""
        return ModelFacts(self.flow, self.unnamed, self.tokens, self.functions)

    def _examine(self, model: Any, *, by_one_rank: bool) -> None:
        """Find what runs of parts of the model tell, as far as the options ask for it [Note: kinds of layers]."""
        self.functions, self.unnamed, self.tokens = Functions(), UnnamedRules(), _ALL_TOKENS
        if by_one_rank and not self.options.token_sharding and self.options.functions == "off":
            return
        self._plan()
        self.kinds = find_kinds(model, self.template, self.layers_path, () if self.flow.obstacle else self.flow.ran)
        few = self._in_few_layers()
        if not by_one_rank:
            self.unnamed = _of_few(derive, few, self)
            self._plan()
            few = few.planned(self.unnamed, _ALL_TOKENS)
        if self.options.token_sharding:
            found = _of_few(share_tokens, few, self)
            partial = frozenset(self.kinds.spread(dict.fromkeys(found.partial), self.specs))
            self.tokens = replace(found, partial=partial)
        if self.options.functions != "off":
            self.functions = self._in_all_layers(find_functions(few, self.options.functions))

    def _in_few_layers(self) -> CausalLM:
        """The same model, of which one layer of each kind does anything, and others hand on what they are given; itself
        where no layer is like another, or the model does not run so."""
        if not self.kinds.like_others:
            return self
        few, firsts = copy.copy(self), self.kinds.in_first
        few.template = copy_to_meta(self.template)
        layers: Any = few.template.get_submodule(self.layers_path)
        for index in self.kinds.like_others:
            for held in (layers[index]._modules, layers[index]._parameters, layers[index]._buffers):
                held.clear()
            layers[index].forward = hand_on(self.flow.doors[index])
        few.aliases = {path: name for path, name in self.aliases.items() if firsts(path)}
        draws = {place: width for place, width in self.flow.draws.items() if firsts(place.module)}
        few.flow = replace(self.flow, draws=draws)
        if self.balancing is not None:
            routers = {path: place for path, place in self.balancing.routers.items() if firsts(path)}
            few.balancing = replace(self.balancing, routers=routers)
        few._plan()
        return self if look(few, 1).error is not None else few

    def _in_all_layers(self, found: Functions) -> Functions:
        """What was recognised in one layer of each kind, for all of them."""
        spread, paths = self.kinds.spread, [path for path, _ in self.template.named_modules()]
        return replace(
            found, norms=spread(found.norms, paths), rotary=spread(found.rotary, paths),
            gates=spread(found.gates, paths), packed=tuple(self.kinds.spread_groups(found.packed)),
        )  # fmt: skip

    def with_options(self, options: StageOptions, why: str) -> CausalLM:
        """The same model, whose stages are planned and built by these options, which ask for less than its own."""
        other = copy.copy(self)
        other.options = options
        if options.functions != self.options.functions:
            other.functions = Functions(obstacle=why)
        if options.sp_overlap != self.options.sp_overlap:
            other.overlap = AT_ONCE
        same = options.token_sharding == self.options.token_sharding
        return other.planned(self.unnamed, self.tokens if same else TokenRules(obstacle=why))

    def planned(self, unnamed: UnnamedRules, tokens: TokenRules) -> CausalLM:
        """The same model, planned by other rules."""
        other = copy.copy(self)
        other.unnamed, other.tokens = unnamed, tokens
        other._plan()
        return other

    def copy_to_run(self, device: torch.device, values: Mapping[str, Tensor] | None) -> Any:
        """A copy to run once: with the values given, or with none (a repeated number; on meta no number either)."""
        copied = copy_to_meta(self.template)
        place_on(copied, device)
        give_values(copied, values, device)
        run_experts_one_by_one(copied)
        copied.apply(_checkpoint_nothing)
        return copied

    def without_values(self, run: Callable[[Any], _Found]) -> _Found:
        """Calls `run` with a copy on the meta device, or with one that has values where the forward depends on them."""
        try:
            return run(self.copy_to_run(_META, None))
        except (NotImplementedError, RuntimeError, ValueError) as error:  # experts choose by the numbers
            logger.debug("a run needs numbers: %s", error)
            return run(self.copy_to_run(torch.device("cpu"), None))

    def _trace(self, original: Any) -> Flow:
        """Run a few tokens."""
        named = [*original.named_parameters(), *original.named_buffers()]
        reading = refuse_reading({id(tensor): name for name, tensor in named})
        try:
            with reading:
                found = self.without_values(self._trace_of)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self.name} cannot run one packed sequence by its own forward: {type(error).__name__}: {error}"
            ) from error
        if not found.body:
            raise ConfigError(f"{self.name} computes its logits in the module that runs its layers: not supported")
        return found

    def _trace_of(self, copied: Any) -> Flow:
        with refuse_state(copied):
            return trace(copied, self.layers_path, self.first_position)

    def _plan(self) -> None:
        """Buckets and shard rules, those of parameters that the published plan does not name among them."""
        config, model, unnamed, tokens = self.text_config, self.template, self.unnamed, self.tokens
        heads, kv_heads = _heads_of(config, self.flow.heads)
        units = dict.fromkeys(_QUERY_MODULES, heads) | dict.fromkeys(_KEY_VALUE_MODULES, kv_heads)
        ends = ends_of(model)
        modules = {id(module): path for path, module in model.named_modules()}
        vocabulary = {modules[id(module)] for module in ends}
        in_vocabulary = {name for path, name in self.aliases.items() if path.rpartition(".")[0] in vocabulary}
        styled = tensor_parallel_obstacle(model, self.style_plan, ends)
        specs: dict[str, ParamSpec] = {}
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            if name in in_vocabulary:
                rule = ShardRule(dim=0)
            elif styled:
                rule = ShardRule()
            else:
                plain = plain_name(name)
                own = units | self._kv_heads_of(plain)
                found = adapter_rule(name, shard_rule(self.style_plan, plain, shape, own))
                rule = unnamed.rule(name) or found
                rule = ShardRule(gradient="partial") if name in tokens.partial else rule
            specs[name] = ParamSpec(name, shape, rule, parameter.requires_grad)
        flow = self.flow
        groups = [("embeddings", flow.first), *((f"layers.{i}", names) for i, names in enumerate(flow.layers))]
        groups.append(("head", frozenset(specs)))
        placed: frozenset[str] = frozenset()
        for index, (bucket, names) in enumerate(groups):
            groups[index] = (bucket, names - placed)
            placed |= names
        everywhere = frozenset().union(flow.first, *flow.layers)
        # What PEFT trains a copy of is left in the model, and nobody reads it.
        beside = {name for name in frozenset(specs) - everywhere if specs[name].trainable}
        self.plan = ModelPlan(
            make_buckets(groups, specs), flow.first, flow.layers, flow.last | beside,
            heads, kv_heads, self._heads_cut(specs),
            no_tp=styled or unnamed.obstacle, no_pp=self._pipeline_obstacle(), no_slices=flow.no_slices,
            no_token_sharding=tokens.obstacle, unread=flow.unread,
        )  # fmt: skip
        self.specs = specs

    def _kv_heads_of(self, name: str) -> dict[str, int]:
        """Key/value heads of the attention that a parameter is part of, where layers differ in them."""
        attention_path, _, module = name.rpartition(".")[0].rpartition(".")
        if module not in _KEY_VALUE_MODULES:
            return {}
        owner: Any = self.template.get_submodule(attention_path)
        size, keys = getattr(owner, "head_dim", None), linear_of(getattr(owner, "k_proj", owner))
        rows = keys.weight.shape[0] if isinstance(keys, torch.nn.Linear) else 0
        if not isinstance(size, int) or not rows or rows % size:
            return {}
        return dict.fromkeys(_KEY_VALUE_MODULES, rows // size)

    def _heads_cut(self, names: Mapping[str, ParamSpec]) -> bool:
        sample = f"{self.layers_path}.0."
        modules = {plain_name(name).rpartition(".")[0] for name in names if name.startswith(sample)}
        return any(
            style_of(self.style_plan, module) == "colwise"
            and module.rpartition(".")[2] in (*_QUERY_MODULES, *_KEY_VALUE_MODULES)
            for module in modules
        )

    def _pipeline_obstacle(self) -> str:
        if not self.flow.obstacle:
            return ""
        return f"{self.name} cannot be cut into stages: {self.flow.obstacle}; use strategies with pp1 for this model"

    def build(self, place: StagePlace, device: torch.device, dtype: torch.dtype) -> StageModule:
        """One rank's share of a stage, on the meta device but for its buffers."""
        return CausalStage(self, place, device, dtype)

    def width(self, layer: int) -> int:
        """Features of the hidden states (1, T, width) that enter a layer."""
        return self.flow.doors[layer].width

    def skeleton(self, device: torch.device, dtype: torch.dtype) -> Any:
        """A copy of the whole model with parameters on the meta device and real buffers, ready to train."""
        model = copy_to_meta(self.template)
        place_on(model, device, dtype)
        model.train()
        model.apply(_checkpoint_nothing)  # its stages do [Note: recomputed layers]
        return model


def _of_few(find: Callable[[CausalLM], _Rules], few: CausalLM, whole: CausalLM) -> _Rules:
    """What is found in few layers; what is in the way is told of the whole model."""
    found = find(few)
    return find(whole) if found.obstacle and few is not whole else found


def _heads_of(config: Any, seen: Collection[tuple[int, int]]) -> tuple[int, int]:
    """Heads of queries, and of keys and values: as the config says, if layers attend with so many."""
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    said = heads, int(getattr(config, "num_key_value_heads", None) or heads)
    return said if said in seen or not seen or not heads else min(seen)


def _notes(flow: Flow, balancing: Balancing | None) -> tuple[str, ...]:
    notes = [] if balancing is None or balancing.is_models_own else [balancing.difference]
    if rate := flow.attention_dropout:
        notes.append(
            f"attention drops {rate:g} of its probabilities: they are computed in blocks that stand in memory, which "
            "takes two to three times as long as fused attention; set attention_dropout to 0 in the model's config if "
            "you can"
        )
    return tuple(notes)


def _checkpoint_nothing(module: Any) -> None:
    if getattr(module, "gradient_checkpointing", False):
        module.gradient_checkpointing = False


def _aliases(model: Any) -> dict[str, str]:
    """Every path of every parameter -> the name `named_parameters` gives it (tied weights have two paths)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {path: names[id(p)] for path, p in model.named_parameters(remove_duplicate=False)}
