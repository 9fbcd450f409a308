"""Update a policy by GRPO with DeepSpeed; `grpo.diff` is all that swaps the engine.

deepspeed --num_gpus 2 examples/swap/grpo.py --deepspeed_config examples/swap/ds_grpo.json

Padded batch, reference, loss and accumulation are those of nano-aha-moment (github.com/McGill-NLP/nano-aha-moment);
answers and rewards are drawn, where that has an inference engine, and each buffer is gone through twice.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from task import make_model
from torch import Tensor

PROMPTS, ANSWERS, MICRO_BATCH, EPOCHS = 2, 4, 4, 2  # prompts of a rank, answers to each; rows at a time; of a buffer
TEMPERATURE, KL_COEFFICIENT = 0.9, 0.05

Batch = dict[str, Tensor]


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """Command line; the launcher adds --local_rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10, help="buffers")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return deepspeed.add_config_arguments(parser).parse_args(arguments)


def make_episodes(iteration: int, rank: int) -> tuple[list[list[int]], list[list[int]], list[float]]:
    """Prompts, answers and advantages of a rank, of each sequence: a few answers are much longer than others."""
    draw = torch.Generator().manual_seed(1000 * iteration + rank)
    prompts, answers, advantages = [], [], []
    for _ in range(PROMPTS):
        prompt = torch.randint(3, 97, (int(torch.randint(3, 12, (), generator=draw)),), generator=draw).tolist()
        lengths = (torch.randn(ANSWERS, generator=draw) + 2.5).exp().clamp(1, 160).long().tolist()
        prompts += [prompt] * ANSWERS
        answers += [torch.randint(3, 97, (length,), generator=draw).tolist() for length in lengths]
        rewards = torch.rand(ANSWERS, generator=draw)
        advantages += ((rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)).tolist()
    return prompts, answers, advantages


def prepare_model_inputs(prompts: list[list[int]], answers: list[list[int]], advantages: list[float]) -> Batch:
    """One padded batch."""
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))

    def padded(rows: list[list[Any]], value: float = 0) -> Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    pairs = list(zip(prompts, answers, strict=True))
    return {
        "input_ids": padded([prompt + answer for prompt, answer in pairs]),
        "attention_mask": padded([[1] * len(prompt + answer) for prompt, answer in pairs]),
        "labels": padded([[-100] * len(prompt) + answer for prompt, answer in pairs], -100),
        "advantages": padded([[0.0] * len(prompt) + [one] * len(answer)
                              for (prompt, answer), one in zip(pairs, advantages, strict=True)]),
    }  # fmt: skip


def micro_batches(inputs: Batch) -> Iterator[Batch]:
    """Some rows at a time."""
    for at in range(0, len(inputs["input_ids"]), MICRO_BATCH):
        yield {name: values[at : at + MICRO_BATCH] for name, values in inputs.items()}


def token_log_probs(model: Any, batch: Batch) -> Tensor:
    """Of each token of the answers, (rows, length - 1), and 0 elsewhere."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    labels = batch["labels"][:, 1:]
    log_probs = torch.log_softmax(logits[:, :-1].float() / TEMPERATURE, dim=-1)
    return log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)


def policy_loss(policy: Any, batch: Batch, total_response_len: Tensor) -> Tensor:
    """The policy gradient with a penalty for leaving the reference."""
    log_probs = token_log_probs(policy, batch)
    ratio = batch["ref_log_probs"] - log_probs
    penalty = ratio.exp() - 1 - ratio
    losses = -log_probs * batch["advantages"][:, 1:] + KL_COEFFICIENT * penalty
    return (losses * (batch["labels"][:, 1:] != -100)).sum() / total_response_len


def mean_over_ranks(value: Tensor) -> float:
    """The mean of what the ranks have."""
    torch.distributed.all_reduce(value)
    return value.item() / torch.distributed.get_world_size()


def main(arguments: list[str] | None = None) -> list[tuple[float, float]]:
    """Train; loss and norm of the gradient of each update."""
    args = parse_args(arguments)
    deepspeed.init_distributed()
    model, reference = make_model(), make_model()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    reference.to(engine.device).eval()
    found: list[tuple[float, float]] = []
    for iteration in range(args.iterations):
        inputs = prepare_model_inputs(*make_episodes(iteration, engine.global_rank))
        inputs = {name: values.to(engine.device) for name, values in inputs.items()}
        with torch.no_grad():
            ref_log_probs = torch.cat([token_log_probs(reference, batch) for batch in micro_batches(inputs)])
        total_response_len = (inputs["labels"] != -100).sum()
        inputs["ref_log_probs"] = ref_log_probs
        for _ in range(EPOCHS):
            loss = torch.zeros((), device=engine.device)
            for batch in micro_batches(inputs):
                part = policy_loss(engine, batch, total_response_len)
                engine.backward(part, scale_wrt_gas=False)
                engine.step()
                loss += part.detach()
            found.append((mean_over_ranks(loss), float(engine.get_global_grad_norm())))
            if engine.global_rank == 0:
                print("update {}: loss {:.4f}, norm {:.4f}".format(engine.global_steps, *found[-1]))
    engine.destroy()
    return found


if __name__ == "__main__":
    main()
