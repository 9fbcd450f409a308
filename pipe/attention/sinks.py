"""Attention with sinks by kernels that know none, which return the log-sum-exp of each query's scores.

[Note: sinks]
A sink is a learnt score of a key that every query of a head sees and that has no value. It takes its share of the
softmax, and adds nothing. Where a kernel returns out = softmax(S) V and lse = log(sum(exp(S))), with the sink's score s

  out' = out * sigmoid(lse - s)      lse' = log(exp(lse) + exp(s))

A kernel's backward computes the probabilities again, as exp(S - lse), and takes from their gradients the sum over a
query's output of output times gradient. Handed out' and lse' in place of its own it computes those with the sink, so it
gives the exact gradients of queries, keys and values. The gradient of s is the same formula for a key whose value is
zero: minus its probability, exp(s - lse'), times that sum. So nothing is kept beyond what the kernel keeps, and no
probabilities stand in memory.

Sinks: Xiao et al. 2023 (StreamingLLM), learnt as in gpt-oss. A softmax in parts: Dao et al. 2022 (FlashAttention).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

_aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


class Kernel(Protocol):
    """A kernel of attention and its backward, for one way in which queries see keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The output, (1, heads, T, d) or (T, heads, d), the log-sum-exp, (1, heads, T) or (heads, T), and what more
        the backward asks for."""

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *kept: Tensor) -> Gradients:
        """The gradients of queries, keys and values; `kept` are what the forward returned, with sinks in the first
        two."""


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
    """Attention by this kernel, with the scores `sinks` (heads,) of keys without a value [Note: sinks]."""
    out: Tensor = _WithSinks.apply(q, k, v, sinks, kernel)
    return out


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
        out, lse, *more = kernel.forward(q, k, v)
        scores = sinks.to(lse.dtype)[:, None]
        _by_heads(out).mul_(torch.sigmoid(lse - scores).unsqueeze(-1))
        lse = torch.logaddexp(lse, scores)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *more)
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, *more = ctx.saved_tensors
        gradients = ctx.kernel.backward(grad, q, k, v, out, lse, *more)
        if not ctx.needs_input_grad[3]:
            return *gradients, None, None
        # In FP32 at least, as the log-sum-exp is: it is added up over all tokens.
        total = torch.linalg.vecdot(_by_heads(grad).to(lse.dtype), _by_heads(out).to(lse.dtype))
        share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
        return *gradients, -(share * total).sum(-1).view(-1).to(sinks.dtype), None


def _by_heads(rows: Tensor) -> Tensor:
    """Rows of tokens with their heads in front, as the log-sum-exp has them."""
    return rows if rows.dim() == 4 else rows.transpose(0, 1)


def visible(queries: range, keys: range, window: int | None, device: torch.device) -> Tensor:
    """Which keys of a sequence these queries of it see, (queries, keys); a window counts the token itself."""
    rows = torch.arange(queries.start, queries.stop, device=device)[:, None]
    columns = torch.arange(keys.start, keys.stop, device=device)[None]
    seen = columns <= rows
    return seen if window is None else seen & (columns > rows - window)


def has_log_sum_exp(q: Tensor, v: Tensor) -> bool:
    """Whether `OnCpu` takes these: not on a GPU, whose kernels of one sequence take 16 or 32 bit and other masks."""
    return q.device.type in ("cpu", "meta") and q.shape[-1] == v.shape[-1]


class OnCpu(NamedTuple):
    """torch's kernel for CPUs: some queries of one sequence, and the keys among which are all that they see."""

    scale: float
    queries: range
    keys: range
    window: int | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """q (1, heads, T, d), k and v (1, kv_heads, keys, d)."""
        found: tuple[Tensor, ...] = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **self._options(q))
        return found

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *kept: Tensor) -> Gradients:
        """Of their sizes."""
        options = {"dropout_p": 0.0} | self._options(q)
        found: Gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, *kept, **options)
        return found

    def _options(self, q: Tensor) -> dict[str, Any]:
        if self.window is None and self.queries == self.keys:
            return {"is_causal": True, "scale": self.scale}
        # The mask is made anew in the backward: kept, it would be as large as a head's scores.
        seen = visible(self.queries, self.keys, self.window, q.device)
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))
        return {"is_causal": False, "attn_mask": mask, "scale": self.scale}


class OnGpu(NamedTuple):
    """torch's kernel for GPUs, FlashAttention 2 or what took it over: all sequences of a row in one call."""

    scale: float
    bounds: tuple[Tensor, Tensor, int, int]
    """Where sequences begin and end among queries and keys, (sequences + 1,) in 32 bit, and the longest of each."""
    window: int | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """q (T, heads, d), k and v (keys, kv_heads, d), in 16 bit."""
        call = _aten._flash_attention_forward
        out, lse, *state, _ = call(q, k, v, *self.bounds, 0.0, self.window is None, False, **self._options())
        return out, lse, *state

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *kept: Tensor) -> Gradients:
        """Of their sizes."""
        out, lse, *state = kept
        call = _aten._flash_attention_backward
        found: Gradients = call(
            grad, q, k, v, out, lse, *self.bounds, 0.0, self.window is None, *state, **self._options()
        )
        return found

    def _options(self) -> dict[str, Any]:
        # Kernels count the tokens to the left without the token itself.
        left = -1 if self.window is None else self.window - 1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": 0}


@cache
def gpu_works(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `OnGpu` gives for a slice of 3 tokens after 3 others, with and without a window, what its softmax gives.

    It calls private operators of torch, which may be other kernels here than those that it was written for.
    """
    queries, keys = (torch.tensor([0, count], device=device, dtype=torch.int32) for count in (3, 6))
    scale = 2.0 / head_dim  # scores like the sinks', which then have a share that counts

    def waves(*shape: int) -> Tensor:  # no random numbers: the generators of a job are its own
        made = torch.arange(math.prod(shape), device=device, dtype=torch.float32).mul(0.7).sin()
        return made.view(shape).to(dtype).requires_grad_()

    def found(attend: Callable[..., Tensor], window: int | None) -> list[Tensor]:
        leaves = waves(3, 4, head_dim), waves(6, 2, head_dim), waves(6, 2, head_dim), waves(4)
        with torch.enable_grad():
            out = attend(*leaves, window)
            return [out, *torch.autograd.grad(out, leaves, waves(*out.shape).detach())]

    def by_kernel(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
        return with_sinks(q, k, v, sinks, OnGpu(scale, (queries, keys, 3, 6), window))

    def by_softmax(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
        hidden = ~visible(range(3, 6), range(6), window, device)
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        scores = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(hidden, float("-inf"))
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, 3, 1)), dim=-1)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., :-1], v)

    try:
        for window in (None, 2):
            for mine, right in zip(found(by_kernel, window), found(by_softmax, window), strict=True):
                torch.testing.assert_close(mine, right, rtol=0.0, atol=0.05 * float(right.abs().max()))
    except Exception as error:  # operators that this torch does not have, say
        logger.warning("attention with sinks keeps probabilities in memory, as torch's kernel gives others: %s", error)
        return False
    return True
