"""A job that goes on: `ds-hydra launch --respawn 1 --num_gpus 2 tests/support/launched_job.py FOLDER STEPS`.

Rank 1 kills itself in step 2; a process comes back in its place and joins, for which the others wait in the end. In a
job with spares rank 1 kills itself when one is known to wait, and when it has taken that place the job's end waits for
another one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import ds_hydra
from ds_hydra.host.environment import MOST_RANKS, joins
from tests.support.fault_job import digest
from tests.support.small_job import STRATEGIES, sequences, small_config, small_model


def trained(folder: Path, steps: int) -> None:
    """Train, and leave what this process has come to."""
    elastic = {"strategies": {"1": ["tp1"]}, "compare_every": 1}
    config = small_config(2, strategies=STRATEGIES[2], elastic=elastic, faults={})
    engine = ds_hydra.initialize(model=small_model(), training_data=sequences(), config=config)[0]
    first, dies = engine.global_steps, engine.global_rank == 1 and not joins()
    while engine.global_steps < steps:
        last = engine.global_steps == steps - 1
        if MOST_RANKS in os.environ and (engine.global_steps == 2 or last) and engine.global_rank == 0:
            while engine.world_size == 2 and not engine.going_on.agent._machine.knocks:
                time.sleep(0.02)
            (folder / "waits").touch()
        if dies and engine.global_steps == 2:
            while MOST_RANKS in os.environ and not (folder / "waits").exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        waits = engine.global_rank == 0 and engine.global_steps == steps - 2 and engine.world_size == 1
        while waits and not engine.going_on.agent.wanted:
            time.sleep(0.02)
        engine.train_batch()
    record = {"first": first, "ranks": engine.world_size, "joined": joins(), "digest": digest(engine)}
    (folder / f"end{engine.global_rank}").write_text(json.dumps(record))
    engine.destroy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    trained(Path(sys.argv[-2]), int(sys.argv[-1]))
