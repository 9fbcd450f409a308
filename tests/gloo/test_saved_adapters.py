"""Adapters on ranks: saved as PEFT saves them, and loaded by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.testing import run_ranks
from tests.support.case import FLOAT32, Case
from tests.support.equivalence import make_engine, samples_of, traced_once
from tests.support.families import base_family, build_model

TOKENS = torch.arange(3, 40)[None]


def _kept(rank: int, case: Case) -> tuple[int, int, int]:
    """Elements that the optimizer has here, elements of frozen weights, and bytes of their gradients."""
    engine = make_engine(case, samples_of(case))
    engine.train_batch()
    moved = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
    frozen = engine.crew.masters.frozen
    return moved, frozen.flat.numel(), sum(grad.nbytes for grad in frozen.grads)


def test_frozen_weights_are_shared_out_without_gradients_or_states() -> None:
    case = Case("", "lora", ("tp2",), FLOAT32, steps=1).shortened()
    with traced_once(case):
        found = run_ranks(_kept, 2, case, timeout=120)
    parameters = list(build_model("lora", torch.float32).parameters())
    for which, trained in ((0, True), (1, False)):
        assert sum(each[which] for each in found) == sum(p.numel() for p in parameters if p.requires_grad is trained)
    assert all(num_bytes == 0 for _, _, num_bytes in found)


def _pulled(rank: int, case: Case, folder: str) -> list[int]:
    """Bytes that came in a step: the first, the next, one after an evaluation, one after loading."""
    data = samples_of(case)
    engine = make_engine(case, data)
    engine.save_checkpoint(folder)
    found: list[int] = []

    def step() -> None:
        engine.train_batch()
        found.append(engine.last_step.pull_bytes)

    step()
    step()
    engine.eval_batch(data[:4])
    step()
    engine.load_checkpoint(folder)
    step()
    return found


def test_frozen_weights_are_pulled_when_they_may_have_changed(tmp_path: Path) -> None:
    case = Case("", "lora", ("tp2",), FLOAT32, steps=2).shortened()
    with traced_once(case):
        results = run_ranks(_pulled, 2, case, str(tmp_path), timeout=120)
    for first, again, evaluated, loaded in results:
        assert first == loaded
        assert again == evaluated < first / 4


def _save(rank: int, case: Case, folder: str) -> dict[str, Tensor] | None:
    """Train, save; the logits of the model in one process with the parameters that the ranks hold."""
    engine = make_engine(case, samples_of(case))
    for _ in range(case.steps):
        engine.train_batch()
    engine.save_16bit_model(folder)
    values = engine.fp32_state_dict()
    return values if rank == 0 else None


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=TOKENS).logits
    return logits


@pytest.mark.drawn
@pytest.mark.parametrize(
    "family",
    ["lora with biases", "lora and whole modules", "lora beside another"],
)  # fmt: skip
def test_peft_loads_what_was_saved(family: str, tmp_path: Path) -> None:
    """The base that it started from and the saved adapters make the model that was trained."""
    case = Case("", family, ("tp2", "pp2"), FLOAT32, steps=2).shortened()
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "model.safetensors").write_text("a base model")
    with traced_once(case):
        values = run_ranks(_save, 2, case, str(tmp_path), timeout=120)[0]
    trained = build_model(family, torch.float32)
    before = _logits(trained)
    trained.load_state_dict(values)
    base = build_model(base_family(family), torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path))
    assert torch.equal(_logits(loaded), _logits(trained))
    assert not torch.allclose(_logits(loaded), before, atol=1e-3), "training has moved it"
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        keys = set(file.keys())
    assert not [key for key in keys if "base_layer.weight" in key or "original_module" in key], "the base is not saved"
    if family == "lora beside another":
        loaded.load_adapter(str(tmp_path / "other"), "other")
        state, expected = loaded.state_dict(), trained.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items() if ".other." in name)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert (tmp_path / "model.safetensors").read_text() == "a base model"
