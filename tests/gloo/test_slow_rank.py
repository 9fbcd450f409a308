"""A rank that computes slowly is told by rank 0 in one line, within twenty steps of a real job."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

from ds_hydra.costs.cost_table import CostTable, SchemeCost
from ds_hydra.costs.table_file import TableFile
from ds_hydra.pipe.models.causal_stage import CausalStage
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.testing import run_ranks
from tests.support.small_job import small_engine

SLOW = 2


def test_a_rank_that_sleeps_in_its_forwards_is_told(tmp_path: Path) -> None:
    # Each stage takes about 20 ms for a micro-batch, whatever it holds, but for the slow rank's.
    TableFile(CostTable((SchemeCost(ParallelScheme(), 0.0, 1e-4, 20.0, 1000),))).save(tmp_path / "costs.json")

    def train(rank: int) -> list[str]:
        forward, lines = CausalStage.forward, list[str]()

        def sleeping(self: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(0.1 if rank == SLOW else 0.02)
            return forward(self, *args, **kwargs)

        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ds_hydra").addHandler(handler)
        with mock.patch.object(CausalStage, "forward", sleeping):
            engine = small_engine(rank, strategies=["4*tp1"], cost_table=str(tmp_path / "costs.json"))
            for _ in range(20):
                engine.train_batch()
            engine.destroy()
        return [line for line in lines if "times as long as others" in line]

    told, *others = run_ranks(train, 4)
    assert len(told) == 1
    assert told[0].startswith(f"rank {SLOW} computes ")
    assert others == [[], [], []]
