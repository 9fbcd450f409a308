"""Kinds of layers: what is found of one holds for all alike, each is in the small copy, and wrappers of forwards."""

from __future__ import annotations

import re
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from ds_hydra.pipe import wrappers
from ds_hydra.pipe.models import causal_lm, flow, meta_copy
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM, ModelFacts
from ds_hydra.pipe.models.flow import LayerKinds
from ds_hydra.pipe.models.token_rules import _Silent
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.pipe.wrappers import WRAPPERS, wrap
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.layer_kinds import choose
from tests.support.families import build_model
from tests.support.small_job import small_model

# --- What is found of one layer of each kind is what all layers tell, and layers are alike only where nothing
# differs.
ALL = StageOptions(token_sharding=True, functions="recompute")
ALONE = (0, 1, 2, 3)

# Names of families -> the first layers of their kinds.
FOUND = {
    "llama": (0, 0, 0, 0),
    "gemma2": (0, 1, 0, 1),
    "gpt_oss": (0, 1, 0, 1),
    "mixtral, balanced": (0, 0, 0, 0),
    "dropout (Phi)": (0, 0, 0, 0),
    "activation with parameters": (0, 0, 0, 0),
    "norms of queries and keys (GLM-4.5)": (0, 1, 1, 1),
    "layers that share weights": (0, 1, 2, 1),
    "embeddings of each layer": (0, 0, 0, 3),
    "hooks of modules": ALONE,
    "lora": (0, 0, 0, 0),
}


@pytest.mark.drawn
@pytest.mark.parametrize("family", FOUND)
def test_one_layer_of_each_kind_tells_what_all_do(family: str) -> None:
    """Also where the one runs without numbers, as large models do, and all run with some."""
    with mock.patch.object(meta_copy, "FEW_PARAMETERS", 0):
        by_kinds = source_of(family)
    by_all = source_of(family, alone)
    assert by_kinds.kinds.firsts == FOUND[family]
    for one in ("plan", "specs", "unnamed", "tokens", "functions", "flow", "balancing", "options", "notes"):
        assert getattr(by_kinds, one) == getattr(by_all, one), one
    assert list(by_kinds.functions.norms) == list(by_all.functions.norms)
    told = ModelFacts.from_text(by_kinds.facts.to_text())
    assert told == by_kinds.facts
    from_facts = CausalLM(base_of(build_model(family, torch.float64)), ALL, facts=told)
    assert (from_facts.plan, from_facts.options) == (by_kinds.plan, by_kinds.options)


def source_of(family: str, found: Callable[..., LayerKinds] = causal_lm.find_kinds) -> CausalLM:
    with mock.patch.object(causal_lm, "find_kinds", found):
        return CausalLM(base_of(build_model(family, torch.float64)), ALL)


def alone(_: Any, template: nn.Module, path: str, __: Any) -> LayerKinds:
    layers: Any = template.get_submodule(path)
    return LayerKinds(path, tuple(range(len(layers))))


