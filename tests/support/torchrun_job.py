"""For launchers: a job that trains a few steps, of which rank 0 saves what came of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ds_hydra.testing import rank_environment
from tests.support.case import Case
from tests.support.equivalence import make_engine, model_dtype, samples_of
from tests.support.families import build_model

LAUNCHED = Case(
    "launched",
    "llama_tied",
    ("2*tp2", "tp2pp2", "sp2 + 2*tp1"),
    steps=3,
    lengths=(9, 30, 5, 17, 44) * 4,
    tokens_per_step=90,
)


def model() -> Any:
    """What the job trains."""
    return build_model(LAUNCHED.family, model_dtype(LAUNCHED))


def trained(rank: int) -> dict[str, Any]:
    """Losses and parameters of a run, on a rank that a launcher or a test has started."""
    if not torch.distributed.is_torchelastic_launched():
        rank_environment(rank)
    engine = make_engine(LAUNCHED, samples_of(LAUNCHED))
    losses = [float(engine.train_batch()) for _ in range(LAUNCHED.steps)]
    parameters = engine.fp32_state_dict()
    engine.destroy()
    return {"losses": losses, "parameters": parameters}


def save(file: Path) -> None:
    """What a rank that a launcher has started does."""
    found = trained(rank := int(os.environ["RANK"]))
    if rank == 0:
        torch.save(found, file)
    torch.distributed.destroy_process_group()
