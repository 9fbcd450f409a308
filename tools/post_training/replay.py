"""Many updates of recorded rollouts through the engine's calls, against the same loop in plain torch: parameters.

The loop is that of a GRPO script: log-probabilities of the policy before its updates are the old ones, those of the
first policy the reference; each batch, padded as a collator makes it, is gone through twice, in two parts whose
gradients add up to an update each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_hydra.losses import grpo
from ds_hydra.testing import float64_throughout, run_ranks
from tests.support.families import build_model, reference_model
from tests.support.small_job import shared_source
from tools.post_training.equality import LAYOUTS, RANKS, Planned, apart, engine_of
from tools.post_training.plain import LOSSES
from tools.post_training.rollouts import rollouts, scores_of, share

EPOCHS, PARTS = 2, (slice(0, None, 2), slice(1, None, 2))
LOSS = grpo(kl=0.1)  # LOSSES["GRPO"]
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
Batch = list[dict[str, Any]]


def recorded(update: int) -> Batch:
    """The rollouts of an update, without log-probabilities."""
    names = ("input_ids", "labels", "advantages", "temperature")
    return [{name: item[name] for name in names} for item in rollouts(seed=update)]


def collated(items: Batch) -> Any:
    """A padded batch, on the left and on the right in turn; no tensor where there is no item."""
    if not items:
        return []
    longest = max(len(item["input_ids"]) for item in items)

    def padded(value: Any, at: int) -> Tensor:
        one = torch.as_tensor(value)
        room = longest - len(one)
        return torch.nn.functional.pad(one, (room, 0) if at % 2 else (0, room))

    columns: dict[str, Any] = {
        name: torch.stack([padded(item[name], at) for at, item in enumerate(items)])
        for name in items[0] if name != "temperature"
    }  # fmt: skip
    masks = [padded(torch.ones_like(item["input_ids"]), at) for at, item in enumerate(items)]
    columns["attention_mask"] = torch.stack(masks)
    columns["temperature"] = torch.tensor([item["temperature"] for item in items], dtype=torch.float64)
    return columns


LogProbs = Callable[[Batch], list[Tensor]]


def _loop(
    updates: int,
    log_probs: LogProbs,
    reference: LogProbs,
    own: Callable[[Batch], Batch],
    *,
    part: Callable[[Batch, int], None],
    step: Callable[[], object],
) -> None:
    for update in range(updates):
        batch = recorded(update)
        mine = own(batch)
        both = log_probs(mine), reference(mine)
        for item, old, first in zip(mine, *both, strict=True):
            item["old_log_probs"], item["reference_log_probs"] = old, first
        for _ in range(EPOCHS):
            for which in PARTS:
                part(mine[which], len(batch))
            step()


def replayed(updates: int) -> float:
    """The largest difference of a parameter, relative to its largest entry, after these updates."""
    model, first = (reference_model("llama", torch.float64) for _ in range(2))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def of(policy: Any) -> LogProbs:
        def found(items: Batch) -> list[Tensor]:
            with torch.no_grad():
                return [scores_of(policy, item)[0] for item in items]

        return found

    def plain_part(items: Batch, count: int) -> None:
        loss = LOSSES["GRPO"].plain(items, [scores_of(model, item) for item in items])
        (loss * len(items) / count).backward()

    def plain_step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def on_ranks(rank: int) -> dict[str, Tensor]:
        planned = Planned()
        engine = engine_of(rank, "llama", planned, optimizer={"type": "AdamW", "params": ADAMW | {"torch_adam": True}})

        def part(items: Batch, count: int) -> None:
            planned.layout = LAYOUTS[(engine.global_steps + len(items)) % len(LAYOUTS)]
            engine.forward_backward(collated(items), LOSS, normaliser=count)

        def log_probs(items: Batch) -> list[Tensor]:
            found: list[Tensor] = engine.log_probs(collated(items)).log_probs
            return found

        _loop(updates, log_probs, of(first), lambda batch: share(rank, batch), part=part, step=engine.optimizer_step)
        found: dict[str, Tensor] = engine.fp32_state_dict()
        return found if rank == 0 else {}

    with float64_throughout(model), shared_source(build_model("llama", torch.float64)):
        found = run_ranks(on_ranks, RANKS, timeout=600)[0]
        _loop(updates, of(model), of(first), lambda batch: batch, part=plain_part, step=plain_step)
    values = {name: value.detach() for name, value in model.named_parameters()}
    assert min(apart(before[name], value) for name, value in values.items()) > 1e-4, "the updates move every parameter"
    return max(apart(value, found[name]) for name, value in values.items())
