"""Batches of token sequences with prompts, as a collator of a script pads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hydra.pipe.loss import IGNORED
from ds_hydra.testing import Sample


def prompted(lengths: Sequence[int], vocabulary: int, seed: int) -> list[Sample]:
    """Sequences of these lengths; the first third of each is a prompt."""
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for length in lengths:
        tokens = torch.randint(3, vocabulary, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length // 3] = IGNORED
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def known(sample: Sample) -> Tensor:
    """Which tokens but the first are targets."""
    return sample["labels"][1:] != IGNORED


def num_targets(sample: Sample) -> int:
    return int(known(sample).sum())


def collated(samples: Sequence[Sample]) -> dict[str, Tensor]:
    size = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, value: int) -> Tensor:
        return torch.stack([torch.nn.functional.pad(s[name], (0, size - len(s[name])), value=value) for s in samples])

    mask = torch.stack([(torch.arange(size) < len(sample["input_ids"])).long() for sample in samples])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", IGNORED), "attention_mask": mask}
