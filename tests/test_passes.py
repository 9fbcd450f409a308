"""How many bytes the operators of a GPU pass beside products and attention, in 16 bit with sums in FP32.

Operators are those that a GPU would run: tensors of a CPU say that they are on one, and kernels in place of Triton's
say what goes in and out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from ds_hydra.pipe import fused, loss
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.profiling.stage_timer import StageTimer

WIDTH, TOKENS, WORDS = 256, 64, 1024
_UNCOUNTED = {"mm", "bmm", "addmm", "_grouped_mm"}  # products
_NO_PASS = {
    "view", "t", "transpose", "detach", "unsqueeze", "squeeze", "expand", "slice", "split_with_sizes", "unsafe_split",
    "unsafe_split_with_sizes", "as_strided", "_unsafe_view", "alias", "empty", "empty_like", "new_empty", "select",
    "empty_strided", "permute", "split", "new_empty_strided", "unbind",
}  # fmt: skip


class Passes(TorchDispatchMode):
    """Bytes that operators read and write, and how many operators there are."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.operators = Counter[str](), 0

    def add(self, name: str, *tensors: Tensor) -> None:
        self.operators += 1
        self.bytes[name] += sum(each.numel() * each.element_size() for each in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in _UNCOUNTED:
            self.operators += 1
        elif name not in _NO_PASS:
            self.add(name, *_tensors(args), *_tensors(out))
        return out


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


class _Kernels:
    """Of the shapes that Triton's kernels make."""

    def __init__(self, passes: Passes):
        self._passes = passes

    def statistics(self, logits: Tensor, local: Tensor) -> Any:
        self._passes.add("statistics", logits)
        return mock.Mock(**{name: torch.empty(len(logits)) for name in ("peak", "total", "target")})

    def to_gradient(self, logits: Tensor, *_: Tensor) -> None:
        self._passes.add("to_gradient", logits, logits)

    def gated(self, gate: Tensor, up: Tensor, *, tanh: bool) -> Tensor:
        out = gate.new_empty(gate.shape)
        self._passes.add("gate", gate, up, out)
        return out

    def gate_gradients(
        self, gate: Tensor, up: Tensor, given: Tensor, dgate: Tensor, dup: Tensor, *, tanh: bool, product: bool
    ) -> None:
        self._passes.add("gate backward", gate, up, given, dgate, dup, *[given] * product)

    def normed(self, x: Tensor, weight: Tensor, *_: float) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        self._passes.add("norm", x, weight, out)
        return out, x.new_empty(x.shape[:-1], dtype=torch.float32)

    def norm_gradients(self, x: Tensor, weight: Tensor, given: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        dx, dw = torch.empty_like(x), torch.empty_like(weight)
        self._passes.add("norm backward", x, weight, given, dx, dw)
        return dx, dw

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
        out = x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)
        self._passes.add("rotary", x, cos, sin, out)
        return out


class _Norm(torch.autograd.Function):
    """`F.rms_norm`, which on a GPU is one kernel each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, passes: Passes) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.passes, out = passes, torch.empty_like(x)
        passes.add("norm", x, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        dx, dw = (torch.empty_like(one) for one in ctx.saved_tensors)
        ctx.passes.add("norm backward", *ctx.saved_tensors, dy, dx, dw)
        return dx, dw, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.new_empty(q.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(one.new_empty(one.shape) for one in ctx.saved_tensors)


def passes_of(layers: int, functions: str, family: str = "llama", **more: int) -> Passes:
    """Of a micro-batch of TOKENS tokens, forward and backward, through a model whose sums of gradients are there."""
    config = AutoConfig.for_model(
        family, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=layers, head_dim=64,
        num_attention_heads=WIDTH // 64, num_key_value_heads=WIDTH // 256, vocab_size=WORDS, pad_token_id=0, **more,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    source = CausalLM(model.bfloat16(), StageOptions(functions=functions))
    timer = StageTimer(source, ParallelScheme(), 0, torch.device("cpu"), torch.bfloat16)
    passes, batch = Passes(), timer.batch((TOKENS,))
    product = torch.addmm

    def addmm(total: Tensor, left: Tensor, right: Tensor, *, out_dtype: Any = None, beta: int = 1, **out: Any) -> Any:
        if out_dtype is None:
            return product(total, left, right)
        passes.add("sum of a weight's gradient", total, *[total] * beta)
        return total

    with ExitStack() as stack:
        for where, name, value in (
            (Tensor, "is_cuda", True),
            (fused, "kernels_for", lambda *_: _Kernels(passes)),
            (loss, "kernels_for", lambda *_: _Kernels(passes)),
            (torch.nn.functional, "rms_norm", lambda x, _, weight, eps: _Norm.apply(x, weight, passes)),
            (torch, "addmm", addmm),
        ):
            stack.enter_context(mock.patch.object(where, name, value, create=True))
        choose = "ds_hydra.pipe.attention.backends.choose_backend"
        stack.enter_context(mock.patch(choose, return_value=lambda *given: _Attention.apply(*given[:3])))
        timer.run(batch)  # what is found out once for each module is over then
        passes.bytes.clear()
        passes.operators = 0
        with passes:
            timer.run(batch)
    return passes


@pytest.mark.parametrize("functions", ["auto", "recompute"])
def test_what_a_layer_passes(functions: str) -> None:
    two, three = passes_of(2, functions), passes_of(3, functions)
    layer = three.bytes - two.bytes
    sums = layer.pop("sum of a weight's gradient")
    weights = (2 * WIDTH + 2 * WIDTH // 4 + 3 * 4 * WIDTH) * WIDTH
    assert sums == 8 * weights  # each read and written once, in FP32
    numbers = TOKENS * WIDTH
    assert layer["gate"] == 2 * 12 * numbers
    assert layer["gate backward"] == 2 * (24 if functions == "recompute" else 20) * numbers
    assert layer["cat"] <= 2 * 2 * 1.5 * numbers  # of queries, keys and values alone
    # 2.4 GB of 8,192 tokens of 2,048 features, a little less where nothing is computed twice.
    assert layer.total() * 8192 * 2048 / numbers <= 2.4e9, layer
    assert three.operators - two.operators <= 30


@pytest.mark.parametrize(
    ("family", "gigabytes"), [("qwen3", 2.4), ("gemma3_text", 3.1), ("phi3", 2.6), ("glm4", 3.4), ("olmo2", 2.5)]
)
def test_what_layers_of_other_families_pass(family: str, gigabytes: float) -> None:
    """With norms of heads; norms that count from 1 and gates by tanh; and gate and up in one linear layer."""
    layer = passes_of(3, "auto", family).bytes - passes_of(2, "auto", family).bytes
    del layer["sum of a weight's gradient"]
    assert layer.total() * 8192 * 2048 / (TOKENS * WIDTH) <= 1e9 * gigabytes, layer


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_what_stacks_of_experts_pass(family: str) -> None:
    """Their gradients are in no tensor but the sums, which are read and written once."""
    experts = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 16, "moe_intermediate_size": WIDTH}
    two, three = (passes_of(layers, "auto", family, **experts) for layers in (2, 3))
    layer, inner = three.bytes - two.bytes, WIDTH if family == "qwen3_moe" else 4 * WIDTH
    stacks, attention = 16 * 3 * inner * WIDTH, (2 * WIDTH + 2 * WIDTH // 4) * WIDTH
    assert layer.pop("sum of a weight's gradient") == 8 * (stacks + attention)
    # Autograd would write dW, and copy it into the stack's order; a hook would add it: 16 bytes a parameter.
    assert not layer["copy_"]
    assert layer["add_"] < stacks


def test_what_the_vocabulary_passes() -> None:
    """The gradients of embeddings and head are in no tensor of their size but the head's, in FP32."""
    few = passes_of(2, "auto").bytes
    size = 4 * WORDS * WIDTH
    assert few["addcmul_"] == 3 * size + 4
    assert few["index_put_"] <= 2 * size + 8 * TOKENS * WIDTH  # which passes its rows alone
    assert not {"embedding_dense_backward", "zeros_like", "mul_"} & {name for name, of in few.items() if of >= size}
