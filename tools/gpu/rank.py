"""One rank of a job on several devices: `python -m tools.gpu.rank FOLDER JOB STRATEGY ...`."""

from __future__ import annotations

import ast
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tools.gpu.bench import Bench, engine_config, llama, new_model, sequences, take_device

EIGHT_B_LAYERS = 8  # of Llama 8B's width, which fit beside their states


def train(
    folder: Path, strategies: list[str], *, steps: int, one_queue: bool = False, killed: bool = False,
    traced: bool = False, full: bool = False, layers: int = 0,
) -> None:  # fmt: skip
    """`steps` steps by the strategies in turn, at real shapes in BF16 if `full`, else of a tiny model in FP32; the last
    rank ends itself in the fifth if it is to be killed."""
    if one_queue:
        # CUDA reads it when it starts. A job of a user's is refused with it, so it is gone before the engine starts.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        torch.cuda.init()
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    take_device()
    import ds_hydra

    bench = Bench(torch.device("cuda" if full else "cpu"), full=full, seconds=0.0, folder=folder)
    shape, longest = llama(bench, layers or None), bench.pick(8192, 96)
    if full and layers == EIGHT_B_LAYERS:
        shape.hidden_size, shape.intermediate_size, shape.head_dim = 4096, 14336, 128
    config = engine_config(bench.pick(131072, 400), strategies=strategies, choose="cycle", context_length=longest)
    config["bf16"]["enabled"] = full
    hydra: dict[str, Any] = config["hydra"]
    hydra |= {"steps_file": str(folder / "steps.jsonl"), "timeout_seconds": 60}
    if not full:  # a process for plans takes longer than tiny steps
        hydra["planner"] = {"ahead": 0}
    if traced:
        hydra["trace"] = {"steps": list(range(steps - 3, steps)), "profiler": True}
    data = sequences(bench, longest, bench.pick(2000, 200))
    engine = ds_hydra.initialize(model=new_model(shape, bench), training_data=data, config=config)[0]
    last = engine.global_rank == int(os.environ["WORLD_SIZE"]) - 1
    for step in range(1, steps + 1):
        if killed and last and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.train_batch()
    engine.destroy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), sys.argv[3:], **ast.literal_eval(sys.argv[2]))
