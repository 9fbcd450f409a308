"""A job whose ranks share the heads of recurrent layers goes on with ranks that share them otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hydra.testing import run_ranks
from tests.support.families import build_model
from tests.support.small_job import same, shared_source, small_engine, whole_state

FAMILY = "nemotron_h"


def leg(rank: int, saved: Path, strategies: list[str], steps: int, to: Path) -> Any:
    """Load, train, save: state after loading, and when saved."""
    engine = small_engine(rank, build_model(FAMILY, torch.float32), strategies=strategies)
    engine.load_checkpoint(saved)
    loaded = whole_state(engine)
    for _ in range(steps):
        engine.train_batch()
    engine.save_checkpoint(to)
    return loaded, whole_state(engine)


@pytest.mark.long
def test_heads_that_were_shared_otherwise_go_on(tmp_path: Path) -> None:
    """The state is the same to the bit, and so is the next step, but for rounding, whoever shares the heads then."""
    with shared_source(build_model(FAMILY, torch.float32)):
        first = run_ranks(leg, 4, tmp_path, ["tp4", "tp2sp2"], 2, tmp_path, timeout=300)[0][1]
        ends: list[dict[str, Tensor]] = []
        for number, strategy in enumerate(("sp2", "tp2", "tp1")):
            ranks = 1 if strategy == "tp1" else 2
            to = tmp_path / str(number)
            loaded, end = run_ranks(leg, ranks, tmp_path, [strategy], 1, to, timeout=300)[0]
            assert same(loaded, first), strategy
            ends.append(end)
    *shared, alone = ends
    for end in shared:
        assert not same(end, first)
        for name, value in alone.items():
            torch.testing.assert_close(end[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)
