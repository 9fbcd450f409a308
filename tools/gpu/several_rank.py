"""One rank of part "several": `torchrun -m tools.gpu.several_rank STEPS_FILE ROUNDS FULL STRATEGY ...`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import ds_hydra
from tools.gpu.bench import Bench, engine_config, llama, new_model, sequences, take_device


def train(steps_file: str, rounds: int, full: bool, strategies: Sequence[str]) -> None:
    """Every strategy in turn, `rounds` times; rank 0 writes the records."""
    bench = Bench(take_device(), full, 0.0, Path(steps_file).parent)
    logging.getLogger("ds_hydra").setLevel(logging.WARNING)
    longest = bench.pick(8192, 96)
    config = engine_config(bench.pick(131072, 400), strategies=list(strategies), choose="cycle", context_length=longest)
    config["hydra"]["steps_file"] = steps_file
    data = sequences(bench, longest, count=bench.pick(2000, 200))
    engine = ds_hydra.initialize(model=new_model(llama(bench), bench), training_data=data, config=config)[0]
    for _ in range(rounds * len(strategies)):
        engine.train_batch()
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:])
