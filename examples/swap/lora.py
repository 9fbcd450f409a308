"""Train LoRA adapters by PEFT with DeepSpeed's loop of three calls; `lora.diff` is all that swaps the engine.

deepspeed --num_gpus 2 examples/swap/lora.py --deepspeed_config examples/swap/ds_three_calls.json --save runs/adapters
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import deepspeed
import task
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader, DistributedSampler


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """Command line; the launcher adds --local_rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="updates")
    parser.add_argument("--save", help="folder for the adapters")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return deepspeed.add_config_arguments(parser).parse_args(arguments)


def make_model() -> PeftModel:
    """Adapters beside every linear layer, and embeddings that are trained as a whole."""
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["embed_tokens"])
    return get_peft_model(task.make_model(), lora)


def make_loader(rank: int, num_ranks: int) -> DataLoader[Any]:
    """The batches of one rank."""
    data = task.make_data()
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_ranks, rank), collate_fn=task.collate)  # type: ignore[arg-type]


def main(arguments: list[str] | None = None) -> list[float]:
    """Train and save the adapters; the loss of each update."""
    args = parse_args(arguments)
    model = make_model()
    deepspeed.init_distributed()
    loader = make_loader(torch.distributed.get_rank(), torch.distributed.get_world_size())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=trained)
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
                mean = torch.stack(found).mean()
                torch.distributed.all_reduce(mean)
                losses.append(mean.item() / torch.distributed.get_world_size())
                found.clear()
                if engine.global_rank == 0:
                    print(f"update {engine.global_steps}: loss {losses[-1]:.4f}")
            if len(losses) == args.steps:
                break
    if args.save:
        engine.module.save_pretrained(args.save)
    engine.destroy()
    return losses


if __name__ == "__main__":
    main()
