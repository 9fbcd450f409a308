"""One GPU rank trains in BF16 as in FP32, with recomputed layers and across a restart; and what its times are of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from ds_hydra.elastic.copies import HostCopy
from ds_hydra.testing import free_port
from ds_hydra.zero_hetero.clock import Stopwatch, clock_of
from tests.support.fault_job import digest
from tools import aims

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a launcher sets for the only rank of a job."""
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in ranks.items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def start(*, bf16: bool = True, dropout: float = 0.0, **hydra: Any) -> Any:
    """An engine with a small Llama and random sequences, the same each time; `hydra` adds to the block."""
    import ds_hydra

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024, attention_dropout=dropout,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(1)
    data = [
        torch.randint(0, 64, (int(n),), generator=generator) for n in torch.randint(3, 700, (64,), generator=generator)
    ]
    settings = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": bf16},
        "hydra": {"tokens_per_step": 4000, "strategies": ["tp1"], "steps_file": None, **hydra},
    }
    return ds_hydra.initialize(model=model, training_data=data, config=settings)[0]


def losses(steps: int, **settings: Any) -> list[float]:
    """Of the first steps."""
    engine = start(**settings)
    found = [float(engine.train_batch()) for _ in range(steps)]
    engine.destroy()
    return found


def test_bf16_follows_fp32() -> None:
    wide, narrow = losses(12, bf16=False), losses(12)
    assert wide[-1] < wide[0] - 0.5
    assert max(abs(a - b) for a, b in zip(wide, narrow, strict=True)) < 0.05 * wide[0]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputed_layers_train_alike(dropout: float) -> None:
    """A GPU's backward runs in a thread of its own, and what is recomputed there must draw what was drawn before."""
    kept = losses(4, dropout=dropout)
    recomputed = losses(4, dropout=dropout, activation_checkpointing=True)
    assert recomputed == pytest.approx(kept, rel=2e-3)


def test_a_restarted_job_goes_on(tmp_path: Path) -> None:
    """Masters, the fused optimizer's state and the generators come back to the device."""
    checkpoint = {"dir": str(tmp_path), "every": 3}
    through = losses(6)
    assert losses(3, checkpoint=checkpoint) == pytest.approx(through[:3], rel=2e-3)
    assert losses(3, checkpoint=checkpoint) == pytest.approx(through[3:], rel=2e-3)


def test_a_copy_on_the_host_is_updated_on_the_device() -> None:
    """To the bit, behind the update of the masters; here a rank keeps a copy of its own."""
    engine = start()
    crew = engine.crew
    names = [{"names": group.names} for group in engine.job.recipe.groups]

    def alone(copy: HostCopy, sent: torch.Tensor, came: torch.Tensor, tag: int) -> mock.Mock:
        came.copy_(sent.detach())
        return mock.Mock()

    with mock.patch.object(HostCopy, "exchange", alone):
        copy = HostCopy(engine.job.source, names, crew.masters, crew.update.optimizer, crew.world, shift=0)
        crew.update.copy = copy
        copy.refresh()
        for step in range(4):
            engine.train_batch()
            copy.compare(step)
    own, kept = (
        [optimizer.state[span.param]["exp_avg"] for span in masters.trained.spans]
        for masters, optimizer in ((crew.masters, crew.update.optimizer), (copy.masters, copy.optimizer))
    )
    engine.destroy()
    assert all(state.is_pinned() for state in kept)
    assert all(torch.equal(*both) for both in zip(kept, [state.cpu() for state in own], strict=True))


def test_the_device_is_empty_while_states_are_on_the_host() -> None:
    right = losses(4)
    torch.mm(*torch.ones(2, 64, 64, device="cuda", requires_grad=True)).sum().backward()  # libraries have their room
    before = torch.cuda.memory_allocated()
    engine = start()
    found = [float(engine.train_batch()) for _ in range(2)]
    full, states = torch.cuda.memory_allocated() - before, digest(engine)
    engine.to("cpu")
    stays = torch.cuda.memory_allocated() - before
    engine.to("cuda")
    assert digest(engine) == states
    found += [float(engine.train_batch()) for _ in range(2)]
    engine.destroy()
    assert stays <= aims.STAYS_ON_DEVICE * full
    assert found == pytest.approx(right, rel=2e-3)  # the backward of attention adds in any order


def test_kernels_are_charged_to_the_lap_that_launched_them() -> None:
    """Nothing waits for them but who reads the times."""
    device = torch.device("cuda", torch.cuda.current_device())
    clock = clock_of(device)
    watch = Stopwatch(clock)
    matrix = torch.zeros(8192, 8192, device=device)
    for _ in range(2):  # the first round loads the kernels
        watch.take()
        clock.wait()
        began = perf_counter()
        with watch.lap("backward"):
            for _ in range(20):
                matrix = matrix @ matrix
        launched = perf_counter() - began
        with watch.lap("optimizer"):
            pass
        clock.wait()
        whole = perf_counter() - began
    spent = watch.take().spent()
    assert launched < 0.5 * whole
    assert spent["backward"].own_s == pytest.approx(whole, rel=0.1)
    assert spent["optimizer"].own_s < 0.05 * whole
