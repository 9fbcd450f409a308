"""Block-diagonal causal attention of packed rows, behind Hugging Face's attention interface."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.pipe.attention.backends import varlen_attention
from ds_hydra.pipe.dropout import AttentionDropout
from ds_hydra.pipe.rows import Pack
from ds_hydra.zero_hetero.errors import ConfigError

ATTENTION_NAME = "hydra_varlen"
CHUNKED = "chunked_attention"
_DROPS = "_hydra_attention_dropout"
_PACK = "_hydra_pack"

# A rate and the heads that these ranks compute -> their dropout; None: none is to be computed.
MakeDropout = Callable[[float, int], AttentionDropout | None]


class NotPackedError(ConfigError):
    """A module does not attend in a way that packed attention implements."""


# Keywords that Hugging Face passes along and that change nothing here (positions are already in q and k). Any other one
# that has a value is an error: it may be a new kind of mask of a new model, which must not be dropped in silence.
_HARMLESS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "cache",
        "past_key_values",
        "past_key_value",
    }
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"}
    | {"is_causal", "num_items_in_batch"}
)


def hydra_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    hydra: Pack | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer in Hugging Face's calling convention.

    query (1, heads, T_local, d), key and value (1, kv_heads, T_local, d), after rotary embedding;
    returns (1, T_local, heads, d_v). `s_aux` (heads,) are attention sinks. Raises ConfigError on a feature that is not
    implemented. The pack is the one that the module was told of, or the keyword `hydra` of a layer list.
    """
    _refuse_features(module, attention_mask, features)
    told: Callable[[], Pack] | None = getattr(module, _PACK, None)
    hydra = told() if hydra is None and told is not None else hydra
    if hydra is None:  # sequences of a row would see each other
        raise NotPackedError(
            f"{type(module).__name__} attends for a module that is none of the model's, which knows of no pack"
        )
    if key.shape[2] != query.shape[2]:  # of tokens that are put together, say
        raise NotPackedError(
            f"{type(module).__name__} attends to {key.shape[2]} keys for {query.shape[2]} tokens: which of them are of "
            "which sequence of a pack is not known"
        )
    drop, chunk = _dropout_of(module, dropout, query.shape[1]), _chunk_of(module)
    if dropout and chunk is not None:
        raise NotPackedError(f"{type(module).__name__} drops what it attends to in chunks: set attention_dropout to 0")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (T_local, heads, d)
    if hydra.sp == 1 and torch.is_grad_enabled():
        v = _without_the_rest(v, q, k)
    context = None
    if hydra.chunk is not None:
        hydra.chunk.contexts.note_heads(query.shape[1], key.shape[1])
        context = hydra.chunk.contexts.of(module)
    out = varlen_attention(
        q,
        k,
        v,
        hydra,
        scale=scaling,
        window=sliding_window,
        chunk=chunk,
        softcap=softcap,
        sinks=s_aux,
        dropout=drop,
        context=context,
        seen=hydra.seen if hydra.seen is not None and layer_type(module) in hydra.seen.layers else None,
    )
    return out.unsqueeze(0).contiguous(), None  # as Hugging Face's are, which some models view as rows of features


def _refuse_features(module: nn.Module, attention_mask: Tensor | None, features: Mapping[str, Any]) -> None:
    """ConfigError for attention that is not causal or has a feature that is not implemented."""
    if not getattr(module, "is_causal", True):
        raise ConfigError(
            f"the attention of {type(module).__name__} is not causal (is_causal is False): tokens would see those "
            "behind them. Only causal language models are trained in packs; set is_decoder=True, or "
            "use_bidirectional_attention=False, in the model's config if it is one"
        )
    unknown = {name for name, given in features.items() if given is not None and name not in _HARMLESS}
    if unknown or attention_mask is not None or features.get("is_causal") is False:
        what = ", ".join(sorted(unknown)) or ("attention_mask" if attention_mask is not None else "is_causal=False")
        raise NotPackedError(
            f"{type(module).__name__} uses the attention feature {what}, which packed attention does not "
            "implement; ignoring it would train another model"
        )


def _chunk_of(module: nn.Module) -> int | None:
    """Tokens of a chunk, in a layer whose tokens see those of their own chunk (Llama 4): as the model's config has it,
    since masks alone tell it to others."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    return int(config.attention_chunk_size) if CHUNKED in kinds and layer_type(module) == CHUNKED else None


def layer_type(module: nn.Module) -> str:
    """Of which type the model's config says that the layer of an attention is; empty: it names none. Raises
    NotPackedError where the layer does not know its number."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if not kinds:
        return ""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise NotPackedError(f"{type(module).__name__} has no layer_idx, and its config has layers of {set(kinds)}")
    return str(kinds[index])


def _without_the_rest(v: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The values, which the backward keeps, apart from a tensor of which nothing else is kept.

    Of one product that makes queries, keys and values, what is kept may be the values and turned copies of the others:
    as a view the values would keep the queries and keys that were turned, too.
    """
    storage = v.untyped_storage()
    shared = {x.untyped_storage().data_ptr() for x in (q, k)}
    if v.is_meta or storage.nbytes() <= v.nbytes or storage.data_ptr() in shared:
        return v
    return v.clone(memory_format=torch.contiguous_format)


def let_attention_drop(module: nn.Module, make: MakeDropout) -> None:
    """Tell a module that calls `hydra_attention` by which rule its probabilities are dropped."""
    object.__setattr__(module, _DROPS, make)


def _dropout_of(module: nn.Module, rate: float, heads: int) -> AttentionDropout | None:
    make: MakeDropout | None = getattr(module, _DROPS, None)
    if rate and make is None:
        raise ConfigError(
            f"{type(module).__name__} drops {rate} of its attention, but did not when the model was traced: set "
            "attention_dropout to 0 in the model's config"
        )
    return make(rate, heads) if rate and make is not None else None


def tell_pack(model: nn.Module, pack_of: Callable[[], Pack]) -> None:
    """Let all modules that call `hydra_attention` know the pack that runs. It is asked for when a module attends, also
    where a layer is computed again, in whatever thread."""
    for module in model.modules():
        object.__setattr__(module, _PACK, pack_of)


def use_in(model: nn.Module, name: str = ATTENTION_NAME) -> None:
    """Make a copy of a model attend by what Hugging Face knows by this name; the model that it was copied from keeps
    its own."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name  # type: ignore[union-attr]


def for_boxes(model: Any) -> str:
    """What a model attends by where it runs one sequence at a time: what it does now, if that runs on any device."""
    name = model.config.get_text_config()._attn_implementation
    return name if name in ("eager", "sdpa") else "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def packed_configs(model: nn.Module) -> list[Any]:
    """The configs of a model's modules that attend by `hydra_attention`."""
    found = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    return [each for each in found.values() if getattr(each, "_attn_implementation", None) == ATTENTION_NAME]


@contextmanager
def attending_by(name: str, configs: Sequence[Any]) -> Iterator[None]:
    """Within it, modules with these configs attend by what has this name, so that masks are made for that."""
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config in configs:
            config._attn_implementation_internal = ATTENTION_NAME


def let_attend_alone(module: nn.Module, name: str) -> None:
    """Make one module of a copy, and what is in it, attend by what Hugging Face knows by this name."""
    copies: dict[int, Any] = {}
    for each in module.modules():
        config = getattr(each, "config", None)
        if hasattr(config, "_attn_implementation"):
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                copies[id(config)]._attn_implementation_internal = name
            each.config = copies[id(config)]


@cache
def register() -> None:
    """Make ATTENTION_NAME known to Hugging Face; no model uses it but our stages, whose configs name it."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, hydra_attention)
