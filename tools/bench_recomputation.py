"""What a host's flag for recomputation costs four jobs: obeyed, and taken as the permission that it is here.

  python -m tools.bench_recomputation [--quick] [--json FILE]

A model like Qwen2.5-7B is fine-tuned on chats and long documents of up to 32K tokens, on 8, 16 and 64 GPUs of 80 GB and
on 8 of 48 GB, which hold the longest sequence only with layers recomputed. Trainers set `gradient_checkpointing` by
default. A step is planned with layers kept, as the job runs without the flag; as the job decides where the flag allows
recomputation; and with all layers recomputed, as `"activation_checkpointing": "all"` has it. Beside each stands what it
gains over the best layout that stays the same in every step. Costs are estimates from FLOPs, as `ds-hydra init` makes
them; transfers of parameters are not counted.

A second table has the work that other choices beside keeping and recomputing spare. The first is not built, and is what
it could spare at most, each sequence taking what is least for it: of a sequence's layers which are not kept as many
wait on the host as copies at 50 GB/s each way hide behind its forward, within its 0.9 TB for eight ranks. The second
is what a job spares by recomputing all layers but for their attention, where it does so. With two jobs of longer
documents, of up to 262,144 tokens.

Exits non-zero if an aim is missed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from transformers import Qwen2Config

from ds_hydra.commands.figures import figures_parser, finish, print_table
from ds_hydra.commands.init import Times
from ds_hydra.commands.init_job import Job, device_here
from ds_hydra.commands.translated import OwnLayout, Setting
from ds_hydra.costs.shape_costs import RECOMPUTED_WORK, least_work, less_work_recomputed
from ds_hydra.engine.costs import within_memory
from ds_hydra.rivals.preview import ONE
from ds_hydra.zero_hetero.errors import ConfigError
from tools import aims

CONTEXT, NODE = 32_768, 8
JOBS = ((8, 80.0, 160_000), (16, 80.0, 160_000), (64, 80.0, 320_000), (8, 48.0, 160_000))  # GPUs, GB, tokens of a step
LONG = ((8, 48.0, 131_072, 4), (8, 80.0, 262_144, 8))  # GPUs, GB, context, and how many times as long documents are
LINK, HOST = 50e9, 0.9e12 / NODE  # bytes a second, and bytes, of one rank


class Found(NamedTuple):
    """Steps of one job: with layers kept, as it decides where it may choose, and with all recomputed."""

    kept: Times
    permitted: Times
    obeyed: Times


def chats_and_documents(count: int = 5000, context: int = CONTEXT, times: int = 1) -> list[int]:
    """Lengths in tokens: 85 % chats of about 630, the rest documents of about 7,300, or so many times that, cut at the
    context."""
    rng = np.random.default_rng(0)
    chats = rng.lognormal(6.45, 0.8, round(0.85 * count))
    documents = rng.lognormal(8.9, 1.1, count - len(chats))
    lengths = np.clip(np.concatenate((chats, times * documents)), 16, context).astype(int)
    rng.shuffle(lengths)
    return [int(length) for length in lengths]


def job_of(gpus: int, gib: float, tokens: int, context: int = CONTEXT) -> Job:
    """One of the jobs."""
    config: dict[str, Any] = {
        "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "hydra": {"tokens_per_step": tokens, "context_length": context},
    }  # fmt: skip
    model = Qwen2Config(
        vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=context, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return Job.of(folder, config, gpus, NODE, gib)


def measured(job: Job, tokens: int) -> Found:
    """What is planned for it."""
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


def third_choice(job: Job, lengths: Sequence[int], tokens: int) -> tuple[float, float]:
    """Shares of the sequences' work that are spared, at most where layers wait on the host, and where attention stays.

    With F for a sequence's forward and L for a copy of all that its layers keep, one that is recomputed takes 4 F, and
    one of whose layers a share of F / L is fetched 4 F - F * F / L.
    """
    (schemes, kept), (_, again) = (job.memory(recomputed) for recomputed in (False, True))
    attends = copy.copy(job.source)
    attends.options = replace(attends.options, keep_attention=True)
    _, staying = replace(job, source=attends).memory(True)
    n, count = np.unique(np.asarray(lengths, dtype=np.float64), return_counts=True)
    work: tuple[list[Any], ...] = ([], [], [], [], [])
    for one in job.table(device_here("H100"), schemes, tokens, False).costs:
        each = max(needs.per_token / needs.alive for needs in kept.stages(one.scheme))
        forward, moved = (one.a * n**2 + one.b * n) / 3, 1e3 * each * n / LINK
        hidden = np.minimum(np.minimum(1.0, forward / moved), HOST / (each * n))
        fits = [n <= memory.max_length(one.scheme) for memory in (kept, again, staying)]
        all_kept, all_again = (np.where(fits[i], (3 + i) * forward, np.inf) for i in (0, 1))
        usual = np.where(fits[0], all_kept, all_again)
        fetched = np.minimum(usual, np.where(fits[1], (4 - hidden) * forward, np.inf))
        attended = np.where(fits[2], one.a * n**2 + one.b * n * RECOMPUTED_WORK, np.inf)
        for found, of_it in zip(work, (usual, fetched, all_kept, all_again, attended), strict=True):
            found.append(one.scheme.num_ranks * of_it)
    least_of, on_host, *jobs = (float((np.min(found, axis=0) * count).sum()) for found in work)
    spared = 0.0 if jobs[0] <= jobs[1] else max(0.0, 1.0 - jobs[2] / jobs[1])
    return 1.0 - on_host / least_of, spared


def gain(times: Times) -> float | None:
    """Over the best layout that is the same in every step; None where the longest sequence does not fit."""
    return None if times.ours is None else times.rivals.get(ONE, ("", times.ours))[1] / times.ours


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 where an aim is missed."""
    args = figures_parser(__doc__, "python -m tools.bench_recomputation").parse_args(arguments)
    rows, missed = list[tuple[str, ...]](), list[str]()

    def cell(times: Times) -> str:
        over = gain(times)
        return f"{times.holds:,} fit" if times.ours is None or over is None else f"{times.ours:,.0f} ms, {over:.2f}"

    for gpus, gib, tokens in JOBS[::3] if args.quick else JOBS:
        found = measured(job_of(gpus, gib, tokens), tokens)
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
    spared = []
    for gpus, gib, context, times in (*((gpus, gib, CONTEXT, 1) for gpus, gib, _ in JOBS), *LONG):
        lengths = chats_and_documents(5000, context, times)
        shares = third_choice(job_of(gpus, gib, context, context), lengths, context)
        spared.append((f"{gpus} GPUs of {gib:.0f} GB, {context:,} tokens", *(f"{share:.1%}" for share in shares)))
    print("\nwork that other choices spare")
    print_table(("job", "layers on the host, at most", "attention kept"), spared)
    return finish("bench_recomputation", f"{len(rows)} jobs", {"rows": rows, "spared": spared}, missed, args.json)


if __name__ == "__main__":
    sys.exit(main())
