"""Pipelines whose backwards are split train as one process does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from ds_hydra.pipe import weight_gradients
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.pipe.weight_gradients import WeightGradients
from ds_hydra.self_check.compare import compare
from ds_hydra.self_check.runs import Data, Outcome, run_pipeline, uneven_data
from ds_hydra.self_check.schemes import uneven_pipeline
from tests.support.families import build_model

DATA = uneven_data(97, ((5, 33, 2), (12,), (7, 3), (21,)))


def outcome(model: Any, shape: str, *, checkpointing: bool = False, data: Data = DATA) -> Outcome:
    return ran(CausalLM(model, StageOptions(activation_checkpointing=checkpointing)), shape, data)


def ran(source: CausalLM, shape: str, data: Data = DATA) -> Outcome:
    pipeline = uneven_pipeline(PipelineShape.parse(shape), source.plan.num_layers)
    return run_pipeline(source, pipeline, data)


def off(model: Any, shape: str, *, checkpointing: bool = False) -> str | None:
    """What a pipeline that splits backwards does other than one process; None: nothing."""
    source = CausalLM(model)
    split = CausalLM(model, StageOptions(activation_checkpointing=True)) if checkpointing else source
    return compare(ran(source, "tp1"), ran(split, shape)).what


def hooked() -> Any:
    """Hooks that double one gradient and note how often."""
    model = build_model("llama", torch.float64)
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: 2.0 * gradient)
    return model


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("family", "shape", "checkpointing"),
    [
        ("llama_tied", "pp3/zb-h1", False),
        ("llama_tied", "tp2pp2/zb-h1", True),
        ("mixtral", "sp2pp2/zb-h1", False),
        ("frozen base with adapters", "pp2/zb-h1", False),
        ("gpt2", "tp2pp2/zb-h1", False),
        ("mixtral", "sp2pp2/list", False),
        ("llama_tied", "pp2/v", False),
        ("llama_8_layers", "tp2pp3/v", True),
        ("frozen base with adapters", "pp2/v", False),
    ],
)
def test_pipelines_that_split_backwards_train_as_one_process(family: str, shape: str, checkpointing: bool) -> None:
    assert off(build_model(family, torch.float64), shape, checkpointing=checkpointing) is None


@pytest.mark.parametrize(("shape", "checkpointing"), [("pp2/list", False), ("pp2/v", True)])
def test_they_do_so_and_evaluate_with_a_sequence_in_slices(shape: str, checkpointing: bool) -> None:
    model = build_model("gemma2", torch.float64)
    sliced = outcome(model, shape, checkpointing=checkpointing, data=DATA.in_slices())
    assert compare(outcome(model, "tp1"), sliced).what is None


def test_hooks_of_parameters_see_the_gradient_of_each_micro_batch() -> None:
    plain = build_model("llama", torch.float64)
    name = "model.layers.1.mlp.up_proj.weight"
    single, doubled = (
        outcome(plain, "pp2/zb-h1").gradients[name],
        outcome(hooked(), "pp2/zb-h1").gradients[name],
    )
    assert torch.allclose(doubled, 2.0 * single, rtol=1e-12)
    assert off(hooked(), "pp2/zb-h1") is None


def forgets_one_weight(queue: WeightGradients, entries: Sequence[Any]) -> None:
    if entries[0].place != min(queue._places.values()):
        real_run(queue, entries)


def adds_twice(queue: WeightGradients, entries: Sequence[Any]) -> None:
    real_run(queue, [*entries, *entries[1:]])


def leaves_the_last_out(queue: WeightGradients, entries: Sequence[Any]) -> None:
    real_run(queue, entries[: max(1, len(entries) - 1)])


real_run = WeightGradients._run


@pytest.mark.drawn
@pytest.mark.parametrize("wrong", [forgets_one_weight, adds_twice, leaves_the_last_out])
def test_a_wrong_sum_is_found(wrong: Callable[..., None]) -> None:
    with mock.patch.object(weight_gradients.WeightGradients, "_run", wrong):
        what = off(build_model("llama", torch.float64), "pp3/zb-h1")
    assert what is not None
    assert "gradient of" in what
