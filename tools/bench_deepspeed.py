"""Step time beside plain DeepSpeed: same model, weights, data and optimizer, in the same processes, in turns.

Four gloo ranks train a small Llama in FP32 on long-tailed sequences, once by a homogeneous strategy of this engine
and once by the DeepSpeed job of the same shape. Steps alternate (A B, B A, ...); a step's time is that of its slowest
rank. `ratio` is ours over theirs, of the medians; the quartiles are those of the ratios of the pairs, each of which
ran the same sequences; `cpu ratio` compares the CPU time of all ranks, which a busy machine disturbs less. Loss and
gradient norm must agree in the first pair, where both engines hold the same parameters; `drift` is the largest
difference of norms in any pair (Adam magnifies rounding of gradients near zero). What the baselines do to be fast is
said in `tools/deepspeed_baselines.py`.

  python -m tools.bench_deepspeed [--quick] [--json FILE] [--pairs N] [--rows STRATEGY ...]

Exits non-zero if a ratio is above 1.0 or if losses or gradient norms differ.
"""

from __future__ import annotations

import importlib
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
    prepare,
)

NUM_RANKS = 4
NOTE = """\
The ranks share {cores} cores. Where cores are fewer than ranks, compute is serial in effect: then the ratios show what
the engines add to equal compute, and say nothing about speed-up. Gloo's all-reduce and all-gather, which DeepSpeed
calls, are slower than the point-to-point messages that this engine sends: that is part of what is seen. Other work on
the machine (see the load) moves the ratios of times at random, those of CPU time less."""


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


@dataclass(frozen=True)
class Rival:
    """A row: a baseline, its strategy in this engine, and what is not token-exact in it."""

    name: str
    strategy: str
    make: Callable[[Any, Job], Baseline]
    remark: str = ""


RIVALS = (
    Rival("ZeRO-1", "4*tp1", lambda model, job: Zero1(model, job.shape)),
    Rival("ZeRO-1 + AutoTP 2", "2*tp2", lambda model, job: Zero1(model, job.shape, tp=2)),
    Rival("ZeRO-1 + Ulysses 2", "2*sp2", lambda model, job: Ulysses(model, job.shape, sp=2)),
    Rival("PipelineModule PP2", "2*pp2", lambda model, job: Pipeline(model, job.shape, job.longest, pp=2)),
)


@dataclass(frozen=True)
class Row:
    """Figures of one row; times in milliseconds."""

    deepspeed: str
    ours: str
    our_ms: float
    their_ms: float
    ratio: float
    lower_quartile: float
    upper_quartile: float
    our_cpu_ms: float  # of all ranks together
    their_cpu_ms: float
    loss_difference: float
    norm_difference: float
    drift: float
    planning_hidden: float  # share of the steps
    aim: float = 1.0

    @property
    def ok(self) -> bool:
        return self.ratio <= self.aim and max(self.loss_difference, self.norm_difference) <= aims.DEEPSPEED_AGREEMENT


def our_engine(model: Any, job: Job, strategy: str) -> Any:
    """This project's engine with the baselines' optimizer and clipping."""
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
    return ds_hydra.initialize(model=model, training_data=job.sequences(), config=config)[0]


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
    everyone = [torch.empty_like(mine) for _ in range(NUM_RANKS)]
    dist.all_gather(everyone, mine)
    table = torch.stack(everyone)
    return Timing(table[:, 0].max().item(), table[:, 1].sum().item(), table[:, 2].sum().item())


