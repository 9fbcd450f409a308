"""Tiny models of many families for tests, by name: freshly initialised, and the same in every process."""

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
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
)

import tests.support.families
import tests.support.own_models  # noqa: F401  (registers the model "one_class")
from ds_hydra.pipe.attention.backends import varlen_attention
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.rows import Pack
from tests.support.changed_models import CHANGED, CHANGED_LINEARS


# --- The attention "dense" of references in FP64: Hugging Face's "eager" has an FP32 softmax in any dtype.
def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Softcapped, windowed, causal attention with sinks over the whole score matrix, in the dtype of its inputs."""
    assert attention_mask is None, "no mask function is registered for it"
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])[None]
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if s_aux is not None:  # a score of each head for a key without a value
        scores = torch.cat((scores, s_aux[None, :, None, None].expand(1, -1, len(distance), 1)), dim=-1)
    weights = F.dropout(torch.softmax(scores, dim=-1)[..., : len(distance)], dropout)
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register("dense", dense_attention)


# --- Models that are not plain decoders, tiny: each breaks an assumption that an engine might make.
VOCAB = 97
HEADS, KV_HEADS, LAYERS = 8, 4, 4
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# With attention that looks somewhere, so that the gradients of queries and keys count.
_SIZES: dict[str, Any] = COMMON | {"initializer_range": 0.1}
_BERT = COMMON | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
_OPT = COMMON | {"ffn_dim": 96, "attention_dropout": 0.0, "dropout": 0.0, "pad_token_id": 1}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 1024, "attn_pdrop": 0.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 256,
    "factor": 4.0,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}

# Name -> (model type of Hugging Face, settings).
HARD_MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "final norm without parameters": ("olmo", COMMON),
    "one norm before and after the layers": ("nanochat", COMMON),
    "activation with parameters": ("apertus", COMMON),
    "norms of queries and keys (GLM-4.5)": (
        "glm4_moe",
        COMMON | {"use_qk_norm": True, "n_routed_experts": 4, "moe_intermediate_size": 48, "num_experts_per_tok": 2},
    ),
    "norms of queries and keys (Phi)": (
        "phi",
        COMMON | {"qk_layernorm": True, "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "norms of each head (Command R+)": ("cohere", COMMON | {"use_qk_norm": True}),
    "longrope": ("llama", COMMON | {"rope_parameters": _LONGROPE}),
    "dynamic rope": ("llama", COMMON | {"rope_parameters": _DYNAMIC}),
    "dropout": ("gpt2", _GPT2 | {"resid_pdrop": 0.3, "embd_pdrop": 0.3}),
    "dropout by a function": ("opt", _OPT | {"dropout": 0.1}),
    "dropout (Phi)": ("phi", COMMON | {"attention_dropout": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "noise on what is routed": ("mixtral", COMMON | {"num_local_experts": 4, "router_jitter_noise": 0.1}),
    "dropout beside experts": (
        "qwen3_moe",
        COMMON | {"attention_dropout": 0.1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "bidirectional": ("gemma3_text", COMMON | {"head_dim": 16, "use_bidirectional_attention": True}),
    "masked language model": ("bert-mlm", _BERT),
    "positions from the padding id": ("roberta", _BERT | {"pad_token_id": 1, "is_decoder": True}),
    "BERT as a decoder": ("bert", _BERT | {"is_decoder": True}),
    "embeddings of another width (OPT-350m)": ("opt", _OPT | {"word_embed_proj_dim": 32}),
    "embeddings scaled in place": (
        "ctrl",
        {"vocab_size": 97, "n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 1024, "dff": 96}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "layers called by keyword": ("modernbert-decoder", COMMON | {"local_attention": 8, "pad_token_id": 0}),
    "embeddings of each layer": (
        "gemma4_text",
        COMMON | {"head_dim": 16, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8},
    ),
    "random routing": ("phimoe", COMMON | {"num_local_experts": 4}),
}


def hard_model(name: str) -> Any:
    """A freshly made model of HARD_MODELS."""
    model_type, settings = HARD_MODELS[name]
    if model_type == "bert-mlm":
        return BertForMaskedLM(BertConfig(**settings))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))


# --- Tiny mixtures of experts for what FAMILIES has none for: by name; and routers whose choice no rounding
# changes.
_WIDE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
SURE = "mixtral, sure of its experts"

# Name -> model type and settings, as in FAMILIES.
ROUTED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "experts for eight": ("qwen3_moe", _SIZES | _WIDE),
    "experts for six": (
        "qwen3_moe",
        _SIZES | _WIDE | {"num_experts": 6, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6,
                          "head_dim": 8},
    ),
    SURE: ("mixtral", _SIZES | {"num_local_experts": 4}),
}  # fmt: skip


def made_sure(model: Any) -> Any:
    """The model with tokens that go to experts by their number, far from a tie, whatever the layers before make of
    them: a feature for each expert says so in the embedding, the routers read little else, and what layers add to
    these features is small.

    In 16 bit the router of any other model sends some tokens elsewhere than the same model does that adds up in another
    order, and a gradient then differs by all that an expert makes of a token.
    """
    experts = model.config.num_local_experts
    of_tokens = torch.arange(model.config.vocab_size)[:, None] + torch.arange(experts)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, -experts:] = 1.5 * (of_tokens * 3 % experts).float() - 2.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[-experts:] *= 0.02
            layer.mlp.experts.down_proj[:, -experts:] *= 0.02
            layer.post_attention_layernorm.weight[-experts:] = 1.0
            layer.mlp.gate.weight *= 0.1
            layer.mlp.gate.weight[:, -experts:] = 0.4 * torch.eye(experts)
    return model


# --- Models that PEFT has adapted: a name in, the family of the base and PEFT's config of the adapters out.
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_SAVED = ["embed_tokens", "lm_head", "input_layernorm"]
# Random weights in A and in B: with PEFT's zeros in B, A has no gradient at first.
_SETTINGS: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM"}

# Name -> family of the base and settings of its LoraConfig ("another": there is a second adapter). Tensor parallel
# ranks take those of the first table.
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": "all-linear"}),
    "lora with dropout": ("llama", {"target_modules": "all-linear", "lora_dropout": 0.2}),
    "lora with biases": ("qwen2", {"target_modules": _ATTENTION, "bias": "lora_only", "use_rslora": True}),
    "lora of fused layers": ("phi3", {"target_modules": "all-linear", "rank_pattern": {"qkv_proj": 3}}),
    "lora beside experts": ("mixtral", {"target_modules": _ATTENTION}),
    "lora and whole modules": ("llama", {"target_modules": "all-linear", "modules_to_save": _SAVED}),
    "dora": ("llama", {"target_modules": "all-linear", "use_dora": True}),
    "dora with dropout": ("qwen2", {"target_modules": [*_ATTENTION, "up_proj"], "use_dora": True, "lora_dropout": 0.2}),
    "lora and tokens": ("llama", {"target_modules": ["q_proj", "down_proj"], "trainable_token_indices": [5, 7, 40]}),
    "lora beside another": ("llama", {"target_modules": ["q_proj", "down_proj"], "another": True}),
    "lora of some layers": ("llama_tied", {"target_modules": r"model\.layers\.[13]\..*\.(q_proj|down_proj)"}),
}
ADAPTED_WITHOUT_TP: dict[str, tuple[str, dict[str, Any]]] = {
    "lora and tied tokens": ("llama_tied", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7, 40]}),
    "lora of the ends": ("llama", {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}),
    "lora of Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "lora with biases of its own": ("qwen2", {"target_modules": _ATTENTION, "lora_bias": True}),
    "lora in boxes": ("lfm2", {"target_modules": "all-linear"}),
    "lora in boxes with dropout": (
        "qwen3_next",
        {"target_modules": ["in_proj_qkvz", "out_proj", "q_proj"], "lora_dropout": 0.2},
    ),
}
# Beside layers whose heads tensor parallel ranks share.
ADAPTED_BY_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora of heads": ("qwen3_5", {"target_modules": ["in_proj_qkv", "in_proj_b", "out_proj", "q_proj"]}),
    "lora of heads with dropout": ("bamba", {"target_modules": ["in_proj", "out_proj"], "lora_dropout": 0.2}),
}
# Adapters of stacks of experts.
_STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTED_STACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora of stacks": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": _STACKS}),
    "lora of stacks (GPT-OSS)": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": _STACKS}),
    "lora of one stack": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": _STACKS[1:]}),
}
_ALL = ADAPTED_STACKS | ADAPTED | ADAPTED_WITHOUT_TP | ADAPTED_BY_HEADS


def base_family(name: str) -> str:
    """The family of the model beneath the adapters; any other family is its own."""
    return _ALL.get(name, (name, {}))[0]


def adapted(name: str, base: Any) -> Any:
    """What `peft.get_peft_model` makes of a model of the base's family; frozen but for the adapters."""
    from peft import LoraConfig, get_peft_model  # what trains other models does without

    _, settings = _ALL[name]
    own = {key: value for key, value in (_SETTINGS | settings).items() if key != "another"}
    # Adapters of a 16 bit base in 16 bit: the reference computes all of it in one type, as the ranks do.
    model = get_peft_model(base, LoraConfig(**own), autocast_adapter_dtype=False)
    if "another" in settings:  # which is not in use
        model.add_adapter("other", LoraConfig(**(_SETTINGS | {"r": 2, "target_modules": ["q_proj", "v_proj"]})))
    return model


