"""Triton kernels for blocks of logits, gates, and rotary embeddings of queries and keys, each in one pass.

torch's operators pass a block of logits a dozen times, most of them in FP32: some 56 bytes move for each logit, against
6 here; they pass the parts of a packed product, whose rows lie apart, at a third of their speed. What is computed is
the same but for roundings in between, which these have not, and the order in which a row's exponents are added up.
Which tensors they are for, `kernels_for` says.

Triton compiles the bodies of the kernels and reads their annotations, so that these have none but its own.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

logger = logging.getLogger(__name__)

_WORDS, _FEATURES = 4096, 1024  # of a row that a program has at a time
_WARPS = 8
_PROGRAMS = 512  # at most, where each has several rows
LEAST = tl.constexpr(-3.0e38)  # not infinity, whose difference from itself is no number


@triton.jit  # type: ignore[untyped-decorator]
def _row_statistics(logits, local, peak, total, target, WIDTH: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    logits += row.to(tl.int64) * WIDTH
    # Each lane has a running peak: what it added up before a larger logit came is scaled down to that one.
    most = tl.full([WORDS], LEAST, tl.float32)
    added = tl.zeros([WORDS], tl.float32)
    for start in range(0, WIDTH, WORDS):
        words = start + tl.arange(0, WORDS)
        part = tl.load(logits + words, mask=words < WIDTH, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, part)
        added = added * tl.exp(most - larger) + tl.exp(part - larger)
        most = larger
    highest = tl.max(most, axis=0)
    tl.store(peak + row, highest)
    tl.store(total + row, tl.sum(added * tl.exp(most - highest), axis=0))
    tl.store(target + row, tl.load(logits + tl.load(local + row)).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _row_gradient(logits, local, peak, scale, at_label, WIDTH: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    place = logits + row.to(tl.int64) * WIDTH + words
    part = tl.load(place, mask=words < WIDTH, other=float("-inf")).to(tl.float32)
    found = tl.exp(part - tl.load(peak + row)) * tl.load(scale + row)
    found -= tl.where(words == tl.load(local + row), tl.load(at_label + row), 0.0)
    tl.store(place, found.to(logits.dtype.element_ty), mask=words < WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def _activated(g, TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    """SiLU of g, or GELU by its tanh, and the derivative: each is g sigmoid(a), with a = g or twice tanh's argument."""
    if TANH:
        s = tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    else:
        s = tl.sigmoid(g)
        slope = 1.0
    return g * s, s + g * s * (1.0 - s) * slope


