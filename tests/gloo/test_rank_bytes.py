"""What the memory model counts for a rank is what its runtimes hold, to the byte; gaps in it change no value; and which
pushes wait for memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.costs.memory import ElementBytes, RankBytes, push_turns, rank_bytes
from ds_hydra.step import strategy_runtime
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero import scratch_plan
from tests.support.planner_cases import room_for_pushes
from tests.support.small_job import same, small_config, small_engine, small_source, whole_state

SIZES = {"fp32": 4, "bf16": 2}
_TRAIN = strategy_runtime.StrategyRuntime.train


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("grad_dtype", "wire", "node_size"),
    [("fp32", "bf16", 4), ("bf16", "bf16", 2), ("bf16", "fp32", 4), ("fp32", "bf16", 3)],
)
def test_every_rank_holds_what_is_counted(grad_dtype: str, wire: str, node_size: int) -> None:
    def run(rank: int) -> list[tuple[RankBytes, RankBytes, int]]:
        room = 20_000  # bytes: for some pushes and not for all
        with (
            mock.patch.object(scratch_plan, "AT_ONCE", 300),
            mock.patch.object(strategy_runtime, "room_for_pushes", return_value=room),
            room_for_pushes(room),
        ):
            return steps(rank)

    def steps(rank: int) -> list[tuple[RankBytes, RankBytes, int]]:
        config = small_config(4, node_size=node_size)
        config["hydra"]["strategies"] = [*config["hydra"]["strategies"], "tp2pp2/v"]
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": grad_dtype}}
        config |= {"communication_data_type": wire}
        engine = small_engine(rank, config=config)
        found, waiting = [], 0
        for _ in config["hydra"]["strategies"]:
            engine.train_batch()
            stepper, world = engine.crew.stepper, engine.crew.world
            runtime = stepper.runtimes.built[engine.last_step.strategy]
            arena = stepper.arena
            held = RankBytes(
                sum(buffer.nbytes for buffer in runtime.pulls.buffers),
                runtime.gradient_bytes,
                arena.scratch.num_bytes,
            )
            element = ElementBytes(2, SIZES[grad_dtype], wire=SIZES[wire])
            plan, strategy = engine.job.source.plan, runtime.strategy
            counted = rank_bytes(plan, strategy, element, node_size=world.node_size)[rank]
            turns = push_turns(plan, strategy, element, node_size=world.node_size)[:, rank]
            assert [window.after for window in runtime.pushes._windows] == turns.tolist()
            found.append((held, counted, arena.params.nbytes + arena.grads.nbytes))
            waiting += int(turns.any())
        assert waiting, "some pushes wait for memory"
        return found

    for rows in run_ranks(run, 4, timeout=120):
        assert [held for held, _, _ in rows] == [counted for _, counted, _ in rows]
        assert {room for _, _, room in rows} == {max(held.params + held.grads for held, _, _ in rows)}
        assert len({held for held, _, _ in rows}) > 1, "strategies differ in what they hold"


@pytest.mark.drawn
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_parameters_begin_on_128_bytes_and_are_what_they_are_side_by_side(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(rank: int) -> tuple[dict[str, Tensor], list[str]]:
        engine = small_engine(rank, config=small_config(num_ranks) | {"bf16": {"enabled": True}})
        for _ in range(4):
            engine.train_batch()
        askew = [
            f"{strategy} {name}"
            for strategy, runtime in engine.crew.stepper.runtimes.built.items()
            for name, parameter in runtime.parts[0].parameters.items()
            if parameter.storage_offset() % 64
        ]
        return whole_state(engine), askew

    results = run_ranks(run, num_ranks, timeout=120)
    assert [askew for _, askew in results] == [[]] * num_ranks
    monkeypatch.setattr(small_source(), "plan", replace(small_source().plan, alignment=1))
    side_by_side = run_ranks(run, num_ranks, timeout=120)
    assert any(askew for _, askew in side_by_side)
    assert all(same(one, other) for (one, _), (other, _) in zip(results, side_by_side, strict=True))


@pytest.mark.drawn
@pytest.mark.parametrize(("num_ranks", "grad_dtype"), [(4, "fp32"), (4, "bf16"), (3, "bf16")])
def test_sums_among_gradients_are_those_in_memory_of_their_own(num_ranks: int, grad_dtype: str) -> None:
    """To the bit, under strategies that change: where sums lie [Note: where sums lie] changes no value."""

    def run(rank: int, apart: bool) -> tuple[dict[str, Tensor], int]:
        config = small_config(num_ranks) | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": grad_dtype}}
        engine = small_engine(rank, config=config)
        masters, arena, among = engine.crew.masters.trained, engine.crew.stepper.arena, 0
        for _ in range(4):
            with mock.patch.object(strategy_runtime.StrategyRuntime, "train", _apart if apart else _TRAIN):
                engine.train_batch()
            among += sum(grad.untyped_storage().data_ptr() == arena.grads.data_ptr() for grad in masters.grads)
        return whole_state(engine), among

    (among, count), (apart, none) = (run_ranks(run, num_ranks, each, timeout=200)[0] for each in (False, True))
    assert count > 0 == none
    assert same(among, apart)


def _apart(runtime: strategy_runtime.StrategyRuntime, *batches: Any, alone: bool, **others: Any) -> Any:
    """A phase of a step, as if there were others."""
    assert alone
    return _TRAIN(runtime, *batches, alone=False, **others)
