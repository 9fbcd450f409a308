"""For launchers: `torchrun tests/support/torchrun_job.py FILE` trains a few steps and rank 0 saves to FILE."""

from __future__ import annotations

import sys

import torch

from tests.support.case import Case
from tests.support.equivalence import make_engine, samples_of

LAUNCHED = Case(
    "launched",
    "llama_tied",
    ("2*tp2", "tp2pp2", "sp2 + 2*tp1"),
    steps=3,
    lengths=(9, 30, 5, 17, 44) * 4,
    tokens_per_step=90,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    engine = make_engine(LAUNCHED, samples_of(LAUNCHED))
    losses = [float(engine.train_batch()) for _ in range(LAUNCHED.steps)]
    parameters = engine.fp32_state_dict()
    if torch.distributed.get_rank() == 0:
        torch.save({"losses": losses, "parameters": parameters}, sys.argv[1])
    engine.destroy()
    torch.distributed.destroy_process_group()
