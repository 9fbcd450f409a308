"""How ranks end after a fault of one of them: soon, with the promised codes, and with one cause, told once."""

from __future__ import annotations

import _thread
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hydra.testing import run_ranks
from ds_hydra.watchdog.host import abort_later
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.ends import TRACEBACK, all_told, codes, ends, mark_fault
from tests.support.small_job import Blinks, failing, small_engine

FAULTS = {"frozen_seconds": 9.0}


ENDS = [(1, "SIGKILL"), (0, "SIGKILL"), (2, "exit"), (1, "sys.exit"), (0, "sys.exit")]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("lost", "how", "saved"),
    [(*end, saved) for saved in (False, True) for end in ENDS],
)  # fmt: skip
def test_a_rank_that_goes_is_named_once_and_says_whether_a_restart_helps(
    lost: int, how: str, saved: bool, tmp_path: Path
) -> None:
    checkpoint = {"checkpoint": {"dir": str(tmp_path)}} if saved else {}

    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, faults=FAULTS, **checkpoint)
        while True:
            if engine.global_steps == 2 and rank == lost:
                mark_fault(place)
                if how == "SIGKILL":
                    os.kill(os.getpid(), signal.SIGKILL)
                (os._exit if how == "exit" else __import__("sys").exit)(3)
            engine.train_batch()

    found = ends(program, 3)
    expected: list[int | None] = [78 if how == "sys.exit" else 75] * 3
    expected[lost] = -9 if how == "SIGKILL" else 3
    assert codes(found) == expected, all_told(found)
    assert max(end.seconds for end in found) < 5.0
    told = all_told(found)
    what = "'s script ended after 2 steps" if how == "sys.exit" else " died"
    assert told.count(f"rank {lost}{what}") == 1, told
    assert TRACEBACK not in told
    assert "(idle): rank" not in told, "the others were in a step"
    assert ("resumes from the newest checkpoint" in told) == (saved and how != "sys.exit")


@pytest.mark.parametrize("later", [True, False])
def test_a_rank_that_torchs_own_watchdog_aborts_ends_with_75_all_the_same(later: bool) -> None:
    """A thread that knows nothing of Python aborts each rank 0.1 s after another one has died, as torch's does on
    NCCL."""

    def program(rank: int, place: Path) -> None:
        faulthandler.disable()  # pytest's, which would tell of the abort
        if later:
            abort_later()
        engine = small_engine(rank, faults=FAULTS)
        engine.train_batch()
        if rank == 1:
            mark_fault(place)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=aborts, args=(place,), daemon=True).start()
        with engine.crew.activity("backward"):
            time.sleep(30)  # as in a collective that never ends

    def aborts(place: Path) -> None:
        while not (place / "fault").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        ctypes.CDLL(None).abort()

    found = ends(program, 3)
    own = 75 if later else -signal.SIGABRT
    assert codes(found) == [own, -signal.SIGKILL, own], all_told(found)
    assert max(end.seconds for end in found) < 5.0
    assert all_told(found).count("rank 1 died") == later, "told once"


def test_a_refusal_of_one_rank_ends_all_as_a_refusal() -> None:
    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, faults=FAULTS)
        while True:
            if engine.global_steps == 1 and rank == 1:
                raise ConfigError("lower x")
            engine.train_batch()

    found = ends(program, 2)
    assert codes(found) == [78, 78]
    assert all_told(found) == "ds_hydra.ConfigError: lower x\n"


def test_an_error_that_the_script_swallows_is_still_told() -> None:
    def program(rank: int, place: Path) -> None:
        data = Blinks([torch.full((60,), 9)] * 32)
        engine = small_engine(rank, data=data, faults=FAULTS, strategies=["2*tp1"])
        engine.train_batch()
        if rank == 1:
            engine.crew.update.apply = lambda *_: dict[str, str]()["no key"]
        try:
            engine.train_batch()
        except KeyError:
            raise SystemExit(3) from None

    found = ends(program, 2)
    assert codes(found) == [75, 3]
    assert all_told(found).startswith("[ds_hydra] rank 1 failed in step 2 (optimizer): KeyError: 'no key'. Restart")
    assert all_told(found).count("\n") == 1


