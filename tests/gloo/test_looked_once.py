"""One rank looks at a model for all that have the same; a rank with another one looks by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_hydra.engine.job import look_once, model_source
from ds_hydra.pipe.models import causal_lm
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.ranks.channel import Channel
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import USUAL, small_model

Change = Callable[[Any, int], object]


def other_values(model: Any, rank: int) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(rank + 1)


def another_epsilon(model: Any, rank: int) -> None:
    model.model.norm.variance_epsilon = 1e-6 * (rank + 1)


def another_type(model: Any, rank: int) -> None:
    model.to(torch.float64 if rank else torch.float32)


def a_frozen_layer(model: Any, rank: int) -> None:
    model.model.layers[1].requires_grad_(rank == 0)


def a_hook(model: Any, _: int) -> None:
    model.model.norm.register_forward_hook(lambda *_: None)


def looked(rank: int, change: Change) -> tuple[int, bool]:
    """How often this rank ran the model, and whether it found what it finds alone."""
    model = small_model()
    change(model, rank)
    alone = CausalLM(model, USUAL)
    channel = Channel(dist.group.WORLD, rank, dist.get_world_size())
    with mock.patch.object(causal_lm, "trace", side_effect=causal_lm.trace) as trace:
        found = look_once(lambda facts: model_source(model, USUAL, facts=facts), model, USUAL, channel)()
    assert isinstance(found, CausalLM)
    return trace.call_count, (found.facts, found.plan, found.options) == (alone.facts, alone.plan, alone.options)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("change", "runs"),
    [(other_values, [1, 0]), (another_epsilon, [1, 1]), (another_type, [1, 1]), (a_frozen_layer, [1, 1]),
     (a_hook, [1, 1])],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_model_is_looked_at_by_one_rank(change: Change, runs: list[int]) -> None:
    told = run_ranks(partial(looked, change=change), 2)
    assert [count for count, _ in told] == runs
    assert all(same for _, same in told)


def refused(rank: int) -> str:
    model = small_model()
    model.is_quantized = True
    make = look_once(
        lambda facts: model_source(model, USUAL, facts=facts), model, USUAL, Channel(dist.group.WORLD, rank, 2)
    )
    with pytest.raises(ConfigError) as error:
        make()
    return str(error.value)


def test_a_model_that_is_refused_is_refused_by_each_rank() -> None:
    first, second = run_ranks(refused, 2)
    assert first == second
    assert "quantized" in first
