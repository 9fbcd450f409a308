"""A tiny Llama that learns Python's own sources, byte by byte, on forked CPU ranks: real training in seconds."""

from __future__ import annotations

import logging
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import torch

import ds_hydra.engine.engine  # noqa: F401  (the same)
from ds_hydra.commands.moving import moving
from ds_hydra.ranks.forked import rank_environment, run_ranks

RANKS, STEPS = 8, 8
LAYOUTS = ("tp4 + 2*pp2", "sp4 + tp2 + 2*tp1", "2*tp2pp2", "tp2sp2 + 4*tp1")
_FILES, _CONTEXT, _TOKENS = 120, 512, 4000
_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class TinyJob:
    """A run of a few steps; `told`: rank 0 prints the line of each."""

    strategies: tuple[str, ...]
    steps: int
    choose: str = "cycle"
    told: bool = False
    steps_file: str | None = None


def equal() -> dict[str, Any]:
    """Print the losses of one rank and of eight ranks in four layouts, step by step; returns them."""
    print(f"\n3. A tiny Llama trained on Python sources: one rank, and {RANKS} ranks that change layout in every step")
    with moving("training on one rank"):
        alone = train(1, TinyJob(("tp1",), STEPS))
    with moving(f"training on {RANKS} ranks"):
        together = train(RANKS, TinyJob(LAYOUTS, STEPS))
    print("   step  one rank  eight ranks")
    for step, (one, other) in enumerate(zip(alone, together, strict=True)):
        same = "=" if f"{one:.4f}" == f"{other:.4f}" else "DIFFERENT"
        print(f"   {step + 1:>4}    {one:.4f}       {other:.4f}  {same}  {LAYOUTS[step % len(LAYOUTS)]}")
    return {"one_rank": alone, "eight_ranks": together}


def train(num_ranks: int, job: TinyJob) -> list[float]:
    """The losses of a run on so many ranks of this machine."""
    losses: list[float] = run_ranks(_train, num_ranks, job, _sequences(), timeout=_TIMEOUT_S)[0]
    return losses


def _sequences() -> list[torch.Tensor]:
    """Files of the standard library as sequences of bytes, cut at the context."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_FILES]
    return [torch.tensor(list(text[:_CONTEXT])) for text in (file.read_bytes() for file in files) if len(text) > 1]


def _train(rank: int, job: TinyJob, data: list[torch.Tensor]) -> list[float]:
    """Losses of the steps on this rank."""
    import ds_hydra

    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("ds_hydra").setLevel(logging.INFO if job.told and rank == 0 else logging.WARNING)
    warnings.simplefilter("ignore")
    rank_environment(rank)
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "hydra": {
            "tokens_per_step": _TOKENS, "strategies": list(job.strategies), "choose": job.choose,
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
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=_CONTEXT, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
