"""One process of a job of row "lost ranks": `python -m tools.gpu.lost_rank FOLDER NUMBER JOB`."""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ds_hydra.host.environment import joins as joins_a_job
from tests.support.elastic_job import Loss, arm
from tests.support.fault_job import digest
from tools.gpu.bench import Bench, engine_config, llama, new_model, sequences, take_device

STRATEGIES = {
    4: ["tp2 + 2*tp1", "2*sp2", "tp2pp2", "4*tp1"],
    3: ["3*tp1", "tp2 + tp1"],
    2: ["tp2", "2*tp1"],
    5: ["tp2 + 3*tp1", "5*tp1"],
}


def train(
    folder: Path, number: int, *, steps: int, joins: bool, losses: Sequence[Sequence[Any]] = (), tag: str | None = None
) -> None:
    """To so many steps: an elastic job with `losses`, or one from the checkpoint `tag` that saves another."""
    take_device()
    import ds_hydra

    bench, ranks = Bench(torch.device("cpu"), full=False, seconds=0.0, folder=folder), int(os.environ["WORLD_SIZE"])
    while joins_a_job() and not (folder / "invitation.json").exists():
        time.sleep(0.05)
    ranks = 4 if joins_a_job() else ranks
    config = engine_config(400, strategies=STRATEGIES[ranks], choose="cycle", context_length=96)
    config["bf16"]["enabled"] = False
    hydra: dict[str, Any] = config["hydra"]
    hydra |= {"deterministic": True, "timeout_seconds": 30, "planner": {"ahead": 0}}
    if tag is None:
        others = {str(some): STRATEGIES[some] for some in STRATEGIES if some != ranks}
        hydra |= {"elastic": {"strategies": others, "compare_every": 1}, "faults": {"frozen_seconds": 3.0}}
    engine = ds_hydra.initialize(model=new_model(llama(bench), bench), training_data=sequences(bench, 96, 200),
                                 config=config)[0]  # fmt: skip
    if tag:
        engine.load_checkpoint(folder, tag)
    for loss in losses:
        if loss[1] == number:
            arm(lambda: engine, Loss(*loss))
    found = []
    while engine.global_steps < steps:
        if joins and engine.global_rank == 0 and engine.global_steps == 1:
            while not engine.going_on.agent.wanted:
                time.sleep(0.02)
        found.append(float(engine.train_batch()))
    if tag is not None:
        engine.save_checkpoint(folder, f"until{steps}")
    record = {"digest": digest(engine), "losses": found, "noted": [], "rank": engine.global_rank}
    (folder / f"end{number}").write_text(json.dumps(record))
    engine.destroy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), int(sys.argv[2]), **ast.literal_eval(sys.argv[3]))
