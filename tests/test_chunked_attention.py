"""Attention in chunks, and queries that are scaled by their position: as alone, in packs and slices (Llama 4)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from ds_hydra.engine.checked import _refuse_other_ways
from ds_hydra.pipe.attention import interface
from ds_hydra.pipe.models import causal_stage, refusals
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.shape import PipelineShape, StrategyShape
from ds_hydra.self_check.check import check_strategies
from ds_hydra.self_check.compare import compare
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.precision import doubled
from ds_hydra.self_check.runs import run_pipeline, uneven_data
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.families import build_model


@pytest.mark.drawn
@pytest.mark.parametrize("shape", ["tp2", "sp2", "pp2/v"])
def test_sequences_longer_than_a_chunk_equal_plain_ones(shape: str) -> None:
    """A chunk of 48 tokens and a scale that grows at 40, of which a trial with 13 tokens sees nothing."""
    model = build_model("llama4", torch.float64)
    with doubled():
        source = CausalLM(model)
    assert (bool(source.boxes), source.plan.no_slices) == (False, "")
    data = uneven_data(97, [(200,), (30, 90)])
    right = Plain(model, source.flow.draws, source.layers_path).outcome(data)
    pipeline = place_pipeline(PipelineShape.parse(shape), 0, source.plan.num_layers)
    for each in (data, data.in_slices()):
        assert compare(right, run_pipeline(source, pipeline, each)).what is None


MUTANTS: dict[str, Any] = {
    "chunks_are_not_seen": lambda: mock.patch.object(interface, "_chunk_of", return_value=None),
    "chunks_are_too_long": lambda: mock.patch.object(interface, "_chunk_of", return_value=9),
    "the_row_is_counted": lambda: mock.patch.object(causal_stage, "count_by_sequence"),
}


@pytest.mark.drawn
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_self_check_finds(mutant: str) -> None:
    with MUTANTS[mutant]():
        found = check_strategies(build_model("llama4", torch.float32), [StrategyShape.parse("tp1")], keep=False)
    assert re.search(r"the loss is .* off, and model\.layers\.\d", found.objections()[0])


def test_dropout_in_chunks_runs_once_for_each_sequence() -> None:
    """Kernels know chunks as sequences of their own, but numbers are drawn by a token's place in its sequence."""
    model = build_model("llama4", torch.float32).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    source = CausalLM(model, by_one_rank=True)
    assert {box.path for of in source.boxes.of for box in of} == {"self_attn"}


def test_a_small_copy_that_meets_otherwise_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Llama 4 was before its chunks were known: the model is examined with fewer tokens than a chunk has, and its
    copy with more."""
    monkeypatch.setattr(interface, "_chunk_of", lambda module: None)
    monkeypatch.setattr(causal_stage, "count_by_sequence", lambda *_: None)
    monkeypatch.setattr(refusals, "_KNOWN_LAYER_TYPES", frozenset({"full_attention"}))
    model = build_model("llama4", torch.float32)
    source = CausalLM(model, by_one_rank=True)
    found = check_strategies(model, [StrategyShape.parse("tp1")], keep=False)
    assert (bool(source.boxes), found.objections(), found.boxed) == (False, [], "self_attn")
    with pytest.raises(ConfigError, match="a small copy of the model runs self_attn once for each sequence"):
        _refuse_other_ways(found, source)
    _refuse_other_ways(replace(found, boxed=""), source)
