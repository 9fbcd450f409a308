"""Latent attention: its heads are shared by tensor parallel ranks, whether or not a model's plan has a word of it."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch

from ds_hydra.pipe.models import causal_lm
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.facts import ModelFacts
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.tensor_parallel import TensorParallel
from ds_hydra.self_check.check import check_strategies
from tests.support.families import build_model


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear"])
def test_heads_are_cut_where_the_plan_has_no_word_of_them(family: str) -> None:
    """Of Kimi's layers two have delta rules, whose projections are called alike: every rank computes these whole."""
    source = CausalLM(build_model(family, torch.float32))
    assert (source.plan.heads_cut, source.plan.no_tp, source.plan.no_slices) == (True, "", "")
    attention = "model.layers.3.self_attn"
    cut = {name: source.specs[f"{attention}.{name}.weight"].shard_shape(0, 4) for name in ("kv_b_proj", "o_proj")}
    assert cut == {"kv_b_proj": (8 * (8 + 12) // 4, 16), "o_proj": (64, 8 * 12 // 4)}
    assert source.specs[f"{attention}.kv_a_proj_with_mqa.weight"].rule.dim is None
    whole = [f"model.layers.0.self_attn.{name}.weight" for name in ("q_proj", "o_proj")]
    assert all(source.specs[name].rule.dim is None for name in whole if family == "kimi_linear")
    assert ModelFacts.from_json(source.facts.to_json()) == source.facts


def test_attention_that_cannot_be_cut_is_left_whole() -> None:
    """As it was before: of code that views its tensors by all heads, say."""
    with mock.patch.object(causal_lm, "latent_styles", return_value={"model.layers.0.self_attn.o_proj": "rowwise"}):
        source = CausalLM(build_model("deepseek_v3", torch.float32))
    assert (source.plan.heads_cut, source.plan.no_tp, source.unnamed.latent) == (False, "", False)


def rotary_parts_keep_a_part_of_their_gradient() -> Any:
    """The key that all heads share has the gradient of a rank's own heads alone."""
    right = TensorParallel._other

    def other(self: Any, style: str, *given: Any) -> None:
        if style != "mla_kv_a_proj":
            right(self, style, *given)

    return mock.patch.object(TensorParallel, "_other", other)


@pytest.mark.drawn
def test_the_self_check_finds_a_shared_key_whose_gradient_is_a_part() -> None:
    with rotary_parts_keep_a_part_of_their_gradient():
        shapes = [StrategyShape.parse("tp2"), StrategyShape.parse("pp2")]
        (objection,) = check_strategies(build_model("deepseek_v3", torch.float32), shapes, keep=False).objections()
    assert re.search(r"tp2 trains otherwise .*the gradient of model\..* is .*use strategies with tp1", objection)
