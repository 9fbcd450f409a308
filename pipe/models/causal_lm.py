"""Stages of a Hugging Face causal language model, copied from the user's own model and cut by its own forward.

What a stage computes is the user's: class, attributes, hooks, replaced submodules, adapters. It is cut out by running
the model's own forward, see [Note: cutting by the forward]. Which parameters a stage needs is found by a trace, as
said in [Note: the trace]. How tensor parallel ranks share them is told by the model's published plan, and where that
is silent by what their use asks for.

Three ways, in this order:

- by Hugging Face's attention interface, which is packed attention in stages: in one call for all sequences of a pack;
- by boxes, each called as it is once for each sequence [Note: boxes];
- in no way that can be run: ConfigError.

A model whose class and config promise the interface, and whose layers all attend by it where a few tokens are packed,
is not looked at further, but where a script's code, a convolution or a recurrence is in a layer: the self-check would
find a layer that does something else besides.

What single runs of parts of a model tell of it (`ModelFacts`) can be sent to other ranks. None of it depends on the
values of parameters: of ranks that have the same model by its fingerprint one runs it.
"""

from __future__ import annotations

import base64
import copy
import logging
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_hydra.pipe.adapters import adapter_rule, ends_of, linear_of, plain_name, stack_path
from ds_hydra.pipe.attention import interface as attention
from ds_hydra.pipe.loss import TokenLoss, loss_of_values
from ds_hydra.pipe.model_plan import BY_WIDTH, WIDE, ModelPlan, ParamSpec, ShardRule, make_buckets
from ds_hydra.pipe.models.adapted import with_stack_rules
from ds_hydra.pipe.models.boxes import Boxes
from ds_hydra.pipe.models.causal_stage import CausalStage
from ds_hydra.pipe.models.cut import hand_on
from ds_hydra.pipe.models.experts import STYLE, Balancing, Experts, asks_for_balance, find_balancing
from ds_hydra.pipe.models.find_boxes import Mixers, find_boxes
from ds_hydra.pipe.models.flow import Flow, find_kinds, trace
from ds_hydra.pipe.models.meta_copy import (
    copy_to_meta,
    devices_to_run_on,
    give_values,
    kept_in_fp32,
    parameter_hooks,
    place_on,
    ready_to_run,
    run_experts_one_by_one,
    stand_in_values,
)
from ds_hydra.pipe.models.positions import (
    counts_padding,
    first_position,
    noise_hooks,
    refuse_dynamic_rotary,
    uncounted_tokens,
)
from ds_hydra.pipe.models.recognise import Functions, find_functions
from ds_hydra.pipe.models.recurrent_heads import box_sizes, shared_heads
from ds_hydra.pipe.models.refusals import (
    failing,
    find_layers,
    known_tokens,
    may_mix_beside,
    may_mix_otherwise,
    refuse_parts_in_evaluation,
    refuse_unsupported,
)
from ds_hydra.pipe.models.state import held_beside, refuse_reading, refuse_state
from ds_hydra.pipe.models.token_rules import (
    TokenRules,
    UnnamedRules,
    cannot_run,
    derive,
    latent_styles,
    look,
    share_tokens,
    without,
)
from ds_hydra.pipe.rows import AT_ONCE, Overlap
from ds_hydra.pipe.stage import StageModule, StagePlace
from ds_hydra.pipe.stage_options import AS_WRITTEN, StageOptions
from ds_hydra.pipe.tensor_parallel import (
    gate_beside_up,
    plan_of,
    shard_rule,
    style_of,
    tensor_parallel_obstacle,
    unread_plan,
)
from ds_hydra.zero_hetero.errors import ConfigError


@dataclass(frozen=True)
class ModelFacts:
    """What was found of a model under the options of a job."""

    flow: Flow
    unnamed: UnnamedRules
    tokens: TokenRules
    functions: Functions
    boxes: Boxes

    def to_text(self) -> str:
        """A text from which `from_text` makes an equal object, in a rank of the same job."""
        return base64.b64encode(pickle.dumps(self)).decode()

    @classmethod
    def from_text(cls, text: str) -> ModelFacts:
        """From the text of `to_text`."""
        facts = pickle.loads(base64.b64decode(text))
        assert isinstance(facts, cls), "the text is that of a model's facts"
        return facts


