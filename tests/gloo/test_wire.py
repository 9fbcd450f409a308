"""Gradients travel in the type that the config names: what it costs in bytes, and what 16 bit loses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_hydra.testing import run_ranks, whole_gradients
from tests.support.small_job import small_config, small_engine


def step(rank: int, wire: str | None) -> tuple[dict[str, Tensor], int]:
    """Gradients of an FP32 step, whole on rank 0, and the bytes that this rank has pushed."""
    config = small_config(2, strategies=["2*tp1"]) | {"gradient_clipping": 0.0}
    engine = small_engine(rank, config=config if wire is None else {**config, "communication_data_type": wire})
    engine.train_batch()
    found = whole_gradients(engine), engine.last_step.push_bytes
    engine.destroy()
    return found


@pytest.mark.drawn
def test_the_wire_has_the_type_of_the_config() -> None:
    runs = {wire: run_ranks(step, 2, wire, timeout=120)[0] for wire in (None, "fp32", "bf16", "fp16")}
    assert runs["bf16"][1] == runs["fp16"][1] == runs["fp32"][1] // 2 > 0
    wide = runs["fp32"][0]
    assert all(torch.equal(wide[name], gradient) for name, gradient in runs[None][0].items())
    apart = {
        wire: max(float((runs[wire][0][name] - wide[name]).norm() / wide[name].norm()) for name in wide)
        for wire in ("bf16", "fp16")
    }
    assert 2.0**-12 < apart["bf16"] < 2.0**-8, apart
    assert 0 < apart["fp16"] < apart["bf16"], apart
