"""Triton's kernels find what torch's operators do: on a GPU as they are used, elsewhere by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from ds_hydra.pipe.weight_gradients import WeightGradients

pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] * ON_GPU
DEVICE = "cuda" if ON_GPU else "cpu"
TOKENS, WIDTH, FEATURES, OF_HEAD = (700, 256, 1100, 96) if ON_GPU else (9, 16, 1030, 20)
WORDS = (53, 4096, 50257, 128256) if ON_GPU else (101,)
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if ON_GPU else (torch.float32,)
Found = list[Tensor]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module; without a GPU, as Triton's interpreter runs it, in place of what a GPU would have."""
    from ds_hydra.pipe import kernels

    if not ON_GPU:
        monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)  # what they are asked for
        for user in (loss, fused):
            monkeypatch.setattr(user, "kernels_for", lambda *_: kernels)
    return kernels


def values(dtype: torch.dtype, *shapes: tuple[int, ...]) -> Found:
    generator = torch.Generator(DEVICE).manual_seed(3)
    return [torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("rows", "words"), [(3, 53), (2, 4096), (2, 9001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_logits_is_passed_once_each_way(
    kernels: ModuleType, rows: int, words: int, dtype: torch.dtype
) -> None:
    (logits,) = values(dtype, (rows, words))
    logits *= 7
    logits[0, -1] = 40.0  # a peak that comes last
    labels = torch.arange(rows, device=DEVICE) * (words // rows)
    found = kernels.statistics(logits, labels)
    losses = found.total.log() + found.peak - found.target
    torch.testing.assert_close(losses, F.cross_entropy(logits.float(), labels, reduction="none"))
    expected = logits.float().softmax(-1) - F.one_hot(labels, words)
    kernels.to_gradient(logits, labels, found.peak, found.total.reciprocal(), torch.ones_like(found.peak))
    torch.testing.assert_close(logits, expected.to(dtype))


def head(dtype: torch.dtype, words: int) -> Found:
    """The loss, both gradients and the tokens' losses."""
    hidden, weight = (one.requires_grad_() for one in values(dtype, (1, TOKENS, WIDTH), (words, WIDTH)))
    labels = torch.arange(TOKENS, device=DEVICE) * 7919 % words
    labels[::4] = -100
    weights, losses = torch.linspace(0.1, 1.0, TOKENS, device=DEVICE), torch.zeros(TOKENS, device=DEVICE)
    batch = MicroBatch(Pack((TOKENS,)), torch.zeros(1, TOKENS), None, labels, weights, losses)
    loss = HeadLoss(0, words, None)(hidden, weight, batch)
    loss.backward()
    return [loss.detach(), *gradients(hidden, weight), losses]


def gate_of(dtype: torch.dtype, act: Callable[[Tensor], Tensor] = F.silu, trained: bool = True) -> Found:
    both, weight = values(dtype, (1, TOKENS, 2 * FEATURES), (WIDTH, FEATURES))
    weight *= 0.03
    both.requires_grad_(), weight.requires_grad_(trained)
    gate, up = torch.unsafe_split(both, FEATURES, -1)
    linear: Any = F.linear  # of what torch's stubs do not know that it computes with
    out = linear(Gated(gate, up, act), weight)
    out.float().sin().sum().backward()
    return [out.detach(), *(gradients(both, weight) if trained else gradients(both))]


def turn(dtype: torch.dtype) -> Found:
    """Queries out of a packed product, of two sequences with tables of their own, and by shared tables."""
    packed, cos, sin = values(dtype, (2, TOKENS, 5 * 24), (2, 1, TOKENS, 24), (2, 1, TOKENS, 24))
    queries = packed.requires_grad_()[..., : 3 * 24].view(2, TOKENS, 3, 24).transpose(1, 2)
    out = rotate(queries, cos, sin)
    out.float().sin().sum().backward()
    return [out.detach(), *gradients(packed), rotate(queries.detach(), cos[:1], sin[:1])]


def norm(dtype: torch.dtype, heads: int, tokens: int) -> Found:
    """Of rows that lie apart, with a weight that counts from 1."""
    packed, weight, factors = values(dtype, (1, tokens, heads + 1, OF_HEAD), (OF_HEAD,), (1, tokens, heads, OF_HEAD))
    packed.requires_grad_(), weight.requires_grad_()
    out = rms_norm(packed[:, :, :heads], weight, 1e-6, offset=1.0)
    (out.float().sin() * factors).sum().backward()
    return [out.detach(), *gradients(packed, weight)]


def gradients(*leaves: Tensor) -> Found:
    assert all(leaf.grad is not None for leaf in leaves)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


FUNCTIONS: dict[str, Callable[[torch.dtype], Found]] = {
    **{f"head of {words}": partial(head, words=words) for words in WORDS},
    "gate": gate_of,
    "module's gate": partial(gate_of, act=SiLUActivation()),
    "frozen": partial(gate_of, trained=False),
    "gate by tanh": partial(gate_of, act=nn.GELU(approximate="tanh")),
    "turn": turn,
    "norm": partial(norm, heads=1, tokens=600),
    "norm of few rows": partial(norm, heads=2, tokens=9),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_find_the_same_with_them(
    name: str, dtype: torch.dtype, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads in several blocks of rows."""
    monkeypatch.setattr(loss, "HEAD_LOGITS_AT_ONCE", TOKENS // 2 * max(WORDS))
    assert loss.kernels_for(torch.zeros(1, device=DEVICE, dtype=dtype)) is kernels
    with_them = FUNCTIONS[name](dtype)
    for user in (loss, fused):
        monkeypatch.setattr(user, "kernels_for", lambda *_: None)
    off = 1e-5 if dtype == torch.float32 else 8e-3
    for one, other in zip(with_them, FUNCTIONS[name](dtype), strict=True):
        assert one.dtype == other.dtype
        assert (one.double() - other.double()).norm() <= off * other.double().norm()


@pytest.mark.parametrize("name", ["statistics", "gated", "gate_gradients", "normed", "norm_gradients", "turned"])
def test_kernels_that_find_something_else_are_not_used(
    name: str, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right, device = getattr(kernels, name), torch.device(DEVICE)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        (found if isinstance(found, Tensor) else args[4] if found is None else found[1]).mul_(1.01)
        return found

    assert kernels.work.__wrapped__(device)
    assert not caplog.records
    monkeypatch.setattr(kernels, name, wrong)
    assert not kernels.work.__wrapped__(device)
    assert "torch's operators compute all" in caplog.text


def test_other_activations_and_features_that_lie_apart_are_torchs(kernels: ModuleType) -> None:
    gate, up = values(torch.float32, (1, 3, 8), (1, 3, 8))
    assert fused._gate_kernels(gate, up, F.silu) == (kernels, False)
    assert fused._gate_kernels(gate, up, nn.GELU(approximate="tanh")) == (kernels, True)
    assert fused._gate_kernels(gate, up, F.gelu) is None
    assert fused._gate_kernels(gate, up, nn.GELU()) is None
    assert fused._gate_kernels(gate, up, nn.PReLU()) is None
    with mock.patch.object(F, "silu", lambda x: 1.1 * x):
        assert fused._gate_kernels(gate, up, F.silu) is None
    assert fused._gate_kernels(gate.transpose(1, 2), up, F.silu) is None
    heads, tables = (torch.zeros(*sizes, 4, 8, device=DEVICE) for sizes in ((2, 3), (1, 1)))
    assert fused._rotary_kernels(heads, tables, tables) is kernels
    assert fused._rotary_kernels(heads[0], tables, tables) is None
    assert fused._rotary_kernels(heads, tables.expand(2, 3, 4, 8), tables) is None


def test_numbers_of_a_cpu_are_torchs() -> None:
    heads, tables = torch.zeros(2, 3, 4, 8), torch.zeros(1, 1, 4, 8)
    assert fused.kernels_for(heads) is None
    assert fused._rotary_kernels(heads, tables, tables) is None
    assert fused._gate_kernels(heads, heads, F.silu) is None


@pytest.mark.gpu
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


@pytest.mark.gpu
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