# --- Tiny models of kinds of attention that FAMILIES has none of: by name.
# Values are narrower than keys, of which a half has no positions.
_LATENT: dict[str, Any] = _SIZES | {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

# Name -> model type and settings, as in FAMILIES.
LATENT: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", _LATENT | {"topk_method": "greedy", "num_experts_per_tok": 2}),
    "deepseek_v3": ("deepseek_v3", _LATENT),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT | {"mlp_layer_types": ["dense", *["sparse"] * 3]}),
    "kimi_linear": (
        "kimi_linear",
        _LATENT
        | {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_heads": 4, "linear_head_dim": 8,
           "num_experts": 4},
    ),
}  # fmt: skip
# Three layers attend in chunks; queries of the fourth, which has no rotary embedding, are scaled by their position. A
# chunk is longer than what a trial of the model sees.
_CHUNKED: dict[str, Any] = {"intermediate_size_mlp": 96, "head_dim": 8, "num_local_experts": 4, "floor_scale": 40,
                            "attention_chunk_size": 48}  # fmt: skip
# Dropout of attention's weights in windows, behind a softcap, beside sinks and where values are narrower than keys.
_DROPPED: dict[str, Any] = {"attention_dropout": 0.1, "head_dim": 16, "sliding_window": 8}
DROPPING: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "windows, dropout": ("gemma3_text", _SIZES | _DROPPED),
    "softcap, dropout": ("gemma2", _SIZES | _DROPPED),
    "sinks, dropout": ("gpt_oss", _SIZES | _DROPPED | {"num_local_experts": 4}),
    "latent, dropout": ("deepseek_v3", _LATENT | {"attention_dropout": 0.1}),
}
ATTENDING: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **LATENT,
    **DROPPING,
    "llama4": ("llama4_text", _SIZES | _CHUNKED),
}


