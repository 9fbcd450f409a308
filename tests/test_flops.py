"""A model's floating point operations, against those that torch counts in a forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from ds_hydra.costs.analytic import flops_of
from ds_hydra.pipe.models.causal_lm import CausalLM

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
LENGTHS = [200, 70]


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    eager: Any = {"attn_implementation": "eager"}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **eager, tie_word_embeddings=tied))
    with FlopCounterMode(display=False) as counted:
        for length in LENGTHS:
            ids = torch.zeros(1, length, dtype=torch.long)
            model(input_ids=ids, labels=ids).loss.backward()
    # Eager attention computes all pairs of tokens, of which a causal one needs half.
    halves = sum(6 * 64 * 3 * length**2 for length in LENGTHS)
    assert flops_of(CausalLM(model).plan, 64, LENGTHS) == counted.get_total_flops() - halves


def test_nothing_is_said_of_experts_and_frozen_parameters() -> None:
    experts = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
    assert flops_of(CausalLM(experts).plan, 64, LENGTHS) is None
    frozen = LlamaForCausalLM(LlamaConfig(**SIZES))
    frozen.model.embed_tokens.requires_grad_(False)
    assert flops_of(CausalLM(frozen).plan, 64, LENGTHS) is None
