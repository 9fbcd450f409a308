"""Models that change what a layer has made in place, or cut its gradient, train under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.check import check_strategies
from tests.support.small_job import small_model

SIZES = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def of_type(model_type: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | settings)))


def clipped() -> Any:
    return of_type("olmo", intermediate_size=96, num_key_value_heads=6, clip_qkv=0.5)


def added_in_place() -> Any:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return of_type("roc_bert", is_decoder=True, intermediate_size=96, **rates)


def detached(path: str) -> Any:
    model = small_model(tied=False)
    model.get_submodule(path).register_forward_hook(lambda module, args, out: out.detach())
    return model


def stray_heads() -> Any:
    """Of keys and values, in a config whose model has no such setting."""
    return of_type("gpt2", n_positions=256, num_key_value_heads=3, **NO_DROPOUT)


MODELS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "queries clipped": (clipped, ("tp2pp2", "tp2")),
    "embeddings added": (added_in_place, ("pp2/v", "pp2/zb-h1")),
    "layer detached": (lambda: detached("model.layers.1"), ("tp1", "pp2", "pp4", "pp2/v")),
    "embedding detached": (lambda: detached("model.embed_tokens"), ("tp2", "pp2", "pp2/v")),
    "stray heads": (stray_heads, ("sp2", "tp3", "sp3")),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", MODELS)
def test_it_is_equal(name: str) -> None:
    make, texts = MODELS[name]
    strategies = [*map(StrategyShape.parse, texts)]
    options = StageOptions(token_sharding=True, functions="auto")
    assert check_strategies(make(), strategies, options, keep=False).objections() == []


def test_heads_are_counted_where_layers_attend() -> None:
    assert (CausalLM(stray_heads()).plan.num_heads, CausalLM(stray_heads()).plan.num_kv_heads) == (6, 6)
    assert (CausalLM(small_model()).plan.num_heads, CausalLM(small_model()).plan.num_kv_heads) == (8, 4)
