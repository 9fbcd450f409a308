"""A rank that stands still is named with its frame and ends the job; one that is slow is named, and nobody ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ds_hydra.watchdog import progress, watchdog
from ds_hydra.watchdog.progress import Stand, few_of, named, stuck
from tests.support.ends import all_told, codes, ends
from tests.support.small_job import small_engine
from tests.support.stuck_jobs import MODES, PLACES, REFUSED, Case, objections, run

ALWAYS = {("script", "plain"), ("script", "elastic")}
CASES = [
    pytest.param(case, marks=() if (place, mode) in ALWAYS else pytest.mark.drawn)
    for mode in MODES
    for place in PLACES
    if (place, mode) not in REFUSED
    for case in [Case(place, mode)]
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_lock_that_is_taken_twice_is_named_and_ends(case: Case, tmp_path: Path) -> None:
    assert list(objections(case, run(case, tmp_path), tmp_path)) == []


@pytest.mark.drawn
@pytest.mark.parametrize("place", ["script", "data", "evaluation"])
def test_who_is_slow_is_named_and_not_ended(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (progress, watchdog):
        monkeypatch.setattr(module, "NAMED_S", 2.0)
    found = run(Case(place, "plain", "slow 8"), tmp_path, limit_s=60.0)
    assert codes(found) == [0, 0, 0], all_told(found)
    assert all_told(found).count("rank 1 moves, in step 3") >= 2, all_told(found)
    assert not list(tmp_path.glob("stacks-*"))


def test_sigquit_asks_a_rank_for_its_stacks(tmp_path: Path) -> None:
    """It goes on, and a handler of the script's own is called too."""

    def program(rank: int, place: Path) -> None:
        signal.signal(signal.SIGQUIT, lambda *_: (place / "mine").touch())
        engine = small_engine(rank, faults={"frozen_seconds": 9.0}, steps_file=str(tmp_path / "steps.jsonl"))
        engine.train_batch()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGQUIT)
            deadline = time.monotonic() + 20
            while not list(tmp_path.glob("stacks-*")) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert (place / "mine").exists()
        engine.train_batch()
        engine.destroy()

    found = ends(program, 2)
    assert codes(found) == [0, 0], all_told(found)
    (written,) = tmp_path.glob("stacks-*")
    assert "=== rank 1, " in written.read_text()
    assert "test_stuck.py" in written.read_text()
    assert f"rank 1: stacks of all threads are in {written}" in all_told(found)


def _stand(rank: int, waits_s: float, stands_s: float, limit_s: float = 20.0) -> Stand:
    return Stand(rank, 3, "idle", waits_s, stands_s, limit_s, f"train.py:{rank} in main")


@pytest.mark.parametrize(
    ("stands", "expected"),
    [
        ([_stand(0, 23, 0), _stand(1, 0, 21)], [1]),
        ([_stand(0, 23, 0), _stand(1, 0, 21), _stand(2, 0, 15)], [1, 2]),
        ([_stand(0, 22, 0), _stand(1, 0, 22)], []),  # it may wait for longer, or its own error comes
        ([_stand(0, 23, 0, 60), _stand(1, 0, 60)], []),  # in its group
        ([_stand(0, 23, 0), _stand(2, 5, 0, 60), _stand(1, 0, 60)], []),  # another one may
        ([_stand(0, 23, 0), _stand(1, 0, 0)], []),  # it moves
        ([_stand(0, 23, 0), _stand(1, 0, 60), _stand(2, 0, 0)], []),  # one of those that are late does
        ([_stand(0, 23, 0), _stand(1, 21, 0)], []),  # all wait: a group's own time-out ends that
        ([_stand(0, 0, 90), _stand(1, 0, 90)], []),  # nobody waits
    ],
)
def test_in_doubt_nobody_is_stuck(stands: list[Stand], expected: list[int]) -> None:
    assert [one.rank for one in stuck(stands, 3.0)[0]] == expected


def test_who_is_late_is_named() -> None:
    stands = [_stand(0, 31, 0), _stand(1, 0, 12), _stand(2, 0, 0), _stand(3, 31, 0)]
    assert named(stands) == (
        "rank 0 waits since 31 s in step 3 (idle) for others: rank 1 stands still since 12 s, in step 3 (idle), at "
        "train.py:1 in main; rank 2 moves, in step 3 (idle), at train.py:2 in main"
    )
    assert named([_stand(0, 29, 0), _stand(1, 0, 12)]) == ""
    assert [one.rank for one in few_of(stands * 3)] == [2, 2, 2, 1, 0]
