"""Models that are not plain decoders, tiny: each breaks an assumption that an engine might make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForMaskedLM

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_BERT = COMMON | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
_OPT = COMMON | {"ffn_dim": 96, "attention_dropout": 0.0, "dropout": 0.0, "pad_token_id": 1}
_GPT2 = {"vocab_size": 97, "n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 1024, "attn_pdrop": 0.0}
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


def drawn_anew(model: Any, seed: int) -> Any:
    """The model with other values of its parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model
