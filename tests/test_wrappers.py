"""What stands around the forwards of a stage's modules, in one order, told as text."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from ds_hydra.pipe import wrappers
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.lone_rank import _Silent
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.pipe.wrappers import WRAPPERS, wrap
from tests.support.families import build_model

_NUMBER = re.compile(r"[.]\d+(?=[.]|$)")
ALL = StageOptions(token_sharding=True, functions="recompute")

# Family, pipeline, options -> chains of the last stage's modules, with layers that have the same.
TOLD: dict[tuple[str, str, StageOptions], str] = {
    ("llama", "tp2pp2", StageOptions()): """
1 : tensor parallel: one copy for its columns
1 lm_head: tensor parallel: column
2 model.layers.*.mlp.down_proj: tensor parallel: row
2 model.layers.*.mlp.gate_proj: tensor parallel: column
2 model.layers.*.mlp.up_proj: tensor parallel: column
2 model.layers.*.mlp: tensor parallel: one copy for its columns
2 model.layers.*.self_attn.k_proj: tensor parallel: column
2 model.layers.*.self_attn.o_proj: tensor parallel: row
2 model.layers.*.self_attn.q_proj: tensor parallel: column
2 model.layers.*.self_attn.v_proj: tensor parallel: column
2 model.layers.*.self_attn: tensor parallel: one copy for its columns
2 model.layers.*: handed on
2 model.layers.*: recomputed
""",
    ("llama", "tp2pp2/zb-h1", ALL): """
1 : tensor parallel: one copy for its columns
1 lm_head: tensor parallel: column
4 model.layers.*.input_layernorm: function: norm
2 model.layers.*.mlp.down_proj: tensor parallel: row <- put off
2 model.layers.*.mlp.gate_proj: tensor parallel: column of shared tokens <- packed: one of several <- put off
2 model.layers.*.mlp.up_proj: tensor parallel: column of shared tokens <- packed: one of several <- put off
2 model.layers.*.mlp: function: gated MLP
2 model.layers.*.mlp: tensor parallel: block of shared tokens <- packed: forgets <- function: gated MLP
4 model.layers.*.post_attention_layernorm: function: norm
2 model.layers.*.self_attn.k_proj: tensor parallel: column of shared tokens <- packed: one of several <- put off
2 model.layers.*.self_attn.o_proj: tensor parallel: row <- put off
2 model.layers.*.self_attn.q_proj: tensor parallel: column of shared tokens <- packed: one of several <- put off
2 model.layers.*.self_attn.v_proj: tensor parallel: column of shared tokens <- packed: one of several <- put off
2 model.layers.*.self_attn: function: rotary
2 model.layers.*.self_attn: tensor parallel: block of shared tokens <- packed: forgets <- function: rotary
2 model.layers.*: handed on
2 model.layers.*: recomputed
1 model.norm: function: norm
""",
    ("longrope", "pp2", StageOptions(functions="auto")): """
4 model.layers.*.input_layernorm: function: norm
2 model.layers.*.mlp.gate_proj: packed: one of several
2 model.layers.*.mlp.up_proj: packed: one of several
2 model.layers.*.mlp: packed: forgets
4 model.layers.*.post_attention_layernorm: function: norm
2 model.layers.*.self_attn.k_proj: packed: one of several
2 model.layers.*.self_attn.q_proj: packed: one of several
2 model.layers.*.self_attn.v_proj: packed: one of several
2 model.layers.*.self_attn: function: rotary
2 model.layers.*.self_attn: packed: forgets <- function: rotary
2 model.layers.*: handed on
2 model.layers.*: recomputed
1 model.norm: function: norm
1 model.rotary_emb: by length
""",
    ("dropout (Phi)", "tp2", StageOptions()): """
1 : tensor parallel: one copy for its columns
1 lm_head: tensor parallel: column
1 model.embed_dropout: draws
1 model.embed_tokens: tensor parallel: vocabulary
4 model.layers.*.mlp.fc1: tensor parallel: column
4 model.layers.*.mlp.fc2: tensor parallel: row
4 model.layers.*.mlp: tensor parallel: one copy for its columns
4 model.layers.*.resid_dropout: draws
4 model.layers.*.self_attn.dense: tensor parallel: row
4 model.layers.*.self_attn.k_proj: tensor parallel: column
4 model.layers.*.self_attn.q_proj: tensor parallel: column
4 model.layers.*.self_attn.v_proj: tensor parallel: column
4 model.layers.*.self_attn: tensor parallel: one copy for its columns <- draws
4 model.layers.*: recomputed <- draws
""",
    ("lora", "tp2", ALL): """
