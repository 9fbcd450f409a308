"""Batches as verl's trainers hand them to a worker, and a small model's folder. `on_cpu` is to be called before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from verl.utils import tensordict_utils as tu

from tests.support.small_job import small_model

WORDS = 97
Rows = Sequence[Tensor]
"""Sequences of tokens, (T,) each, of which the last ones are responses."""


def save_model(folder: Path, model: Any = None, **config: Any) -> None:
    """The small model in FP64, or another, with a tokenizer beside it, as verl asks for; its config changed by what is
    given."""
    model = model or small_model().double()
    model.config.update(config)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2").save_pretrained(folder)


def tokens(seed: int, lengths: Sequence[int]) -> list[Tensor]:
    """Drawn tokens, none of which is padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, WORDS, (length,), generator=generator) for length in lengths]


def jagged(rows: Rows) -> Tensor:
    """(B, j)."""
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    return torch.nested.nested_tensor_from_jagged(torch.cat(tuple(rows)), offsets=offsets)


def answers(values: Rows, responses: Sequence[int]) -> Tensor:
    """Right padded (B, R): the part of each that is the response."""
    return torch.nn.utils.rnn.pad_sequence(
        [value[len(value) - count :] for value, count in zip(values, responses, strict=True)], batch_first=True
    )


def policy_batch(rows: Rows, responses: Sequence[int], tensors: dict[str, Tensor], **more: Any) -> TensorDict:
    """A batch of reinforcement: `tensors` are more columns, (B, R) each, and `more` are settings of all."""
    asked = [row[: len(row) - count].flip(0) for row, count in zip(rows, responses, strict=True)]
    prompts = torch.nn.utils.rnn.pad_sequence(asked, batch_first=True).flip(1)  # left padded
    padded = answers(rows, responses)
    mask = answers([torch.ones_like(row) for row in rows], responses)
    columns = {
        "input_ids": jagged(rows), "position_ids": jagged([torch.arange(len(row)) for row in rows]),
        "prompts": prompts, "responses": padded, "attention_mask": (torch.cat((prompts, padded), dim=1) != 0).long(),
        "response_mask": mask, "loss_mask": mask, **tensors,
    }  # fmt: skip
    lengths = [len(row) for row in rows]
    return tu.get_tensordict(columns, {
        "temperature": 0.7, "calculate_entropy": True, "compute_loss": True, "global_batch_size": len(rows),
        "global_token_num": lengths, "max_seq_len": max(lengths), "max_response_len": max(responses), **more,
    })  # fmt: skip
