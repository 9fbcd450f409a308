"""Models that PEFT has adapted: a name in, the family of the base and PEFT's config of the adapters out."""

from __future__ import annotations

from typing import Any

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
    "lora beside another": ("llama", {"target_modules": ["q_proj", "down_proj"], "another": True}),
    "lora of some layers": ("llama_tied", {"target_modules": r"model\.layers\.[13]\..*\.(q_proj|down_proj)"}),
}
ADAPTED_WITHOUT_TP: dict[str, tuple[str, dict[str, Any]]] = {
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
