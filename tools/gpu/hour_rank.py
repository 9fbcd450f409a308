"""One rank of a row of the first hour: `python -m tools.gpu.hour_rank FOLDER JOB STRATEGY ...`."""

from __future__ import annotations

import ast
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tools.gpu.bench import Bench, engine_config, llama, new_model, sequences, take_device


def train(
    folder: Path, strategies: list[str], *, steps: int, one_queue: bool = False, killed: bool = False,
    traced: bool = False,
) -> None:  # fmt: skip
    """`steps` steps in FP32 by the strategies in turn; the last rank ends itself in the fifth if it is to be killed."""
    if one_queue:
        # CUDA reads it when it starts. A job of a user's is refused with it, so it is gone before the engine starts.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        torch.cuda.init()
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    take_device()
    import ds_hydra

    bench = Bench(torch.device("cpu"), full=False, seconds=0.0, folder=folder)
    config = engine_config(400, strategies=strategies, choose="cycle", context_length=96)
    config["bf16"]["enabled"] = False
    hydra: dict[str, Any] = config["hydra"]
    hydra |= {"steps_file": str(folder / "steps.jsonl"), "timeout_seconds": 60, "planner": {"ahead": 0}}
    if traced:
        hydra["trace"] = {"steps": list(range(steps // 2, steps // 2 + 4)), "profiler": True}
    engine = ds_hydra.initialize(model=new_model(llama(bench), bench), training_data=sequences(bench, 96, 200),
                                 config=config)[0]  # fmt: skip
    last = engine.global_rank == int(os.environ["WORLD_SIZE"]) - 1
    for step in range(1, steps + 1):
        if killed and last and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.train_batch()
    engine.destroy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), sys.argv[3:], **ast.literal_eval(sys.argv[2]))
