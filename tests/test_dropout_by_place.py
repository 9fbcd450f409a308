"""Training with dropout in one process and as ranks of a pipeline: equal, and no more so once an ingredient is missing.

All ranks are threads of this process. The reference runs the plain model, one sequence at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from ds_hydra.pipe import dropout
from ds_hydra.pipe.models import draws
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.layer_list import LayerList
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.precision import doubled
from ds_hydra.self_check.runs import run_pipeline, uneven_data
from ds_hydra.self_check.schemes import uneven_pipeline
from ds_hydra.step import batching
from ds_hydra.testing.drawing import drawing
from tests.support.families import build_model, mean_loss

DATA = uneven_data(97, ((5, 33, 2), (12,)))


def phi() -> Any:
    """Dropout of every kind; one module of it serves all layers, twice in each."""
    model = build_model("dropout (Phi)", torch.float64, "dense")
    for layer in model.model.layers:
        layer.resid_dropout = model.model.layers[0].resid_dropout
    return model


def opt() -> Any:
    """Dropout by a function, called twice in each layer."""
    return build_model("dropout by a function", torch.float64, "dense")


def noisy_embeddings() -> Any:
    """Noise that a hook adds (NEFTune)."""
    model = build_model("llama", torch.float64, "dense")

    def noise(module: Any, args: Any, out: Tensor) -> Tensor:
        return out + torch.zeros_like(out).uniform_(-0.1, 0.1) if module.training else out

    model.model.embed_tokens.register_forward_hook(noise)
    return model


def dropped_probabilities() -> Any:
    """Dropout between two layers that tensor parallel ranks cut, where each has some of the features."""
    model = build_model("llama", torch.float64, "dense")
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.2))
    return model


@functools.cache
def source_of(build: Callable[[], Any], checkpointing: bool = False) -> CausalLM:
    model = build()
    model.set_attn_implementation("eager")  # packs have an attention of their own, and "dense" is a script's
    return CausalLM(model, StageOptions(activation_checkpointing=checkpointing))


@functools.cache
def expected_of(build: Callable[[], Any]) -> dict[str, Tensor]:
    return reference(build())


def gradients(source: CausalLM, shape: str) -> dict[str, Tensor]:
    pipeline = uneven_pipeline(PipelineShape.parse(shape), 4)
    return dict(run_pipeline(source, pipeline, DATA).gradients)


def reference(model: Any) -> dict[str, Tensor]:
    model.train()
    for number, tokens in enumerate(DATA.sequences):
        keys = dropout.token_keys([len(tokens)], [dropout.sequence_key(0, number)])
        ids, targets = map(torch.from_numpy, DATA.load(number)[:2])
        with doubled(), drawing(model, keys):
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            F.cross_entropy(logits, targets, reduction="sum").backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest gradient: some are 0 but for rounding."""
    largest = max(float(value.abs().max()) for value in other.values())
    assert set(one) == set(other)
    return max(float((one[name] - value).abs().max()) for name, value in other.items()) / largest


@pytest.mark.drawn
@pytest.mark.parametrize("shape", ["tp1", "tp2", "sp2", "pp2", "tp2pp3"])
@pytest.mark.parametrize("build", [phi, opt, noisy_embeddings, dropped_probabilities])
def test_every_shape_draws_alike(build: Callable[[], Any], shape: str) -> None:
    expected = expected_of(build)
    assert apart(gradients(source_of(build), shape), expected) < 1e-12
    if shape in ("tp1", "pp2"):
        assert apart(gradients(source_of(build, checkpointing=True), shape), expected) < 1e-12


MISSING: dict[str, tuple[Any, str, Any]] = {
    "layer": (draws, "place_key", lambda layer, module, draw: dropout.place_key(0, module, draw)),
    "module": (draws, "place_key", lambda layer, module, draw: dropout.place_key(layer, "", draw)),
    "count": (draws, "place_key", lambda layer, module, draw: dropout.place_key(layer, module, 0)),
    "sequence": (batching, "sequence_key", lambda step, sequence: dropout.sequence_key(step, 0)),
    "position": (
        draws,
        "token_keys",
        lambda lengths, keys, past=(): dropout.token_keys([1] * sum(lengths), [0] * sum(lengths)),
    ),
}


@pytest.mark.parametrize("missing", list(MISSING))
def test_without_an_ingredient_it_is_another_training(missing: str) -> None:
    with mock.patch.object(*MISSING[missing]):
        found = gradients(source_of(phi), "tp1")
    assert apart(found, expected_of(phi)) > 1e-3


def test_a_rank_of_tensor_parallelism_draws_its_own_features() -> None:
    with mock.patch.object(draws.Draws, "_first", return_value=0):
        found = gradients(source_of(dropped_probabilities), "tp2")
    assert apart(found, expected_of(dropped_probabilities)) > 1e-3


def test_what_is_recomputed_without_its_place_is_an_error() -> None:
    """As in a model that recomputes by itself: torch sees that other tensors are kept."""
    here = (nullcontext(), nullcontext())
    with (
        mock.patch.object(draws.Draws, "checkpointed", return_value=here),
        pytest.raises(CheckpointError, match="different metadata"),
    ):
        gradients(source_of(opt, checkpointing=True), "tp1")


class _Entries(torch.nn.Module):
    """What a `PipelineModule` of these layers shows of itself."""

    def __init__(self, *layers: torch.nn.Module):
        super().__init__()
        self._layer_specs, self.loss_fn = list(layers), mean_loss
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)


def test_entries_of_a_layer_list_draw_alike_in_every_shape() -> None:
    torch.manual_seed(0)
    linear, drop = torch.nn.Linear(16, 16), torch.nn.Dropout(0.3)
    model = _Entries(torch.nn.Embedding(97, 16), drop, linear, drop, torch.nn.Linear(16, 97)).double()
    found = []
    for shape in ("tp1", "pp3", "sp2", "tp2pp2"):
        source = LayerList(model)
        pipeline = uneven_pipeline(PipelineShape.parse(shape), 5)
        found.append(dict(run_pipeline(source, pipeline, DATA).gradients))
    assert max(apart(other, found[0]) for other in found[1:]) < 1e-12
    calm = _Entries(model._layer_specs[0], linear, model._layer_specs[4])
    assert len(LayerList(calm).draws) == 0
