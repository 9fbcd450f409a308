"""Shrinks the config of a Hugging Face model to that of a tiny model of the same kind.

Sizes go by the names that Hugging Face's configs use. Whatever says how a layer works and not how large it is stays.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

HEAD_DIM = 8
POSITIONS = 66  # longest sequence, which is beyond a chunk of 64 tokens
FEW_POSITIONS = POSITIONS // 4  # where a rotary embedding changes from its short to its long frequencies
WINDOW = 6
VOCABULARY = 96


@dataclass(frozen=True)
class Sizes:
    """What the tiny model is given; the model's heads are divided by `head_divisor`."""

    layers: tuple[int, ...]  # those of the model that the tiny one's layers are like
    hidden: int
    old_hidden: int
    head_divisor: int = 1
    positions: int = POSITIONS
    vocabulary: int = VOCABULARY
    spread_experts: int = 1  # over so many ranks, each with as many

    def of(self, key: str, old: int) -> int:
        """The size that replaces `old` under a config's key."""
        for pattern, new in _RULES:
            if re.search(pattern, key):
                value = new(self, old) if callable(new) else new
                return int(value)
        return old


_POSITIONS = r"(max_position_embeddings|n_positions|n_ctx|max_(sequence|target)_(length|positions)|max_seq_len)$"
# Pattern of a key -> its new value, or a function of the sizes and the old one. The first that matches counts.
_RULES: tuple[tuple[str, Any], ...] = (
    (r"^(num_hidden_layers|n_layers?|num_layers|decoder_layers|num_decoder_layers)$", lambda to, _: len(to.layers)),
    (
        r"(num_key_value_heads|num_kv_heads|n_head_kv|num_query_groups|kv_n_heads|n_kv_heads?)$",
        lambda to, old: max(min(old, 1), old // to.head_divisor),
    ),
    (r"^(n_heads?|num_heads)$|attention_heads$", lambda to, old: max(1, old // to.head_divisor)),
    (r"qk_rope_head_dim$", 4),
    (r"head_dim$|^(d_kv|attention_head_size|kv_channels)$", HEAD_DIM),
    (r"^q_lora_rank$", 24),
    (r"^kv_lora_rank$", 16),
    (r"^(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|model_dim|lru_width)$", lambda to, _: to.hidden),
    (r"^word_embed_proj_dim$", lambda to, old: to.hidden if old == to.old_hidden else to.hidden // 2),
    (r"vocab_size(_per_layer_input)?$", lambda to, _: to.vocabulary),
    (r"^(num_experts_per_tok(en)?|moe_?top_?k|moe_k|top_k(_experts)?|experts_top_k)$", lambda _, old: min(old, 2)),
    (r"^(n_group|topk_group|num_expert_group)$", 1),
    (r"shared_experts$", lambda _, old: min(old, 1)),
    (r"(num|n)(_local|_routed|_moe)?_experts$|^moe_num_experts$", lambda to, old: _few_experts(old, to.spread_experts)),
    (r"^zero_expert_num$", lambda _, old: min(old, 6)),
    (r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$", lambda _, old: min(old, 1)),
    (
        r"(intermediate|ffn|inner|feed_forward|mlp)_?(hidden_)?(size|dim)|^(n_inner|d_ff|ffn_dim)$",
        lambda to, _: 3 * to.hidden // 2,
    ),
    (r"^original_max_position_embeddings$", FEW_POSITIONS),
    (_POSITIONS, lambda to, _: to.positions),
    (r"(sliding_window(_size)?|window_size|attention_chunk_size|local_attention)$", lambda _, old: min(old, WINDOW)),
    # What a token sees of those before it: of an indexer, of a recurrence at once, of an attention in blocks.
    (r"^(index_topk|indexer_budget|block_size|floor_scale)$", lambda _, old: min(old, 4)),
    (r"^(mamba_)?chunk_size$", lambda _, old: min(old, 8)),
    (r"^(mamba_d_state|ssm_state_size|state_size)$", lambda _, old: min(old, 8)),
    (r"^(index|indexer)_n_heads$|^indexer_compress_ratio$", lambda _, old: min(old, 2)),
    (r"^indexer_kv_heads$", lambda _, old: min(old, 1)),
    (r"^hidden_size_per_layer_input$|^(altup|laurel)", lambda _, old: min(old, 8)),
    (r"^num_kv_shared_layers$", lambda _, old: min(old, 1)),
    (r"^rotary_dim$", 4),
    (r"rank$", lambda _, old: min(old, 8)),
)


def shrunk_config(
    config: Any, layers: int, head_divisor: int, positions: int = POSITIONS, vocabulary: int = VOCABULARY,
    spread_experts: int = 1,
) -> Any:  # fmt: skip
    """A copy of a config with `layers` layers and small widths. Raises ValueError where it has no attention heads."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    heads, hidden = usual(text, "num_attention_heads"), usual(text, "hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        raise ValueError("the config does not say how wide a layer is and how many attention heads it has")
    kept = kept_layers(text, layers)
    sizes = Sizes(
        kept, max(1, heads // head_divisor) * HEAD_DIM, hidden, head_divisor, positions, vocabulary, spread_experts
    )
    num_layers = int(text.num_hidden_layers)
    for part in _configs(small):
        _shrink(part, sizes, num_layers)
        _agree(part)
    return small


def _few_experts(old: int, ranks: int) -> int:
    """Up to 6 of them, or more where they are to be shared by more ranks, each with as many."""
    return -(-min(old, 6) // ranks) * ranks if old % ranks == 0 else min(old, 6)


def kept_layers(config: Any, count: int) -> tuple[int, ...]:
    """`count` layers of a config, in order: one of each kind that its lists of layers tell apart, then the first ones.

    A config may have fewer layers than `count`: then they are repeated.
    """
    number = int(config.num_hidden_layers)
    lists = [v for v in vars(config).values() if isinstance(v, list | tuple) and len(v) == number]
    others = _overrides(config)
    kinds = [repr([*(values[layer] for values in lists), others.get(layer)]) for layer in range(number)]
    chosen = [layer for layer in range(number) if kinds[layer] not in kinds[:layer]][:count]
    chosen += [layer for layer in range(number) if layer not in chosen][: count - len(chosen)]
    return tuple(sorted((chosen * count)[:count]))


def usual(config: Any, key: str) -> Any:
    """A value by its usual name; where layers differ in it, which configs do not tell by `getattr`, the others'."""
    own = getattr(config, "attribute_map", {}).get(key, key)
    return vars(config)[own] if own in vars(config) else getattr(config, key, None)


def _overrides(config: Any) -> dict[int, dict[str, Any]]:
    """What single layers have otherwise than the config says, by layer."""
    spec = vars(config).get("_heterogeneity_spec")
    return {} if spec is None else dict(spec.per_layer_overrides)


def _configs(config: Any) -> Iterator[Any]:
    """A config and those within it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict"):
            yield from _configs(value)


def _shrink(config: Any, sizes: Sizes, num_layers: int) -> None:
    values = vars(config)  # written directly: setting one of two that must agree would be refused
    for key, value in list(values.items()):
        if key.startswith("_"):
            continue
        if key.endswith("_token_id"):
            values[key] = _clamped(value, sizes.vocabulary)
        elif isinstance(value, list | tuple) and len(value) == num_layers:
            values[key] = type(value)(_number(key, value[layer], sizes) for layer in sizes.layers)
        elif isinstance(value, dict):
            values[key] = _shrunk_rotary(value)
        else:
            values[key] = _number(key, value, sizes)
    if "block_size" in values and not any(re.search(_POSITIONS, key) for key in values):  # nanoGPT's word for it
        values["block_size"] = sizes.positions
    overrides = _overrides(config)
    if overrides:
        config.per_layer_config = {
            index: {key: _number(key, value, sizes) for key, value in overrides[layer].items()}
            for index, layer in enumerate(sizes.layers)
            if layer in overrides
        }


def _number(key: str, value: Any, sizes: Sizes) -> Any:
    return sizes.of(key, value) if isinstance(value, int) and not isinstance(value, bool) else value


def _clamped(token_id: Any, vocabulary: int) -> Any:
    if isinstance(token_id, list | tuple):
        return [_clamped(item, vocabulary) for item in token_id]
    return min(token_id, vocabulary - 1) if isinstance(token_id, int) else token_id


def _shrunk_rotary(parameters: dict[Any, Any]) -> dict[Any, Any]:
    """Rotary parameters, or those of each kind of layer, for heads of HEAD_DIM and few positions."""
    part = parameters.get("partial_rotary_factor", 1.0)
    small: dict[Any, Any] = {}
    for key, value in parameters.items():
        if isinstance(value, dict):
            small[key] = _shrunk_rotary(value)
        elif key == "original_max_position_embeddings":
            small[key] = FEW_POSITIONS
        elif key in ("short_factor", "long_factor"):
            small[key] = list(value)[: _rotary_pairs(part)]
        elif key == "mrope_section":
            small[key] = rotary_sections(part, value)
        else:
            small[key] = value
    return small


def rotary_sections(part: float, like: Sequence[int] = ()) -> list[int]:
    """How many pairs of a head, of which so large a part is turned, go by each axis of positions: of three, or of those
    of a model. Of three the one that has another number than the two others stays where it is."""
    pairs = _rotary_pairs(part)
    if len(like) > 3:
        return [pairs // len(like)] * len(like)
    sections = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
    return sections[::-1] if len(like) == 3 and like[0] == like[1] != like[2] else sections


def _rotary_pairs(part: float) -> int:
    return int(HEAD_DIM * part) // 2


def _agree(config: Any) -> None:
    """Sizes that follow from others in some kinds of models."""
    values = vars(config)
    if _rotary_kind(values.get("rope_parameters")) == "dynamic":  # changes where the model's positions end
        values["max_position_embeddings"] = FEW_POSITIONS
    if isinstance(values.get("qk_rope_head_dim"), int):  # latent attention: rotary tables are made from head_dim
        values["head_dim"] = values["qk_rope_head_dim"]
        if "num_key_value_heads" in values:
            values["num_key_value_heads"] = values["num_attention_heads"]
        if "qk_head_dim" in values:
            values["qk_head_dim"] = HEAD_DIM + values["qk_rope_head_dim"]
    elif "head_dim" in values and values["head_dim"] is None:
        values["head_dim"] = HEAD_DIM
    if isinstance(values.get("hidden_size"), int):
        _agree_state_space(values)


_SSM_HEADS = {"mamba_n_heads": "mamba_d_head", "mamba_num_heads": "mamba_head_dim", "n_mamba_heads": "mamba_headdim"}

_SSM_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")


def _agree_state_space(values: dict[str, Any]) -> None:
    """Heads of a state space layer, whose widths are together those of the layer, times what it expands by."""
    width = int(values.get("mamba_expand") or values.get("expand") or 2) * values["hidden_size"]
    for heads, size in _SSM_HEADS.items():
        if isinstance(values.get(heads), int) and size in values:
            values[heads], values[size] = width // HEAD_DIM, HEAD_DIM
            values |= {"mamba_d_ssm": width} if isinstance(values.get("mamba_d_ssm"), int) else {}
            # So that every degree divides them as before: those that divide attention heads divide these heads too.
            groups = (key for key in _SSM_GROUPS if isinstance(values.get(key), int))
            values |= {key: math.gcd(values[key], values[heads]) for key in groups}


def _rotary_kind(parameters: Any) -> Any:
    return parameters.get("rope_type") if isinstance(parameters, dict) else None
