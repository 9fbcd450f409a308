"""A job that a launcher restarts.

Rank 1 kills itself once before step `die_at` (counted from 0); every rank leaves the digest of its masters and moments.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch.distributed as dist

import ds_hydra
from ds_hydra.testing import rank_environment
from tests.support.fault_job import digest
from tests.support.small_job import sequences, small_config, small_model

STEPS = 5


def trained(rank: int, folder: Path, die_at: int) -> str:
    """The digest of this rank at the end; on a rank that a launcher or a test has started."""
    if not dist.is_torchelastic_launched():
        rank_environment(rank)
    config = small_config(2, checkpoint={"dir": str(folder / "checkpoints"), "every": 1}, faults={})
    engine = ds_hydra.initialize(model=small_model(), training_data=sequences(), config=config)[0]
    while engine.global_steps < STEPS:
        if rank == 1 and engine.global_steps == die_at and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        engine.train_batch()
    found = digest(engine)
    engine.destroy()
    return found


def save(folder: Path, die_at: int) -> None:
    """What a rank that a launcher has started does."""
    found = trained(rank := int(os.environ["RANK"]), folder, die_at)
    (folder / f"digest{rank}").write_text(found)
    dist.destroy_process_group()
