"""Tiny mixtures of experts for what FAMILIES has none for: by name; and routers whose choice no rounding changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.support.hard_models import COMMON

_SIZES = COMMON | {"initializer_range": 0.1}
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
