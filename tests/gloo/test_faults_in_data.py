"""How ranks end where what fails is the script's data: an iterator, a dataset, a rank that reads."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ends import TRACEBACK, all_told, codes, ends, mark_fault
from tests.support.small_job import Blinks, failing, sequences, small_engine

FAULTS = {"frozen_seconds": 9.0}


HANDED = {
    "bug": (ValueError("my tokenizer broke"), [75, 1, 75]),
    "storage": (OSError(5, "Input/output error", "/data/tokens.bin"), [75, 1, 75]),
    "exit": (SystemExit(7), [75, 7, 75]),
}


@pytest.mark.drawn
@pytest.mark.parametrize("kind", HANDED)
def test_an_iterator_that_fails_keeps_its_traceback_on_its_rank(kind: str) -> None:
    raised, expected = HANDED[kind]

    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, data=None, faults=FAULTS)
        handed = failing(raised)(rank)
        while True:
            engine.train_batch(handed)

    found = ends(program, 3)
    assert codes(found) == expected, all_told(found)
    if kind == "exit":
        assert all_told(found).count("SystemExit") == 1
        return
    assert found[1].told.count(TRACEBACK) == 1
    assert "my_tokenizer" in found[1].told
    assert found[1].told.rstrip().endswith(f"{type(raised).__name__}: {raised}")
    assert found[0].told + found[2].told == ""


@pytest.mark.drawn
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kind", ["storage", "memory", "vocabulary"])
def test_a_dataset_that_fails_does_so_with_the_code_of_its_error(kind: str, ahead: int) -> None:
    def program(rank: int, place: Path) -> None:
        data = Blinks(sequences())
        data.rank = rank
        if kind == "memory":
            data.error = MemoryError("of 3 GiB")
        elif kind == "vocabulary":
            data = Blinks([torch.full((60,), 999 if i == 5 else 9) for i in range(32)])
        engine = small_engine(rank, data=data, faults=FAULTS, planner={"ahead": ahead}, strategies=["2*tp1"])
        for _ in range(8):
            engine.train_batch()

    found = ends(program, 2)
    if kind == "vocabulary":
        assert codes(found) == [78, 78], all_told(found)
        assert all_told(found).count("999") == 1
        assert TRACEBACK not in all_told(found)
        assert "estart" not in all_told(found)
        return
    assert codes(found) == [75, 1], all_told(found)
    assert found[0].told == ""
    assert found[1].told.rstrip().endswith("of 3 GiB" if kind == "memory" else "'/data/tokens.bin'")


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_goes_while_data_are_read_ends_the_others(how: str) -> None:
    """Before there is a world, masters or plans."""

    def program(rank: int, place: Path) -> None:
        class Watched(list[Any]):
            def __getitem__(self, index: Any) -> Any:
                if rank == 1 and index == 20:
                    mark_fault(place)
                    os.kill(os.getpid(), getattr(signal, how))
                return {"input_ids": super().__getitem__(index).tolist()}  # says no length, so that it is read

        small_engine(rank, data=Watched(sequences()), faults={**FAULTS, "frozen_seconds": 2.0}, timeout_seconds=40)

    found = ends(program, 2)
    assert codes(found) == [75, -9], all_told(found)
    assert max(end.seconds for end in found) < 5.0
    assert all_told(found).startswith("[ds_hydra] rank 0 ends in step 1 (assembly): rank 1 ")