# --- Tiny models whose tokens meet otherwise than by the attention interface, in some layers or in all: by
# name.
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "output_router_logits": False,
}
_MIXED: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2}
_MAMBA_2: dict[str, Any] = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8,
                            "mamba_n_groups": 1}  # fmt: skip

# Name -> model type and settings, as in FAMILIES. A word in brackets tells what is a box.
BOXED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bloom": (
        "bloom",
        {"vocab_size": 97, "hidden_size": 64, "n_layer": 4, "n_head": 8, "initializer_range": 0.1,
         "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "gptj, dropout": (
        "gptj",
        {"vocab_size": 97, "n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 1024, "rotary_dim": 4,
         "initializer_range": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    ),
    "qwen3_next": ("qwen3_next", _SIZES | _DELTA | _EXPERTS | _MIXED),
    "lfm2": ("lfm2", _SIZES | {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}),
    "bamba": (
        "bamba",
        _SIZES | _MAMBA_2 | {"attn_layer_indices": [1, 3]},
    ),
    "falcon_h1": (
        "falcon_h1",
        _SIZES | {"head_dim": 8, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
                  "mamba_chunk_size": 8, "mamba_n_groups": 1},
    ),
    "one class": ("one_class", {}),
    "one class, tied, dropout": ("one_class", {"tie_word_embeddings": True, "dropout": 0.1, "cap": 5.0}),
}  # fmt: skip

# Recurrent layers whose heads tensor parallel ranks share: projections in one and apart; fewer groups of B and C
# than ranks.
BY_HEADS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", _SIZES | _DELTA | _MIXED),
    "olmo_hybrid": (
        "olmo_hybrid",
        _SIZES | _MIXED | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
                           "linear_value_head_dim": 12},
    ),
    "nemotron_h": (
        "nemotron_h",
        _SIZES | {"mamba_num_heads": 16, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8,
                  "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "head_dim": 8},
    ),
    "granite_4": (
        "granitemoehybrid",
        _SIZES | _MAMBA_2 | _MIXED | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 32},
    ),
}  # fmt: skip

