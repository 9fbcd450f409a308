"""What a host's flag for recomputation costs four jobs: obeyed, and taken as the permission that it is here.

  python -m tools.bench_recomputation [--quick] [--json FILE]

A model like Qwen2.5-7B is fine-tuned on chats and long documents of up to 32K tokens, on 8, 16 and 64 GPUs of 80 GB and
on 8 of 48 GB, which hold the longest sequence only with layers recomputed. Trainers set `gradient_checkpointing` by
default. A step is planned with layers kept, as the job runs without the flag; as the job decides where the flag allows
recomputation; and with all layers recomputed, as `"activation_checkpointing": "all"` has it. Beside each stands what it
gains over the best layout that stays the same in every step. Costs are estimates from FLOPs, as `ds-hydra init` makes
them; transfers of parameters are not counted.

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from transformers import Qwen2Config

from ds_hydra.commands.figures import figures_parser, finish, print_table
from ds_hydra.commands.init import Times
from ds_hydra.commands.init_job import Job, device_here
from ds_hydra.commands.planned_block import Setting
from ds_hydra.commands.translated import OwnLayout
from ds_hydra.costs.shape_costs import least_work, less_work_recomputed
from ds_hydra.engine.costs import within_memory
from ds_hydra.zero_hetero.errors import ConfigError
from tools import aims

CONTEXT, NODE = 32_768, 8
JOBS = ((8, 80.0, 160_000), (16, 80.0, 160_000), (64, 80.0, 320_000), (8, 48.0, 160_000))  # GPUs, GB, tokens of a step
ONE_LAYOUT = "ds-hydra, one layout in every step"


class Found(NamedTuple):
    """Steps of one job: with layers kept, as it decides where it may choose, and with all recomputed."""

    kept: Times
    permitted: Times
    obeyed: Times


def chats_and_documents(count: int = 5000) -> list[int]:
    """Lengths in tokens: 85 % chats of about 630, the rest documents of about 7,300, cut at the context."""
    rng = np.random.default_rng(0)
    chats = rng.lognormal(6.45, 0.8, round(0.85 * count))
    documents = rng.lognormal(8.9, 1.1, count - len(chats))
    lengths = np.clip(np.concatenate((chats, documents)), 16, CONTEXT).astype(int)
    rng.shuffle(lengths)
    return [int(length) for length in lengths]


def measured(gpus: int, gib: float, tokens: int) -> Found:
    """What is planned for one of the jobs."""
    config: dict[str, Any] = {
        "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "hydra": {"tokens_per_step": tokens, "context_length": CONTEXT},
    }  # fmt: skip
    model = Qwen2Config(
        vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=CONTEXT, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        job = Job.of(folder, config, gpus, NODE, gib)
    settings = [Setting("tokens_per_step", tokens, ""), Setting("context_length", CONTEXT, "")]
    lengths, device = chats_and_documents(), device_here("H100")
    kept, obeyed = (job.times(lengths, settings, OwnLayout(), device, again) for again in (False, True))
    # As a job decides before step 0: layers are kept where the longest sequence fits so, unless narrower layouts save
    # more work than a second forward costs.
    work = []
    for again in (False, True):
        schemes, memory = job.memory(again)
        work.append(least_work(within_memory(job.table(device, schemes, tokens, False), memory), lengths))
    return Found(kept, obeyed if kept.ours is None or less_work_recomputed(*work) else kept, obeyed)


def gain(times: Times) -> float | None:
    """Over the best layout that is the same in every step; None where the longest sequence does not fit."""
    return None if times.ours is None else times.rivals[ONE_LAYOUT][1] / times.ours


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 where an aim is missed."""
    args = figures_parser(__doc__, "python -m tools.bench_recomputation").parse_args(arguments)
    rows, missed = list[tuple[str, ...]](), list[str]()

    def cell(times: Times) -> str:
        over = gain(times)
        return f"{times.holds:,} fit" if times.ours is None or over is None else f"{times.ours:,.0f} ms, {over:.2f}"

    for gpus, gib, tokens in JOBS[::3] if args.quick else JOBS:
        found = measured(gpus, gib, tokens)
        name = f"{gpus} GPUs of {gib:.0f} GB"
        if found.permitted.ours is None or found.obeyed.ours is None:
            raise ConfigError(f"{name}: no layout holds {CONTEXT} tokens, though layers are recomputed")
        over = found.permitted.ours / min(found.kept.ours or found.obeyed.ours, found.obeyed.ours)
        if over > aims.PERMITTED:
            missed.append(f"{name}: the flag costs {over:.3f} of the step, not <= {aims.PERMITTED}")
        faster = found.obeyed.ours / found.permitted.ours
        rows.append((name, cell(found.kept), cell(found.permitted), cell(found.obeyed), f"{faster:.2f}"))
    print("milliseconds of a step, and the gain over the best layout that stays the same in every step")
    headers = ("job", "without the flag", "flag as permission", "flag obeyed", "obeyed over permission")
    print_table(headers, rows)
    return finish("bench_recomputation", f"{len(rows)} jobs", {"rows": rows}, missed, args.json)


if __name__ == "__main__":
    sys.exit(main())
