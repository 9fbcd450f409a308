"""Every kind of layer that a model has is in its small copy, whatever tells it apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.layer_kinds import choose
from tests.support.small_job import small_model

Lags = Callable[[int], int]  # layer -> tokens that it looks back


def eight_layers() -> Any:
    config = small_model(tied=False).config
    config.num_hidden_layers = 8
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def with_lag(x: Tensor, lag: int) -> Tensor:
    return x + 0.5 * F.pad(x, (0, 0, lag, 0))[:, : x.shape[1]] if lag else x


class Scaled(nn.Module):
    """An MLP with a scale of its own, and a convolution before it where it has one."""

    def __init__(self, inner: nn.Module, scale: float, width: int | None):
        super().__init__()
        self.inner, self.scale = inner, scale
        self.before = nn.Conv1d(width, width, 4, groups=width) if width else None

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            x = x + self.before(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)
        out: Tensor = self.inner(x) * self.scale
        return out


class Lagged(LlamaMLP):
    lag: int
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(with_lag(x, self.lag))
        return out * self.scale


class ByIndex(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *rest: Any, **more: Any) -> Any:
        lag = 2 if self.self_attn.layer_idx >= 6 else 0
        return super().forward(with_lag(hidden_states, lag), *rest, **more)


class MadeByItsClass(LlamaForCausalLM):
    def __init__(self, config: Any):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.mlp.__class__, layer.mlp.scale, layer.mlp.lag = Lagged, 0.97**index, 2 * (index >= 6)


class Lag(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return with_lag(x, 3)


def convolutions() -> Any:
    model = eight_layers()
    for index, layer in enumerate(model.model.layers):
        layer.mlp = Scaled(layer.mlp, 0.97**index, model.config.hidden_size if index > 5 else None)
    return model


def attributes(lag: Lags) -> Any:
    model = eight_layers()
    for index, layer in enumerate(model.model.layers):
        layer.mlp.__class__, layer.mlp.scale, layer.mlp.lag = Lagged, 0.97**index, lag(index)
    return model


def hooks(lag: Lags) -> Any:
    model = eight_layers()
    for index, layer in enumerate(model.model.layers):
        back, scale = lag(index), 0.97**index
        layer.mlp.register_forward_hook(lambda _, args, out, lag=back, scale=scale: scale * with_lag(out, lag))
    return model


def hooks_that_hold_nothing(lag: Lags) -> Any:
    model = eight_layers()
    for index, layer in enumerate(model.model.layers):
        layer.mlp.lag = lag(index)
        layer.mlp.register_forward_hook(lambda module, args, out: with_lag(out, module.lag))
    return model


def indices() -> Any:
    model = eight_layers()
    for layer in model.model.layers:
        layer.__class__ = ByIndex
    return model


def two_layers_of_one_copy() -> Any:
    model = eight_layers()
    model.model.layers[2].mlp.act_fn, model.model.layers[6].mlp.act_fn = Lag(), nn.Tanh()
    return model


UNLIKE: dict[str, Callable[[], Any]] = {
    "convolutions": convolutions,
    "attributes of the last": lambda: attributes(lambda index: 4 * (index == 7)),
    "attributes of some": lambda: attributes([0, 0, 0, 0, 3, 2, 1, 0].__getitem__),
    "attributes of all": lambda: attributes(int),
    "closures": lambda: hooks(lambda index: 4 * (index == 5)),
    "hooks": lambda: hooks_that_hold_nothing(lambda index: 4 * (index < 3)),
    "indices": indices,
    "made by its class": lambda: MadeByItsClass(eight_layers().config),
    "two layers of one copy": two_layers_of_one_copy,
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", UNLIKE)
def test_a_layer_that_mixes_sequences_is_found_wherever_it_is(name: str) -> None:
    result = check_strategies(UNLIKE[name](), [StrategyShape.parse("tp1")], keep=False, context_length=32)
    (objection,) = result.objections()
    assert "no strategy trains this model as one process does" in objection


def test_numbers_of_every_layer_make_no_kinds() -> None:
    scales = [{"scale": 0.97**index, "lag": 4 * (index == 5)} for index in range(32)]
    kept, kinds = choose(["layer"] * 32, scales, 4)
    assert kinds == 2
    assert len(kept) == 4
    assert {0, 5} < set(kept)
    assert choose(["layer"] * 5, [{}] * 5, 2) == ([0, 1], 1)
    assert choose(["a", "b", "a", "c", "d", "e"], [{}] * 6, 2) == ([0, 1, 3, 4, 5], 5)
