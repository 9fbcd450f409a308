"""A host's flag for recomputation allows it: layers are computed again where that is what it takes, with equal bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import ds_hydra
from ds_hydra.engine import prepare
from ds_hydra.engine.costs import job_memory
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import rank_environment, small_model

DATA = [[3 + index % 5] * 40 + [7, 9] * 30 for index in range(8)]
ONE = ParallelScheme()


class Found(NamedTuple):
    """What a job of two steps came to."""

    losses: list[float]
    weights: dict[str, Tensor]
    recomputed: list[float]
    attended: bool  # whether attention's output is kept


def job(rank: int, flag: Any, *, of_model: bool = False, memory: float = 2.0**40, **hydra: Any) -> Found | str:
    """Two steps, with `memory` bytes for each rank, or the error that refuses it; `of_model`: the script calls the
    model's own method."""
    rank_environment(rank)
    model = small_model()
    if of_model:
        model.gradient_checkpointing_enable()
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "hydra": {"tokens_per_step": 300, "strategies": ["2*tp1"], "self_check": "off", "steps_file": None,
                  "activation_checkpointing": flag, "planner": {"ahead": 0}, **hydra},
    }  # fmt: skip
    try:
        with mock.patch.object(prepare, "least_memory", return_value=(memory, {})):
            engine: Any = ds_hydra.initialize(model=model, training_data=DATA, config=config)[0]
    except ConfigError as error:
        return str(error)
    losses, recomputed = [], []
    for _ in range(2):
        losses.append(float(engine.train_batch()))
        recomputed.append(engine.last_step.recomputed)
    return Found(losses, {name: value.clone() for name, value in engine.full_parameters()}, recomputed,
                 engine.crew.job.source.options.keep_attention)  # fmt: skip


def needed(recomputed: bool, attended: bool = False) -> float:
    """Bytes of a rank for the longest sequence, without a copy of the model beside it, which takes what is left."""
    asked = StageOptions(
        activation_checkpointing=recomputed, functions="auto", tiles=True, keep_attention=attended
    )  # fmt: skip
    memory = job_memory(CausalLM(small_model(), asked), [ONE], 2, 2.0**40, torch.float32)
    return replace(memory.fullest(ONE, 100), twin=0).total(100) / (1.0 - memory.margin)


def same(one: Found, other: Found) -> bool:
    return one.losses == other.losses and all(
        torch.equal(value, other.weights[name]) for name, value in one.weights.items()
    )


def test_a_flag_is_a_permission_and_all_is_an_order() -> None:
    allowed, ordered, by_model, attended = (
        run_ranks(partial(job, **how), 2)[0]
        for how in ({"flag": True}, {"flag": "all"}, {"flag": False, "of_model": True}, {"flag": "keep_attention"})
    )
    assert allowed.recomputed == by_model.recomputed == [0.0, 0.0], "the longest sequence fits"
    assert ordered.recomputed == attended.recomputed == [1.0, 1.0]
    assert (allowed.attended, ordered.attended, attended.attended) == (False, False, True)
    assert same(allowed, ordered)
    assert same(attended, ordered)
    assert same(by_model, ordered)


def test_layers_are_computed_again_where_nothing_else_holds_the_longest_sequence() -> None:
    """But for attention, whose output is kept where that fits, too."""
    tight, tighter = ((needed(flag) + needed(True, attended=True)) / 2 for flag in (False, True))
    kept, allowed, again, ample = (
        run_ranks(partial(job, flag=flag, memory=memory), 2)[0]
        for flag, memory in ((False, tight), (True, tight), (True, tighter), (True, 2 * needed(False)))
    )
    assert isinstance(kept, str)
    assert "no candidate strategy holds more" in kept
    assert allowed.recomputed == again.recomputed == [1.0, 1.0]
    assert (allowed.attended, again.attended, ample.attended) == (True, False, False)
    assert ample.recomputed == [0.0, 0.0]
    torch.testing.assert_close(allowed.weights, ample.weights)  # by other micro-batches, as more of them fit
