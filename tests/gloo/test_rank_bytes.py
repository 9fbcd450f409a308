"""What the memory model counts for a rank is what its runtimes hold, to the byte."""

from __future__ import annotations

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.costs.rank_bytes import ElementBytes, RankBytes, rank_bytes
from tests.support.ranks import run_ranks
from tests.support.small_job import small_config, small_engine

SIZES = {"fp32": 4, "bf16": 2}


@pytest.mark.parametrize(
    ("grad_dtype", "wire", "node_size"), [("fp32", "bf16", 4), ("bf16", "bf16", 2), ("bf16", "fp32", 4)]
)
def test_every_rank_holds_what_is_counted(grad_dtype: str, wire: str, node_size: int) -> None:
    def run(rank: int) -> list[tuple[RankBytes, RankBytes, int]]:
        config = small_config(4, node_size=node_size)
        config["hydra"]["strategies"] = [*config["hydra"]["strategies"], "tp2pp2/v"]
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": grad_dtype}}
        config |= {"communication_data_type": wire}
        engine = small_engine(rank, config=config)
        found = []
        for _ in config["hydra"]["strategies"]:
            engine.train_batch()
            stepper, world = engine.crew.stepper, engine.crew.world
            runtime = stepper._runtimes[engine.last_step.strategy]
            arena = stepper._arena
            held = RankBytes(
                sum(buffer.nbytes for buffer in runtime.pulls.buffers),
                sum(bucket.grads.nbytes for bucket in runtime.pushes.buckets),
                arena.scratch.num_bytes,
            )
            element = ElementBytes(2, SIZES[grad_dtype], wire=SIZES[wire])
            counted = rank_bytes(engine.job.source.plan, runtime.strategy, element, node_size=world.node_size)[rank]
            found.append((held, counted, arena.params.nbytes + arena.grads.nbytes))
        return found

    for rows in run_ranks(run, 4, timeout=120):
        assert [held for held, _, _ in rows] == [counted for _, counted, _ in rows]
        assert {room for _, _, room in rows} == {max(held.params + held.grads for held, _, _ in rows)}
        assert len({held for held, _, _ in rows}) > 1, "strategies differ in what they hold"
