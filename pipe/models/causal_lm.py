"""Stages of a Hugging Face causal language model, built from the user's own model by its published plans.

The model's own forward runs in every stage. Layers of other stages are skipped, the embeddings of other
stages are stood in for, and the hidden states that were received enter at the first local layer: so models
that transform embeddings before the layers (Gemma, Granite, GPT-2) need no code of their own.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.attention import interface as attention
from ds_hydra.pipe.loss import chunked_loss
from ds_hydra.pipe.model_plan import ModelPlan, ParamSpec, ShardRule, make_buckets
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.pipe.stage import StageModule, StagePlace
from ds_hydra.pipe.tensor_parallel import TensorParallel, shard_rule, style_of
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

_QUERY_MODULES = ("q_proj", "q_b_proj", "kv_b_proj", "o_proj", "out_proj", "dense", "query_key_value")
_KEY_VALUE_MODULES = ("k_proj", "v_proj")
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class CausalLM:
    """A Hugging Face `PreTrainedModel` for causal language modelling as a source of stages."""

    def __init__(self, model: Any, *, activation_checkpointing: bool = False):
        """Reads names, shapes, plans, values and buffers of a materialised model; refuses what cannot be packed.

        Raises ConfigError for models with recurrent state, unknown attention, dropout in attention, or
        without Hugging Face's attention interface.
        """
        refuse_unsupported(model)
        attention.register()
        self.model_class, self.config = type(model), copy.deepcopy(model.config)
        self.text_config = self.config.get_text_config()
        self.activation_checkpointing = activation_checkpointing
        self.layers_path = find_layers(model, self.text_config.num_hidden_layers)
        self.hidden_size: int = self.text_config.hidden_size
        self.vocab_size: int | None = model.get_input_embeddings().weight.shape[0]
        self.values: Mapping[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
        self.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        self.style_plan: Mapping[str, str] = dict(model.tp_plan or {})
        self.aliases: Mapping[str, str] = _aliases(model)
        self.plan = self._plan(model)
        self.specs = {param.name: param for bucket in self.plan.buckets for param in bucket.params}
        self._try_attention()

    def _plan(self, model: Any) -> ModelPlan:
        config, modules = self.text_config, {m: name for name, m in model.named_modules()}
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        units = dict.fromkeys(_QUERY_MODULES, heads) | dict.fromkeys(_KEY_VALUE_MODULES, kv_heads)
        vocabulary = {modules[m] for m in (model.get_input_embeddings(), model.get_output_embeddings())}
        specs: dict[str, ParamSpec] = {}
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            if name.rpartition(".")[0] in vocabulary:
                rule = ShardRule(dim=0)
            else:
                rule = shard_rule(self.style_plan, name, shape, units)
            specs[name] = ParamSpec(name, shape, rule, parameter.requires_grad)
        first, layers, last = self._places(model, specs)
        sample = f"{self.layers_path}.0."
        heads_cut = any(
            style_of(self.style_plan, name.rpartition(".")[0]) == "colwise"
            and name.rpartition(".")[0].rpartition(".")[2] in (*_QUERY_MODULES, *_KEY_VALUE_MODULES)
            for name in specs
            if name.startswith(sample)
        )
        groups = [("embeddings", first), *((f"layers.{i}", names) for i, names in enumerate(layers))]
        groups.append(("head", last - first))
        return ModelPlan(make_buckets(groups, specs), first, tuple(layers), last, heads, kv_heads, heads_cut)

    def _places(
        self, model: Any, specs: Mapping[str, ParamSpec]
    ) -> tuple[frozenset[str], list[frozenset[str]], frozenset[str]]:
        """Which parameters the first stage, each layer, and the last stage need."""
        prefix = self.layers_path + "."
        layers: list[set[str]] = [set() for _ in range(self.text_config.num_hidden_layers)]
        first: set[str] = set()
        last: set[str] = set()
        decoder = self.layers_path.rpartition(".")[0]
        children = [name for name, _ in model.get_submodule(decoder).named_children()]
        before = children[: children.index(self.layers_path.rpartition(".")[2])]
        before = [name for name in before if not name.startswith("final")]
        for path, name in self.aliases.items():
            if path.startswith(prefix):
                layers[int(path[len(prefix) :].split(".")[0])].add(name)
            elif any(path.startswith(f"{decoder}.{child}.".lstrip(".")) for child in before):
                first.add(name)
            else:
                last.add(name)
        return frozenset(first), [frozenset(names) for names in layers], frozenset(last)

    def _try_attention(self) -> None:
        """Run four tokens through the layers without data, so that attention refuses what it lacks before step 0."""
        model = self.skeleton(torch.device("meta"), torch.float32)
        tokens = torch.zeros(1, 4, dtype=torch.long, device="meta")
        try:
            with torch.no_grad():
                model.base_model(input_ids=tokens, position_ids=tokens, use_cache=False, hydra=Pack((4,)))
        except ConfigError:
            raise
        except (NotImplementedError, RuntimeError, ValueError) as error:  # experts are chosen by data
            logger.debug("a dry run of the layers stopped early: %s", error)

    def build(self, place: StagePlace, device: torch.device, dtype: torch.dtype) -> StageModule:
        """One rank's share of a stage, on the meta device but for its buffers."""
        return _CausalLMStage(self, place, device, dtype)

    def width(self, layer: int) -> int:
        """Features of the hidden states (1, T, width) that enter a layer."""
        return self.hidden_size

    def skeleton(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The whole model with parameters on the meta device and real buffers."""
        config = copy.deepcopy(self.config)
        with torch.device("meta"):
            model = self.model_class._from_config(config, attn_implementation=attention.ATTENTION_NAME, dtype=dtype)
        for name, buffer in self.buffers.items():
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = buffer.to(device)
        model.train()
        if self.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


class _CausalLMStage(StageModule):
    def __init__(self, source: CausalLM, place: StagePlace, device: torch.device, dtype: torch.dtype):
        model = source.skeleton(device, dtype)
        needed = source.plan.needed(place.stage)
        names = {path: name for path, name in source.aliases.items() if name in needed}
        super().__init__(model, place, names)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        specs = {path: source.specs[name] for path, name in source.aliases.items()}
        TensorParallel(source.style_plan, specs, place.tp_rank, place.stage.tp, place.tp_group).install(
            model, embedding, head
        )
        self.base: nn.Module = model.base_model
        self._received = _Received()
        _cut(model, source.layers_path, place, self._received)
        self._hidden = _Given()
        if place.is_last:
            setattr(model, model.base_model_prefix, self._hidden)
            path = next(name for name, module in model.named_modules() if module is head)
            self.vocab = specs[f"{path}.weight"].shard_rows(place.tp_rank, place.stage.tp)

    def forward(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        self._received.value = hidden
        input_ids = batch.input_ids if self.place.is_first else torch.zeros_like(batch.position_ids)
        out = self.base(input_ids=input_ids, position_ids=batch.position_ids, use_cache=False, hydra=batch.pack)
        self._received.value = None
        out = out[0]
        if not self.place.is_last:
            return out
        assert batch.labels is not None, "the last stage was given no labels"
        assert batch.weights is not None, "the last stage was given no weights"
        start, stop = self.vocab
        return chunked_loss(out, batch.labels, batch.weights, self._head, start, stop - start, self.place.tp_group)

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's vocabulary rows, by the model's own forward after its layers."""
        self._hidden.value = hidden
        logits: Tensor = self.module(use_cache=False).logits
        self._hidden.value = None
        return logits


class _Received(nn.Module):
    """Stands in for an embedding: the hidden states that came from the stage before."""

    value: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self.value is not None, "a later stage runs on received hidden states"
        return self.value


class _Hidden:
    """What a base model returns, reduced to its hidden states; whatever else a head asks for is None."""

    def __init__(self, value: Tensor | None):
        self.last_hidden_state = value

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _Given(nn.Module):
    """Stands in for the model below the head: hands the head hidden states that were computed before."""

    value: Tensor | None = None

    @property
    def decoder(self) -> _Given:  # some models call the decoder of their base model
        return self

    def forward(self, *_: Any, **__: Any) -> _Hidden:
        return _Hidden(self.value)


class _Skipped(nn.Module):
    """Stands in for a layer or a norm of another stage."""

    def __init__(self, skipped: nn.Module):
        super().__init__()
        object.__setattr__(self, "_skipped", skipped)

    def __getattr__(self, name: str) -> Any:  # attributes that the model's forward reads off its layers
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._skipped, name)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class _EntryLayer(_Skipped):
    """The first local layer: runs on what was received, whatever the model's forward made of it.

    A wrapper around the layer and not a hook in it: activation checkpointing would run a hook again, when the
    received tensor is gone.
    """

    def __init__(self, layer: nn.Module, received: _Received):
        super().__init__(layer)
        object.__setattr__(self, "_received", received)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._skipped(self._received.value, *args, **kwargs)