def test_a_step_that_was_interrupted_marks_its_engine(tmp_path: Path) -> None:
    """Also where nobody else would end the job."""

    def job(rank: int) -> list[str]:
        engine, told = small_engine(rank), []
        engine.train_batch()

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        engine.crew.update.apply = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.train_batch()
        for call in (engine.train_batch, engine.fp32_state_dict, lambda: engine.save_checkpoint(str(tmp_path))):
            with pytest.raises(RuntimeError) as raised:
                call()
            told.append(str(raised.value))
        engine.destroy()
        return told

    told = run_ranks(job, 1)[0]
    for name, text in zip(("train_batch()", "fp32_state_dict()", "save_checkpoint()"), told, strict=True):
        assert text.startswith("KeyboardInterrupt has left step 2 (optimizer): ")
        assert f"so {name} cannot go on" in text


def test_the_same_bug_on_all_ranks_is_told_once() -> None:
    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, faults=FAULTS)
        engine.train_batch()
        raise ValueError("a typo of mine")

    found = ends(program, 3)
    assert codes(found) == [1, 1, 1]
    assert all_told(found).count(TRACEBACK) == 1


def test_a_refusal_is_told_once_and_names_the_rank_where_it_is_not_everyones() -> None:
    def program(rank: int, place: Path) -> None:
        small_engine(rank, faults=FAULTS, steps_file="/proc/nowhere/steps.jsonl")

    found = ends(program, 3)
    assert codes(found) == [78, 78, 78]
    told = [line for line in all_told(found).splitlines() if "ConfigError" in line]
    assert len(told) == 1, all_told(found)
    assert told[0].endswith("change hydra.steps_file or hydra.plans_file (on rank 0)")
    assert TRACEBACK not in all_told(found)


def test_without_heartbeats_a_lost_connection_is_told() -> None:
    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank)
        engine.train_batch()
        if rank == 1:
            os._exit(3)
        engine.train_batch()

    found = ends(program, 2)
    assert codes(found) == [75, 3]
    line = [line for line in all_told(found).splitlines() if line.startswith("[ds_hydra]")]
    assert len(line) == 1
    assert "lost" in line[0]


class Silent(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


OWN = {
    "without a text": Silent(),
    "with a long text": ValueError("x" * 5000),
    "of a file in no encoding": OSError(2, "No such file", b"/data/\xff".decode(errors="surrogateescape")),
    "of a connection of its own": RuntimeError("connection refused by the tokenizers' server"),
}


@pytest.mark.drawn
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("handed", [False, True])
def test_an_error_of_whatever_text_is_that_of_its_rank(kind: str, handed: bool) -> None:
    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, faults=FAULTS, timeout_seconds=40, **({"data": None} if handed else {}))
        shares = failing(OWN[kind])(rank)
        for step in range(4):
            if rank == 1 and step == 2:
                mark_fault(place)
                if not handed:
                    raise OWN[kind]
            engine.train_batch(shares if handed else None)

    found = ends(program, 2)
    assert codes(found) == [75, 1], all_told(found)
    assert max(end.seconds for end in found) < 4.0
    assert found[0].told == ""
    assert TRACEBACK in found[1].told


def test_of_several_frozen_ranks_none_is_left() -> None:
    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, faults={**FAULTS, "frozen_seconds": 2.0}, timeout_seconds=40)
        engine.train_batch()
        if rank < 2:
            mark_fault(place)
            os.kill(os.getpid(), signal.SIGSTOP)
        engine.train_batch()

    found = ends(program, 3, limit_s=30)
    assert codes(found) == [-9, -9, 75], all_told(found)


