"""Whole experts on ranks: a checkpoint is neither of jobs that spread them nor of jobs that cut them by width."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.testing import run_ranks
from tests.support.case import Case
from tests.support.equivalence import make_engine, samples_of, traced_once

SPREAD = Case("", "qwen3_moe", ("tp2ep2", "sp2ep2"), steps=4).shortened()


def _saved(rank: int, case: Case, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps, a checkpoint, and the losses of two more; what is trained when it was saved."""
    engine = make_engine(case, samples_of(case))
    for _ in range(2):
        engine.train_batch()
    engine.save_checkpoint(folder)
    values = engine.fp32_state_dict()
    return [float(engine.train_batch()) for _ in range(2)], values if rank == 0 else {}


def _resumed(rank: int, case: Case, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    engine = make_engine(case, samples_of(case))
    engine.load_checkpoint(folder)
    values = engine.fp32_state_dict()
    return [float(engine.train_batch()) for _ in range(2)], values if rank == 0 else {}


@pytest.mark.drawn
def test_jobs_of_both_kinds_and_another_ep_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    with traced_once(SPREAD):
        losses, values = run_ranks(_saved, 2, SPREAD, str(tmp_path), timeout=120)[0]
        again, same = run_ranks(_resumed, 2, SPREAD, str(tmp_path), timeout=120)[0]
    by_width = replace(SPREAD, strategies=("tp2", "2*tp1"))
    with traced_once(by_width):
        found, turned = run_ranks(_resumed, 2, by_width, str(tmp_path), timeout=120)[0]
    four = replace(SPREAD, strategies=("tp2sp2ep4", "sp4ep4"))
    with traced_once(four):
        on_four, moved = run_ranks(_resumed, 4, four, str(tmp_path), timeout=120)[0]
    for other in (same, turned, moved):
        assert values.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in values.items()), "to the bit"
    assert again == losses
    for others in (found, on_four):
        assert all(abs(one - other) <= 1e-9 * abs(one) for one, other in zip(losses, others, strict=True))
