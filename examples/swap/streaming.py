"""Train on a stream that is too long to index, and go on in the middle of it after a restart.

    deepspeed --num_gpus 2 examples/swap/streaming.py --steps 40

`datasets.load_dataset(..., streaming=True)` is such a stream; the one here has the same three methods by which its
place is kept: set_epoch, state_dict and load_state_dict. Rank 0 alone reads it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hydra


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Sequences drawn at random, other ones in each epoch; none is kept."""

    def __init__(self, per_epoch: int = 1000):
        self._per_epoch, self._epoch, self._at = per_epoch, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._at = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._at = state["epoch"], state["at"]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self._at < self._per_epoch:
            generator = torch.Generator().manual_seed(self._epoch * self._per_epoch + self._at)
            length = int((torch.randn(1, generator=generator) + 3).exp().clamp(2, 200))
            self._at += 1
            yield {"input_ids": torch.randint(3, 97, (length,), generator=generator)}


def make_config(folder: str, steps: int) -> dict[str, Any]:
    """A checkpoint every ten steps; a restart goes on with the newest."""
    hydra = {
        "tokens_per_step": 512,
        "context_length": 256,  # a stream's longest sequence is not known before it comes
        "strategies": ["tp2", "2*tp1"],
        "total_steps": steps,
        "checkpoint": {"dir": folder, "every": 10},
        "steps_file": None,
    }
    return {"optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}, "hydra": hydra}


def main() -> None:
    """Train until step `--steps` of the job, those before a restart included."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoints", default="runs/streaming")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    args = parser.parse_args()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, max_position_embeddings=256))
    config = make_config(args.checkpoints, args.steps)
    engine, _, loader, _ = ds_hydra.initialize(args=args, model=model, training_data=Stream(), config=config)
    for _ in loader:
        engine.train_batch()
    engine.destroy()


if __name__ == "__main__":
    main()