_QUERY_MODULES = ("q_proj", "q_b_proj", "kv_b_proj", "o_proj", "out_proj", "dense", "query_key_value")
_KEY_VALUE_MODULES = ("k_proj", "v_proj")


class Heads:
    """Heads of queries, and of keys and values; 0 where no module `attends` by the interface."""

    def __init__(self, config: Any, model: Any, seen: Collection[tuple[int, int]], *, attends: bool):
        """As the config says, if layers were `seen` to attend with so many."""
        heads = int(getattr(config, "num_attention_heads", 0) or 0) if attends else 0
        said = heads, int(getattr(config, "num_key_value_heads", None) or heads) if attends else 0
        self.heads, self.kv_heads = said if said in seen or not seen or not heads else min(seen)
        self._model = model
        self._units = dict.fromkeys(_QUERY_MODULES, self.heads) | dict.fromkeys(_KEY_VALUE_MODULES, self.kv_heads)

    def units(self, name: str) -> Mapping[str, int]:
        """Heads by the last part of a module's name, for the parameter of this plain name."""
        return self._units | self._kv_heads_of(name)

    def _kv_heads_of(self, name: str) -> dict[str, int]:
        """Key/value heads of the attention that a parameter is part of, where layers differ in them."""
        attention_path, _, module = name.rpartition(".")[0].rpartition(".")
        if module not in _KEY_VALUE_MODULES:
            return {}
        owner: Any = self._model.get_submodule(attention_path)
        size, keys = getattr(owner, "head_dim", None), linear_of(getattr(owner, "k_proj", owner))
        rows = keys.weight.shape[0] if isinstance(keys, torch.nn.Linear) else 0
        if not isinstance(size, int) or not rows or rows % size:
            return {}
        return dict.fromkeys(_KEY_VALUE_MODULES, rows // size)

    @staticmethod
    def cut(plan: Mapping[str, str], names: Iterable[str], layers: str) -> bool:
        """Whether the plan cuts a layer by heads; `layers` is what the names of their parameters begin with."""
        modules = {plain_name(name).rpartition(".")[0] for name in names if name.startswith(layers)}
        return any(
            style_of(plan, module) == "colwise" and module.rpartition(".")[2] in (*_QUERY_MODULES, *_KEY_VALUE_MODULES)
            for module in modules
        )


logger = logging.getLogger(__name__)


def find_ways(source: CausalLM, model: Any, values: Mapping[str, Tensor]) -> tuple[Boxes, Flow]:
    """The boxes of a model's layers, and its flow. `source` is not yet traced; `values` are for all parameters."""
    device = next(iter(values.values())).device
    source.first_position = 0
    refusal: ConfigError | None = None
    packed: Flow | None = None
    try:
        source.number(source.copy_to_run(device, values))
        if not may_mix_otherwise(model):
            packed = source.trace(model)
            if not packed.unattended and not may_mix_beside(model, source.layers_path):
                return Boxes(), packed
    except attention.NotPackedError as error:
        refusal = error
    except ConfigError:  # of what no way of running it would cure
        raise
    except Exception as error:  # of a forward that takes no positions, say
        refusal = ConfigError(f"{source.name} cannot run one packed sequence: {failing(error)}")
    try:
        boxes, flow = _boxed(source, model, values, packs=refusal is None)
    except Exception as error:
        if packed is not None:  # the self-check has the last word on layers that do not attend
            return Boxes(), packed
        if refusal is None or str(error) == str(refusal):
            raise
        raise ConfigError(f"{refusal}. Nor can it run once for each sequence of a pack: {error}") from error
    if boxes:
        logger.info("%s", boxes.told(source.layers_path))
        return boxes, flow
    if refusal is not None:
        raise refusal
    return Boxes(), packed or source.trace(model)


def _boxed(source: CausalLM, model: Any, values: Mapping[str, Tensor], *, packs: bool) -> tuple[Boxes, Flow]:
    """The boxes of a model that may need some, and its flow where sequences run alone."""
    try:
        flow = source.trace(model, alone=True)
    except ConfigError:
        if source.own_attention == "eager":
            raise
        source.own_attention = "eager"  # the kernels of others draw random numbers where nobody sees it
        flow = source.trace(model, alone=True)
    kinds = find_kinds(model, source.template, source.layers_path, () if flow.obstacle else flow.ran)
    device = next(iter(values.values())).device
    alone, packed = (
        Mixers(source.copy_to_run(device, values), source.layers_path, flow.doors, kinds.firsts) for _ in range(2)
    )
    attention.use_in(alone.model, source.own_attention)
    boxes = find_boxes(alone, packed if packs else None, source.first_position)
    return replace(boxes, attention=source.own_attention), replace(flow, heads=boxes.heads, no_slices=boxes.whole)


_NOISE = (
    "noise of embeddings (NEFTune) is as large as the length of each sequence says, as in its paper; transformers goes "
    "by the length to which a batch is padded"
)
# What a model that is given no positions makes of them: it begins at 0, or does as it likes with each sequence.
_NOT_NUMBERED: tuple[int, bool, tuple[int, ...]] = (0, True, ())
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
        computed_in: torch.dtype = torch.float32,
    ):
        """Copies what the model is but for its values, traces it, and refuses what cannot be packed or cut.

        `token_loss` is trained on in place of the cross entropy; a model of values has neither. `by_one_rank`: stages
        of one rank alone are built, for which nothing is found out about tensor parallelism. With `facts` of the same
        model its layers are not run again. `computed_in`: the job's type, beside which a model may keep parameters in
        FP32. Raises ConfigError for states, attention or positions that packing would change, and what is not copied.
        """
        refuse_unsupported(model)
        attention.register()
        self.valued = model.get_output_embeddings() is None
        self.token_loss = loss_of_values(token_loss) if self.valued else token_loss
        self.overlap = Overlap() if options.sp_overlap else AT_ONCE
        self.model_class, self.name = type(model), type(model).__name__
        asked = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        self.options = replace(options, activation_checkpointing=options.activation_checkpointing or asked)
        self.values: Mapping[str, Tensor] = {n: p.detach() for n, p in model.named_parameters() if not p.is_meta}
        self.computed_in, self.wide = computed_in, kept_in_fp32(model, computed_in)
        self.dtype, self.hooks = next(model.parameters()).dtype, parameter_hooks(model)
        self.aliases: Mapping[str, str] = _aliases(model)
        self.template = copy_to_meta(model)
        balances = asks_for_balance(self.template)
        self.own_attention = attention.for_boxes(self.template)
        attention.use_in(self.template)
        self.config = self.template.config
        self.text_config = self.config.get_text_config()
        self.layers_path = find_layers(model)
        self.vocab_size: int | None = known_tokens(model)
        self._published_plan: Mapping[str, str] = plan_of(model, self.layers_path)
        self._unread = unread_plan(model, self._published_plan, ends_of(model))
        self.experts: Experts | None = None  # that are spread as whole ones, if any are
        refuse_dynamic_rotary(model)
        values = stand_in_values(model)
        device = next(iter(values.values())).device
        self.first_position, self.counts_padding, self.uncounted = _NOT_NUMBERED
        self.boxes, self.flow = find_ways(self, model, values) if facts is None else (facts.boxes, facts.flow)
        if self.boxes and not self.boxes.packed:
            self.first_position, self.counts_padding, self.uncounted = _NOT_NUMBERED
        elif facts is not None:
            self.number(self.copy_to_run(device, values))
        self._box()
        refuse_parts_in_evaluation(model, self.drawing)
        self.balancing: Balancing | None = find_balancing(self) if balances else None
        self.balances = self.balancing is not None
        self.notes = _notes(self.flow, self.balancing, noisy=any(map(noise_hooks, model.modules())))
        if facts is None:
            self._examine(model, by_one_rank=by_one_rank)
        else:
            self.unnamed, self.tokens, self.functions = facts.unnamed, facts.tokens, facts.functions
        self._plan()
        self.options = replace(self.options, token_sharding=self.plan.token_sharding)

    @property
    def facts(self) -> ModelFacts:
        """What was found by running parts of it."""
        return ModelFacts(self.flow, self.unnamed, self.tokens, self.functions, self.boxes)

    @property
    def drawing(self) -> frozenset[str]:
        """Modules that draw random numbers in training, by path."""
        return frozenset(place.module for place in self.flow.draws)

    def number(self, runs: Any) -> None:
        """Find how the model numbers tokens, by a copy with values. Raises NotPackedError."""
        self.first_position = first_position(runs, self.layers_path)
        self.counts_padding = counts_padding(runs, self.layers_path, self.first_position)
        self.uncounted = uncounted_tokens(runs, self.layers_path, self.first_position)

    def _box(self) -> None:
        """Let boxes attend by the model's own attention, and take them out of what tensor parallel ranks share."""
        paths = self.boxes.paths(self.layers_path)
        for path in paths:
            attention.let_attend_alone(self.template.get_submodule(path), self.boxes.attention)
        self._published_plan = without(self._published_plan, paths)
        self.latent = latent_styles(self.template, self._published_plan, paths)

    def _examine(self, model: Any, *, by_one_rank: bool) -> None:
        """Find what runs of parts of the model tell, as far as the options ask for it [Note: kinds of layers]."""
        self.functions, self.unnamed, self.tokens = Functions(), UnnamedRules(), _ALL_TOKENS
        wanted = self.options.functions != "off" or self.options.tiles
        if by_one_rank and not self.options.token_sharding and not wanted:
            return
        self._plan()
        self.kinds = find_kinds(model, self.template, self.layers_path, () if self.flow.obstacle else self.flow.ran)
        few = self._in_few_layers()
        if self.boxes and (why := cannot_run(few)):
            raise ConfigError(f"{self.name} cannot run once for each sequence of a pack ({why}): not supported")
        if not by_one_rank:
            self.unnamed = _of_few(derive, few, self)
            self._plan()
            few = few.planned(self.unnamed, _ALL_TOKENS)
        if self.boxes:
            obstacle = "layers have modules in which tokens meet, each run for a sequence at a time"
            self.tokens, self.functions = TokenRules(obstacle=obstacle), Functions(obstacle=obstacle)
            return
        if self.options.token_sharding:
            found = _of_few(share_tokens, few, self)
            partial = frozenset(self.kinds.spread(dict.fromkeys(found.partial), self.specs))
            self.tokens = replace(found, partial=partial)
        if wanted:
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
        like = self.kinds.like_others
        few.boxes = replace(self.boxes, of=tuple(() if i in like else b for i, b in enumerate(self.boxes.of)))
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
            by_rows=tuple(spread(dict.fromkeys(found.by_rows), paths)),
        )  # fmt: skip

    def with_options(self, options: StageOptions, why: str) -> CausalLM:
        """The same model, whose stages are planned and built by these options, which ask for less than its own."""
        other = copy.copy(self)
        other.options = options
        if options.functions != self.options.functions:
            other.functions = Functions(by_rows=self.functions.by_rows, obstacle=why)
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
        ready_to_run(copied)
        return copied

    def without_values(self, run: Callable[[Any], _Found]) -> _Found:
        """Calls `run` with a copy that has no values of the model's, where it can be run."""
        first, then = devices_to_run_on(self.template)
        try:
            return run(self.copy_to_run(first, None))
        except (NotImplementedError, RuntimeError, ValueError) as error:
            logger.debug("a run is tried again: %s", error)
            return run(self.copy_to_run(then, None))

    def trace(self, original: Any, *, alone: bool = False) -> Flow:
        """Run a few tokens of one sequence: packed, or `alone` by the model's own attention. Raises NotPackedError."""
        named = [*original.named_parameters(), *original.named_buffers()]
        reading = refuse_reading({id(tensor): name for name, tensor in named})
        try:
            with reading:
                return self.without_values(partial(self._trace_of, alone=alone))
        except ConfigError:
            raise
        except Exception as error:
            raise attention.NotPackedError(
                f"{self.name} cannot run one packed sequence by its own forward: {failing(error)}"
                f"{held_beside(original) if 'meta' in str(error) else ''}"
            ) from error

    def _trace_of(self, copied: Any, *, alone: bool) -> Flow:
        if alone:
            attention.use_in(copied, self.own_attention)
            with refuse_state(copied):
                return trace(copied, self.layers_path, alone=True)
        with refuse_state(copied):
            return trace(copied, self.layers_path, self.first_position)

    def _plan(self) -> None:
        """Buckets and shard rules, those of parameters that the published plan does not name among them."""
        config, model, flow, unnamed, tokens = self.text_config, self.template, self.flow, self.unnamed, self.tokens
        spread = self.experts or Experts(obstacle=BY_WIDTH)
        styles = {**self._published_plan, **(self.latent if unnamed.latent else {})}
        self.style_plan = without(styles, unnamed.whole) | dict.fromkeys(map(stack_path, spread.modules), STYLE)
        found = Heads(config, model, self.flow.heads, attends=not self.boxes or bool(self.flow.heads))
        ends = ends_of(model)
        modules = {id(module): path for path, module in model.named_modules()}
        vocabulary = {modules[id(module)] for module in (ends[:1] if self.valued else ends)}
        in_vocabulary = {name for path, name in self.aliases.items() if path.rpartition(".")[0] in vocabulary}
        styled = tensor_parallel_obstacle(model, self.style_plan, ends)
        self.head_cuts, by_heads = shared_heads(self) if self.boxes else ({}, {})
        specs: dict[str, ParamSpec] = {}
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            if name in in_vocabulary:
                rule = ShardRule(dim=0)
            elif styled:
                rule = ShardRule()
            elif name in tokens.partial or (name.startswith(modules[id(ends[0])] + ".") and plain_name(name) == name):
                rule = ShardRule(gradient="partial")  # it sees the tokens whose rows the rank holds
            else:
                plain = plain_name(name)
                own = adapter_rule(name, shard_rule(self.style_plan, plain, shape, found.units(plain)))
                rule = by_heads.get(name) or unnamed.rule(name) or gate_beside_up(model, name, own)
            rule = ShardRule(0, by_width=(rule.dim, rule.parts)) if name in spread.stacks else rule
            specs[name] = ParamSpec(name, shape, rule, parameter.requires_grad)
        specs = with_stack_rules(model, specs) if getattr(model, "peft_config", None) else specs
        layers = ((f"layers.{i}", names) for i, names in enumerate(flow.layers))
        groups = [(WIDE, self.wide), ("embeddings", flow.first), *layers, ("head", frozenset(specs))]
        placed: frozenset[str] = frozenset()
        for index, (bucket, names) in enumerate(groups):
            groups[index] = (bucket, names - placed)
            placed |= names
        # What PEFT trains a copy of is left in the model, and nobody reads it.
        beside = {name for name in frozenset(specs).difference(flow.first, *flow.layers) if specs[name].trainable}
        self.plan = ModelPlan(
            make_buckets(groups, specs), flow.first, flow.layers, flow.last | beside,
            found.heads, found.kv_heads, found.cut(self.style_plan, specs, f"{self.layers_path}."),
            no_tp=styled or unnamed.obstacle, no_pp=self._pipeline_obstacle(), no_slices=flow.no_slices,
            no_token_sharding=tokens.obstacle, unread=flow.unread, boxes=box_sizes(self) if self.boxes else (),
            no_ep=spread.obstacle, experts=spread.counts,
        )  # fmt: skip
        if not self.plan.cuts_layers:  # heads of recurrent layers are shared without a published plan
            self.plan = replace(self.plan, no_tp=self.plan.no_tp or self._unread)
        self.specs = specs

    def _pipeline_obstacle(self) -> str:
        obstacle = self.flow.obstacle
        if self.boxes and not self.boxes.by_length:
            obstacle = "its layers are handed what follows from the token ids, which later stages do not have"
        what = f"{self.name} cannot be cut into stages: {obstacle}; use strategies with pp1 for this model"
        return what if obstacle else ""

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
        ready_to_run(model)  # its stages do [Note: recomputed layers]
        return model


def _of_few(find: Callable[[CausalLM], _Rules], few: CausalLM, whole: CausalLM) -> _Rules:
    """What is found in few layers; what is in the way is told of the whole model."""
    found = find(few)
    return find(whole) if found.obstacle and few is not whole else found


def _notes(flow: Flow, balancing: Balancing | None, *, noisy: bool) -> tuple[str, ...]:
    difference = "" if balancing is None or balancing.is_models_own else balancing.difference
    return tuple(note for note in (difference, flow.slow_attention, _NOISE if noisy else "") if note)


def _aliases(model: Any) -> dict[str, str]:
    """Every path of every parameter -> the name `named_parameters` gives it (tied weights have two paths)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {path: names[id(p)] for path, p in model.named_parameters(remove_duplicate=False)}
