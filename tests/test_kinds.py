"""What is found of one layer of each kind is what all layers tell, and layers are alike only where nothing differs."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from ds_hydra.pipe.models import causal_lm, kinds, meta_copy
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.facts import ModelFacts
from ds_hydra.pipe.models.kinds import LayerKinds
from ds_hydra.pipe.stage_options import StageOptions
from tests.support.families import build_model
from tests.support.small_job import small_model

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
    told = ModelFacts.from_json(by_kinds.facts.to_json())
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


def own_forward(layer: Any) -> None:
    layer.mlp.forward = types.MethodType(LlamaMLP.forward, layer.mlp)


def renamed(layer: Any) -> None:
    layer.mlp.up_proj.__class__ = Doubled


def hook(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda *_: None)


def hook_of_gradient(layer: Any) -> None:
    layer.mlp.up_proj.weight.register_hook(lambda dy: dy)


def buffer(layer: Any) -> None:
    layer.mlp.register_buffer("mask", torch.ones(3))


def frozen(layer: Any) -> None:
    layer.mlp.up_proj.weight.requires_grad_(False)


def shorter(layer: Any) -> None:
    linear = layer.mlp.down_proj
    layer.mlp.down_proj = nn.Linear(linear.in_features, linear.out_features, bias=True)


def epsilon(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon = 1e-5


def held(layer: Any) -> None:
    layer.mlp.said = [{"scale": -0.0}]


def object_of_its_own(layer: Any) -> None:
    layer.mlp.said = object()


EDITS = [own_forward, renamed, hook, hook_of_gradient, buffer, frozen, shorter, epsilon, held, object_of_its_own]


@pytest.mark.drawn
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: str(edit.__name__))
def test_a_layer_that_differs_is_of_no_others_kind(edit: Callable[[Any], None]) -> None:
    model = small_model()
    for layer in model.model.layers:
        layer.mlp.said = [{"scale": 0.0}]
        if edit is buffer:
            layer.mlp.register_buffer("mask", torch.zeros(3))
    edit(model.model.layers[2])
    with mock.patch.object(kinds, "own_code", return_value=()) if edit is renamed else mock.MagicMock():
        firsts = CausalLM(model).kinds.firsts
    assert firsts in ((0, 0, 2, 0), ALONE)
    assert edit not in (hook, hook_of_gradient) or firsts == ALONE, "a script's code may go by anything"


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
    with mock.patch.object(kinds, "own_code", side_effect=(lambda _: ()) if whose == "a package's" else kinds.own_code):
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
