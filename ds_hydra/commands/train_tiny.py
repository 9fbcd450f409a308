"""Train a tiny Llama on Python's own sources, on CPU ranks of this machine: is everything in place?

  ds-hydra train-tiny [--ranks 4] [--steps 20] [--strategies "tp4 + 2*pp2" ...] [--steps-file FILE]

The ranks are forked; each step runs the next of the strategies. `ds-hydra report` draws the steps file. The sources are
learnt byte by byte, in seconds; `ds-hydra demo` compares such a run on one rank with one on eight. Torch and DeepSpeed
are imported when ranks start: they have to know the device first.
"""

from __future__ import annotations

import argparse
import logging
import os
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hydra.commands.figures import CommandParser, guarded, new_file
from ds_hydra.commands.moving import moving
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.zero_hetero.errors import ConfigError

if TYPE_CHECKING:
    import torch

_USUAL = {  # strategies by the number of ranks
    1: ("tp1",),
    2: ("tp2", "2*tp1", "pp2", "sp2"),
    4: ("tp2 + 2*tp1", "2*pp2", "tp2pp2", "sp2 + tp2"),
    8: ("tp4 + 2*pp2", "sp4 + tp2 + 2*tp1", "2*tp2pp2", "tp2sp2 + 4*tp1"),
}
RANKS, STEPS = 8, 8  # of the comparison with one rank
_FILES, _CONTEXT, _TOKENS = 120, 512, 4000
_TIMEOUT_S = 3600.0


def main(arguments: Sequence[str] | None = None, *, name: str = "ds-hydra train-tiny") -> int:
    """Train and print each step's line; 1 when the loss has not fallen."""
    parser = CommandParser(prog=name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="forked on this machine (default 4)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--strategies", nargs="+", metavar="TEXT", help="of as many ranks, run in turn")
    parser.add_argument("--steps-file", type=new_file, metavar="FILE", help="write each step's record there")
    args = parser.parse_args(arguments)
    return guarded(name, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """What `main` does once its options are read. ConfigError or PlanError for what is refused."""
    if args.steps < 2:
        raise ConfigError(f"--steps must be at least 2 but is {args.steps}: the first and the last loss are compared")
    strategies = tuple(args.strategies or _USUAL.get(args.ranks, (f"{args.ranks}*tp1",)))
    for text in strategies:
        ranks = StrategyShape.parse(text).num_ranks
        if ranks != args.ranks:
            raise ConfigError(f"the strategy {text!r} is of {ranks} ranks; give --ranks {ranks}, or others")
    on_cpus()
    told = None if args.steps_file is None else str(args.steps_file)
    losses = train(args.ranks, TinyJob(strategies, args.steps, told=True, steps_file=told))
    fell = losses[-1] < losses[0]
    print(f"train-tiny: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps on {args.ranks} ranks"
          f"{'' if fell else '; it has not fallen'}")  # fmt: skip
    return 0 if fell else 1


def on_cpus() -> None:
    """Let torch and DeepSpeed, imported later, see no device but the CPU, and let each rank have one thread."""
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")


@dataclass(frozen=True)
class TinyJob:
    """A run of a few steps; `told`: rank 0 prints the line of each."""

    strategies: tuple[str, ...]
    steps: int
    told: bool = False
    steps_file: str | None = None


def equal() -> dict[str, Any]:
    """Print the losses of one rank and of eight ranks in four layouts, step by step; returns them."""
    layouts = _USUAL[RANKS]
    print(f"\n3. A tiny Llama trained on Python sources: one rank, and {RANKS} ranks that change layout in every step")
    with moving("training on one rank"):
        alone = train(1, TinyJob(("tp1",), STEPS))
    with moving(f"training on {RANKS} ranks"):
        together = train(RANKS, TinyJob(layouts, STEPS))
    print("   step  one rank  eight ranks")
    for step, (one, other) in enumerate(zip(alone, together, strict=True)):
        same = "=" if f"{one:.4f}" == f"{other:.4f}" else "DIFFERENT"
        print(f"   {step + 1:>4}    {one:.4f}       {other:.4f}  {same}  {layouts[step % len(layouts)]}")
    return {"one_rank": alone, "eight_ranks": together}


def train(num_ranks: int, job: TinyJob) -> list[float]:
    """The losses of a run on so many ranks of this machine."""
    import deepspeed  # noqa: F401  (before forking: the ranks share it)

    import ds_hydra.engine.engine  # noqa: F401  (the same)
    from ds_hydra.ranks.forked import run_ranks

    losses: list[float] = run_ranks(_train, num_ranks, job, _sequences(), timeout=_TIMEOUT_S)[0]
    return losses


def _sequences() -> list[torch.Tensor]:
    """Files of the standard library as sequences of bytes, cut at the context."""
    import torch

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_FILES]
    return [torch.tensor(list(text[:_CONTEXT])) for text in (file.read_bytes() for file in files) if len(text) > 1]


def _train(rank: int, job: TinyJob, data: list[torch.Tensor]) -> list[float]:
    """Losses of the steps on this rank."""
    import torch

    import ds_hydra
    from ds_hydra.ranks.forked import rank_environment

    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("ds_hydra").setLevel(logging.INFO if job.told and rank == 0 else logging.WARNING)
    warnings.simplefilter("ignore")
    rank_environment(rank)
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "hydra": {
            "tokens_per_step": _TOKENS, "strategies": list(job.strategies), "choose": "cycle",
            "steps_file": job.steps_file, "total_steps": job.steps, "planner": {"ahead": 2 if job.told else 0},
            "self_check": "on" if job.told else "off",
            "faults": {"frozen_seconds": 0},
        },
    }  # fmt: skip
    engine = ds_hydra.initialize(model=_model(), training_data=data, config=config)[0]
    losses = [float(engine.train_batch()) for _ in range(job.steps)]
    engine.destroy()
    return losses


def _model() -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=_CONTEXT, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