@pytest.mark.parametrize("what", ["closed", "not read", "without threads"])
def test_a_rank_whose_output_goes_nowhere_ends_too(what: str) -> None:
    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, faults=FAULTS, timeout_seconds=40)
        engine.train_batch()
        if rank == 1:
            mark_fault(place)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "closed":
            sys.stdout = None  # type: ignore[assignment]  # as Python has it where a process began without
        elif what == "without threads":  # each dies before it has begun, as where there is no memory left
            _thread.start_new_thread = threading._start_new_thread = lambda *_: 0  # type: ignore
        else:
            sys.stdout = os.fdopen(os.pipe()[1], "w")
            threading.Thread(target=print, args=("x" * 2**20,), kwargs={"flush": True}, daemon=True).start()
        engine.train_batch()

    found = ends(program, 2, limit_s=30)
    assert codes(found) == [75, -9]
    assert max(end.seconds for end in found) < 6.0
    assert all_told(found).count("rank 1 died") == 1


def test_a_hook_that_a_script_sets_later_takes_no_code_away() -> None:
    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, faults=FAULTS)
        engine.train_batch()
        sys.excepthook = lambda kind, error, trace: sys.stderr.write(f"mine: {error}\n")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.train_batch()

    found = ends(program, 2)
    assert codes(found) == [75, -9]
    assert "mine" not in all_told(found)
    assert all_told(found).count("rank 1 died") == 1


def test_an_interrupt_is_told_once_and_has_the_code_of_shells() -> None:
    def program(rank: int, place: Path) -> None:
        engine = small_engine(rank, faults=FAULTS)
        engine.train_batch()
        raise KeyboardInterrupt

    found = ends(program, 2)
    assert codes(found) == [130, 130]
    assert all_told(found).count(TRACEBACK) == 1


WITH_A_SAVE: list[tuple[str, bool, list[int | None]]] = [
    ("comes to its end", False, [0, 0]),
    ("raises", False, [1, 1]),
    ("raises", True, [1, 1]),
    ("exits", False, [3, 3]),
    ("is interrupted", False, [130, 130]),
    ("raises on one rank", False, [75, 1]),
    ("raises on one rank", True, [75, 1]),
    ("exits on one rank", False, [78, 3]),
    ("fills the disk", False, [74, 74]),
]


@pytest.mark.parametrize(("how", "destroyed", "expected"), WITH_A_SAVE)
def test_a_script_that_ends_while_a_save_is_under_way_ends_with_it(
    how: str, destroyed: bool, expected: list[int | None], tmp_path: Path
) -> None:
    """By Python's own end, where a thread that is left within gloo aborts the process. `destroyed`: in a `finally`."""
    full = how == "fills the disk"

    def program(rank: int, place: Path) -> None:
        from ds_hydra.checkpoint import write

        original = write.write_shard

        def late(path: Path, tensors: Any, metadata: Any) -> Any:
            time.sleep(0.7)
            if full and rank == 1:
                raise OSError(28, "No space left on device")
            return original(path, tensors, metadata)

        write.write_shard = late
        saved = {"dir": str(tmp_path / "run"), "every": 1, "asynchronous": True}
        engine = small_engine(rank, faults=FAULTS, checkpoint=saved, planner={"ahead": 2})
        engine.train_batch()
        engine.saving.config = None  # no further save
        try:
            if how.endswith("on one rank") and rank == 0:
                engine.train_batch()
            elif how.startswith("raises"):
                raise ValueError("mine")
            elif how.startswith("exits"):
                sys.exit(3)
            elif how == "is interrupted":
                raise KeyboardInterrupt
        finally:
            if destroyed:
                engine.destroy()

    found = ends(program, 2, finalized=True)
    assert codes(found) == expected, all_told(found)
    assert all_told(found).count("No space left") == full
    assert (tmp_path / "run" / "global_step1").exists() != full
    assert ("ValueError: mine" in all_told(found)) == how.startswith("raises")
