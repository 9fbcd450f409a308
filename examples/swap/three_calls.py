"""Train a language model with DeepSpeed's loop of three calls; `three_calls.diff` is all that swaps the engine.

deepspeed --num_gpus 2 examples/swap/three_calls.py --deepspeed_config examples/swap/ds_three_calls.json
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import deepspeed
import torch
from task import collate, make_data, make_model
from torch.utils.data import DataLoader, DistributedSampler


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """Command line; the launcher adds --local_rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="updates")
    parser.add_argument("--save", help="file for the trained weights")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return deepspeed.add_config_arguments(parser).parse_args(arguments)


def make_loader(rank: int, num_ranks: int) -> DataLoader[Any]:
    """The batches of one rank."""
    data = make_data()
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_ranks, rank), collate_fn=collate)  # type: ignore[arg-type]


def mean_over_ranks(losses: list[torch.Tensor]) -> float:
    """The mean of the batches of all ranks, each counted once."""
    mean = torch.stack(losses).mean()
    torch.distributed.all_reduce(mean)
    return mean.item() / torch.distributed.get_world_size()


def evaluate(engine: Any, batches: list[Any]) -> float:
    """Mean loss of the batches of all ranks."""
    engine.eval()
    with torch.no_grad():
        loss = mean_over_ranks([engine(**batch).loss for batch in batches])
    engine.train()
    return loss


def main(arguments: list[str] | None = None) -> list[float]:
    """Train and save; the loss of each update, and that of an evaluation at the end."""
    args = parse_args(arguments)
    model = make_model()
    deepspeed.init_distributed()
    loader = make_loader(torch.distributed.get_rank(), torch.distributed.get_world_size())
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    losses: list[float] = []
    found: list[torch.Tensor] = []  # of the batches of an update
    while len(losses) < args.steps:
        for batch in loader:
            batch = {name: values.to(engine.device) for name, values in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            found.append(loss.detach())
            updates = engine.is_gradient_accumulation_boundary()
            engine.step()
            if updates:
                losses.append(mean_over_ranks(found))
                found.clear()
                if engine.global_rank == 0:
                    print(f"update {engine.global_steps}: loss {losses[-1]:.4f}")
            if len(losses) == args.steps:
                break
    losses.append(evaluate(engine, list(loader)[:3]))
    state = engine.module.state_dict()
    if args.save and engine.global_rank == 0:
        torch.save(state, args.save)
    engine.destroy()
    return losses


if __name__ == "__main__":
    main()
