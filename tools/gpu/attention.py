"""Part "attention": every backend against SDPA in FP32 on several mixes of lengths, outputs, gradients and times."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_hydra.pipe.attention.backends import BACKENDS, Segments, choose_backend
from tools import aims
from tools.gpu.bench import Bench, Findings, Table

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


class Mix(NamedTuple):
    """Lengths of one packed row; `window` counts the token itself."""

    name: str
    lengths: tuple[int, ...]
    window: int | None = None


class Measured(NamedTuple):
    """One backend on one mix; errors are relative to the largest entry of the reference."""

    backend: str
    mix: str
    tokens: int
    output_error: float
    gradient_error: float  # largest of queries, keys and values
    forward_ms: float
    both_ms: float  # forward and backward
    tflops: float  # of forward and backward, masked scores not counted
    chosen: bool  # training would take this one


def mixes(bench: Bench) -> tuple[Mix, ...]:
    """One long sequence, equal ones, a long tail, many tiny ones, and a window."""
    one = bench.pick(8192, 96)
    tail = [max(1, int(one / (rank + 1) ** 1.2)) for rank in range(bench.pick(64, 6))]
    return (
        Mix("one long", (one,)),
        Mix("16 equal", (one // 16,) * 16),
        Mix("long tail", tuple(tail)),
        Mix("256 tiny", (bench.pick(48, 2),) * bench.pick(256, 16)),
        Mix("one long, window", (one,), bench.pick(1024, 16)),
    )


def measure_attention(bench: Bench) -> Findings:
    """Errors and times of all backends that this machine has."""
    heads, kv_heads, head_dim = bench.pick((HEADS, KV_HEADS, HEAD_DIM), (4, 2, 16))
    names = [name for name in BACKENDS if name in _usable(bench)]
    found: list[Measured] = []
    for mix in mixes(bench):
        generator = torch.Generator().manual_seed(0)
        tokens = sum(mix.lengths)
        wide = [torch.randn(tokens, h, head_dim, generator=generator) for h in (heads, kv_heads, kv_heads)]
        inputs = [x.to(bench.device, torch.bfloat16) for x in wide]
        expected = _reference(inputs, mix)
        found += [_measure(bench, name, mix, inputs, expected) for name in names if bench.left > 0]
    missed = [
        f"{m.backend} on {m.mix}: differs from FP32 by {max(m.output_error, m.gradient_error):.1e}, "
        f"more than {aims.GPU_ATTENTION:.0e}"
        for m in found
        if not max(m.output_error, m.gradient_error) <= aims.GPU_ATTENTION
    ]
    if len(found) < len(names) * len(mixes(bench)):
        missed.append(f"{len(names) * len(mixes(bench)) - len(found)} cases were left out: no time was left")
    worst = max(max(m.output_error, m.gradient_error) for m in found)
    headers = ("backend", "lengths", "tokens", "output", "gradients", "forward ms", "with backward", "TFLOP/s", "taken")
    rows = tuple(
        (m.backend, m.mix, m.tokens, f"{m.output_error:.1e}", f"{m.gradient_error:.1e}", m.forward_ms, m.both_ms,
         m.tflops, "yes" if m.chosen else "") for m in found
    )  # fmt: skip
    return Findings(
        f"{len(names)} backends ({', '.join(names)}) on {len(mixes(bench))} mixes, at worst {worst:.1e} from FP32",
        (Table("Attention, BF16, errors against SDPA in FP32", headers, rows),),
        {"heads": [heads, kv_heads, head_dim], "rows": [m._asdict() for m in found]},
        tuple(missed),
    )


def _usable(bench: Bench) -> Iterator[str]:
    yield "sdpa"
    if bench.device.type == "cuda":
        yield "torch"
        if importlib.util.find_spec("flash_attn") is not None:
            yield "flash"


def _measure(bench: Bench, name: str, mix: Mix, inputs: list[Tensor], expected: list[Tensor]) -> Measured:
    segments, scale = Segments.whole(mix.lengths), inputs[0].shape[-1] ** -0.5
    q, k, v = (x.detach().requires_grad_() for x in inputs)

    def forward() -> Tensor:
        return BACKENDS[name](q, k, v, segments, scale, mix.window, None)

    def both() -> list[Tensor]:
        out = forward()
        return [out, *torch.autograd.grad(out, (q, k, v), out.detach())]

    got = [x.detach().float() for x in both()]
    output, *gradients = (_error(one, other) for one, other in zip(got, expected, strict=True))
    repeats = bench.pick(10, 2)
    both_ms = bench.median_ms(both, repeats)
    # Two products in the forward and five in the backward, of 2 * length^2 * head_dim, of which half is masked.
    seen = sum(_pairs(length, mix.window) for length in mix.lengths)
    flops = 7 * 2.0 * inputs[0].shape[1] * inputs[0].shape[2] * seen
    with torch.no_grad():
        forward_ms = bench.median_ms(forward, repeats)
        chosen = choose_backend(q, v, None) is BACKENDS[name]
    return Measured(name, mix.name, sum(mix.lengths), output, max(gradients), forward_ms, both_ms,
                    flops / both_ms / 1e9, chosen)  # fmt: skip


def _pairs(length: int, window: int | None) -> int:
    """Pairs of a token and one that it sees: of 4 tokens 10, with a window of 2 seven."""
    seen = min(length, window or length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def _reference(inputs: list[Tensor], mix: Mix) -> list[Tensor]:
    """Output and gradients by torch's plain SDPA in FP32, from the same BF16 numbers."""
    # One key head of one sequence at a time: the plain kernel holds all scores, 256 MiB for a head of 8,192 tokens.
    q, k, v = (x.detach().float().requires_grad_() for x in inputs)
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    start = 0
    for length in mix.lengths:
        rows = slice(start, start + length)
        for head in range(k.shape[1]):
            queries = slice(head * group, (head + 1) * group)
            _one_head(out, (q, k, v), rows, queries, head, mix.window)
        start += length
    return [out, *(x.grad for x in (q, k, v) if x.grad is not None)]


def _one_head(
    out: Tensor, inputs: tuple[Tensor, ...], rows: slice, queries: slice, head: int, window: int | None
) -> None:
    """Fill in the output of a key head's queries in one sequence, and add to the gradients of the inputs."""
    q = inputs[0][rows, queries].transpose(0, 1)[None]
    k, v = (x[rows, head : head + 1].transpose(0, 1)[None].expand(-1, q.shape[1], -1, -1) for x in inputs[1:])
    seen: Any = None
    if window is not None:
        age = torch.arange(q.shape[2], device=q.device)
        seen = (age[:, None] >= age) & (age[:, None] - age < window)
    with sdpa_kernel(SDPBackend.MATH):
        part = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
    # The gradient that `_measure` gives is the backend's own output in BF16, so both differ by rounding alone.
    part.backward(part.detach())
    out.data[rows, queries] = part.detach()[0].transpose(0, 1)