@triton.jit  # type: ignore[untyped-decorator]
def _gate_forward(  # type: ignore[no-untyped-def]
    gate, up, out, gate_row, up_row, WIDTH: tl.constexpr, FEATURES: tl.constexpr, TANH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    there = columns < WIDTH
    g = tl.load(gate + row * gate_row + columns, mask=there, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + columns, mask=there, other=0.0).to(tl.float32)
    active, _ = _activated(g, TANH)
    tl.store(out + row * WIDTH + columns, (active * u).to(out.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_backward(  # type: ignore[no-untyped-def]
    gate, up, given, dgate, dup, gate_row, up_row, dgate_row, dup_row,
    WIDTH: tl.constexpr, FEATURES: tl.constexpr, PRODUCT: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    there, dense = columns < WIDTH, row * WIDTH + columns
    g = tl.load(gate + row * gate_row + columns, mask=there, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + columns, mask=there, other=0.0).to(tl.float32)
    dy = tl.load(given + dense, mask=there, other=0.0).to(tl.float32)
    active, slope = _activated(g, TANH)
    tl.store(dgate + row * dgate_row + columns, (dy * u * slope).to(dgate.dtype.element_ty), mask=there)
    tl.store(dup + row * dup_row + columns, (dy * active).to(dup.dtype.element_ty), mask=there)
    if PRODUCT:
        tl.store(given + dense, (active * u).to(given.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_forward(  # type: ignore[no-untyped-def]
    x, weight, out, root, eps, offset, WIDTH: tl.constexpr, FEATURES: tl.constexpr
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, FEATURES)
    there = columns < WIDTH
    part = tl.load(x + row * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=there, other=0.0).to(tl.float32) + offset
    r = tl.rsqrt(tl.sum(part * part, axis=0) / WIDTH + eps)
    tl.store(root + row, r)
    tl.store(out + row * WIDTH + columns, (part * r * w).to(out.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(  # type: ignore[no-untyped-def]
    x, weight, given, root, dx, dw, offset, rows, each, WIDTH: tl.constexpr, FEATURES: tl.constexpr
):
    program, columns = tl.program_id(0).to(tl.int64), tl.arange(0, FEATURES)
    there = columns < WIDTH
    w = tl.load(weight + columns, mask=there, other=0.0).to(tl.float32) + offset
    added = tl.zeros([FEATURES], tl.float32)
    for row in range(program * each, tl.minimum(program * each + each, rows)):
        r = tl.load(root + row)
        u = tl.load(x + row * WIDTH + columns, mask=there, other=0.0).to(tl.float32) * r
        dy = tl.load(given + row * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
        added += dy * u
        g = dy * w
        found = r * (g - u * (tl.sum(g * u, axis=0) / WIDTH))
        tl.store(dx + row * WIDTH + columns, found.to(dx.dtype.element_ty), mask=there)
    tl.store(dw + program * WIDTH + columns, added, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    x, cos, sin, out, x_batch, x_head, x_token, cos_batch, cos_token, sin_batch, sin_token, tokens,
    HEADS: tl.constexpr, HALF: tl.constexpr, MOST_HEADS: tl.constexpr, MOST: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    heads, columns = tl.arange(0, MOST_HEADS)[:, None], tl.arange(0, MOST)[None, :]
    there, known = (heads < HEADS) & (columns < HALF), columns < HALF
    x += batch * x_batch + token * x_token + heads * x_head + columns
    cos += batch * cos_batch + token * cos_token + columns
    sin += batch * sin_batch + token * sin_token + columns
    out += row * HEADS * 2 * HALF + heads * 2 * HALF + columns
    a = tl.load(x, mask=there, other=0.0).to(tl.float32)
    b = tl.load(x + HALF, mask=there, other=0.0).to(tl.float32)
    cos_a, cos_b = tl.load(cos, mask=known, other=0.0), tl.load(cos + HALF, mask=known, other=0.0)
    sin_a, sin_b = tl.load(sin, mask=known, other=0.0), tl.load(sin + HALF, mask=known, other=0.0)
    if BACK:
        turned_a, turned_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        turned_a, turned_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    tl.store(out, turned_a.to(out.dtype.element_ty), mask=there)
    tl.store(out + HALF, turned_b.to(out.dtype.element_ty), mask=there)


class RowStatistics(NamedTuple):
    """What is known of each of T rows of logits; (T,) in FP32."""

    peak: Tensor
    total: Tensor
    target: Tensor


def statistics(logits: Tensor, local: Tensor) -> RowStatistics:
    """Of logits (T, V): the peak of each row, the sum of exp(logit - peak), and the logit in column `local` (T,)."""
    found = RowStatistics(*torch.empty((3, len(logits)), dtype=torch.float32, device=logits.device))
    _row_statistics[(len(logits),)](logits, local, *found, WIDTH=logits.shape[1], WORDS=_WORDS, num_warps=_WARPS)
    return found


def to_gradient(logits: Tensor, local: Tensor, peak: Tensor, scale: Tensor, at_label: Tensor) -> None:
    """Write over logits (T, V): exp(logit - peak) * scale, less `at_label` in column `local`; all others are (T,)."""
    grid = len(logits), triton.cdiv(logits.shape[1], _WORDS)
    _row_gradient[grid](logits, local, peak, scale, at_label, WIDTH=logits.shape[1], WORDS=_WORDS, num_warps=_WARPS)


def gated(gate: Tensor, up: Tensor, *, tanh: bool) -> Tensor:
    """act(gate) * up of tensors (..., n) whose features lie side by side; act is SiLU, or GELU by its tanh."""
    rows = gate.flatten(0, -2), up.flatten(0, -2)
    out = gate.new_empty(gate.shape)
    _gate_forward[_grid(out)](
        *rows, out, *(one.stride(0) for one in rows), WIDTH=out.shape[-1], FEATURES=_FEATURES, TANH=tanh
    )
    return out


def gate_gradients(
    gate: Tensor, up: Tensor, given: Tensor, dgate: Tensor, dup: Tensor, *, tanh: bool, product: bool
) -> None:
    """Write the gradients by both into `dgate` and `dup`, whose features lie side by side; `given` is that by their
    product, contiguous, which with `product` stands there afterwards."""
    rows = [one.flatten(0, -2) for one in (gate, up, dgate, dup)]
    _gate_backward[_grid(given)](
        *rows[:2], given, *rows[2:], *(one.stride(0) for one in rows), WIDTH=given.shape[-1], FEATURES=_FEATURES,
        PRODUCT=product, TANH=tanh,
    )  # fmt: skip


def normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """`fused.rms_norm` of x (..., n), contiguous, and the inverse root of the mean of each row's squares, in FP32."""
    out, root = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    width = x.shape[-1]
    features = triton.next_power_of_2(width)
    _norm_forward[(root.numel(),)](x, weight, out, root, eps, offset, WIDTH=width, FEATURES=features, num_warps=_WARPS)
    return out, root


def norm_gradients(x: Tensor, weight: Tensor, given: Tensor, root: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    """Gradients by x and the weight of what `normed` made, whose own is `given`; all but the weight are contiguous."""
    rows, width = root.numel(), x.shape[-1]
    each = triton.cdiv(rows, _PROGRAMS)  # rows of a program, which adds up its part of the weight's gradient
    dx, parts = torch.empty_like(x), x.new_empty((triton.cdiv(rows, each), width), dtype=torch.float32)
    _norm_backward[(len(parts),)](
        x, weight, given, root, dx, parts, offset, rows, each, WIDTH=width, FEATURES=triton.next_power_of_2(width),
        num_warps=_WARPS,
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """x (B, heads, T, d), turned by tables (1 or B, 1, T, d) or `back`; heads lie side by side in what is returned."""
    batch, heads, tokens, width = x.shape
    out = x.new_empty((batch, tokens, heads, width))
    tables = ((0 if len(one) == 1 else one.stride(0), one.stride(2)) for one in (cos, sin))
    _turn[(batch * tokens,)](
        x, cos, sin, out, x.stride(0), x.stride(1), x.stride(2), *next(tables), *next(tables), tokens, HEADS=heads,
        HALF=width // 2, MOST_HEADS=triton.next_power_of_2(heads), MOST=triton.next_power_of_2(width // 2), BACK=back,
    )  # fmt: skip
    return out.transpose(1, 2)


def _grid(rows: Tensor) -> tuple[int, int]:
    return rows.numel() // rows.shape[-1], triton.cdiv(rows.shape[-1], _FEATURES)


@cache
def work(device: torch.device) -> bool:
    """Whether the kernels compile for a device and find there what torch's operators find."""

    def waves(*shape: int) -> Tensor:  # no random numbers: the generators of a job are its own
        return torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.float32).sin().view(shape)

    try:
        _check_rows(waves(2, 5000), torch.tensor([7, 4999], device=device))
        _check_gate(waves(3, 2 * 1100))
        _check_norm(waves(5, 300), waves(300))
        _check_turn(waves(1, 5, 3, 24).transpose(1, 2), waves(1, 1, 5, 24), waves(1, 1, 5, 24).flip(-1))
    except Exception as error:  # no compiler for what launches them, say
        logger.warning("Triton's kernels do not work here, so torch's operators compute all: %s", error)
        return False
    return True


def _check_rows(logits: Tensor, local: Tensor) -> None:
    found, made = statistics(logits, local), logits.clone()
    to_gradient(made, local, found.peak, found.total.reciprocal(), torch.ones_like(found.peak))
    losses = found.total.log() + found.peak - found.target
    torch.testing.assert_close(losses, F.cross_entropy(logits, local, reduction="none"))
    expected = logits.softmax(-1) - F.one_hot(local, logits.shape[1])
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-6)


def _check_gate(both: Tensor) -> None:
    for tanh in (False, True):
        gate, up = (one.detach().requires_grad_() for one in both.chunk(2, -1))
        given = both.detach().chunk(2, -1)[0].flip(0).contiguous()
        expected = (F.gelu(gate, approximate="tanh") if tanh else F.silu(gate)) * up
        gradients = torch.autograd.grad(expected, (gate, up), given)
        made = torch.empty_like(both).chunk(2, -1)
        found = gated(gate.detach(), up.detach(), tanh=tanh)
        gate_gradients(gate.detach(), up.detach(), given, *made, tanh=tanh, product=True)
        torch.testing.assert_close((found, given, *made), (expected, expected, *gradients), rtol=1e-4, atol=1e-6)


def _check_norm(x: Tensor, weight: Tensor) -> None:
    rows, scale = x.detach().requires_grad_(), weight.detach().requires_grad_()
    expected = F.rms_norm(rows, x.shape[-1:], scale + 1.0, 1e-6)
    given = x.flip(0).contiguous()
    out, root = normed(x, weight, 1e-6, 1.0)
    found = out, *norm_gradients(x, weight, given, root, 1.0)
    torch.testing.assert_close(found, (expected, *torch.autograd.grad(expected, (rows, scale), given)))


def _check_turn(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    def half(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    torch.testing.assert_close(turned(x, cos, sin, back=False), x * cos + half(x) * sin, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(turned(x, cos, sin, back=True), x * cos - half(x * sin), rtol=1e-4, atol=1e-6)
