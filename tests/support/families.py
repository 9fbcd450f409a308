"""Tiny models of many families for tests: a name in, a freshly initialised model out, the same in every process.

Names are keys of FAMILIES, of BALANCED, VALUED, BOXED, BY_HEADS, WITH_EXPERTS, ROUTED, ATTENDING and HARD_MODELS, of
CHANGED and CHANGED_LINEARS (a Llama that was changed), of ADAPTED, ADAPTED_BY_HEADS, ADAPTED_STACKS and
ADAPTED_WITHOUT_TP (a model with PEFT's adapters), "layer_list" for a DeepSpeed `PipelineModule` with a tied layer, or
the path of a Hugging Face config file.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

import tests.support.dense  # noqa: F401  (registers the attention "dense")
from ds_hydra.pipe.attention.backends import varlen_attention
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.rows import Pack
from tests.support.adapted_models import adapted, base_family
from tests.support.attending_models import ATTENDING
from tests.support.boxed_models import BOXED, BY_HEADS, WITH_EXPERTS
from tests.support.changed_models import CHANGED, CHANGED_LINEARS
from tests.support.hard_models import HARD_MODELS
from tests.support.routed_models import ROUTED, SURE, made_sure

VOCAB = 97
HEADS, KV_HEADS, LAYERS = 8, 4, 4
LAYER_LIST = "layer_list"
OTHER_SIZES = frozenset({"llama_3_layers", "llama_8_layers", "llama_1_key_head", "llama_8_key_heads"})

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # so that attention looks somewhere, and the gradients of queries and keys count
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 1024}
_NO_DROPOUT = {"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

# Name -> (model type of Hugging Face, settings beside or in place of the common ones).
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", _COMMON),
    "llama_tied": ("llama", _COMMON | {"tie_word_embeddings": True}),
    "llama_3_layers": ("llama", _COMMON | {"num_hidden_layers": 3}),
    "llama_8_layers": ("llama", _COMMON | {"num_hidden_layers": 8, "tie_word_embeddings": True}),
    "llama_1_key_head": ("llama", _COMMON | {"num_key_value_heads": 1}),
    "llama_8_key_heads": ("llama", _COMMON | {"num_key_value_heads": HEADS}),
    "qwen2": ("qwen2", _COMMON),
    "qwen3": ("qwen3", _COMMON | {"head_dim": 16}),
    "mistral": ("mistral", _COMMON | {"sliding_window": 6}),
    "gemma2": ("gemma2", _COMMON | {"head_dim": 16, "sliding_window": 8}),  # tied, softcaps in attention and head
    "gemma3_text": ("gemma3_text", _COMMON | {"head_dim": 16, "sliding_window": 8}),
    "phi": ("phi", _COMMON | _NO_DROPOUT),
    "phi3": ("phi3", _COMMON),
    "granite": ("granite", _COMMON | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "mixtral": ("mixtral", _COMMON | {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", _COMMON | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    "olmo2": ("olmo2", _COMMON),
    "cohere": ("cohere", _COMMON),
    "gpt_neox": ("gpt_neox", _COMMON),
    "starcoder2": ("starcoder2", _COMMON | _NO_DROPOUT | {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "glm4": ("glm4", _COMMON | {"head_dim": 8}),
    "smollm3": ("smollm3", _COMMON),
    "gpt_oss": ("gpt_oss", _COMMON | {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8}),  # attention sinks
    "gpt2": ("gpt2", _GPT2 | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
}
# Models whose routers have a loss, which counts enough to be felt in every gradient.
_ROUTER_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
BALANCED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mixtral, balanced": ("mixtral", _COMMON | {"num_local_experts": 4} | _ROUTER_LOSS),
    "qwen3_moe, balanced": (
        "qwen3_moe",
        _COMMON | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48} | _ROUTER_LOSS,
    ),
    "olmoe, balanced": ("olmoe", _COMMON | {"num_experts": 4, "num_experts_per_tok": 2} | _ROUTER_LOSS),
}
# Critics: a head of one output for each token.
_OF_VALUES = {"num_labels": 1, "classifier_dropout": 0.0}
VALUED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama, values": ("llama", _COMMON | _OF_VALUES),
    "qwen3_moe, values": ("qwen3_moe", {**FAMILIES["qwen3_moe"][1], **_OF_VALUES}),
    "gpt2, values": ("gpt2", {**FAMILIES["gpt2"][1], **_OF_VALUES}),
}
# Model types whose attention feature (softcap, sinks) Hugging Face's SDPA drops or refuses.
NEEDS_EAGER = frozenset({"gemma2", "gpt_oss"})
NOT_BY_INTERFACE = frozenset({"bloom", "gptj"})  # they attend by code of their own


def hf_config(family: str) -> Any:
    """The Hugging Face config of a family, or of a config file."""
    family = "llama" if family in CHANGED or family in CHANGED_LINEARS else base_family(family)
    tables = (FAMILIES, HARD_MODELS, BALANCED, VALUED, BOXED, BY_HEADS, WITH_EXPERTS, ROUTED, ATTENDING)
    listed = next((table[family] for table in tables if family in table), None)
    if listed:
        model_type, settings = listed
        return AutoConfig.for_model(model_type, **settings)
    settings = json.loads(Path(family).read_text())
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def vocab_size(family: str) -> int:
    """Tokens that a family's data may hold."""
    return VOCAB if family == LAYER_LIST else int(hf_config(family).get_text_config().vocab_size)


