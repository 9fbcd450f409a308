"""What is decided by the device, without one: attention's choice, a profile's process group, a layer list's buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_hydra.commands import profile_session
from ds_hydra.pipe.attention import backends
from ds_hydra.pipe.attention.backends import choose_backend, per_sequence_sdpa, torch_varlen
from ds_hydra.pipe.models.layer_list import LayerList


def on_gpu(head_dim: int, dtype: torch.dtype) -> Any:
    """What the choice asks of queries on a GPU."""
    return SimpleNamespace(is_cuda=True, dtype=dtype, shape=(9, 4, head_dim), device=torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype", "generation", "backend"),
    [
        (64, 64, torch.bfloat16, (9, 0), torch_varlen),
        (256, 256, torch.float16, (8, 0), torch_varlen),
        (64, 64, torch.bfloat16, (7, 5), per_sequence_sdpa),  # a T4: the kernels are not written for it
        (20, 20, torch.bfloat16, (9, 0), per_sequence_sdpa),  # torch's operator wants a multiple of 8
        (264, 264, torch.bfloat16, (9, 0), per_sequence_sdpa),
        (192, 128, torch.bfloat16, (9, 0), per_sequence_sdpa),  # values narrower than keys
        (64, 64, torch.float32, (9, 0), per_sequence_sdpa),
    ],
)
def test_attention_is_chosen_by_what_the_kernels_can(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, value_dim: int, dtype: torch.dtype, generation: Any, backend: Any
) -> None:
    backends._has_flash_kernels.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    assert choose_backend(on_gpu(head_dim, dtype), on_gpu(value_dim, dtype), None) is backend
    backends._has_flash_kernels.cache_clear()


def test_layers_of_a_micro_batch_share_the_bounds_of_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied to the device once for a pack, not once for each layer or for each time that it is computed."""
    given: list[tuple[torch.Tensor, ...]] = []

    def kernel(q: Any, k: Any, v: Any, *bounds: Any, scale: float, window_size: Any, enable_gqa: bool = False) -> Any:
        given.append(bounds)
        return q

    monkeypatch.setattr(backends, "_torch_varlen", lambda: kernel)
    q = torch.zeros(10, 4, 8)
    for lengths in ((3, 5, 2), (3, 5, 2), (4, 6)):
        torch_varlen(q, q, q, backends.Segments.whole(lengths), 1.0, None, None)
    assert [bounds[0].tolist() for bounds in given] == [[0, 3, 8, 10], [0, 3, 8, 10], [0, 4, 10]]
    assert given[0][0] is given[0][1] is given[1][0]


class _StartedError(Exception):
    """Ends a profile when it has started its process group."""


@pytest.mark.parametrize(("device", "backend"), [("cuda:1", "nccl"), ("cpu", "gloo")])
def test_a_launched_profile_starts_its_group_on_its_own_device(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    started: list[tuple[str, torch.device | None]] = []

    def start(name: str, *, device_id: torch.device | None = None) -> None:
        started.append((name, device_id))
        raise _StartedError

    monkeypatch.setattr(dist, "init_process_group", start)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    session: Any = SimpleNamespace(request=SimpleNamespace(device=torch.device(device)))
    with pytest.raises(_StartedError):
        profile_session.measure(session, 1)
    assert started == [(backend, torch.device(device) if backend == "nccl" else None)]


class Shift(nn.Module):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.shift


def test_buffers_of_a_layer_list_go_where_the_stage_computes() -> None:
    module = nn.ModuleDict({"0": nn.Embedding(16, 8), "1": Shift()})
    module._layer_specs, module.loss_fn = list(module.values()), nn.CrossEntropyLoss()  # type: ignore[assignment]
    source = LayerList(module)
    assert source.layer(1, torch.device("meta")).shift.is_meta
    here = source.layer(1, torch.device("cpu"))
    assert torch.equal(here.shift, torch.ones(8))
    assert here.inner.weight.is_meta
