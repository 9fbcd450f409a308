"""Models with boxes: which modules they are, what one process computes with the same sequences, what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ds_hydra.pipe.models import boxed_layers as running
from ds_hydra.pipe.models import three_ways
from ds_hydra.pipe.models.boxed_stage import StageBoxes
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.draws import Draws
from ds_hydra.pipe.models.facts import ModelFacts
from ds_hydra.pipe.placement import Strategy, place_pipeline
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.compare import compare
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.precision import doubled
from ds_hydra.self_check.runs import run_pipeline, uneven_data
from tests.support.boxed_models import BOXED
from tests.support.families import build_model
from tests.support.mutants import gradients_of_other_ranks_are_dropped

DATA = uneven_data(97, [(6, 33, 2, 6), (12,)])
_HALF_AGAIN = tuple(replace(batch, recompute=0.5) for batch in DATA.microbatches)
AGAIN = replace(DATA, microbatches=_HALF_AGAIN)

WAYS = {
    "bloom": [("self_attention",)] * 4,
    "gptj, dropout": [("attn",)] * 4,
    "qwen3_next": [("linear_attn",), ()] * 2,
    "lfm2": [("conv",), ()] * 2,
    "falcon_h1": [("mamba", "self_attn")] * 4,
    "llama": [],
}


@pytest.mark.drawn
@pytest.mark.parametrize("family", WAYS)
def test_tokens_meet_in_these_modules(family: str) -> None:
    source = CausalLM(build_model(family, torch.float32))
    assert [tuple(box.path for box in of) for of in source.boxes.of] == WAYS[family]
    assert ModelFacts.from_json(source.facts.to_json()) == source.facts


MIXED, SHAPES = "(sp2[0:1] > tp2[1:3] > tp1[3:4])", ("tp2", "pp2/v", "sp4", "pp2/zb-h1")


@pytest.mark.drawn
@pytest.mark.parametrize(("number", "family"), enumerate(BOXED))
def test_equal_to_one_process(number: int, family: str) -> None:
    """In FP64; layers that are computed again, split backwards, V shapes and dropout by place among it. Each family has
    one of the shapes; rows of `tools.check_equivalence` have the others."""
    model = build_model(family, torch.float64)
    with doubled():
        source = CausalLM(model)
    right = Plain(model, source.flow.draws, source.layers_path).outcome(DATA)
    for shape in (MIXED, SHAPES[number % len(SHAPES)]):
        pipeline = place_pipeline(PipelineShape.parse(shape), 0, source.plan.num_layers)
        source.plan.check(Strategy((pipeline,)))
        assert compare(right, run_pipeline(source, pipeline, AGAIN)).what is None, shape


def of_the_neighbour() -> Any:
    """A box is given what the sequence before its own is handed."""
    right = running._Cut._of

    def of(self: Any, place: int, group: list[int]) -> Any:
        return right(self, place, [max(0, group[0] - 1)] if self.box.sources[place] is not None else group)

    return mock.patch.object(running._Cut, "_of", of)


def of_the_whole_row() -> Any:
    """A module runs once for a pack: its state and its convolution go over the boundaries."""

    def call(self: Any, box: Any, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return mock.patch.object(running.BoxedLayers, "_call", call)


def rows_are_put_back_in_another_order() -> Any:
    right = running._Cut.joined

    def joined(self: Any, outs: Any) -> Any:
        of_length = {n: s for s, n in enumerate(self.run.pack.lengths)}
        return right(self, {s: outs.get(of_length[self.run.pack.lengths[s]], outs[s]) for s in outs})

    return mock.patch.object(running._Cut, "joined", joined)


def layers_computed_again_know_no_sequences() -> Any:
    return mock.patch.object(StageBoxes, "again", lambda self: self._layers.of(None))


def sequences_draw_as_the_row() -> Any:
    return mock.patch.object(Draws, "alone", return_value=contextlib.nullcontext())


def no_layer_has_boxes() -> Any:
    """Nor does its class say that it needs some."""
    return mock.patch.object(three_ways, "may_mix_otherwise", return_value=False)


MUTANTS: list[tuple[str, str, Callable[[], Any]]] = [
    ("lfm2", "tp1", of_the_whole_row),
    ("qwen3_next", "tp1", of_the_whole_row),
    ("falcon_h1", "tp1", no_layer_has_boxes),
    ("bloom", "tp1", of_the_neighbour),
    ("bloom", "tp1", rows_are_put_back_in_another_order),
    ("bloom", "sp2", gradients_of_other_ranks_are_dropped),
    ("qwen3_next", "sp2", gradients_of_other_ranks_are_dropped),
    ("bloom", "tp1", layers_computed_again_know_no_sequences),
    ("gptj, dropout", "tp1", sequences_draw_as_the_row),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "strategy", "mutant"), MUTANTS, ids=[f"{f}-{m.__name__}" for f, _, m in MUTANTS])
def test_what_would_train_wrongly_is_refused(family: str, strategy: str, mutant: Callable[[], Any]) -> None:
    candidates = [StrategyShape.parse(strategy)]
    with mutant():
        result = check_strategies(build_model(family, torch.float32), candidates, keep=False)
    (verdict,) = (result.verdicts[shape] for shape in candidates[0].pipelines)
    assert verdict.state == "refused", verdict


class _Shift(nn.Module):
    """Adds to each token half of the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
