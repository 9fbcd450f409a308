"""Updates of fewer or more batches than configured: what plain DeepSpeed's own loop makes of them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

import ds_hydra
from ds_hydra.testing import rank_environment, run_ranks
from tests.support.small_job import small_model

ACCUMULATION = 4
UPDATES = ((4, 4), (2, 2), (6, 6), (3, 1), (4, 2))  # batches of both ranks
CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": ACCUMULATION}


def batch_of(update: int, rank: int, number: int) -> dict[str, Tensor]:
    """Two sequences of one length, which differs between batches."""
    generator = torch.Generator().manual_seed(100 * update + 10 * rank + number)
    tokens = torch.randint(3, 97, (2, 6 + 5 * (number % 3) + 3 * rank), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def trained(rank: int, engine: Any, updates: Any, script_factor: float = 1.0) -> list[float]:
    """Updates that the script closes by hand; the norms of their gradients."""
    norms = []
    for update, counts in enumerate(updates):
        for number in range(counts[rank]):
            engine.set_gradient_accumulation_boundary(number == counts[rank] - 1)
            engine.backward(script_factor * engine(**batch_of(update, rank, number)).loss)
            engine.step()
        if not counts[rank]:  # as plain DeepSpeed cannot
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def plain(rank: int) -> tuple[list[float], dict[str, Tensor]]:
    import deepspeed

    rank_environment(rank)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = small_model(tied=False)
    config = CONFIG | {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    engine = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
    norms = trained(rank, engine, UPDATES)
    return norms, {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def hydra(rank: int, updates: Any = UPDATES, **block: Any) -> tuple[list[float], dict[str, Tensor], list[str]]:
    rank_environment(rank)
    lines: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    logging.getLogger("ds_hydra.engine.steps").addFilter(keep)
    model = small_model(tied=False)
    own = {"context_length": 64, "strategies": ["2*tp1", "pp2"], "choose": "cycle", "self_check": "off"}
    own |= {"planner": {"ahead": 0}, "faults": {"frozen_seconds": 0}, "steps_file": None, "loss_norm": "batch"} | block
    engine = ds_hydra.initialize(model=model, optimizer=optimizer_of(model), config=CONFIG | {"hydra": own})[0]
    return trained(rank, engine, updates), engine.fp32_state_dict(), lines


def test_each_batch_counts_what_deepspeed_lets_it_count() -> None:
    (norms, parameters), _ = run_ranks(plain, 2)
    first, second = run_ranks(hydra, 2)
    assert first[0] == second[0]
    assert all(abs(own - right) < 1e-5 * right for own, right in zip(first[0], norms, strict=True)), (first[0], norms)
    for name, right in parameters.items():
        assert torch.allclose(first[1][name], right, rtol=1e-4, atol=1e-6), name
    assert len(first[2]) == 1, "told once"
    assert "an update of 4 batches, where gradient_accumulation_steps and ranks make 8" in first[2][0]
    assert "0.5 of their mean" in first[2][0]
    assert second[2] == []


def test_a_rank_without_batches_counts_in_the_divisor() -> None:
    """Four batches of one rank of two are half of what the two ranks should have, and so is their gradient."""

    def alone(rank: int) -> list[float]:
        return hydra(rank, ((0, 4),))[0]

    def job_of_four(rank: int) -> list[float]:
        CONFIG["gradient_accumulation_steps"] = 2
        return hydra(rank, ((0, 4),))[0]

    (half, _), (full, _) = run_ranks(alone, 2), run_ranks(job_of_four, 2)
    assert abs(2 * half[0] - full[0]) < 1e-6 * full[0]


def test_the_mean_over_targets_is_of_those_that_there_are() -> None:
    def job(rank: int) -> list[float]:
        found, _, lines = hydra(rank, ((2, 2),), loss_norm="token")
        assert lines == []
        return found

    def whole(rank: int) -> list[float]:
        CONFIG["gradient_accumulation_steps"] = 2
        return hydra(rank, ((2, 2),), loss_norm="token")[0]

    assert run_ranks(job, 2) == run_ranks(whole, 2)
