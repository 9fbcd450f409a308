"""hydra.lengths: "auto" proposes strategies for the lengths of a file where those of the job are not known ahead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.engine import prepare
from ds_hydra.entry import accept
from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import LENGTHS, find_before_forks, sequences, small_config, small_engine, small_source

LONGEST = 120


def proposed_for(rank: int, data: Any, **hydra: Any) -> list[int]:
    """The lengths that strategies are proposed for on this rank, once a step has been trained."""
    seen: list[int] = []
    plain = prepare.propose

    def noted(job: Any, found: Any, memory: Any, lengths: Any, world: Any) -> Any:
        seen[:] = lengths
        return plain(job, found, memory, lengths, world)

    prepare.propose = noted
    settings = {"choose": "best", "context_length": LONGEST, "strategies": "auto"}
    config = small_config(2, **settings | hydra)
    config["hydra"]["strategies"] = "auto"
    engine = small_engine(rank, config=config, data=data)
    engine.train_batch(sequences()[rank : rank + 1]) if data is None else engine.train_batch()
    engine.destroy()
    return seen


def stream() -> Iterator[Any]:
    while True:
        yield from sequences()


@pytest.mark.parametrize(
    ("kind", "too_long", "expected"),
    [
        ("handed in", "error", [9, 30, LONGEST]),
        ("handed in", "truncate", [9, 30, LONGEST, LONGEST]),
        ("stream", "skip", [9, 30, LONGEST]),
        ("indexed", "error", list(LENGTHS)),
    ],
)
def test_strategies_are_proposed_for_the_lengths_of_a_file(
    kind: str, too_long: str, expected: list[int], tmp_path: Path
) -> None:
    find_before_forks()
    small_source()
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([9, 30, 500]))

    def run(rank: int) -> list[int]:
        data = {"handed in": None, "indexed": sequences(), "stream": stream()}[kind]
        return proposed_for(rank, data, lengths=str(file), too_long=too_long)

    first, _ = run_ranks(run, 2)
    assert first == expected


def test_what_is_wrong_with_the_file_is_told_at_start(tmp_path: Path) -> None:
    def wrong(lengths: Any, **hydra: Any) -> str:
        with pytest.raises(ConfigError) as error:
            ds_hydra.check_config({"hydra": {"lengths": lengths, **hydra}})
        return str(error.value)

    file = tmp_path / "lengths.txt"
    file.write_text("500\n30x\n")
    assert "nowhere.txt" in wrong(str(tmp_path / "nowhere.txt"))
    assert "lengths.txt, line 2" in (told := wrong(str(file))), told
    file.write_text("500\n300\n")
    assert "none of its 2 sequences fits context_length=200" in wrong(str(file), context_length=200)
    assert "must name a file, but is a list of 2" in wrong([500, 300])
    listed = accept({"hydra": {"lengths": "nowhere.txt", "strategies": ["tp1"]}}, ranks=1)
    assert listed is not None
    assert "hydra.lengths has no effect" in listed.notes[0]