def measure(rank: int, job: Job, rival: Rival) -> Row:
    """Both engines on this rank, steps in turns."""
    warnings.simplefilter("ignore")
    rank_environment(rank)
    prepare()
    model, sequences = job.model(), job.sequences()
    theirs = rival.make(model, job)
    ours = our_engine(model, job, rival.strategy)
    pairs: list[tuple[Timing, Timing]] = []
    norms: list[float] = []
    hidden = 0
    for step in range(job.num_warm_up + job.num_pairs):
        batch = [sequences[i] for i in ours.sampler.batch(step)]

        def run_ours() -> Tensor:
            return ours.train_batch() / NUM_RANKS  # every rank has the whole loss

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
    quartiles = statistics.quantiles([our.ms / their.ms for our, their in counted], n=4, method="inclusive")
    return Row(
        deepspeed=rival.name,
        ours=rival.strategy,
        our_ms=our_ms,
        their_ms=their_ms,
        ratio=our_ms / their_ms,
        lower_quartile=quartiles[0],
        upper_quartile=quartiles[2],
        our_cpu_ms=our_cpu_ms,
        their_cpu_ms=their_cpu_ms,
        loss_difference=_relative(pairs[0][0].loss, pairs[0][1].loss),
        norm_difference=norms[0],
        drift=max(norms),
        planning_hidden=hidden / job.num_pairs,
    )


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(other), 1e-30)


def missed_aims(row: Row) -> list[str]:
    """What a row misses."""
    where = f"{row.ours} against {row.deepspeed}"
    missed = []
    if row.ratio > row.aim:
        missed.append(f"{where}: {row.ratio:.2f} times DeepSpeed's time")
    for what, difference in (("losses", row.loss_difference), ("gradient norms", row.norm_difference)):
        if not difference <= aims.DEEPSPEED_AGREEMENT:
            missed.append(f"{where}: {what} differ by {difference:.1e}, more than {aims.DEEPSPEED_AGREEMENT:.0e}")
    return missed


def main() -> int:
    parser = figures_parser(__doc__)
    parser.add_argument("--pairs", type=int, help="counted steps of each engine (default: 24; quick: 5)")
    strategies = [rival.strategy for rival in RIVALS]
    parser.add_argument("--rows", nargs="+", choices=strategies, default=strategies, help="only these rows")
    args = parser.parse_args()
    if args.quick:
        job = Job(Shape(256, 4, 688, 4096), 8, 384, 768, 2, args.pairs or 5)
    else:
        job = Job(Shape(256, 6, 688, 8192), 8, 1024, 2048, 3, args.pairs or 24)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # takes seconds: once, before the forks
    rows: list[Row] = []
    load = os.getloadavg()[0]
    for rival in RIVALS:
        if rival.strategy in args.rows:
            rows.append(run_ranks(lambda rank, rival=rival: measure(rank, job, rival), NUM_RANKS, timeout=900)[0])
    shape = job.shape
    print(
        f"Llama, {shape.layers} layers of {shape.hidden}, vocabulary {shape.vocab}, FP32, {NUM_RANKS} ranks of one "
        f"thread; about {job.tokens_per_step} tokens a step; {job.num_pairs} pairs; DeepSpeed {deepspeed.__version__}; "
        f"load before the start {load:.1f}"
    )
    show(rows)
    print(NOTE.format(cores=os.cpu_count()))
    missed = [aim for row in rows for aim in missed_aims(row)]
    worst = max(rows, key=lambda row: row.ratio)
    summary = f"{len(rows)} rows, step time against DeepSpeed at worst {worst.ratio:.2f} ({worst.ours})"
    figures = {"load": load, "rows": [asdict(row) | {"ok": row.ok} for row in rows]}
    return finish("bench_deepspeed", summary, figures, missed, args.json)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    print_table(
        [
            "DeepSpeed",
            "ours",
            "our ms",
            "their ms",
            "ratio",
            "quartiles",
            "cpu ratio",
            "loss diff",
            "norm diff",
            "drift",
            "aim",
            "",
        ],
        [
            (
                row.deepspeed,
                row.ours,
                row.our_ms,
                row.their_ms,
                row.ratio,
                f"{row.lower_quartile:.2f} .. {row.upper_quartile:.2f}",
                row.our_cpu_ms / row.their_cpu_ms,
                row.loss_difference,
                row.norm_difference,
                row.drift,
                f"<= {row.aim}",
                "ok" if row.ok else "MISSED",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