1 : tensor parallel: one copy for its columns
1 lm_head: tensor parallel: column
1 model.embed_tokens: tensor parallel: vocabulary
4 model.layers.*.input_layernorm: function: norm
4 model.layers.*.mlp.down_proj.base_layer: tensor parallel: part of a row
4 model.layers.*.mlp.down_proj: tensor parallel: row
4 model.layers.*.mlp.gate_proj.base_layer: tensor parallel: column of shared tokens
4 model.layers.*.mlp.gate_proj.lora_B.default: tensor parallel: all rows
4 model.layers.*.mlp.gate_proj.lora_dropout.default: tensor parallel: own rows
4 model.layers.*.mlp.up_proj.base_layer: tensor parallel: column of shared tokens
4 model.layers.*.mlp.up_proj.lora_B.default: tensor parallel: all rows
4 model.layers.*.mlp.up_proj.lora_dropout.default: tensor parallel: own rows
4 model.layers.*.mlp: tensor parallel: block of shared tokens
4 model.layers.*.post_attention_layernorm: function: norm
4 model.layers.*.self_attn.k_proj.base_layer: tensor parallel: column of shared tokens
4 model.layers.*.self_attn.k_proj.lora_B.default: tensor parallel: all rows
4 model.layers.*.self_attn.k_proj.lora_dropout.default: tensor parallel: own rows
4 model.layers.*.self_attn.o_proj.base_layer: tensor parallel: part of a row
4 model.layers.*.self_attn.o_proj: tensor parallel: row
4 model.layers.*.self_attn.q_proj.base_layer: tensor parallel: column of shared tokens
4 model.layers.*.self_attn.q_proj.lora_B.default: tensor parallel: all rows
4 model.layers.*.self_attn.q_proj.lora_dropout.default: tensor parallel: own rows
4 model.layers.*.self_attn.v_proj.base_layer: tensor parallel: column of shared tokens
4 model.layers.*.self_attn.v_proj.lora_B.default: tensor parallel: all rows
4 model.layers.*.self_attn.v_proj.lora_dropout.default: tensor parallel: own rows
4 model.layers.*.self_attn: tensor parallel: block of shared tokens <- function: rotary
4 model.layers.*: recomputed
1 model.norm: function: norm
""",
}


def told(family: str, shape: str, options: StageOptions) -> str:
    source = CausalLM(base_of(build_model(family, torch.float32)), options)
    pipeline = place_pipeline(PipelineShape.parse(shape), 0, source.plan.num_layers)
    rank = pipeline.ranks[-1]
    place = StagePlace.all_of(
        pipeline, rank, lambda ranks: _Silent(ranks.index(rank), len(ranks)) if len(ranks) > 1 else None,
        token_sharding=source.plan.token_sharding,
    )[0]  # fmt: skip
    chains = source.build(place, torch.device("cpu"), torch.float32).chains
    counts = Counter(f"{_NUMBER.sub('.*', path)}: {chain}" for path, chain in chains.items())
    return "\n" + "".join(f"{count} {line}\n" for line, count in sorted(counts.items()))


@pytest.mark.drawn
@pytest.mark.parametrize("row", TOLD, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_stage_tells_what_stands_around_its_modules(row: tuple[str, str, StageOptions]) -> None:
    assert told(*row) == TOLD[row]


def test_another_order_is_refused() -> None:
    module: Any = nn.Linear(2, 2)
    wrap(module, module.forward, "packed", "one of several")
    wrap(module, module.forward, "tensor parallel", "column")
    with pytest.raises(AssertionError, match="function would stand around tensor parallel"):
        wrap(module, module.forward, "function", "norm")
    assert wrappers.chains(module) == {"": "tensor parallel: column <- packed: one of several"}
    assert all(why for why in WRAPPERS.values())
