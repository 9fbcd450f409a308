"""Tiny models whose tokens meet otherwise than by the attention interface, in some layers or in all: by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.hard_models import COMMON

_SIZES = COMMON | {"initializer_range": 0.1}  # so that what tokens do to each other counts
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
