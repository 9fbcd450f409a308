"""Attention in which tokens of spans see each other: against the whole score matrix, by masks and by two kernels."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_hydra.pipe.attention import backends
from ds_hydra.pipe.attention.backends import Segments, WithSpans, varlen_attention, with_sinks
from ds_hydra.pipe.rows import Chunk, Pack, Seen
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.flash_kernels import Flash

SCALE, HEADS, WIDTH = 0.4, 4, 6
Spans = tuple[tuple[int, int], ...]


def inputs(tokens: int, kv_heads: int, seed: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, HEADS, WIDTH), *[(tokens, kv_heads, WIDTH)] * 2, (tokens, HEADS, WIDTH))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def right(
    lengths: tuple[int, ...], spans: Spans, window: int | None, q: Tensor, k: Tensor, v: Tensor, whole: bool = False
) -> Tensor:
    """All sequences at once, by the whole score matrix of the row."""
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(q))
    image = torch.full((len(q),), -1)
    for index, (start, stop) in enumerate(spans):
        image[start:stop] = index
    before = place[:, None] - place[None]
    near, together = before < (window or len(q)), (image[:, None] == image[None]) & (image[:, None] >= 0)
    seen = ((before >= 0) & near) | together if whole else ((before >= 0) | together) & near
    seen &= numbers[:, None] == numbers[None]
    scores = torch.einsum("ihd,jhd->hij", q, k) * SCALE
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def with_gradients(run: Any, given: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


def drawn(seed: int) -> tuple[tuple[int, ...], Spans]:
    """Sequences, and spans in them: of one token too, side by side, and whole sequences."""
    draw = random.Random(seed)
    lengths, spans, begin = [], [], 0
    for _ in range(draw.randint(1, 4)):
        length = draw.randint(1, 30)
        cuts = sorted(draw.sample(range(length + 1), min(length + 1, 2 * draw.randint(0, 3))))
        spans += [(begin + a, begin + b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
        lengths.append(length)
        begin += length
    return tuple(lengths), tuple(spans)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 1, 3, 50]), st.sampled_from([4, 2, 1]), st.booleans(),
       st.booleans())  # fmt: skip
def test_spans_are_those_of_the_whole_score_matrix(
    seed: int, window: int | None, kv_heads: int, blocks: bool, whole: bool
) -> None:
    """`whole`: a window bounds nothing of a span."""
    lengths, spans = drawn(seed)
    seen = Seen(spans, whole=whole)
    given, pack = inputs(sum(lengths), kv_heads, seed), Pack(lengths)
    with pytest.MonkeyPatch.context() as patch:
        if blocks:
            patch.setattr(backends, "QUERY_BLOCK", 7)
            patch.setattr(backends, "LEAST_BLOCK", 5)
        mine = with_gradients(
            lambda q, k, v: varlen_attention(q, k, v, pack, scale=SCALE, window=window, seen=seen), given
        )
    expected = with_gradients(lambda q, k, v: right(lengths, spans, window, q, k, v, whole), given)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 1, 3, 50]), st.sampled_from([4, 2, 1]))
def test_two_calls_of_the_kernel_for_gpus(seed: int, window: int | None, kv_heads: int) -> None:
    """One for the row, and one for all spans turned round; without spans that matter, one."""
    lengths, spans = drawn(seed)
    given, flash = inputs(sum(lengths), kv_heads, seed), Flash()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_aten", flash)
        seen = Seen(spans).within(0, sum(lengths))
        kernel = WithSpans.on_gpu(SCALE, Segments.whole(lengths), window, seen, torch.device("cpu"))
        mine = with_gradients(lambda q, k, v: with_sinks(q, k, v, None, kernel), given)
    expected = with_gradients(lambda q, k, v: right(lengths, spans, window, q, k, v), given)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    assert len(flash.calls) == (4 if any(stop - start > 1 for start, stop in spans) else 2)


def test_spans_in_slices_are_refused() -> None:
    q, k, v, _ = inputs(6, 2, 0)
    pack = Pack((6,), chunk=Chunk(0, 6, None))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="see each other"):
        varlen_attention(q, k, v, pack, seen=Seen(((1, 3),)))


def test_a_span_beyond_a_window_is_refused_where_its_tokens_see_all_of_it() -> None:
    seen = Seen(((1, 5),), whole=True)
    with pytest.raises(ConfigError, match="4 tokens, which see each other, is longer than a window of 3"):
        WithSpans.on_gpu(SCALE, Segments.whole((6,)), 3, seen, torch.device("cpu"))
