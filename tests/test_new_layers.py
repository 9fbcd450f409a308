"""New kinds of layers, each added by this file alone: a gate on attention, and a layer that mixes tokens twice.

As a user would write them, on the classes that transformers has, and compared by the harness that users have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from ds_hydra.testing import Aims, compare
from tests.support.small_job import shared_source

STRATEGIES = ["tp2pp2", "sp2 + 2*tp1"]


class GatedAttention(LlamaAttention):
    """What heads give counts as much as a gate on the layer's input says (arXiv 2505.06708)."""

    def __init__(self, config: LlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.gate = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:  # type: ignore[override]
        attended, weights = super().forward(hidden_states, *args, **kwargs)
        return attended * torch.sigmoid(self.gate(hidden_states)), weights


class Convolution(nn.Module):
    """Each channel's last three tokens: (1, T, width) -> (1, T, width)."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 1, 3) * 0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = nn.functional.pad(hidden.transpose(1, 2), (2, 0))
        return nn.functional.conv1d(rows, self.weight, groups=hidden.shape[-1]).transpose(1, 2)


class TwoMixers(LlamaDecoderLayer):
    """A convolution over the tokens before a Llama's layer."""

    def __init__(self, config: LlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.convolution = Convolution(config.hidden_size)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states + self.convolution(hidden_states), *args, **kwargs)


class Hybrid(LlamaForCausalLM):
    """Says as transformers' own hybrids do that tokens meet otherwise than by attention, too."""

    _is_stateful = True


def gate(layer: Any, config: LlamaConfig, index: int) -> Any:
    layer.self_attn = GatedAttention(config, index)
    return layer


def mix_twice(layer: Any, config: LlamaConfig, index: int) -> Any:
    return TwoMixers(config, index)


def model_of(change: Callable[[Any, LlamaConfig, int], Any], kind: type[LlamaForCausalLM] = LlamaForCausalLM) -> Any:
    """A tiny Llama whose every layer was changed so, in FP64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, initializer_range=0.1, pad_token_id=None,
    )  # fmt: skip
    model = kind(config)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = change(layer, config, index)
    return model.double()


def data() -> list[dict[str, Tensor]]:
    """Sequences of 3 to 70 tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 97, (length,), generator=generator) for length in (3, 70, 12, 33, 5, 21, 64, 9)]
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.mark.drawn
@pytest.mark.parametrize(
    "make", [functools.partial(model_of, gate), functools.partial(model_of, mix_twice, Hybrid)],
    ids=["a gate on attention", "two token mixers"],
)  # fmt: skip
def test_a_new_kind_of_layer_trains_as_one_process_does(make: Callable[[], Any]) -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
        "gradient_clipping": 0.1,
        "hydra": {
            "tokens_per_step": 120, "strategies": STRATEGIES, "choose": "cycle", "steps_file": None,
            "self_check": "off",  # this is the check
            "planner": {"ahead": 0},
        },
    }  # fmt: skip
    with shared_source(make()):
        found = compare(make, data(), config, num_ranks=4, steps=2)
    assert found.missed(Aims()) == []
