"""Before step 0: every stage is built, one rank looks for all; and the same job under load."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_hydra.engine.job import look_once, model_source
from ds_hydra.pipe.models import causal_lm
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.causal_stage import CausalStage
from ds_hydra.ranks.channel import Channel
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.busy_job import Case, Settings, run
from tests.support.families import FAMILIES
from tests.support.small_job import USUAL, small_config, small_engine, small_model, told

# --- Every stage of every candidate is built before step 0.
STRATEGIES = ["2*tp1", "tp2", "pp2", "sp2"]


def test_a_stage_that_cannot_be_built_ends_the_job_before_step_0_on_all_ranks() -> None:
    """Without a self-check too, and though the first steps would not use it."""

    def program(rank: int) -> str:
        original = CausalStage.__init__

        def init(self: Any, source: Any, place: Any, *rest: Any) -> None:
            if place.is_last and not place.is_first:
                raise TypeError("a layer cannot be copied")
            original(self, source, place, *rest)

        with mock.patch.object(CausalStage, "__init__", init):
            return told(lambda: small_engine(rank, strategies=STRATEGIES))

    first, second = run_ranks(program, 2)
    assert second.startswith("ConfigError: no stage of ")
    assert second.endswith(" can be built: TypeError: a layer cannot be copied")
    assert first == f"ConfigError: building the stages of all strategies failed on rank 1: {second.split(': ', 1)[1]}"


def test_experts_that_their_product_cannot_take_are_refused() -> None:
    """tp2 leaves 44 of 88 columns, no multiple of 8: BF16 experts would fail in step 1."""

    def program(rank: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        model_type, settings = FAMILIES["mixtral"]
        config = AutoConfig.for_model(model_type, **{**settings, "intermediate_size": 88})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with pytest.raises(ConfigError, match=r"tp=2 leaves of .*experts of width 44, .* multiples of 8 in bfloat16"):
            small_engine(rank, model, small_config(2, strategies=["tp2"]) | {"bf16": {"enabled": True}})

    run_ranks(program, 2)


# --- One rank looks at a model for all that have the same; a rank with another one looks by itself.
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
    found = run_ranks(partial(looked, change=change), 2)
    assert [count for count, _ in found] == runs
    assert all(same for _, same in found)


def refused(rank: int) -> str:
    model = small_model()
    model.is_quantized = True
    make = look_once(
        lambda facts: model_source(model, USUAL, facts=facts), model, USUAL, Channel(dist.group.WORLD, rank, 2)
    )
    return told(make)


def test_a_model_that_is_refused_is_refused_by_each_rank() -> None:
    first, second = run_ranks(refused, 2)
    assert first == second
    assert "quantized" in first


# --- A job with proposed strategies and slices: the same plans and the same bits on a busy machine, with other steps
# planned ahead, its planner hurt, after a restart, with other seeds of hashes and without compiled kernels.
DISTURBED = (
    *[Case(f"busy, {number}", beside=4) for number in range(3)],
    *[Case(f"{ahead} ahead", {"ahead": ahead}) for ahead in (0, 1, 8)],
    Case("hurt", {"hurt": True}, 4),
    Case("restarted", beside=2, restarted=True),
    *[Case(f"hashes of {seed}", environment={"PYTHONHASHSEED": f"{seed}"}) for seed in range(3)],
    Case("cold kernels", environment={"NUMBA_CACHE_DIR": "{folder}/numba"}),
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = run(Settings(str(tmp_path_factory.mktemp("calm"))))
    assert found["slices"] > 3
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case("hurt", {"hurt": True, "ahead": 1}, beside=2),
        *(pytest.param(one, marks=pytest.mark.long) for one in DISTURBED),
    ],
    ids=lambda case: case.kind,
)
def test_the_same_job_beside_busy_processes(case: Case, calm: dict[str, Any], tmp_path: Path) -> None:
    found = case.run(str(tmp_path))
    assert (found["plans"], found["bits"]) == (calm["plans"], calm["bits"])
    assert set(found["recipes"]) == set(calm["recipes"])
    assert bool({"restarted", "here"} & set(found["makers"])) == case.replaces