def _cut(model: Any, layers_path: str, place: StagePlace, received: _Received) -> None:
    """Replace what belongs to other stages by stand-ins."""
    stage = place.stage
    layers: Any = model.get_submodule(layers_path)
    for index in range(len(layers)):
        if not stage.first_layer <= index < stage.last_layer:
            layers[index] = _Skipped(layers[index])
    decoder_path, _, layers_name = layers_path.rpartition(".")
    decoder = model.get_submodule(decoder_path)
    children = list(decoder.named_children())
    position = [name for name, _ in children].index(layers_name)
    if not place.is_first:
        layers[stage.first_layer] = _EntryLayer(layers[stage.first_layer], received)
        for name, child in children[:position]:
            if isinstance(child, nn.Embedding):
                setattr(decoder, name, received)
            elif any(True for _ in child.parameters()) and not name.startswith("final"):
                setattr(decoder, name, _Skipped(child))
    if not place.is_last:
        for name, child in children:
            after = name in [n for n, _ in children[position + 1 :]] or name.startswith("final")
            if after and any(True for _ in child.parameters()):
                setattr(decoder, name, _Skipped(child))


def _aliases(model: Any) -> dict[str, str]:
    """Every path of every parameter -> the name `named_parameters` gives it (tied weights have two paths)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {path: names[id(p)] for path, p in model.named_parameters(remove_duplicate=False)}


def find_layers(model: nn.Module, num_layers: int) -> str:
    """Path of the decoder layers: the outermost module list of the configured length."""
    paths = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not paths:
        raise ConfigError(f"{type(model).__name__} has no module list of its {num_layers} layers to cut into stages")
    return min(paths, key=lambda path: path.count("."))


def refuse_unsupported(model: Any) -> None:
    """ConfigError for what packed, sharded training would get wrong in silence."""
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(model, "_is_stateful", False):
        raise ConfigError(f"{name} carries a recurrent state, which would cross packed sequences: not supported")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder; only causal language models are supported")
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if kinds:
        raise ConfigError(
            f"{name} has layers of type {', '.join(sorted(kinds))}; supported: " + ", ".join(sorted(_KNOWN_LAYER_TYPES))
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(f"{name} does not use Hugging Face's attention interface, so sequences cannot be packed")
    if getattr(config, "output_router_logits", False):
        raise ConfigError(f"{name}: the router's auxiliary loss is not supported; set output_router_logits to false")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(f"{name} has parameters on the meta device; give initialize() a materialised model")
    if model.get_output_embeddings() is None:
        raise ConfigError(f"{name} has no language modelling head; use its ...ForCausalLM class")