# Hybrids with experts, of which rows of the table of training cases tell.
WITH_EXPERTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_5_moe": ("qwen3_5_moe_text", _SIZES | _DELTA | _EXPERTS | _MIXED),
    "granite, experts": (
        "granitemoehybrid",
        _SIZES | _MAMBA_2 | _MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
                                      "intermediate_size": 48},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        _SIZES | {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1},
    ),
    "jamba": (
        "jamba",
        _SIZES | {"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                  "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
    ),
}  # fmt: skip


# --- Tiny models of many families for tests: a name in, a freshly initialised model out, the same in every
# process. Names are keys of FAMILIES, of BALANCED, VALUED, BOXED, BY_HEADS, WITH_EXPERTS, ROUTED, ATTENDING and
# HARD_MODELS, of CHANGED and CHANGED_LINEARS (a Llama that was changed), of ADAPTED, ADAPTED_BY_HEADS,
# ADAPTED_STACKS and ADAPTED_WITHOUT_TP (a model with PEFT's adapters), "layer_list" for a DeepSpeed
# `PipelineModule` with a tied layer, or the path of a Hugging Face config file.
LAYER_LIST = "layer_list"
OTHER_SIZES = frozenset({"llama_3_layers", "llama_8_layers", "llama_1_key_head", "llama_8_key_heads"})

_NO_DROPOUT = {"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

# Name -> (model type of Hugging Face, settings beside or in place of the common ones).
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", _SIZES),
    "llama_tied": ("llama", _SIZES | {"tie_word_embeddings": True}),
    "llama_3_layers": ("llama", _SIZES | {"num_hidden_layers": 3}),
    "llama_8_layers": ("llama", _SIZES | {"num_hidden_layers": 8, "tie_word_embeddings": True}),
    "llama_1_key_head": ("llama", _SIZES | {"num_key_value_heads": 1}),
    "llama_8_key_heads": ("llama", _SIZES | {"num_key_value_heads": HEADS}),
    "qwen2": ("qwen2", _SIZES),
    "qwen3": ("qwen3", _SIZES | {"head_dim": 16}),
    "mistral": ("mistral", _SIZES | {"sliding_window": 6}),
    "gemma2": ("gemma2", _SIZES | {"head_dim": 16, "sliding_window": 8}),  # tied, softcaps in attention and head
    "gemma3_text": ("gemma3_text", _SIZES | {"head_dim": 16, "sliding_window": 8}),
    "phi": ("phi", _SIZES | _NO_DROPOUT),
    "phi3": ("phi3", _SIZES),
    "granite": ("granite", _SIZES | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "mixtral": ("mixtral", _SIZES | {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", _SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    "olmo2": ("olmo2", _SIZES),
    "cohere": ("cohere", _SIZES),
    "gpt_neox": ("gpt_neox", _SIZES),
    "starcoder2": ("starcoder2", _SIZES | _NO_DROPOUT | {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "glm4": ("glm4", _SIZES | {"head_dim": 8}),
    "smollm3": ("smollm3", _SIZES),
    "gpt_oss": ("gpt_oss", _SIZES | {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8}),  # attention sinks
    "gpt2": ("gpt2", _GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
}
# Models whose routers have a loss, which counts enough to be felt in every gradient.
_ROUTER_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
BALANCED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mixtral, balanced": ("mixtral", _SIZES | {"num_local_experts": 4} | _ROUTER_LOSS),
    "qwen3_moe, balanced": (
        "qwen3_moe",
        _SIZES | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48} | _ROUTER_LOSS,
    ),
    "olmoe, balanced": ("olmoe", _SIZES | {"num_experts": 4, "num_experts_per_tok": 2} | _ROUTER_LOSS),
}
# Critics: a head of one output for each token.
_OF_VALUES = {"num_labels": 1, "classifier_dropout": 0.0}
VALUED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama, values": ("llama", _SIZES | _OF_VALUES),
    "qwen3_moe, values": ("qwen3_moe", {**FAMILIES["qwen3_moe"][1], **_OF_VALUES}),
    "gpt2, values": ("gpt2", {**FAMILIES["gpt2"][1], **_OF_VALUES}),
}
# Model types whose attention feature (softcap, sinks) Hugging Face's SDPA drops or refuses.
NEEDS_EAGER = frozenset({"gemma2", "gpt_oss"})
NOT_BY_INTERFACE = frozenset({"bloom", "gptj", "one_class"})  # they attend by code of their own


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
