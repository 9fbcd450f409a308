"""A job for launchers and Ray: `ray_job.py FOLDER STEPS [RANKS]`, which leaves a file for each step and process."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ds_hydra
from ds_hydra.host.environment import joins
from tests.support.small_job import sequences, small_config, small_model


def trained(folder: Path, steps: int, least: int = 0) -> list[float]:
    """The losses of the steps that this process has made; before its last two it waits for so many ranks."""
    elastic = {"strategies": {"1": ["tp1"], "2": ["2*tp1"], "3": ["tp2 + tp1"]}, "compare_every": 1}
    config = small_config(2, elastic=elastic, steps_file=str(folder / "steps.jsonl"))
    engine = ds_hydra.initialize(model=small_model(), training_data=sequences(), config=config)[0]
    losses = []
    while engine.global_steps < steps:
        if engine.global_steps >= steps - 2 and engine.world_size < least:
            wait_for_more(engine.going_on.agent, folder / f"more-than-{engine.world_size}")
        losses.append(engine.train_batch().item())
    told = {"ranks": engine.world_size, "joined": joins(), "losses": losses}
    (folder / f"end{engine.global_rank}").write_text(json.dumps(told))
    engine.destroy()
    return losses


def wait_for_more(agent: Any, mark: Path) -> None:
    """Until a process waits to join, of which one rank knows and tells the others by a file."""
    while not (mark.exists() or agent.faulty):
        if agent.wanted:
            mark.touch()
        time.sleep(0.02)


if __name__ == "__main__":
    trained(Path(sys.argv[1]), *map(int, sys.argv[2:]))
