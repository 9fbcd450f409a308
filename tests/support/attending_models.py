"""Tiny models of kinds of attention that FAMILIES has none of: by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.hard_models import COMMON

_SIZES = COMMON | {"initializer_range": 0.1}  # so that what tokens do to each other counts
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
