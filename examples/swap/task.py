"""What the scripts of this folder train: a small Llama, and sequences of very different lengths."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_model() -> LlamaForCausalLM:
    """A Llama of four layers with fixed random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, max_position_embeddings=256))


def make_data(count: int = 160, seed: int = 1) -> list[torch.Tensor]:
    """Token ids of `count` sequences."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randn(count, generator=generator) + 3).exp().clamp(2, 200).long().tolist()
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


def collate(sequences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One padded batch."""
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(one) for one in sequences])[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
