"""What scripts hand to `initialize` and to engines half used: optimizers, compiled modules, states of other models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_hydra
from ds_hydra.testing import OneProcess, float64_throughout, rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.small_job import shared_source, small_model

BATCHES = [[torch.arange(3 + step, 20 + 9 * rank + step) for rank in range(2)] for step in range(3)]
RATE = 1e-2


def model() -> Any:
    return small_model(tied=False).double()


def used(own: Any, kind: Callable[..., Any], **how: Any) -> Any:
    """An optimizer that has made two steps."""
    optimizer = kind(own.parameters(), lr=RATE, **how)
    for begin in (4, 9):
        ids = torch.arange(begin, begin + 12)[None]
        optimizer.zero_grad()
        own(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam that has made steps": lambda own: used(own, torch.optim.AdamW),
    "SGD that has made steps": lambda own: used(own, torch.optim.SGD, momentum=0.9),
    "of a part": lambda own: torch.optim.SGD(
        [one for name, one in own.named_parameters() if "mlp" not in name], lr=1.0
    ),
}


def engine_of(rank: int, own: Any, optimizer: Any) -> Any:
    rank_environment(rank)
    hydra = {"context_length": 64, "strategies": ["tp2", "2*tp1"], "choose": "cycle", "self_check": "off",
             "planner": {"ahead": 0}, "faults": {"frozen_seconds": 0}, "steps_file": None}  # fmt: skip
    config = {"gradient_clipping": 0.0, "hydra": hydra}
    return ds_hydra.initialize(model=own, optimizer=optimizer, config=config)[0]


def trained(engine: Any, rank: int, steps: int = 3) -> dict[str, Tensor]:
    for step in range(steps):
        engine.backward(engine([BATCHES[step][rank]]).loss)
        engine.step()
    found: dict[str, Tensor] = engine.fp32_state_dict()
    return found


@pytest.mark.drawn
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_as_in_one_process(name: str) -> None:
    def run(rank: int) -> dict[str, Tensor]:
        own = model()
        return trained(engine_of(rank, own, OPTIMIZERS[name](own)), rank)

    with float64_throughout(model()):
        frozen = model()
        for path, one in frozen.named_parameters():
            one.requires_grad_(name != "of a part" or "mlp" not in path)
        source = shared_source(frozen) if name != "of a part" else contextlib.nullcontext()
        reference = OneProcess(model(), OPTIMIZERS[name], clip=0.0)
        for batches in BATCHES:
            whole = sum(len(ids) - 1 for ids in batches)
            weights = [torch.full((len(ids) - 1,), 1 / whole, dtype=torch.float64) for ids in batches]
            reference.step([{"input_ids": ids, "labels": ids} for ids in batches], weights)
        with source:
            (found, _) = run_ranks(run, 2)
    for path, value in reference.parameters.items():
        assert torch.allclose(found[path], value, rtol=1e-9, atol=1e-9 * float(value.abs().max())), path


def counts_differ(rank: int) -> str:
    own = model()
    own.lm_head.requires_grad_(False)
    optimizer = used(own, torch.optim.AdamW)
    own.lm_head.requires_grad_(True)
    with pytest.raises(ConfigError) as error:
        engine_of(rank, own, optimizer)
    return str(error.value)


def test_other_counts_of_steps_in_a_group_are_refused() -> None:
    with shared_source(model()):
        for text in run_ranks(counts_differ, 2):
            assert "has made other steps for lm_head.weight than for model.embed_tokens.weight" in text


def refreshed(rank: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], list[float]]:
    """A reference takes the policy's weights, of which the module was compiled; and losses of both then."""
    policy, reference = (model() for _ in range(2))
    first = engine_of(rank, torch.compile(policy), torch.optim.SGD(policy.parameters(), lr=1.0))
    second = engine_of(rank, reference.requires_grad_(False), None)
    before = second.fp32_state_dict()
    trained(first, rank)
    assert second.module.load_state_dict(first.module.state_dict()).missing_keys == []
    part = {"lm_head.weight": torch.zeros(97, 32)}
    losses = []
    for engine in (first, second):
        engine.eval()
        losses.append(engine([BATCHES[0][rank]]).loss.item())
    states = [engine.fp32_state_dict() for engine in (first, second)]
    second.module.load_state_dict(part, strict=False)
    with pytest.raises(RuntimeError, match="size mismatch"):
        second.module.load_state_dict({"lm_head.weight": torch.zeros(96, 32)}, strict=False)
    assert not second.module.lm_head.weight.any()
    return before, states, losses


@pytest.mark.drawn
def test_a_reference_takes_the_weights_of_the_policy() -> None:
    with shared_source(model()):
        for before, (policy, reference), (one, other) in run_ranks(refreshed, 2):
            assert one == other
            assert all(torch.equal(policy[name], value) for name, value in reference.items())
            assert not all(torch.equal(before[name], value) for name, value in reference.items())
