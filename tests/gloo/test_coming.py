"""Steps that a thread makes ready are the steps that training would have made itself, with two small messages each."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_hydra.ranks.channel import AHEAD_TAG, Channel
from ds_hydra.ranks.telling import Telling
from ds_hydra.testing import run_ranks
from tests.support.small_job import LENGTHS, same, sequences, small_engine, whole_state

STEPS, STOP, USED_BEFORE = 6, 4, 3  # strategies take turns: each was used once before this step


class Watched:
    """The training data, and which thread read how many of them; item `bad` cannot be read."""

    def __init__(self, bad: int | None = None) -> None:
        self.items, self.lengths, self._bad = sequences(), LENGTHS, bad
        self.readers: list[str] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.readers.append(threading.current_thread().name)
        if index == self._bad:
            raise OSError("the disk is gone")
        return self.items[index]


def job(rank: int, data: Watched, ahead: int, **hydra: Any) -> Any:
    return small_engine(rank, data=data, planner={"ahead": ahead}, **hydra)


def messages(engine: Any, steps: int) -> list[int]:
    """Train, and count this rank's small messages in each step."""
    found = [0]
    with mock.patch.multiple(Telling, tell=_counting(Telling.tell, found)), mock.patch.multiple(
        Channel, rows=_counting(Channel.rows, found), exchange=_counting(Channel.exchange, found)
    ):  # fmt: skip
        for _ in range(steps):
            engine.train_batch()
            found.append(0)
    return found[:-1]


def _counting(original: Any, found: list[int]) -> Any:
    def counted(*args: Any) -> Any:
        found[-1] += 1
        return original(*args)

    return counted


def trained(rank: int, ahead: int, folder: Path) -> Any:
    """A run: messages, and again after a load in its middle; state; readers; whether the load changed nothing."""
    data = Watched()
    engine = job(rank, data, ahead, total_steps=STEPS)
    counted = messages(engine, STOP)
    engine.save_checkpoint(folder)
    counted += messages(engine, STEPS - STOP)
    state, readers = whole_state(engine), list(data.readers)
    engine.load_checkpoint(folder)  # back to step 4
    again = messages(engine, STEPS - STOP)
    equal = same(whole_state(engine), state)
    engine.destroy()
    return counted, again, state, readers, equal


@pytest.mark.drawn
def test_steps_made_ready_are_the_same_to_the_bit(tmp_path: Path) -> None:
    plain = run_ranks(trained, 2, 0, tmp_path / "0")
    ready = run_ranks(trained, 2, 2, tmp_path / "2")
    for (counted, again, state, readers, equal), one in zip(ready, plain, strict=True):
        assert same(state, one[2])
        assert equal
        assert one[4]
        # Of each step one sequence is read again when it begins, none else twice, and none beyond the last step.
        assert 0 <= len(readers) - len(one[3]) <= STEPS
        assert set(one[3]) == {"MainThread"}
        assert "coming-step" in readers
        assert one[0] == [3] * STEPS  # plan, agreement, figures
        # The plan of step 1 and that of step 2 are told in step 1; no plan is told in the last.
        assert counted[0] == 4
        assert counted[USED_BEFORE:] == [2] * (STEPS - USED_BEFORE - 1) + [1]
        assert again == [4, 1]


def broken(rank: int, ahead: int, bad: int) -> tuple[int, str, str]:
    """Steps that were trained before an item could not be read, the error, and its traceback."""
    engine = job(rank, Watched(bad), ahead)
    try:
        for _ in range(STEPS):
            engine.train_batch()
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        steps = engine.global_steps
        # Nothing stands still: a script that catches the error meets it again.
        with pytest.raises(type(error)):
            engine.train_batch()
        engine.destroy()
        return steps, f"{type(error).__name__}: {error}", text
    return STEPS, "", ""


@pytest.mark.drawn
def test_what_the_thread_cannot_read_is_raised_in_its_step() -> None:
    order = run_ranks(lambda rank: [small_engine(rank).sampler.batch(step) for step in range(STEPS)], 1)[0]
    step, bad = 4, next(i for i in order[4] if all(i not in drawn for drawn in order[:4]))
    for ahead in (0, 2):
        found = run_ranks(broken, 2, ahead, bad)
        assert {steps for steps, _, _ in found} == {step}
        own = [text for _, error, text in found if error == "OSError: the disk is gone"]
        others = [error for _, error, _ in found if f"making step {step + 1} ready failed on rank" in error]
        assert own
        assert len(own) + len(others) == 2
        assert all("__getitem__" in text and ("_make" in text) == (ahead > 0) for text in own)


@pytest.mark.drawn
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_a_text_reaches_all_ranks_beside_collectives(num_ranks: int) -> None:
    """A thread waits for texts of rank 0's, a long one too, while all ranks use the same group."""
    texts = ["", "plan", "é" * 40_000]

    def run(rank: int) -> list[str]:
        heard: list[str] = []
        telling = Telling(dist.group.WORLD, rank, num_ranks, tag=AHEAD_TAG)
        channel = Channel(dist.group.WORLD, rank, num_ranks)

        def listen() -> None:
            heard.extend(telling.tell(text if rank == 0 else None) for text in texts)

        thread = threading.Thread(target=listen)
        if rank != 0:
            thread.start()
        for number in range(20):
            assert channel.rows(torch.tensor([rank + number])).flatten().tolist() == [
                other + number for other in range(num_ranks)
            ]
            assert channel.tell(str(number)) == str(number)
            if number == 9 and rank == 0:
                thread.start()
        thread.join(30)
        return heard

    assert run_ranks(run, num_ranks) == [texts] * num_ranks
