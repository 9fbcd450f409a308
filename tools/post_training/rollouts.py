"""Made-up rollouts with all that losses of log-probabilities read, the same in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_hydra.pipe.loss import IGNORED
from tests.support.families import VOCAB

PER_RANK = (4, 0, 8, 2)  # sequences that each rank hands in, in pairs
PROMPT, TOP = 3, 4


def rollouts(seed: int = 0, count: int = sum(PER_RANK)) -> list[dict[str, Any]]:
    """Sequences of 6 to 60 tokens, of which one in seven is long; the first tokens of each are a prompt.

    What is said of a token stands at its own place, with numbers that nothing may read at the prompt.
    """
    draw = torch.Generator().manual_seed(seed)
    made: list[dict[str, Any]] = []
    for number in range(count):
        length = int(
            torch.randint(40, 60, (), generator=draw) if number % 7 == 2 else torch.randint(6, 20, (), generator=draw)
        )
        tokens = torch.randint(3, VOCAB, (length,), generator=draw)
        labels = tokens.clone()
        labels[:PROMPT] = IGNORED
        likely = torch.stack([torch.randperm(VOCAB, generator=draw)[:TOP] for _ in range(length)])
        told = torch.randn(length, TOP + 1, generator=draw, dtype=torch.float64).log_softmax(dim=-1)[:, :TOP]
        values = torch.randn(
            2, length, generator=torch.Generator().manual_seed(1000 * seed + number), dtype=torch.float64
        )
        made.append(
            {
                "input_ids": tokens,
                "labels": labels,
                "advantages": torch.randn(length, generator=draw, dtype=torch.float64),
                "old_log_probs": -4.6 + 0.4 * torch.randn(length, generator=draw, dtype=torch.float64),
                "reference_log_probs": -4.6 + 0.4 * torch.randn(length, generator=draw, dtype=torch.float64),
                "teacher_ids": likely,
                "teacher_log_probs": told,
                "pair": number // 2,
                "chosen": int(number % 4 in (0, 3)),
                "returns": values[0],
                "old_values": 0.5 * values[1],
                "temperature": 0.7 + 0.1 * (number % 5),
            }
        )
    return made


def values_of(model: Any, item: dict[str, Any]) -> tuple[Tensor]:
    """By plain torch, with a gradient: the value before each token, (T,); 0 before the first."""
    found = model(input_ids=item["input_ids"][None], use_cache=False).logits[0, :-1, 0].double()
    return (torch.cat((found.new_zeros(1), found)),)


def share(rank: int, made: list[dict[str, Any]], per_rank: tuple[int, ...] = PER_RANK) -> list[dict[str, Any]]:
    """What a rank hands in."""
    begin = sum(per_rank[:rank])
    return made[begin : begin + per_rank[rank]]


def scores_of(model: Any, item: dict[str, Any], *, temperature: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """By plain torch, with a gradient: log p of each token, (T,), the entropy that it is drawn from, (T,), and log p of
    all words, (T, V); zeros at the first token."""
    logits = model(input_ids=item["input_ids"][None], use_cache=False).logits[0, :-1].double()
    log_p = torch.log_softmax(logits / (item["temperature"] if temperature else 1.0), dim=-1)
    log_p = torch.cat((torch.zeros(1, log_p.shape[1], dtype=log_p.dtype), log_p))
    own = log_p.gather(-1, item["input_ids"][:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    entropy = torch.cat((torch.zeros(1, dtype=entropy.dtype), entropy[1:]))
    return own, entropy, log_p
