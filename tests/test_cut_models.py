"""Slices of sequences in whole models: which models may be cut, what the self-check tells of it, and what stays."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ds_hydra.pipe.contexts import Context, Contexts
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape, StrategyShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.runs import run_pipeline, uneven_data
from ds_hydra.self_check.schemes import uneven_pipeline
from ds_hydra.self_check.verdicts import CheckResult
from tests.support import mutants
from tests.support.families import LAYERS, VOCAB, build_model
from tests.support.hard_models import hard_model


def check(model: Any, **settings: Any) -> CheckResult:
    """The self-check of whole sequences finds nothing; what it says of slices is what is asked for."""
    result = check_strategies(model, [StrategyShape.parse("tp1")], keep=False, **settings)
    assert result.objections() == []
    return result


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt_oss"])
def test_families_that_may_be_cut(name: str) -> None:
    assert check(build_model(name, torch.float32)).no_slices == ""


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["longrope", "dropout (Phi)", "positions from the padding id"])
def test_unusual_models_that_may_be_cut(name: str) -> None:
    options = StageOptions(activation_checkpointing=name == "longrope")
    assert check(hard_model(name), options=options).no_slices == ""


def mix_tokens(model: Any) -> None:
    """Each token with the one before it in its sequence: right in packs, but a slice does not have its first one's."""

    def mix(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        inside = (kwargs["position_ids"] > 0).unsqueeze(-1)
        return out + 0.5 * out.roll(1, dims=1) * inside

    model.model.layers[1].register_forward_hook(mix, with_kwargs=True)


class _Half(nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states * 0.5, None


def leave_attention_out(model: Any) -> None:
    model.model.layers[2].self_attn = _Half()


def attend_twice(model: Any) -> None:
    """By one module: the second time with other keys and values, which have no place of their own."""
    layer = model.model.layers[1]
    attention = layer.self_attn

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attention

        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            return self.inner(self.inner(hidden_states, **kwargs)[0], **kwargs)

    layer.self_attn = Twice()


CHANGES = [
    (mix_tokens, "^with a sequence in slices, and layers computed again, the loss is .* off"),
    (leave_attention_out, r"^layer \d does not attend by Hugging Face's attention interface"),
    (attend_twice, r"^model\.layers\.1\.self_attn\.inner attends 2 times in one forward"),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("change", "told"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
def test_models_that_must_stay_whole(change: Callable[[Any], None], told: str) -> None:
    model = build_model("llama", torch.float32)
    change(model)
    no_slices = check(model).no_slices
    assert re.search(told, no_slices), no_slices


MUTANTS = [
    ("llama", mutants.slices_begin_at_zero, "the loss is"),
    ("llama", mutants.labels_are_made_of_slices, "the loss is"),
    ("llama", mutants.slices_see_themselves_only, "the loss is"),
    ("llama", mutants.slices_hand_no_gradients_back, r"the gradient of model\.embed_tokens\.weight is"),
    ("llama", mutants.backwards_run_in_the_order_of_forwards, "only .* tokens have|in reverse order"),
    ("mistral", mutants.windows_forget_a_token, "the loss is"),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "mutant", "told"), MUTANTS, ids=[row[1].__name__ for row in MUTANTS])
def test_what_would_train_slices_wrongly_is_told(name: str, mutant: mutants.Mutant, told: str) -> None:
    with mutant():
        result = check(build_model(name, torch.float32))
    assert re.search(told, result.no_slices), result.no_slices


@pytest.mark.drawn
@pytest.mark.parametrize("frozen", ["", "layers.0."])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_kept_of_a_sequence_that_has_run(frozen: str, checkpointing: bool) -> None:
    """In training and in evaluation; also where keys and values have no gradient."""
    model = build_model("llama", torch.float64)
    for name, parameter in model.named_parameters():
        if frozen and ("embed" in name or frozen in name):
            parameter.requires_grad_(False)
    made: list[Contexts] = []
    kept: list[Context] = []

    def init(self: Contexts, total: int) -> None:
        right(self, total)
        made.append(self)

    def of(self: Contexts, module: Any) -> Context:
        context = right_of(self, module)
        kept.append(context)
        return context

    right, right_of = Contexts.__init__, Contexts.of
    source = CausalLM(model, StageOptions(activation_checkpointing=checkpointing))
    data = uneven_data(VOCAB, ((5, 33, 2), (12,))).in_slices()
    with mock.patch.object(Contexts, "__init__", init), mock.patch.object(Contexts, "of", of):
        run_pipeline(source, uneven_pipeline(PipelineShape.of(ParallelScheme(pp=2)), LAYERS), data)
    assert len(made) == 8  # of two sequences and two stages, in training and in evaluation
    assert len(set(map(id, kept))) == 4 * LAYERS
    assert all(not vars(contexts)["_of"] for contexts in made)
