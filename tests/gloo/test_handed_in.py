"""Steps from sequences that ranks hand in: the update of map-style data, whoever has them, and errors on all ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import numpy as np
import pytest
import torch
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.engine.plans import STEPS as STEPS_SEEN
from ds_hydra.pipe.placement import place_strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import MicroBatchPlan, Phase, PipelinePlan, StepPlan
from ds_hydra.step.delivery import runners
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import same, sequences, small_engine, whole_state
from tests.support.strict import Rules, strict_world

STEPS = 3


def padded(part: list[Tensor]) -> dict[str, Tensor]:
    """A batch as a collator makes it."""
    size = max(map(len, part))
    ids = torch.stack([torch.nn.functional.pad(one, (0, size - len(one))) for one in part])
    mask = torch.tensor([[1] * len(one) + [0] * (size - len(one)) for one in part])
    return {"input_ids": ids, "attention_mask": mask}


def quarter(rank: int, batch: list[Tensor]) -> Any:
    """A fourth for each rank, each in another form."""
    part = batch[rank * len(batch) // 4 : (rank + 1) * len(batch) // 4]
    forms: list[Callable[[], Any]] = [
        lambda: [one.tolist() for one in part],
        lambda: padded(part),
        lambda: [{"input_ids": np.asarray(one)} for one in part],
        lambda: iter([part, "never taken"]),
    ]
    return forms[rank]() if part else []


def all_on(owner: int) -> Callable[[int, list[Tensor]], Any]:
    return lambda rank, batch: batch if rank == owner else []


def halves(rank: int, batch: list[Tensor]) -> Any:
    """Two ranks have something, the others have iterators that have ended."""
    half = len(batch) // 2
    return {0: batch[:half], 2: batch[half:]}.get(rank, iter(()))


def of_map_style(rank: int) -> tuple[list[tuple[int, ...]], list[dict[str, Tensor]], list[float]]:
    engine = small_engine(rank)
    losses = [float(engine.train_batch()) for _ in range(STEPS)]
    return [engine.sampler.batch(step) for step in range(STEPS)], [whole_state(engine)], losses


def handed_in(
    rank: int, share: Callable[[int, list[Tensor]], Any], drawn: list[tuple[int, ...]], strict: Rules | None
) -> tuple[dict[str, Tensor], list[float], list[int]]:
    with contextlib.nullcontext() if strict is None else strict_world(strict):
        engine, data = small_engine(rank, data=None), sequences()
        losses = [float(engine.train_batch(share(rank, [data[i] for i in ids]))) for ids in drawn]
        return whole_state(engine), losses, [engine.global_samples, engine.last_step.num_tokens]


@pytest.fixture(scope="module")
def expected() -> Any:
    return run_ranks(of_map_style, 4)[0]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("share", "strict"),
    [
        pytest.param(quarter, None, marks=pytest.mark.long),
        (all_on(0), None),
        (all_on(3), Rules(connect=True)),
        (halves, Rules(blocking=True)),
    ],
)
def test_the_update_is_that_of_map_style_data(expected: Any, share: Any, strict: Rules | None) -> None:
    drawn, (state,), losses = expected
    data = sequences()
    for found, own_losses, (samples, tokens) in run_ranks(handed_in, 4, share, drawn, strict):
        assert own_losses == losses
        assert same(found, state)
        assert samples == sum(map(len, drawn))
        assert tokens == sum(len(data[i]) for i in drawn[-1])


def errors(rank: int) -> list[str]:
    engine = small_engine(rank, data=None, strategies=["2*tp1"], context_length=200)
    good = [[5, 6, 7, 8]] * 3
    texts = []

    def broken() -> Any:
        raise OSError("the disk is gone")
        yield

    for bad in ([[5, 6], [5, 6, 99]], [{"text": "x"}], broken(), [[5] * 201], [], iter(()), 17):
        try:
            engine.train_batch(bad if rank == 1 or not bad else good)
            texts.append(f"step {engine.global_steps}")
        except (Exception, StopIteration) as error:
            texts.append(f"{type(error).__name__}: {error}")
    ended = iter(())
    try:
        engine.train_batch(ended)
    except StopIteration as error:
        texts.append(f"StopIteration: {error}")
    texts.append(f"{float(engine.train_batch(good)):.6f} {engine.global_steps}")
    return texts


def test_errors_reach_all_ranks_with_rank_and_item_and_training_goes_on() -> None:
    first, second = run_ranks(errors, 2)
    assert first[:2] + first[3:] == second[:2] + second[3:]
    assert second[2] == "OSError: the disk is gone", "the rank that read keeps its own error"
    assert "failed on rank 1: item 1 of the data holds the token id 99" in first[0]
    assert "failed on rank 1: item 0 of the data has the columns ['text']" in first[1]
    assert "failed on rank 1: OSError: the disk is gone" in first[2]
    assert "item 0 of the data has 201 tokens" in first[3]
    assert "no rank handed in a sequence" in first[4]
    assert first[5] == "step 1", "a rank whose iterator has ended has none"
    assert "failed on rank 1: item 0 of the data" in first[6]
    assert first[7] == "StopIteration: the iterators of all ranks have ended"
    assert first[8].endswith(" 2")


def too_long(rank: int, ahead: int) -> list[str]:
    engine = small_engine(rank, data=None, strategies=["2*tp1"], planner={"ahead": ahead})
    table = engine.crew.plans.table
    costs = tuple(replace(cost, max_length=50, util_length=50) for cost in table.costs)
    engine.crew.plans.use_table(replace(table, costs=costs))
    texts = []
    for length in (51, 50):
        try:
            engine.train_batch([[5] * length] if rank == 1 else [])
            texts.append(f"step {engine.global_steps}")
        except ValueError as error:
            texts.append(f"{type(error).__name__}: {error}")
    engine.destroy()
    return texts


@pytest.mark.parametrize("ahead", [0, 2])
def test_what_no_strategy_holds_is_refused_on_all_ranks(ahead: int) -> None:
    first, second = run_ranks(too_long, 2, ahead)
    assert first[0].startswith("PlanError")
    assert "51" in first[0]
    assert second[0] == f"PlanError: planning step 1 failed on rank 0: {first[0].removeprefix('PlanError: ')}"
    assert first[1] == second[1] == "step 1"


def test_training_data_and_handed_in_sequences_exclude_each_other() -> None:
    def job(rank: int) -> str:
        try:
            small_engine(rank).train_batch([[1, 2, 3]])
        except ValueError as error:
            return str(error)
        return "no error"

    assert "beside training_data" in run_ranks(job, 1)[0]


def test_only_the_ranks_that_run_a_sequence_get_it() -> None:
    shape = StrategyShape.parse("tp2 + 2*tp1")
    lengths = (9, 5, 4)
    pipelines = tuple(
        PipelinePlan(piece, tuple(MicroBatchPlan.of_whole([one], lengths) for one in of), 1.0)
        for piece, of in zip(shape.pipelines, ((0, 2), (1,), ()), strict=True)
    )
    plan = StepPlan(0, (7, 8, 9), lengths, (Phase(pipelines),), 1.0)
    assert runners(plan, [place_strategy(shape, 4, 4)]) == [{0, 1}, {2}, {0, 1}]


def test_what_a_step_has_need_not_be_known_before() -> None:
    """The first job that a user writes: a context, and nothing else; candidates are proposed all the same."""

    def run(rank: int) -> tuple[int, list[str], float]:
        block = {"context_length": 128, "self_check": "off", "steps_file": None}
        engine = small_engine(rank, data=None, config={"optimizer": {"type": "AdamW"}, "hydra": block})
        loss = float(engine.train_batch([one.tolist() for one in sequences()[rank::2]]))
        return engine.hydra_config.tokens_per_step, list(map(str, engine.crew.prepared.strategies)), loss

    (tokens, candidates, loss), other = run_ranks(run, 2)
    assert (tokens, candidates, loss) == other
    assert tokens == 2 * 128
    assert candidates
    assert 3.0 < loss < 6.0


@pytest.mark.parametrize(
    ("data", "missing"), [([[1, 2, 3]] * 9, "hydra.tokens_per_step"), (None, "hydra.context_length")]
)
def test_sizes_that_nothing_tells_are_asked_for(data: Any, missing: str) -> None:
    def run(rank: int) -> str:
        with pytest.raises(ConfigError) as raised:
            small_engine(rank, data=data, config={"optimizer": {"type": "AdamW"}, "hydra": {"strategies": ["2*tp1"]}})
        return str(raised.value)

    for text in run_ranks(run, 2):
        assert f"{missing} is missing" in text


@pytest.mark.parametrize(("longest", "told"), [(8, 1), (9, 0)])
def test_steps_that_are_all_short_are_told_once(longest: int, told: int) -> None:
    """An eighth of the context, in the first steps; what comes later is not waited for."""

    def run(rank: int) -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ds_hydra").addHandler(handler)
        engine = small_engine(rank, data=None, strategies=["2*tp1"], context_length=64, planner={"ahead": 0})
        for step in range(STEPS_SEEN + 2):
            engine.train_batch([[5] * (longest if step == 3 else 7)])
        return [line for line in lines if "context_length" in line]

    first, second = run_ranks(run, 2)
    assert (len(first), len(second)) == (told, 0)
    for line in first:
        assert (
            "the longest of the 100 sequences of the first 50 steps has 8 tokens, and hydra.context_length is 64"
            in line
        )
