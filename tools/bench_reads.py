"""CPU time of a step whose losses or logits are read before it, beside the same batches collected, and DeepSpeed's.

Gloo ranks train a small Llama in FP32 by the three calls, two batches each in a step: collected, with each loss read as
it is, with a function of it that makes the step run once more, with a loss made of logits, and by plain DeepSpeed,
which reads too. All run in the same processes, in turns; a figure is the median over steps of all ranks' CPU time.

  python -m tools.bench_reads [--quick] [--json FILE]

Exits non-zero if a ratio to the collected step is above its aim.
"""

from __future__ import annotations

import copy
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from tools import aims

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from torch import Tensor

import ds_hydra
import ds_hydra.engine.engine
from ds_hydra.commands.figures import figures_parser, finish, print_table
from ds_hydra.testing import rank_environment, run_ranks
from tools.bench_deepspeed import Job, timed
from tools.deepspeed_baselines import OPTIMIZER, Shape, base_config, prepare, start

BATCHES = 2  # of a rank in a step
COLLECTED, DEEPSPEED = "collected", "plain DeepSpeed"
# What a script makes of what engine(batch) returns, and how much of the collected step's CPU time it may take.
READS: dict[str, tuple[Callable[[Any], Any], float]] = {
    COLLECTED: (lambda out: out.loss, float("inf")),
    "as it is": (lambda out: out.loss if out.loss.item() > 0 else None, aims.READ_AS_IT_IS),
    "squared": (lambda out: out.loss**2, aims.READ),
    "of logits": (lambda out: out.logits.logsumexp(-1).mean(), aims.READ),
    DEEPSPEED: (lambda out: out.loss if out.loss.item() > 0 else None, float("inf")),
}


def step(engine: Any, read: Callable[[Any], Any], rows: list[Tensor]) -> Tensor:
    """One update by the three calls."""
    for one in rows:
        engine.backward(read(engine(input_ids=one, labels=one)))
        engine.step()
    return torch.zeros(())


def measure(rank: int, job: Job, ranks: int) -> dict[str, float]:
    """CPU milliseconds of a step of all ranks, by what is read."""
    warnings.simplefilter("ignore")
    rank_environment(rank)
    prepare()
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    model, engines = job.model(), dict[str, Any]()
    for name in READS:
        if name == DEEPSPEED:
            config = base_config(gradient_accumulation_steps=BATCHES)
            engines[name] = start(copy.deepcopy(model), config)
            continue
        block = {"strategies": [f"{ranks}*tp1"], "context_length": job.longest, "steps_file": None,
                 "losses": "step" if name == COLLECTED else "auto"}  # fmt: skip
        config = {"optimizer": {"type": "AdamW", "params": {**OPTIMIZER, "torch_adam": True}},
                  "gradient_accumulation_steps": BATCHES, "hydra": block}  # fmt: skip
        engines[name] = ds_hydra.initialize(model=copy.deepcopy(model), config=config)[0]
    found: dict[str, list[float]] = {name: [] for name in READS}
    for turn in range(job.num_warm_up + job.num_pairs):
        rows = list(torch.stack(job.equal(turn)[rank::ranks]).chunk(BATCHES))
        for name, (read, _) in READS.items():
            cpu_ms = timed(partial(step, engines[name], read, rows)).cpu_ms
            found[name] += [cpu_ms] * (turn >= job.num_warm_up)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> int:
    args = figures_parser(__doc__).parse_args()
    hidden, layers, pairs = (256, 2, 5) if args.quick else (512, 4, 12)
    job = Job(Shape(hidden, layers, hidden * 8 // 3 // 8 * 8, 2048), 8, 256, 2048, 3, pairs)
    rows, missed, worst = [], list[str](), 0.0
    for ranks in (1, 2):
        times = run_ranks(measure, ranks, job, ranks, timeout=1500)[0]
        for name, (_, most) in READS.items():
            ratio = times[name] / times[COLLECTED]
            rows.append((ranks, name, times[name], ratio, most))
            worst = max(worst, ratio if most < float("inf") else 0.0)
            if ratio > most:
                missed.append(f"{name} on {ranks}: {ratio:.2f} times a collected step's CPU time, more than {most}")
    print_table(("ranks", "read", "CPU ms", "ratio", "at most"), rows)
    figures = {"rows": [dict(zip(("ranks", "read", "cpu_ms", "ratio"), row, strict=False)) for row in rows]}
    return finish(
        "bench_reads", f"{len(rows)} rows, at worst {worst:.2f} times a collected step", figures, missed, args.json
    )


if __name__ == "__main__":
    sys.exit(main())
