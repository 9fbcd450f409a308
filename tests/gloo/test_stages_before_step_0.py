"""Every stage of every candidate is built before step 0, and building one later takes no message of any rank."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ds_hydra
from ds_hydra.pipe.models.causal_stage import CausalStage
from ds_hydra.step.strategy_runtime import StrategyRuntime
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.families import FAMILIES, build_model

STRATEGIES = ["2*tp1", "tp2", "pp2", "sp2"]
MESSAGES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all_single", "broadcast", "barrier", "send", "recv",
    "isend", "irecv", "batch_isend_irecv", "new_group", "reduce_scatter_tensor", "all_gather_object",
    "all_gather_single", "reduce_scatter_single",
)  # fmt: skip


class Silent:
    """A transport that nobody may use."""

    def exchange(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a message")


@contextlib.contextmanager
def no_messages() -> Iterator[None]:
    """Within it, every function of torch.distributed that sends or waits is an error."""
    with contextlib.ExitStack() as stack:
        for name in MESSAGES:
            stack.enter_context(mock.patch.object(dist, name, side_effect=AssertionError(f"{name} was called")))
        yield


def start(model: Any = None, bf16: dict[str, bool] | None = None, **hydra: Any) -> Any:
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    rank_environment(dist.get_rank())
    block = {"tokens_per_step": 64, "strategies": STRATEGIES, "steps_file": None, "planner": {"ahead": 0}}
    config: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "hydra": block | hydra}
    if bf16 is not None:
        config["bf16"] = bf16
    model = model or build_model("llama", torch.float32)
    return ds_hydra.initialize(model=model, training_data=[[3] * 20, [5] * 40] * 4, config=config)[0]


def test_building_a_strategy_in_the_background_communicates_nothing() -> None:
    def program(rank: int) -> list[str]:
        engine = start(self_check="off", choose="cycle")
        crew = engine.crew
        stepper = crew.stepper
        world = dataclasses.replace(crew.world, links=Silent(), edges=Silent())
        built = {}
        with no_messages():
            for text, strategy in stepper.runtimes._strategies.items():
                built[text] = StrategyRuntime(
                    strategy, engine.job.source, crew.masters, stepper.arena, world, crew.activity,
                    grad_dtype=engine.job.types.grads, wire_dtype=engine.job.types.wire,
                )  # fmt: skip
        losses = [float(engine.train_batch()) for _ in range(2)]
        engine.destroy()
        assert all(loss > 0 for loss in losses)
        return list(built)

    assert run_ranks(program, 2) == [STRATEGIES] * 2


def test_a_stage_that_cannot_be_built_ends_the_job_before_step_0_on_all_ranks() -> None:
    """Without a self-check too, and though the first steps would not use it."""

    def program(rank: int) -> str:
        original = CausalStage.__init__

        def init(self: Any, source: Any, place: Any, *rest: Any) -> None:
            if place.is_last and not place.is_first:
                raise TypeError("a layer cannot be copied")
            original(self, source, place, *rest)

        with mock.patch.object(CausalStage, "__init__", init):
            try:
                start(self_check="off", choose="cycle")
            except ConfigError as error:
                return f"{type(error).__name__}: {error}"
        return "it has started"

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
            start(model, bf16={"enabled": True}, strategies=["tp2"], self_check="off")

    run_ranks(program, 2)
