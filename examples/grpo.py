"""A loop of GRPO on two CPU ranks: a tiny model learns to answer with large tokens. The engine is four calls of it.

  OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/grpo.py

Answers are drawn by the model itself from whole weights, which a job of this size can hold; others use an inference
engine. Rewards, advantages and what is drawn are the script's own business; log-probabilities and updates the engine's.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import ds_hydra
from ds_hydra.losses import group_advantages, grpo

PROMPTS, ANSWERS, NEW_TOKENS, PROMPT = 4, 6, (4, 24), 3  # of each rank and update; answers to a prompt; least and most

CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
    "gradient_clipping": 1.0,
    "hydra": {
        "tokens_per_step": 1024,
        "context_length": 64,
        "strategies": ["2*tp1", "tp2"],
        "steps_file": None,
    },
}


def tiny_model() -> Any:
    """A Llama of two layers with a vocabulary of 32."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "llama", vocab_size=32, num_key_value_heads=4, pad_token_id=None, eos_token_id=None, **sizes
        )
    )


@torch.no_grad()
def draw(model: Any, prompt: Tensor, generator: torch.Generator) -> Tensor:
    """An answer of the model to a prompt (tokens,), of some length, behind the prompt."""
    tokens = prompt
    for _ in range(int(torch.randint(*NEW_TOKENS, (), generator=generator))):
        likely = model(input_ids=tokens[None]).logits[0, -1].softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(likely, 1, generator=generator)))
    return tokens


def reward(answer: Tensor) -> float:
    """The share of an answer's tokens that are large."""
    return float((answer >= 16).float().mean())


def rollouts(model: Any, generator: torch.Generator) -> tuple[list[dict[str, Any]], float]:
    """This rank's sequences of an update, and their mean reward."""
    prompts = torch.randint(32, (PROMPTS, PROMPT), generator=generator)
    drawn = [draw(model, prompt, generator) for prompt in prompts for _ in range(ANSWERS)]
    rewards = torch.tensor([reward(tokens[PROMPT:]) for tokens in drawn])
    advantages = group_advantages(rewards, torch.arange(PROMPTS).repeat_interleave(ANSWERS))
    items = [
        {"input_ids": tokens, "completion_mask": (torch.arange(len(tokens)) >= PROMPT).long(), "advantages": float(one)}
        for tokens, one in zip(drawn, advantages, strict=True)
    ]
    return items, float(rewards.mean())


def main() -> list[float]:
    """The mean reward of rank 0's answers in each update."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ds_hydra.init_distributed("gloo")
    engine = ds_hydra.initialize(model=tiny_model(), config=CONFIG)[0]
    policy, generator = tiny_model(), torch.Generator().manual_seed(100 * options.seed + dist.get_rank())
    found = []
    for update in range(options.updates):
        policy.load_state_dict(engine.fp32_state_dict())
        items, mean = rollouts(policy, generator)
        found.append(mean)
        for item, old in zip(items, engine.log_probs(items).log_probs, strict=True):
            item["old_log_probs"] = old
        for half in (slice(0, None, 2), slice(1, None, 2)):  # two updates by what was drawn once
            engine.forward_backward(items[half], grpo(kl=0.0))
            engine.optimizer_step()
        if dist.get_rank() == 0:
            print(f"update {update}: reward {mean:.3f}", flush=True)
    engine.destroy()
    return found


if __name__ == "__main__":
    main()
