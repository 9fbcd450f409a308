"""Calls that ranks do not make alike: named on all ranks, before anything has changed or soon after both wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.ends import TRACEBACK, all_told, codes, ends, mark_fault
from tests.support.small_job import same, small_engine, whole_state
from tests.support.strict import strict_world

FAULTS = {"frozen_seconds": 9.0}
SHARE = [list(range(3, 3 + length)) for length in (9, 20, 33)]
SOON_S = 10.0

Script = Callable[[Any, Path], Any]


def _step(engine: Any, _: Path) -> None:
    engine.train()
    engine.backward(engine({"input_ids": torch.tensor(SHARE[:1])}))
    engine.step()


def _evaluated(engine: Any, _: Path) -> None:
    engine.eval()
    try:
        engine({"input_ids": torch.tensor(SHARE[:1])})
    finally:
        engine.train()


HANDED: dict[str, Script] = {
    "train_batch()": lambda engine, _: engine.train_batch(SHARE),
    "step()": _step,
    "engine(batch) after eval()": _evaluated,
    "eval_batch()": lambda engine, _: engine.eval_batch(SHARE),
    "evaluate()": lambda engine, _: engine.evaluate(SHARE),
    "predict()": lambda engine, _: engine.predict(SHARE, lambda logits, labels: logits.argmax(-1).double()),
    "log_probs()": lambda engine, _: engine.log_probs(SHARE),
    "forward_backward()": lambda engine, _: engine.forward_backward(SHARE),
    "save_checkpoint()": lambda engine, place: engine.save_checkpoint(place / "saved"),
    "load_checkpoint()": lambda engine, place: engine.load_checkpoint(place / "saved"),
    "save_16bit_model()": lambda engine, place: engine.save_16bit_model(place / "model"),
    "load_16bit_model()": lambda engine, place: engine.load_16bit_model(place / "model"),
    "fp32_state_dict()": lambda engine, _: engine.fp32_state_dict(),
    "full_parameters()": lambda engine, _: list(engine.full_parameters()),
}
"""Calls whose names are compared before anything else is exchanged."""


def test_two_different_calls_are_refused_on_both_ranks_and_change_nothing(tmp_path: Path) -> None:
    """Every ordered pair, one after the other in one job, and both ranks can go on after each."""

    def refused(rank: int) -> tuple[list[str], bool, float]:
        engine = small_engine(rank, data=None, context_length=128, planner={"ahead": 0})
        before, missed, longest = whole_state(engine), list[str](), 0.0
        for pair in permutations(HANDED, 2):
            began = time.monotonic()
            expected = f"rank 0 calls {pair[0]}, rank 1 calls {pair[1]}: every rank must make the same calls"
            try:
                HANDED[pair[rank]](engine, tmp_path)
                missed.append(f"{pair}: no error")
            except ConfigError as error:
                missed += [] if str(error).startswith(expected) else [f"{pair}: {error}"]
            longest = max(longest, time.monotonic() - began)
        unchanged = same(before, whole_state(engine)) and not list(tmp_path.iterdir())
        for name in ("step()", "evaluate()", "save_checkpoint()", "load_checkpoint()", "train_batch()"):
            HANDED[name](engine, tmp_path)
        return missed, unchanged and engine.global_steps == 2, longest

    for missed, unchanged, longest in run_ranks(refused, 2):
        assert missed == []
        assert unchanged
        assert longest < 5.0


DRAWN: dict[str, Script] = {"train_batch()": lambda engine, _: engine.train_batch()}
PARTS: dict[str, Script] = {"optimizer_step()": lambda engine, _: engine.optimizer_step()}
REFUSED = {
    "drawn": {"train_batch()", "step()", "forward_backward()"},
    "parts": {"train_batch()", "step()", "save_checkpoint()", "load_checkpoint()", "load_16bit_model()"},
}
"""What an engine with training data, or with gradients that wait for an update, refuses on each rank by itself."""


def _ends_of(calls: tuple[str, str], *, ahead: int, drawn: bool, num_ranks: int = 2, strict: bool = False) -> Any:
    """How ranks end of which rank 0 makes one call and the others another."""
    scripts = HANDED | (DRAWN if drawn else PARTS)

    def program(rank: int, place: Path) -> None:
        # As a script has it that calls init_distributed() itself.
        dist.distributed_c10d._set_pg_timeout(timedelta(minutes=30), dist.group.WORLD)
        data: dict[str, Any] = {} if drawn else {"data": None, "context_length": 128}
        engine = small_engine(rank, faults=FAULTS, timeout_seconds=60, planner={"ahead": ahead}, **data)
        if drawn:
            for _ in range(4):  # all strategies have been built, so that the next step is ready
                engine.train_batch()
        else:
            engine.forward_backward(SHARE)
        if rank == num_ranks - 1:
            mark_fault(place)
        scripts[calls[rank > 0]](engine, place)

    def strictly(rank: int, place: Path) -> None:
        with strict_world():
            program(rank, place)

    return ends(strictly if strict else program, num_ranks)


def _check(found: Any, calls: tuple[str, str], others: str = "rank 1 calls") -> None:
    assert codes(found) == [78] * len(found), all_told(found)
    assert max(end.seconds for end in found) < SOON_S
    assert all_told(found).count(f"rank 0 calls {calls[0]}, {others} {calls[1]}: every rank must") == 1
    assert TRACEBACK not in all_told(found)


LATE = [
    (call, other, kind)
    for call, kind in (("train_batch()", "drawn"), ("optimizer_step()", "parts"))
    for other in HANDED
    if other not in REFUSED[kind]
]


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("call", "other", "kind"), LATE)
def test_a_call_with_other_messages_before_is_named_soon(
    call: str, other: str, kind: str, first: bool, ahead: int
) -> None:
    """A step of training data begins with a plan or with parameters, an update with a norm: heartbeats tell."""
    calls = (call, other) if first else (other, call)
    _check(_ends_of(calls, ahead=ahead, drawn=kind == "drawn"), calls)


@pytest.mark.parametrize(
    ("calls", "kind", "ahead", "strict"),
    [
        (("save_checkpoint()", "train_batch()"), "drawn", 2, False),
        (("train_batch()", "evaluate()"), "drawn", 0, False),
        (("log_probs()", "optimizer_step()"), "parts", 0, True),
    ],
)
def test_some_of_these(calls: tuple[str, str], kind: str, ahead: int, strict: bool) -> None:
    _check(_ends_of(calls, ahead=ahead, drawn=kind == "drawn", strict=strict), calls)


def test_of_more_ranks_each_is_named() -> None:
    calls = "save_checkpoint()", "train_batch()"
    _check(_ends_of(calls, ahead=0, drawn=True, num_ranks=4), calls, "ranks 1, 2, 3 call")


@pytest.mark.parametrize("call", ["save_checkpoint()", "train_batch()"])
@pytest.mark.parametrize("other", ["barrier", "busy"])
def test_a_rank_that_is_alone_in_a_call_waits_as_long_as_the_config_says(call: str, other: str) -> None:
    """Also where the script has made the groups itself, with a longer time."""

    def program(rank: int, place: Path) -> None:
        dist.distributed_c10d._set_pg_timeout(timedelta(minutes=30), dist.group.WORLD)
        engine = small_engine(rank, faults=FAULTS, timeout_seconds=4)
        engine.train_batch()
        mark_fault(place)
        if rank == 0:
            (HANDED | DRAWN)[call](engine, place)
        elif other == "barrier":
            dist.barrier()
        else:
            time.sleep(10)

    found = ends(program, 2)
    assert 3.5 < found[0].seconds < 12.0
    told = all_told(found)
    assert told.count(f"it waited in vain for rank 1 in {call}: every rank must make this call") == 1, told
    assert codes(found) == [75, 75] if other == "barrier" else codes(found)[0] == 75, told


def test_a_rank_that_is_busy_while_another_waits_ends_nothing() -> None:
    def job(rank: int) -> int:
        engine = small_engine(rank, faults=FAULTS, timeout_seconds=60)
        engine.train_batch()
        if rank == 1:
            time.sleep(6)
        engine.train_batch()
        engine.evaluate(SHARE)
        if rank == 0:
            time.sleep(6)
        engine.fp32_state_dict()
        engine.destroy()
        return int(engine.global_steps)

    assert run_ranks(job, 2) == [2, 2]


@pytest.mark.parametrize("how", ["evaluation", "training", "handed"])
def test_a_rank_whose_script_ends_is_told_with_the_right_number_of_steps(how: str) -> None:
    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, faults=FAULTS, data=None, context_length=128, timeout_seconds=60)
        batches = 5 - 2 * rank
        for _ in range(1 if how == "evaluation" else batches):
            HANDED["step()" if how == "training" else "train_batch()"](engine, place)
        for _ in range(batches if how == "evaluation" else 0):
            HANDED["engine(batch) after eval()"](engine, place)
        if rank == 1:
            mark_fault(place)

    found = ends(program, 2)
    assert codes(found) == [78, 0], all_told(found)
    assert max(end.seconds for end in found) < 5.0
    steps = "1 step," if how == "evaluation" else "3 steps,"
    assert all_told(found).count(f"rank 1's script ended after {steps}") == 1, all_told(found)
    assert "drop_last" in all_told(found)
    assert "Restart" not in all_told(found)


def test_a_save_by_one_rank_is_named_where_the_other_ranks_script_has_ended() -> None:
    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, faults=FAULTS, data=None, context_length=128, timeout_seconds=60)
        HANDED["train_batch()"](engine, place)
        if rank == 0:
            engine.save_checkpoint(str(place))
        else:
            time.sleep(1)
            mark_fault(place)

    found = ends(program, 2)
    assert codes(found) == [78, 0], all_told(found)
    assert max(end.seconds for end in found) < 5.0
    told = all_told(found)
    assert told.count("rank 1's script ended after 1 step, or destroyed its engine, while rank 0 calls save_check") == 1
    assert "`if rank == 0:`" in told
