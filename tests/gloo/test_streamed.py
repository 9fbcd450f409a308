"""Training on a stream: rank 0 reads it, every number of ranks trains the same, and a restart goes on exactly."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.testing import run_ranks
from tests.support.small_job import Plain, Stateful, same, sequences, small_engine, whole_state

STEPS = 5


def streaming(rank: int, stream: Any, ahead: int = 0, **hydra: Any) -> Any:
    return small_engine(rank, data=stream, context_length=128, planner={"ahead": ahead}, **hydra)


def undisturbed(rank: int, kind: Any) -> tuple[list[dict[str, Tensor]], list[float], int]:
    stream = kind(sequences())
    engine = streaming(rank, stream)
    states, losses = [], []
    for _ in range(STEPS):
        losses.append(float(engine.train_batch()))
        states.append(whole_state(engine))
    engine.destroy()
    return states, losses, stream.reads


def interrupted(rank: int, kind: Any, ahead: int, folder: Path, states: list[dict[str, Tensor]]) -> list[int]:
    """Stop after two steps and go on in a new engine, twice: the steps whose states differ."""
    differ = []
    engine = streaming(rank, kind(sequences()), ahead)
    for again in (2, 2, 1):
        for _ in range(again):
            engine.train_batch()
            if not same(whole_state(engine), states[engine.global_steps - 1]):
                differ.append(engine.global_steps)
        if engine.global_steps < STEPS:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = streaming(rank, kind(sequences()), ahead)
            engine.load_checkpoint(folder)
    engine.destroy()
    return differ


@pytest.mark.drawn
def test_stopped_in_the_middle_is_the_undisturbed_run(tmp_path: Path) -> None:
    found = run_ranks(undisturbed, 2, Stateful)
    states, losses, reads = found[0]
    assert not same(states[0], states[1])
    assert losses == found[1][1]
    assert reads > 0
    assert found[1][2] == 0, "rank 0 alone reads"
    assert run_ranks(interrupted, 2, Stateful, 2, tmp_path, states, timeout=200) == [[], []]


def given(rank: int) -> dict[str, Tensor]:
    """The same steps, handed in."""
    engine = small_engine(rank, data=None)
    data = sequences()
    at = 0
    for _ in range(3):
        step: list[Tensor] = []
        while sum(map(len, step)) < 250:
            step.append(data[at % len(data)])
            at += 1
        engine.train_batch(step if rank == 1 else [])
    return whole_state(engine)


@pytest.mark.drawn
def test_a_stream_trains_as_its_items_do() -> None:
    states = run_ranks(undisturbed, 2, Plain)[0][0]
    assert same(run_ranks(given, 2)[0], states[2])


class Broken:
    """Gives a few good items and then one that cannot be trained on."""

    def __iter__(self) -> Any:
        yield from sequences()[:8]
        yield {"text": "x"}


def failing(rank: int) -> str:
    engine = streaming(rank, Broken())
    try:
        for _ in range(4):
            engine.train_batch()
    except ValueError as error:
        return f"{type(error).__name__} after step {engine.global_steps}: {error}"
    return "no error"


def test_a_bad_item_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_hydra.watchdog import watchdog

    monkeypatch.setattr(watchdog, "end_process", lambda text: None)
    first, second = run_ranks(failing, 2)
    assert first.startswith("ConfigError after step 1: item 8 of the data has the columns ['text']")
    assert second.startswith("ConfigError after step 1: planning step 2 failed on rank 0: item 8 of the data")


def hidden(rank: int) -> list[bool]:
    engine = streaming(rank, Plain(sequences()), ahead=2, choose="best")
    found = []
    for _ in range(4):
        engine.train_batch()
        found.append(engine.last_step.planning_hidden)
        time.sleep(1.0)  # a step as long as those that planning hides behind
    engine.destroy()
    return found


def test_planning_hides_behind_training() -> None:
    assert all(run_ranks(hidden, 1)[0][2:])


def test_the_loader_makes_the_steps_that_are_left() -> None:
    def job(rank: int) -> list[int]:
        rows: Any = [[5] * 40] * 9
        engine = streaming(rank, torch.utils.data.DataLoader(rows, collate_fn=lambda x: x), total_steps=3)
        engine.train_batch()
        steps = [number for number in engine.training_dataloader if engine.train_batch() is not None]
        engine.destroy()
        return [*steps, engine.global_steps, len(engine.training_dataloader)]

    assert run_ranks(job, 1)[0] == [1, 2, 3, 3]
