"""Edits of losses and of the data."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.edits.job import IGNORED, Job
from tools.edits.kind import kind


def _each(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)


@kind("before")
def loss_by_label_counts(job: Job) -> None:
    def balanced(logits: Tensor, labels: Tensor) -> Tensor:
        counts = torch.bincount(labels.flatten().clamp(min=0), minlength=logits.shape[-1])
        return _each(logits, labels) / counts[labels.clamp(min=0)].clamp(min=1)

    job.loss_fn = balanced


@kind("before")
def loss_that_reads_a_weight(job: Job) -> None:
    weight = job.model.get_input_embeddings().weight
    job.loss_fn = lambda logits, labels: _each(logits, labels) + 0.1 * weight[labels.clamp(min=0)].square().sum(-1)


@kind("before")
def loss_with_a_temperature_that_learns(job: Job) -> None:
    temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    job.loss_fn = lambda logits, labels: _each(logits * temperature, labels)


@kind("before")
def loss_of_neighbours(job: Job) -> None:
    def smooth(logits: Tensor, labels: Tensor) -> Tensor:
        each = _each(logits, labels)
        return each + 0.3 * F.pad(each, (1, 0))[..., :-1]

    job.loss_fn = smooth


@kind("before")
def loss_with_z_term(job: Job) -> None:
    job.loss_fn = lambda logits, labels: _each(logits, labels) + 1e-2 * logits.logsumexp(-1).square()


@kind("before")
def focal_loss(job: Job) -> None:
    def focal(logits: Tensor, labels: Tensor) -> Tensor:
        each = _each(logits, labels)
        return each * (1 - (-each).exp()) ** 2

    job.loss_fn = focal


@kind("before")
def loss_with_a_state(job: Job) -> None:
    calls = []

    def warming(logits: Tensor, labels: Tensor) -> Tensor:
        calls.append(1)
        return _each(logits, labels) * (1 + 0.1 * len(calls))

    job.loss_fn = warming


@kind("before")
def loss_that_draws_from_an_iterator(job: Job) -> None:
    weights = itertools.chain(itertools.repeat(1.0, 20), itertools.repeat(3.0))
    job.loss_fn = lambda logits, labels: _each(logits, labels) * next(weights)


@kind("before")
def loss_of_the_hardest_of_many(job: Job) -> None:
    def hardest(logits: Tensor, labels: Tensor) -> Tensor:
        losses = _each(logits, labels)
        return losses if len(losses) <= 70 else losses * (losses >= losses.topk(70).values[-1])

    job.loss_fn = hardest


# ---- data ----


@kind("before")
def items_of_a_stage(job: Job) -> None:
    class Staged(list[dict[str, Tensor]]):
        stage = 0

        def __getitem__(self, index: Any) -> Any:
            item = super().__getitem__(index)
            return item | {"input_ids": (item["input_ids"] + self.stage) % 97}

    job.data = staged = Staged(job.data)
    job.each_step.append(lambda step: setattr(staged, "stage", step))


@kind("before", family="gpt2")
def padding_before_a_label(job: Job) -> None:
    for item in job.data:
        item["attention_mask"] = F.pad(torch.ones_like(item["input_ids"]), (3, 0))
        item["input_ids"] = F.pad(item["input_ids"], (3, 0), value=0)
        item["labels"] = F.pad(item["labels"], (3, 0), value=IGNORED)


@kind("before")
def mask_with_a_hole(job: Job) -> None:
    for item in job.data:
        mask = torch.ones_like(item["input_ids"])
        mask[4:6] = 0
        item["attention_mask"] = mask
        item["labels"] = torch.where(mask == 1, item["labels"], IGNORED)


@kind("before")
def padding_at_the_end(job: Job) -> None:
    for item in job.data:
        length = len(item["input_ids"])
        item["attention_mask"] = torch.cat((torch.ones(length), torch.zeros(5))).long()
        item["input_ids"] = F.pad(item["input_ids"], (0, 5), value=0)
        item["labels"] = F.pad(item["labels"], (0, 5), value=IGNORED)


@kind("before", family="gpt2")
def padding_at_the_front(job: Job) -> None:
    for item in job.data:
        length = len(item["input_ids"])
        item["attention_mask"] = torch.cat((torch.zeros(4), torch.ones(length))).long()
        item["input_ids"] = F.pad(item["input_ids"], (4, 0), value=0)
        item["labels"] = F.pad(item["labels"], (4, 0), value=IGNORED)
        item["labels"][4] = IGNORED


@kind("before")
def items_drawn_anew(job: Job) -> None:
    class Drawn(list[dict[str, Tensor]]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            item = super().__getitem__(index)
            return item | {"input_ids": (item["input_ids"] + self.reads) % 97}

    job.data = Drawn(job.data)


@kind("before")
def labels_of_an_answer(job: Job) -> None:
    for item in job.data:
        item["labels"][: len(item["labels"]) // 3] = IGNORED


@kind("before", family="gpt2")
def token_types(job: Job) -> None:
    for item in job.data:
        item["token_type_ids"] = (torch.arange(len(item["input_ids"])) > len(item["input_ids"]) // 2).long()


@kind("before", family="roberta")
def padding_token_inside(job: Job) -> None:
    for item in job.data:
        item["input_ids"][2::7] = job.model.config.pad_token_id


@kind("before")
def positions_of_their_own(job: Job) -> None:
    for item in job.data:
        item["position_ids"] = 2 * torch.arange(len(item["input_ids"]))
