"""Which attention runs on a GPU, without one: by what the kernels can, by what is installed, in one order of sums."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.engine.fingerprint import attention_name
from ds_hydra.host.devices import Flags
from ds_hydra.pipe.attention import backends, flash_3
from ds_hydra.pipe.attention.backends import choose_backend, per_sequence_sdpa, torch_varlen


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
        (192, 128, torch.bfloat16, (9, 0), torch_varlen),  # values narrower than keys, which are padded
        (128, 192, torch.bfloat16, (9, 0), per_sequence_sdpa),
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


@pytest.mark.parametrize("window", [None, 3])
def test_values_narrower_than_keys_are_padded_for_kernels(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Those of latent attention, by a function that takes what torch's kernel takes: a slice among others."""

    def varlen_attn(q: Any, k: Any, v: Any, *bounds: Any, scale: float, window_size: tuple[int, int]) -> Any:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        return per_sequence_sdpa(q, k, v, segments, scale, window_size[0] + 1 or None, None)

    segments = backends.Segments((2, 5), (6, 5))
    q, k, v = (
        torch.randn(rows, 4, width, dtype=torch.float64, requires_grad=True)
        for rows, width in ((7, 24), (11, 24), (11, 16))
    )
    options: dict[str, Any] = {"scale": 0.2, "window": window, "softcap": None, "sinks": None, "dropout": None}
    monkeypatch.setattr(backends, "_torch_varlen", lambda: varlen_attn)
    found = []
    for backend in ("torch", "sdpa"):
        out = backends._attend(q, k, v, segments, backend=backend, **options)
        found.append([out, *torch.autograd.grad(out.sin().sum(), (q, k, v))])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """A Hopper GPU with FlashAttention 3 installed, as torch would find them; what torch was told to run."""
    active: list[str | None] = [None]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_3.importlib.util, "find_spec", lambda name: name == "flash_attn_interface")
    monkeypatch.setattr(flash_3.attention, "current_flash_attention_impl", lambda: active[-1])
    monkeypatch.setattr(flash_3.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(flash_3.attention, "restore_flash_attention_impl", lambda: active.append(None))
    return active


def test_flash_attention_3_runs_where_it_can(hopper: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    source: Any = SimpleNamespace(plan=SimpleNamespace(num_heads=4, num_layers=2), width=lambda entry: 256)

    def name() -> str:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *args, **kwargs: on_gpu(64, torch.bfloat16))
            return attention_name(source, cuda, torch.bfloat16)

    without = Flags(HydraConfig(10, fast_paths=()), cuda)
    assert hopper == [None]
    assert name() == "torch_varlen"
    flags_3 = Flags(HydraConfig(10), cuda)
    assert name() == "torch_varlen (FA3)", "a cost table of the other kernels is refused"
    flags_3.close()
    without.close()
    assert hopper == [None, "FA3", None]
    hopper.append("FA4")  # by the script itself
    Flags(HydraConfig(10), cuda).close()
    assert hopper[-1] == "FA4"


def test_flash_attention_3_of_another_torch_is_left_alone(
    hopper: list[str | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(flash_3.attention, "activate_flash_attention_impl", broken)
    Flags(HydraConfig(10), torch.device("cuda", 0)).close()
    assert "undefined symbol" in caplog.text
    assert hopper == [None]


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attn_adds_up_in_one_order_where_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    asked: list[bool] = []

    def kernel(q: Any, *args: Any, deterministic: bool, **kwargs: Any) -> Any:
        asked.append(deterministic)
        return q

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=kernel))
    held = Flags(HydraConfig(10, deterministic=deterministic), torch.device("cpu"))
    q = torch.zeros(10, 4, 8)
    backends.flash_attn(q, q, q, backends.Segments.whole((10,)), 1.0, None, None)
    held.close()
    assert asked == [deterministic]