def test_a_deep_model_is_run_once_by_all_of_its_layers() -> None:
    config = small_model().config
    config.num_hidden_layers = 16
    model, calls = type(small_model())(config), 0

    def count(frame: types.FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is LlamaDecoderLayer.forward.__code__

    sys.setprofile(count)
    try:
        found = CausalLM(model, StageOptions(token_sharding=True, functions="auto"))
    finally:
        sys.setprofile(None)
    assert len(found.functions.norms) == 2 * 16 + 1
    assert 16 < calls <= 16 + 10


class Doubled(nn.Linear):
    """Not of torch, and yet with its forward."""


# What a layer has otherwise than the others, each of which has a buffer "mask" and an attribute "said" in its MLP.
EDITS: dict[str, Callable[[Any], Any]] = {
    "a forward of its own": lambda mlp: setattr(mlp, "forward", types.MethodType(LlamaMLP.forward, mlp)),
    "a class": lambda mlp: setattr(mlp.up_proj, "__class__", Doubled),
    "a hook": lambda mlp: mlp.register_forward_hook(lambda *_: None),
    "a hook of a gradient": lambda mlp: mlp.up_proj.weight.register_hook(lambda dy: dy),
    "a buffer": lambda mlp: mlp.mask.fill_(1.0),
    "a frozen weight": lambda mlp: mlp.up_proj.weight.requires_grad_(False),
    "a bias": lambda mlp: setattr(mlp.down_proj, "bias", nn.Parameter(torch.zeros(mlp.down_proj.out_features))),
    "a number": lambda mlp: setattr(mlp.up_proj, "in_features", 65),
    "a number in a container": lambda mlp: setattr(mlp, "said", [{"scale": -0.0}]),
    "an object": lambda mlp: setattr(mlp, "said", object()),
}


@pytest.mark.drawn
@pytest.mark.parametrize("edit", EDITS)
def test_a_layer_that_differs_is_of_no_others_kind(edit: str) -> None:
    model = small_model()
    for layer in model.model.layers:
        layer.mlp.said = [{"scale": 0.0}]
        layer.mlp.register_buffer("mask", torch.zeros(3))
    EDITS[edit](model.model.layers[2].mlp)
    with mock.patch.object(flow, "own_code", return_value=()) if edit == "a class" else mock.MagicMock():
        firsts = CausalLM(model).kinds.firsts
    assert firsts in ((0, 0, 2, 0), ALONE)
    assert "hook" not in edit or firsts == ALONE, "a script's code may go by anything"


class ByNumber(LlamaMLP):
    """Its attribute is what transformers calls a layer's number, which differs in layers that are alike."""

    layer_idx: int

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out * 2 if self.layer_idx % 2 else out


@pytest.mark.parametrize(("whose", "firsts"), [("a script's", ALONE), ("a package's", (0, 1, 0, 1))])
def test_code_that_goes_by_a_layers_number_is_told_by_what_it_runs(whose: str, firsts: tuple[int, ...]) -> None:
    model = small_model()
    for index, layer in enumerate(model.model.layers):
        layer.mlp.__class__, layer.mlp.layer_idx = ByNumber, index
    with mock.patch.object(flow, "own_code", side_effect=(lambda _: ()) if whose == "a package's" else flow.own_code):
        assert CausalLM(model).kinds.firsts == firsts


def test_what_does_not_run_in_few_layers_is_examined_in_all() -> None:
    look, few = causal_lm.look, []

    def fails(source: CausalLM, *args: Any, **kwargs: Any) -> Any:
        seen = look(source, *args, **kwargs)
        if len(source.aliases) < 30:
            few.append(source)
            seen.error = RuntimeError("it counts its layers")
        return seen

    with mock.patch.object(causal_lm, "look", fails):
        found = CausalLM(small_model(), ALL)
    assert len(few) == 1
    assert found.functions == CausalLM(small_model(), ALL).functions


# --- Every kind of layer that a model has is in its small copy, whatever tells it apart.
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
    """It runs once for each sequence; packed, the self-check would refuse it."""
    with mock.patch.object(causal_lm, "may_mix_beside", return_value=False):
        result = check_strategies(UNLIKE[name](), [StrategyShape.parse("tp1")], keep=False)
    (objection,) = result.objections()
    assert "no strategy trains this model as one process does" in objection
    result = check_strategies(UNLIKE[name](), [StrategyShape.parse("tp1")], keep=False)
    assert not result.objections()


def test_numbers_of_every_layer_make_no_kinds() -> None:
    scales = [{"scale": 0.97**index, "lag": 4 * (index == 5)} for index in range(32)]
    kept, number = choose(["layer"] * 32, scales, 4)
    assert number == 2
    assert len(kept) == 4
    assert {0, 5} < set(kept)
    assert choose(["layer"] * 5, [{}] * 5, 2) == ([0, 1], 1)
    assert choose(["a", "b", "a", "c", "d", "e"], [{}] * 6, 2) == ([0, 1, 3, 4, 5], 5)


# --- What stands around the forwards of a stage's modules, in one order, told as text.
_NUMBER = re.compile(r"[.]\d+(?=[.]|$)")

# Chains of the modules of a last stage, with how many there are.
TOLD = """
1 : tensor parallel: one copy for its columns
1 lm_head: tensor parallel: column <- summed
4 model.layers.*.input_layernorm: function: norm
2 model.layers.*.mlp.down_proj: tensor parallel: row <- summed
2 model.layers.*.mlp.gate_proj: tensor parallel: column of shared tokens <- packed: one of several <- summed
2 model.layers.*.mlp.up_proj: tensor parallel: column of shared tokens <- packed: one of several <- summed
2 model.layers.*.mlp: function: gated MLP
2 model.layers.*.mlp: tensor parallel: block of shared tokens <- packed: forgets <- function: gated MLP
4 model.layers.*.post_attention_layernorm: function: norm
2 model.layers.*.self_attn.k_proj: tensor parallel: column of shared tokens <- packed: one of several <- summed
2 model.layers.*.self_attn.o_proj: tensor parallel: row <- summed
2 model.layers.*.self_attn.q_proj: tensor parallel: column of shared tokens <- packed: one of several <- summed
2 model.layers.*.self_attn.v_proj: tensor parallel: column of shared tokens <- packed: one of several <- summed
2 model.layers.*.self_attn: function: rotary
2 model.layers.*.self_attn: tensor parallel: block of shared tokens <- packed: forgets <- function: rotary
2 model.layers.*: handed on
2 model.layers.*: recomputed
1 model.norm: function: norm
"""


def test_a_stage_tells_what_stands_around_its_modules() -> None:
    source = CausalLM(build_model("llama", torch.float32), ALL)
    pipeline = place_pipeline(PipelineShape.parse("tp2pp2/zb-h1"), 0, source.plan.num_layers)
    place = StagePlace.all_of(
        pipeline, 3, lambda ranks: _Silent(ranks.index(3), len(ranks)) if len(ranks) > 1 else None, token_sharding=True
    )[0]
    chains = source.build(place, torch.device("cpu"), torch.float32).chains
    counts = Counter(f"{_NUMBER.sub('.*', path)}: {chain}" for path, chain in chains.items())
    assert "\n" + "".join(f"{count} {line}\n" for line, count in sorted(counts.items())) == TOLD


def test_another_order_is_refused() -> None:
    module: Any = nn.Linear(2, 2)
    wrap(module, module.forward, "packed", "one of several")
    wrap(module, module.forward, "tensor parallel", "column")
    with pytest.raises(AssertionError, match="function would stand around tensor parallel"):
        wrap(module, module.forward, "function", "norm")
    assert wrappers.chains(module) == {"": "tensor parallel: column <- packed: one of several"}
    assert all(why for why in WRAPPERS.values())