def build_model(family: str, dtype: torch.dtype, attention: str | None = None) -> Any:
    """A model as a user of the engine would pass it; a PipelineModule needs a process group.

    `attention` is Hugging Face's `attn_implementation`.
    """
    torch.manual_seed(0)
    if family == LAYER_LIST:
        return _pipeline_module().to(dtype)
    config = copy.deepcopy(hf_config(family))
    extra = {} if attention is None else {"attn_implementation": attention}
    if dtype == torch.float64 and hasattr(config, "num_experts_per_tok"):
        extra["experts_implementation"] = "eager"  # the grouped one has no FP64
    kind = AutoModelForTokenClassification if family in VALUED else AutoModelForCausalLM
    model = kind.from_config(config, **extra)
    model = _spread(model)
    model = (made_sure(model) if family == SURE else model).to(dtype)
    change = CHANGED.get(family) or CHANGED_LINEARS.get(family)
    if change is not None:
        change(model)
    return model if family == base_family(family) else adapted(family, model)


def reference_model(family: str, dtype: torch.dtype) -> nn.Module:
    """The same values as `build_model` in a model that maps (1, T) token ids to (1, T, vocab) logits by itself."""
    if family == LAYER_LIST:
        torch.manual_seed(0)
        return _PlainLayerList().to(dtype)
    attention = "sdpa"
    config = hf_config(family)
    if config.model_type in NEEDS_EAGER or getattr(config, "attention_dropout", False):
        attention = "eager" if dtype != torch.float64 else "dense"  # eager has an FP32 softmax in any dtype
    if config.model_type in NOT_BY_INTERFACE:
        attention = "eager"
    return base_of(build_model(family, dtype, attention))


def kept_in_fp32(layers: int = 2) -> tuple[Any, set[str]]:
    """A mixture in BF16 as transformers loads it, and its parameters that stay in FP32: of its routers."""
    config = AutoConfig.for_model(
        "ernie4_5_moe", vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, moe_intermediate_size=48, moe_num_experts=4, moe_k=2,
        moe_num_shared_experts=0, moe_layer_start_index=1, moe_layer_end_index=-1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    kept = {name for name, _ in model.named_parameters() if ".mlp.gate." in name}
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.1 if name in kept else parameter.data.to(torch.bfloat16)
    return model, kept


def _spread(model: Any) -> Any:
    """Norm weights and biases away from their constant initial values, where errors in them would hide."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


class Embedding(nn.Module):
    """Token ids (1, T) -> (1, T, width); its weight is the head's too."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, width) * 0.1)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


def tied_head(embedding: Embedding, hidden: Tensor) -> Tensor:
    """Logits by the embedding's weight."""
    return hidden @ embedding.weight.transpose(0, 1)


class Block(nn.Module):
    """Attention and an MLP; attends within packed sequences if it is told of them."""

    slope: Tensor

    def __init__(self, width: int = 64, heads: int = HEADS):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))
        self.register_buffer("slope", torch.linspace(0.01, 0.02, width), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor | None = None, hydra: Pack | None = None) -> Tensor:
        if position_ids is not None:
            x = x + self.slope.to(x.dtype) * torch.sin(position_ids.to(x.dtype)).unsqueeze(-1)
        q, k, v = (part.squeeze(0).unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        if hydra is None:  # one sequence
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
            attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1)
        else:
            attended = varlen_attention(q, k, v, hydra)
        x = x + self.out(attended.flatten(1).unsqueeze(0))
        return x + self.mlp(x)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the targets, as a user's loss function would be."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _pipeline_module() -> Any:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a compiler and 20 s
    deepspeed.init_distributed("gloo", verbose=False)
    embedding = functools.partial(TiedLayerSpec, "embedding", Embedding, tied_weight_attr="weight")
    layers = [
        embedding(),
        *(LayerSpec(Block) for _ in range(LAYERS)),
        nn.LayerNorm(64),
        embedding(forward_fn=tied_head),
    ]
    return PipelineModule(layers, num_stages=1, loss_fn=mean_loss, partition_method="uniform")


class _PlainLayerList(nn.Module):
    """The layers of `_pipeline_module` in a plain module, with the same parameter names and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(64)
        embedding = Embedding()
        for index in range(1, LAYERS + 1):
            self.add_module(str(index), Block())
        self.add_module(str(LAYERS + 1), norm)
        self.tied_modules = nn.ModuleDict({"embedding": embedding})

    def forward(self, token_ids: Tensor) -> Tensor:
        embedding = self.tied_modules["embedding"]
        assert isinstance(embedding, Embedding)
        x = embedding(token_ids)
        positions = torch.arange(token_ids.shape[1])[None]
        for index in range(1, LAYERS + 1):
            x = self.get_submodule(str(index))(x, positions)
        return tied_head(embedding, self.get_submodule(str(LAYERS + 1))(x))
