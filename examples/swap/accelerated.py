"""Train a language model with Accelerate's loop; `accelerated.diff` is all that swaps the engine.

deepspeed --num_gpus 2 examples/swap/accelerated.py --config examples/swap/ds_accelerated.json
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from task import collate, make_data, make_model
from torch.utils.data import DataLoader


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; the loss of each update."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="updates")
    parser.add_argument("--config", required=True, help="of DeepSpeed")
    args, _ = parser.parse_known_args(arguments)  # the launcher adds --local_rank
    accelerator = Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=DeepSpeedPlugin(args.config))
    model: Any = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.steps * accelerator.num_processes)
    loader = DataLoader(make_data(), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    losses: list[float] = []
    found: list[torch.Tensor] = []  # of the batches of an update
    while len(losses) < args.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                found.append(loss.detach())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(accelerator.gather(torch.stack(found)).mean().item())
                found.clear()
                accelerator.print(f"update {len(losses)}: loss {losses[-1]:.4f}")
            if len(losses) == args.steps:
                break
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
