"""What scripts hand to `initialize` and to engines half used: optimizers, compiled modules, states of other models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_hydra
from ds_hydra.testing import OneProcess, Sample, float64_throughout, rank_environment, run_ranks
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
            reference.step(*in_one(batches))
        with source:
            (found, _) = run_ranks(run, 2)
    for path, value in reference.parameters.items():
        assert torch.allclose(found[path], value, rtol=1e-9, atol=1e-9 * float(value.abs().max())), path


class Balanced(nn.Module):
    """Features that are scaled by a buffer."""

    scale: Tensor

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp
        self.register_buffer("scale", torch.ones(32, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x) * self.scale
        return out


def balanced() -> Any:
    own = model()
    for layer in own.model.layers:
        layer.mlp = Balanced(layer.mlp)
    return own


def move(own: Any, step: int) -> None:
    """In place, and by another tensor."""
    for layer in own.model.layers[1:]:
        layer.mlp.scale += torch.linspace(-0.3, 0.3, 32) * (step + 1)
    own.model.layers[0].mlp.scale = own.model.layers[0].mlp.scale * 0.8


def moving(rank: int) -> tuple[dict[str, Tensor], str]:
    own = balanced()
    engine = engine_of(rank, own, torch.optim.SGD(own.parameters(), lr=1.0))
    for step in range(len(BATCHES)):
        engine.backward(engine([BATCHES[step][rank]]).loss)
        engine.step()
        move(engine.module, step)
    engine.module.model.layers[0].mlp.scale += rank
    engine.backward(engine([BATCHES[0][rank]]).loss)
    with pytest.raises(ConfigError) as error:
        engine.step()
    return engine.fp32_state_dict(), str(error.value)


@pytest.mark.drawn
def test_buffers_of_layers_that_a_script_moves_are_taken_over() -> None:
    with float64_throughout(balanced()):
        reference = OneProcess(balanced(), lambda own: torch.optim.SGD(own.parameters(), lr=1.0), clip=0.0)
        for step, batches in enumerate(BATCHES):
            reference.step(*in_one(batches))
            move(reference.model, step)
        with shared_source(balanced()):
            results = run_ranks(moving, 2)
    for found, text in results:
        assert "moved buffers of the model's layers to different values" in text
        for path, value in reference.parameters.items():
            assert torch.allclose(found[path], value, rtol=1e-9, atol=1e-9 * float(value.abs().max())), path


def in_one(batches: list[Tensor]) -> tuple[list[Sample], list[Tensor]]:
    whole = sum(len(ids) - 1 for ids in batches)
    weights = [torch.full((len(ids) - 1,), 1 / whole, dtype=torch.float64) for ids in batches]
    return [{"input_ids": ids, "labels": ids} for ids in batches], weights


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
