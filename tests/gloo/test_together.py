"""A part of set-up that fails on some ranks fails on all, with the cause and not with a closed connection."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_hydra
from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.engine import crew
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.plan.step_plan import Phase, PipelinePlan, StepPlan
from ds_hydra.ranks.together import first_channel, together
from ds_hydra.step.batching import agreed, row_of
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.small_job import small_config, small_engine, small_model


def outcomes(failing: Mapping[int, Exception], num_ranks: int = 3) -> list[str]:
    def program(rank: int) -> str:
        with first_channel() as channel:
            try:
                with together(channel, "reading the table"):
                    if rank in failing:
                        raise failing[rank]
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return str(channel.texts(str(rank)))  # the channel can still be used

    return run_ranks(program, num_ranks)


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        ({}, ["['0', '1', '2']"] * 3),
        (
            {1: ConfigError("no such file")},
            ["ConfigError: reading the table failed on rank 1: no such file", "ConfigError: no such file"],
        ),
        (
            {1: MemoryError("of 3 GiB"), 2: PlanError("too long")},
            ["RuntimeError: reading the table failed on rank 1 and 1 more: MemoryError: of 3 GiB",
             "MemoryError: of 3 GiB", "PlanError: too long"],
        ),
        (dict.fromkeys(range(3), ConfigError("the same")), ["ConfigError: the same"] * 3),
    ],
)  # fmt: skip
def test_the_first_ranks_error_is_told_by_those_that_did_not_fail(
    failing: Mapping[int, Exception], told: list[str]
) -> None:
    found = outcomes(failing)
    assert found[: len(told)] == told
    assert all(text == told[0] for rank, text in enumerate(found) if rank not in failing)


class Unreadable:
    """Data that one rank cannot read."""

    @property
    def lengths(self) -> list[int]:
        if dist.get_rank() == 1:
            raise OSError("/data/tokens.bin is not on this node")
        return [20] * 16

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.arange(3, 23)


def start(data: Any) -> str:
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    rank_environment(dist.get_rank())
    try:
        ds_hydra.initialize(model=small_model(), training_data=data, config=small_config(2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_data_that_one_rank_cannot_read_is_told_by_all() -> None:
    told = run_ranks(lambda rank: start(Unreadable()), 2)
    assert told[1] == "OSError: /data/tokens.bin is not on this node"
    assert told[0] == f"RuntimeError: reading the data failed on rank 1: {told[1]}"


def test_memory_that_one_rank_lacks_is_told_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = crew.ModelMasters

    def scarce(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return masters(*args, **kwargs)

    monkeypatch.setattr(crew, "ModelMasters", scarce)
    told = run_ranks(lambda rank: start([torch.arange(3, 23)] * 16), 2)
    assert told[1] == "OutOfMemoryError: tried to allocate 20 GiB"
    assert told[0] == f"RuntimeError: allocating the master shards failed on rank 1: {told[1]}"


@pytest.mark.parametrize(("schedule", "told"), [("list", "ranks [1] hold other costs, from which"), ("1f1b", "6")])
def test_costs_must_be_equal_where_orders_are_made_from_them(schedule: str, told: str) -> None:
    phase = Phase((PipelinePlan(PipelineShape.parse(f"pp2/{schedule}"), (), 0.0),))
    plan = StepPlan(0, (), (), (phase,), 0.0)

    def program(rank: int) -> str:
        costs = CostTable((SchemeCost(ParallelScheme(pp=2), 0.0, 1.0, 0.0, 100 + rank),))
        try:
            with first_channel() as channel:
                return str(agreed(plan.step, channel.rows(row_of(plan, costs, 3))))
        except PlanError as error:
            return str(error)

    assert all(told in text for text in run_ranks(program, 2))


def test_a_forked_rank_computes_in_one_thread_whatever_libraries_ask_for() -> None:
    """Its parent has used OpenMP, whose threads are not in a forked child."""

    def threads(rank: int) -> tuple[int, float, str]:
        torch.set_num_threads(2)
        return torch.get_num_threads(), float(torch.ones(2_000_000).exp().mean()), os.environ["MKL_NUM_THREADS"]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _ = torch.randn(600, 600) @ torch.randn(600, 600)
        torch.ones(2_000_000).exp()
        found = run_ranks(threads, 2, timeout=20)
    finally:
        torch.set_num_threads(before)
    assert found == [(1, pytest.approx(2.7182817), "1")] * 2


def test_a_model_of_one_layer_trains() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    def job(rank: int) -> list[float]:
        config = AutoConfig.for_model(
            "llama", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            max_position_embeddings=256,
        )  # fmt: skip
        torch.manual_seed(0)
        engine = small_engine(
            rank, AutoModelForCausalLM.from_config(config), small_config(2, strategies=["2*tp1", "tp2"])
        )
        return [float(engine.train_batch()) for _ in range(3)]

    one, other = run_ranks(job, 2)
    assert one == other
    assert one[2] < 5.0


def test_texts_in_no_encoding_travel_as_they_are() -> None:
    """As names of files may be."""
    name = b"/data/\xff".decode(errors="surrogateescape")

    def program(rank: int) -> tuple[list[str], str]:
        with first_channel() as channel:
            return channel.texts(name), channel.tell(name)

    assert run_ranks(program, 2) == [([name, name], name)] * 2
