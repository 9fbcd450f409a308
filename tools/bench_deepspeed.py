"""Step time beside plain DeepSpeed: same model, weights, data and optimizer, in the same processes, in turns.

Gloo ranks train a small Llama in FP32, once by a homogeneous strategy of this engine and once
by the DeepSpeed job of the same shape. Steps alternate (A B, B A, ...); a step's time is that of its slowest rank.
`ratio` is this engine's time over DeepSpeed's, of the medians; the quartiles are those of the ratios of the pairs, each
of which ran the same sequences; `cpu ratio` compares the CPU time of all ranks, which a busy machine disturbs less.
Loss and gradient norm must agree in the first pair, where both engines hold the same parameters; `drift` is the largest
difference of norms in any pair (Adam magnifies rounding of gradients near zero). What the baselines do to be fast is
said in `tools/deepspeed_baselines.py`.

Four ranks train on long-tailed sequences and are judged by time. One and two ranks are handed rows of one length by
the three calls, so that nothing is gained: a model of 512 hidden is judged by CPU time; a smaller one, whose step is
mostly what an engine adds to the model's own work, is shown without an aim (not by --quick).

  python -m tools.bench_deepspeed [--quick] [--json FILE] [--pairs N] [--rows STRATEGY ...]

Exits non-zero if a ratio that has an aim is above 1.0, or if losses or gradient norms differ.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tools import aims

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ds_hydra.commands.figures import figures_parser, finish, print_table
from ds_hydra.testing import rank_environment, run_ranks
from tools.deepspeed_baselines import (
    GRADIENT_CLIPPING,
    OPTIMIZER,
    Baseline,
    Pipeline,
    Shape,
    Ulysses,
    Zero1,
    base_config,
    prepare,
    start,
)

NOTE = """\
The ranks share {cores} cores. Where cores are fewer than ranks, compute is serial in effect: then the ratios show what
the engines add to equal compute, and say nothing about speed-up. Gloo's all-reduce and all-gather, which DeepSpeed
calls, are slower than the point-to-point messages that this engine sends: that is part of what is seen. Other work on
the machine (see the load) moves the ratios of times at random, those of CPU time less."""


TIME, CPU, NOTHING = "time", "CPU time", "nothing"  # what a row is judged by


@dataclass(frozen=True)
class Job:
    """What both engines are given."""

    shape: Shape
    num_heads: int
    longest: int
    tokens_per_step: int
    num_warm_up: int
    num_pairs: int

    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.shape.vocab,
            hidden_size=self.shape.hidden,
            intermediate_size=self.shape.ffn,
            num_hidden_layers=self.shape.layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads // 2,
            max_position_embeddings=self.longest,
            tie_word_embeddings=False,
        )
        config._attn_implementation = "sdpa"
        return LlamaForCausalLM(config).float()

    def sequences(self) -> list[Tensor]:
        """Log-normal lengths, even for Ulysses, and random tokens."""
        generator = torch.Generator().manual_seed(1)
        lengths = torch.empty(4000).log_normal_(4.6, 1.0, generator=generator).clamp(8, self.longest)
        return [torch.randint(self.shape.vocab, (int(length) // 2 * 2,), generator=generator) for length in lengths]

    def equal(self, step: int) -> list[Tensor]:
        """A step's sequences where all are of one length."""
        generator = torch.Generator().manual_seed(step)
        return list(torch.randint(self.shape.vocab, (8, self.tokens_per_step // 8), generator=generator))


@dataclass(frozen=True)
class Rival:
    """A row: a baseline, its strategy in this engine, on how many ranks, of which hidden size, and what is judged."""

    name: str
    strategy: str
    make: Callable[[Any, Job], Baseline]
    ranks: int = 4
    hidden: int = 256
    judged: str = TIME


class Called:
    """An engine that is handed equal rows by the three calls, as a job has it to which nothing here is of use."""

    def __init__(self, engine: Any):
        self.engine = engine

    def step(self, sequences: Sequence[Tensor]) -> Tensor:
        """Run one update on this rank's part of the sequences, which are of one length; its share of the loss."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        rows = torch.stack(list(sequences[rank::ranks]))
        loss = self.engine(input_ids=rows, labels=rows).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach() / ranks


def _called(model: Any, job: Job) -> Baseline:
    return Called(start(copy.deepcopy(model), base_config()))


RIVALS = (
    Rival("three calls", "tp1", _called, 1, 128, NOTHING),
    Rival("three calls", "tp1", _called, 1, 512, CPU),
    Rival("three calls", "2*tp1", _called, 2, 128, NOTHING),
    Rival("three calls", "2*tp1", _called, 2, 512, CPU),
    Rival("ZeRO-1", "4*tp1", lambda model, job: Zero1(model, job.shape)),
    Rival("ZeRO-1 + AutoTP 2", "2*tp2", lambda model, job: Zero1(model, job.shape, tp=2)),
    Rival("ZeRO-1 + Ulysses 2", "2*sp2", lambda model, job: Ulysses(model, job.shape, sp=2)),
    Rival("PipelineModule PP2", "2*pp2", lambda model, job: Pipeline(model, job.shape, job.longest, pp=2)),
)


def our_engine(model: Any, job: Job, strategy: str, data: Any) -> Any:
    """This project's engine with the baselines' optimizer and clipping; without data it is handed its batches."""
    import ds_hydra

    config = {
        "optimizer": {"type": "AdamW", "params": {**OPTIMIZER, "torch_adam": True}},
        "gradient_clipping": GRADIENT_CLIPPING,
        "hydra": {
            "tokens_per_step": job.tokens_per_step,
            "context_length": job.longest,
            "strategies": [strategy],
            "steps_file": None,
        },
    }
    logging.getLogger("ds_hydra").setLevel(logging.WARNING)
    return ds_hydra.initialize(model=model, training_data=data, config=config)[0]


class Timing(NamedTuple):
    """One step: time of the slowest rank, all starting together, CPU time of all ranks, and its loss."""

    ms: float
    cpu_ms: float
    loss: float


def timed(run: Callable[[], Tensor]) -> Timing:
    """Run a step on all ranks; what they return is summed up to the loss."""
    dist.barrier()
    began, cpu_began = time.perf_counter(), time.process_time()
    share = run()
    elapsed = (time.perf_counter() - began) * 1e3
    mine = torch.tensor([elapsed, (time.process_time() - cpu_began) * 1e3, float(share)], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    table = torch.stack(everyone)
    return Timing(table[:, 0].max().item(), table[:, 1].sum().item(), table[:, 2].sum().item())


def measure(rank: int, job: Job, rival: Rival) -> dict[str, Any]:
    """Both engines on this rank, steps in turns."""
    warnings.simplefilter("ignore")
    rank_environment(rank)
    prepare()
    model, sequences = job.model(), job.sequences()
    theirs = rival.make(model, job)
    equal = isinstance(theirs, Called)
    ours = our_engine(model, job, rival.strategy, None if equal else sequences)
    called = Called(ours)
    pairs: list[tuple[Timing, Timing]] = []
    norms: list[float] = []
    hidden = 0
    for step in range(job.num_warm_up + job.num_pairs):
        batch = job.equal(step) if equal else [sequences[i] for i in ours.sampler.batch(step)]

        def run_ours(batch: list[Tensor] = batch) -> Tensor:
            if equal:
                return called.step(batch)
            return ours.train_batch() / dist.get_world_size()  # every rank has the whole loss

        def run_theirs(batch: list[Tensor] = batch) -> Tensor:
            return theirs.step(batch)

        if step % 2 == 0:
            our = timed(run_ours)
            their = timed(run_theirs)
        else:
            their = timed(run_theirs)
            our = timed(run_ours)
        pairs.append((our, their))
        norms.append(_relative(float(ours.get_global_grad_norm()), float(theirs.engine.get_global_grad_norm())))
        hidden += step >= job.num_warm_up and ours.last_step.planning_hidden
    ours.destroy()
    counted = pairs[job.num_warm_up :]
    our_ms, their_ms = (statistics.median(pair[i].ms for pair in counted) for i in (0, 1))
    our_cpu_ms, their_cpu_ms = (statistics.median(pair[i].cpu_ms for pair in counted) for i in (0, 1))
    lower, _, upper = statistics.quantiles([our.ms / their.ms for our, their in counted], n=4, method="inclusive")
    return {
        "DeepSpeed": rival.name,
        "ours": rival.strategy,
        "hidden": rival.hidden,
        "our ms": our_ms,
        "their ms": their_ms,
        "ratio": our_ms / their_ms,
        "quartiles": f"{lower:.2f} .. {upper:.2f}",
        "cpu ratio": our_cpu_ms / their_cpu_ms,
        "loss diff": _relative(pairs[0][0].loss, pairs[0][1].loss),
        "norm diff": norms[0],
        "drift": max(norms),
        "planning hidden": hidden / job.num_pairs,
        "judged by": rival.judged,
    }


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(other), 1e-30)


def missed_aims(row: Mapping[str, Any]) -> list[str]:
    """What a row misses."""
    where = f"{row['ours']} of {row['hidden']} hidden against {row['DeepSpeed']}"
    missed = []
    ratio = {TIME: row["ratio"], CPU: row["cpu ratio"], NOTHING: 0.0}[row["judged by"]]
    if ratio > aims.OVER_DEEPSPEED:
        missed.append(f"{where}: {ratio:.2f} times DeepSpeed's {row['judged by']}")
    for what, difference in (("losses", row["loss diff"]), ("gradient norms", row["norm diff"])):
        if not difference <= aims.DEEPSPEED_AGREEMENT:
            missed.append(f"{where}: {what} differ by {difference:.1e}, more than {aims.DEEPSPEED_AGREEMENT:.0e}")
    return missed


def main() -> int:
    parser = figures_parser(__doc__)
    parser.add_argument("--pairs", type=int, help="counted steps of each engine (default: 24; quick: 5)")
    strategies = list(dict.fromkeys(rival.strategy for rival in RIVALS))
    parser.add_argument("--rows", nargs="+", choices=strategies, default=strategies, help="only these rows")
    args = parser.parse_args()
    jobs = {hidden: _job(hidden, args.quick, args.pairs) for hidden in {rival.hidden for rival in RIVALS}}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # takes seconds: once, before the forks
    rows: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    for rival in RIVALS:
        if rival.strategy in args.rows and not (args.quick and rival.judged == NOTHING):
            job = jobs[rival.hidden]
            rows.append(run_ranks(measure, rival.ranks, job, rival, timeout=900)[0])
    print(
        f"Llama, {job.shape.layers} layers, vocabulary {job.shape.vocab}, FP32, ranks of one thread; about "
        f"{job.tokens_per_step} tokens a step; {job.num_pairs} pairs; DeepSpeed {deepspeed.__version__}; load before "
        f"the start {load:.1f}"
    )
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    print(NOTE.format(cores=os.cpu_count()))
    missed = [aim for row in rows for aim in missed_aims(row)]
    worst = max(rows, key=lambda row: row["ratio"])
    summary = f"{len(rows)} rows, step time against DeepSpeed at worst {worst['ratio']:.2f} ({worst['ours']})"
    figures = {"load": load, "rows": [row | {"ok": not missed_aims(row)} for row in rows]}
    return finish("bench_deepspeed", summary, figures, missed, args.json)


def _job(hidden: int, quick: bool, pairs: int | None) -> Job:
    layers, vocab, longest, warm_up, counted = (4, 4096, 384, 2, 5) if quick else (6, 8192, 1024, 3, 24)
    if quick and hidden > 256:  # takes minutes else
        layers, longest = 2, 192
    return Job(
        Shape(hidden, layers, hidden * 8 // 3 // 8 * 8, vocab), 8, longest, longest * 2, warm_up, pairs or counted
    )


if __name__ == "__main__":
    sys.exit(main())
