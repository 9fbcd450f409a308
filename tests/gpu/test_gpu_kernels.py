"""Triton's kernels on a GPU: they are used, and find what torch's operators do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.pipe import fused, loss
from ds_hydra.pipe.fused import Gated, rms_norm, rotate
from ds_hydra.pipe.loss import HeadLoss
from ds_hydra.pipe.rows import MicroBatch, Pack
from ds_hydra.pipe.weight_gradients import WeightGradients

pytestmark = pytest.mark.gpu
TOKENS, WIDTH = 700, 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def head(words: int, dtype: torch.dtype) -> list[Tensor]:
    """The loss, both gradients and the tokens' losses, in several blocks of rows."""
    hidden, weight = values(dtype, (1, TOKENS, WIDTH), (words, WIDTH))
    weight *= 0.1
    labels = torch.arange(TOKENS, device="cuda") * 7919 % words
    labels[::9] = -100
    weights = torch.linspace(0.1, 1.0, TOKENS, device="cuda")
    batch = MicroBatch(
        Pack((TOKENS,)), torch.zeros(1, TOKENS), None, labels, weights, torch.zeros(TOKENS, device="cuda")
    )
    loss = HeadLoss(0, words, None)(hidden.requires_grad_(), weight.requires_grad_(), batch)
    loss.backward()
    assert batch.token_losses is not None
    return [loss.detach(), *gradients(hidden, weight), batch.token_losses]


def norm(dtype: torch.dtype) -> list[Tensor]:
    rows, weight = values(dtype, (1, TOKENS, 5 * 96), (96,))
    heads = rows.requires_grad_()[..., : 3 * 96].unflatten(-1, (3, 96))
    out = rms_norm(heads, weight.requires_grad_(), 1e-6, offset=1.0)
    out.float().sin().sum().backward()
    return [out.detach(), *gradients(rows, weight)]


def by_tanh(dtype: torch.dtype) -> list[Tensor]:
    return gate(dtype, nn.GELU(approximate="tanh"))


def gate(dtype: torch.dtype, act: Callable[[Tensor], Tensor] = F.silu) -> list[Tensor]:
    both, weight = values(dtype, (1, TOKENS, 2 * 1100), (WIDTH, 1100))
    weight *= 0.03
    linear: Any = F.linear
    entered, up = torch.unsafe_split(both.requires_grad_(), 1100, -1)
    out = linear(Gated(entered, up, act), weight.requires_grad_())
    out.float().sin().sum().backward()
    return [out.detach(), *gradients(both, weight)]


def turn(dtype: torch.dtype) -> list[Tensor]:
    packed, cos, sin = values(dtype, (2, TOKENS, 5 * 64), (1, 1, TOKENS, 64), (1, 1, TOKENS, 64))
    queries = packed.requires_grad_()[..., : 3 * 64].view(2, TOKENS, 3, 64).transpose(1, 2)
    out = rotate(queries, cos, sin)
    out.float().sin().sum().backward()
    return [out.detach(), *gradients(packed)]


def gradients(*leaves: Tensor) -> list[Tensor]:
    assert all(leaf.grad is not None for leaf in leaves)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def compared(function: Callable[[], list[Tensor]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    with_them = function()
    for user in (loss, fused, fused):
        monkeypatch.setattr(user, "kernels_for", lambda *_: None)
    off = 1e-5 if dtype == torch.float32 else 8e-3
    for one, other in zip(with_them, function(), strict=True):
        assert one.dtype == other.dtype
        assert (one.double() - other.double()).norm() <= off * other.double().norm()


@pytest.mark.parametrize("words", [53, 4096, 50257, 128256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_logits(words: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "HEAD_LOGITS_AT_ONCE", 300 * words)
    assert loss.kernels_for(torch.zeros(1, device="cuda", dtype=dtype)) is not None
    compared(lambda: head(words, dtype), dtype, monkeypatch)


@pytest.mark.parametrize("function", [gate, by_tanh, norm, turn])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_and_turns(
    function: Callable[[torch.dtype], list[Tensor]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared(lambda: function(dtype), dtype, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_waited_are_added_in_fp32(dtype: torch.dtype) -> None:
    module = nn.Linear(96, 200, bias=False).to("cuda", dtype)
    queue, weight = WeightGradients(nn.Sequential(module), ["0.weight"]), module._parameters["weight"]
    assert weight is not None, "a linear layer has one"
    x, dy, total = values(torch.float32, (700, 96), (700, 200), (200, 96))
    expected = total.double() + dy.to(dtype).double().t() @ x.to(dtype).double()
    queue.add_to(weight, total)
    queue.add(module, x.to(dtype), dy.to(dtype))
    assert (total.double() - expected).norm() <= 1e-5 * expected.norm()  # 16 bit sums are off by more than 1e-4


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_stacks_of_experts_add_to_parts_of_their_sums(turned: bool, whole: bool) -> None:
    """Parts of whole experts, and of experts whose rows lie between those of others; one of them has no rows."""
    experts: Any = nn.Module()
    (stack,) = values(torch.bfloat16, (4, 64, 128) if whole else (64, 4, 128))
    stack = stack if whole else stack.transpose(0, 1)
    experts.stack = nn.Parameter(stack)
    rows, asked = values(torch.bfloat16, (96, 128 if turned else 64), (96, 64 if turned else 128))
    offs = torch.tensor([40, 40, 72, 96], dtype=torch.int32, device="cuda")
    experts.forward = lambda x: F.grouped_mm(x, experts.stack.mT if turned else experts.stack, offs=offs)
    plain = experts(entered := rows.clone().requires_grad_())
    of_autograd = torch.autograd.grad(plain, (entered, experts.stack), asked)
    queue, total = WeightGradients(nn.Sequential(experts), [], ["0.stack"]), torch.ones_like(stack, dtype=torch.float32)
    queue.add_to(experts.stack, total)
    out = experts(again := rows.clone().requires_grad_())
    out.backward(asked)
    assert experts.stack.grad is None
    torch.testing.assert_close((out, again.grad), (plain, of_autograd[0]))
    torch.testing.assert_close(total - 1.0, of_autograd[1].float(), rtol=2e-2, atol=2e-2)
