"""Triton's kernels find what torch's operators do; here Triton's interpreter runs them, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from ds_hydra.pipe import fused, loss
from ds_hydra.pipe.fused import Gated, rms_norm, rotate
from ds_hydra.pipe.loss import HeadLoss
from ds_hydra.pipe.rows import MicroBatch, Pack

pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled, for tensors of a GPU", allow_module_level=True)
USERS = (loss, fused, fused)
Found = list[Tensor]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, as Triton's interpreter runs it, in place of what a GPU would have."""
    from ds_hydra.pipe import kernels

    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)  # what they are asked for
    for user in USERS:
        monkeypatch.setattr(user, "kernels_for", lambda *_: kernels)
    return kernels


def values(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Found:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("rows", "words"), [(3, 53), (2, 4096), (2, 9001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_logits_is_passed_once_each_way(
    kernels: ModuleType, rows: int, words: int, dtype: torch.dtype
) -> None:
    (logits,) = values((rows, words), dtype=dtype)
    logits *= 7
    logits[0, -1] = 40.0  # a peak that comes last
    labels = torch.arange(rows) * (words // rows)
    found = kernels.statistics(logits, labels)
    losses = found.total.log() + found.peak - found.target
    torch.testing.assert_close(losses, F.cross_entropy(logits.float(), labels, reduction="none"))
    expected = logits.float().softmax(-1) - F.one_hot(labels, words)
    kernels.to_gradient(logits, labels, found.peak, found.total.reciprocal(), torch.ones(rows))
    torch.testing.assert_close(logits, expected.to(dtype))


def head() -> Found:
    hidden, weight, weights = (one.requires_grad_() for one in values((1, 9, 16), (101, 16), (9,)))
    labels = torch.arange(9) * 11
    labels[::4] = -100
    batch = MicroBatch(Pack((9,)), torch.zeros(1, 9), None, labels, weights.detach(), torch.zeros(9))
    loss = HeadLoss(0, 101, None)(hidden, weight, batch)
    loss.backward()
    assert batch.token_losses is not None
    return [loss.detach(), *given(hidden, weight), batch.token_losses]


def gate_of(act: Callable[[Tensor], Tensor], trained: bool = True) -> Found:
    both, weight = values((1, 5, 2 * 1030), (7, 1030))
    weight *= 0.03
    both.requires_grad_(), weight.requires_grad_(trained)
    gate, up = torch.unsafe_split(both, 1030, -1)
    linear: Any = F.linear  # of what torch's stubs do not know that it computes with
    out = linear(Gated(gate, up, act), weight)
    out.sin().sum().backward()
    return [out.detach(), *(given(both, weight) if trained else given(both))]


def turn() -> Found:
    """Queries out of a packed product, of two sequences with tables of their own."""
    packed, cos, sin = values((2, 6, 5 * 24), (2, 1, 6, 24), (2, 1, 6, 24))
    packed.requires_grad_()
    queries = packed[..., : 3 * 24].view(2, 6, 3, 24).transpose(1, 2)
    out = rotate(queries, cos, sin)
    out.sin().sum().backward()
    shared = rotate(queries.detach(), cos[:1], sin[:1])
    return [out.detach(), *given(packed), shared]


def norm(heads: int, tokens: int) -> Found:
    """Of rows of 20 features that lie apart, with a weight that counts from 1."""
    packed, weight, factors = values((1, tokens, heads + 1, 20), (20,), (1, tokens, heads, 20))
    packed.requires_grad_(), weight.requires_grad_()
    out = rms_norm(packed[:, :, :heads], weight, 1e-6, offset=1.0)
    (out.sin() * factors).sum().backward()
    return [out.detach(), *given(packed, weight)]


def given(*leaves: Tensor) -> Found:
    assert all(leaf.grad is not None for leaf in leaves)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize(
    "function",
    [
        head,
        lambda: gate_of(F.silu),
        lambda: gate_of(SiLUActivation()),
        lambda: gate_of(F.silu, trained=False),
        turn,
        lambda: gate_of(nn.GELU(approximate="tanh")),
        lambda: norm(1, 600),
        lambda: norm(2, 9),
    ],
    ids=["head", "gate", "module's gate", "frozen", "turn", "gate by tanh", "norm", "norm of few rows"],
)
def test_functions_find_the_same_with_them(
    function: Callable[[], Found], kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_them = function()
    for user in USERS:
        monkeypatch.setattr(user, "kernels_for", lambda *_: None)
    torch.testing.assert_close(with_them, function(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["statistics", "gated", "gate_gradients", "normed", "norm_gradients", "turned"])
def test_kernels_that_find_something_else_are_not_used(
    name: str, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = getattr(kernels, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        (found if isinstance(found, Tensor) else args[4] if found is None else found[1]).mul_(1.01)
        return found

    assert kernels.work.__wrapped__(torch.device("cpu"))
    assert not caplog.records
    monkeypatch.setattr(kernels, name, wrong)
    assert not kernels.work.__wrapped__(torch.device("cpu"))
    assert "torch's operators compute all" in caplog.text


def test_other_activations_and_features_that_lie_apart_are_torchs(kernels: ModuleType) -> None:
    gate, up = values((1, 3, 8), (1, 3, 8))
    assert fused._gate_kernels(gate, up, F.silu) == (kernels, False)
    assert fused._gate_kernels(gate, up, nn.GELU(approximate="tanh")) == (kernels, True)
    assert fused._gate_kernels(gate, up, F.gelu) is None
    assert fused._gate_kernels(gate, up, nn.GELU()) is None
    assert fused._gate_kernels(gate, up, nn.PReLU()) is None
    with mock.patch.object(F, "silu", lambda x: 1.1 * x):
        assert fused._gate_kernels(gate, up, F.silu) is None
    assert fused._gate_kernels(gate.transpose(1, 2), up, F.silu) is None
    heads, tables = torch.zeros(2, 3, 4, 8), torch.zeros(1, 1, 4, 8)
    assert fused._rotary_kernels(heads, tables, tables) is kernels
    assert fused._rotary_kernels(heads[0], tables, tables) is None
    assert fused._rotary_kernels(heads, tables.expand(2, 3, 4, 8), tables) is None


def test_numbers_of_a_cpu_are_torchs() -> None:
    heads, tables = torch.zeros(2, 3, 4, 8), torch.zeros(1, 1, 4, 8)
    assert fused.kernels_for(heads) is None
    assert fused._rotary_kernels(heads, tables, tables) is None
    assert fused._gate_kernels(heads, heads, F.silu) is None
