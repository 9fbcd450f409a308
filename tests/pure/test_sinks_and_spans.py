"""Attention with sinks, and with spans whose tokens see each other, by kernels that know neither: as the whole score
matrix has it, by the CPU's and the GPU's calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hydra.pipe.attention import backends
from ds_hydra.pipe.attention.backends import (
    OnGpu,
    Segments,
    WithSpans,
    per_sequence_sdpa,
    varlen_attention,
    with_sinks,
)
from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.rows import Chunk, Pack, Seen
from ds_hydra.zero_hetero.errors import ConfigError

FLOAT64 = torch.float64
HEADS, WIDTH = 4, 6
SCALE = 0.4
Spans = tuple[tuple[int, int], ...]


def inputs(tokens: int, kv_heads: int, seed: int, *, sinks: bool = True) -> list[Tensor]:
    """q, k, v, perhaps sinks, of which one is none and one takes nearly all, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, HEADS, WIDTH), *[(tokens, kv_heads, WIDTH)] * 2, (HEADS,), (tokens, HEADS, WIDTH))
    found = [torch.randn(shape, generator=generator, dtype=FLOAT64) for shape in shapes]
    found[3][0], found[3][1] = float("-inf"), 40.0
    return found if sinks else [*found[:3], found[4]]


def by_matrix(
    lengths: tuple[int, ...], window: int | None, spans: Spans = (), whole: bool = False
) -> Callable[..., Tensor]:
    """All sequences of a row at once, by its whole score matrix; `whole`: a window bounds nothing of a span."""

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        place, image = torch.arange(len(q)), torch.full((len(q),), -1)
        for index, (start, stop) in enumerate(spans):
            image[start:stop] = index
        before = place[:, None] - place[None]
        near, together = before < (window or len(q)), (image[:, None] == image[None]) & (image[:, None] >= 0)
        seen = ((before >= 0) & near) | together if whole else ((before >= 0) | together) & near
        seen &= numbers[:, None] == numbers[None]
        scores = (torch.einsum("ihd,jhd->hij", q, k) * SCALE).masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
        return torch.einsum("hij,jhd->ihd", torch.softmax(scores, dim=-1)[..., : len(q)], v)

    return run


def with_gradients(run: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and sinks."""
    leaves = [x.clone().requires_grad_() for x in given[:-1]]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[-1])]


class Flash:
    """torch's two operators for GPUs, on any device, by the whole score matrix: their arguments, by name, are those of
    its schema."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _given(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(name)
        schema = getattr(torch.ops.aten, name).default._schema
        names = [each.name for each in schema.arguments if not each.kwarg_only]
        assert len(args) + len(set(names) & set(options)) == len(names)
        assert set(options) <= {each.name for each in schema.arguments}
        return dict(zip(names, args, strict=False)) | options

    def _scores(self, given: dict[str, Any]) -> Tensor:
        """(heads, queries, keys) of the row."""
        q, k, left = given["query"], given["key"], given["window_size_left"]
        assert given["is_causal"] == (left == -1)
        assert given["window_size_right"] == 0
        own, others = given["cum_seq_q"].tolist(), given["cum_seq_k"].tolist()
        scores = torch.full((q.shape[1], len(q), len(k)), float("-inf"), dtype=q.dtype)
        for (start, stop), (first, last) in zip(pairwise(own), pairwise(others), strict=True):
            distance = torch.arange(last - (stop - start), last)[:, None] - torch.arange(first, last)[None]
            hidden = (distance < 0) | ((distance > left) & (left >= 0))
            keys = k[first:last].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            part = torch.einsum("ihd,jhd->hij", q[start:stop], keys) * given["scale"]
            scores[:, start:stop, first:last] = part.masked_fill(hidden, float("-inf"))
        return scores

    def _flash_attention_forward(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        given = self._given("_flash_attention_forward", args, options)
        scores, v = self._scores(given), given["value"]
        v = v.repeat_interleave(scores.shape[0] // v.shape[1], dim=1)
        out = torch.einsum("hij,jhd->ihd", torch.softmax(scores, dim=-1), v)
        return out, torch.logsumexp(scores, dim=-1), torch.tensor(5), torch.tensor(6), torch.tensor(7)

    def _flash_attention_backward(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        given = self._given("_flash_attention_backward", args, options)
        assert (int(given["rng_state"]), int(given["unused"])) == (5, 6)
        q, k, v, grad = (given[name] for name in ("query", "key", "value", "grad_out"))
        weights = torch.exp(self._scores(given) - given["logsumexp"][..., None])
        shared = q.shape[1] // k.shape[1]
        wide = [x.repeat_interleave(shared, dim=1) for x in (k, v)]
        delta = (grad * given["out"]).sum(-1).T[..., None]
        inner = weights * (torch.einsum("ihd,jhd->hij", grad, wide[1]) - delta) * given["scale"]
        dk, dv = torch.einsum("hij,ihd->jhd", inner, q), torch.einsum("hij,ihd->jhd", weights, grad)
        dk, dv = (x.unflatten(1, (-1, shared)).sum(2) for x in (dk, dv))
        return torch.einsum("hij,jhd->ihd", inner, wide[0]), dk, dv


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([None, 1, 3, 50]),
       st.sampled_from([4, 2, 1]), st.booleans(), st.integers(0, 10**6))  # fmt: skip
def test_sinks_are_those_of_the_whole_score_matrix(
    lengths: list[int], window: int | None, kv_heads: int, blocks: bool, seed: int
) -> None:
    """Also of sequences of one token, which a sink leaves only a share of itself."""
    given, pack = inputs(sum(lengths), kv_heads, seed), Pack(tuple(lengths))

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return varlen_attention(q, k, v, pack, scale=SCALE, window=window, sinks=bias)

    with pytest.MonkeyPatch.context() as patch:
        if blocks:
            patch.setattr(backends, "QUERY_BLOCK", 7)
        mine = with_gradients(run, given)
    right = with_gradients(by_matrix(tuple(lengths), window), given)
    torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 1, 3, 50]), st.sampled_from([4, 2]), st.booleans())
def test_sinks_in_slices_are_those_of_the_whole(seed: int, window: int | None, kv_heads: int, recompute: bool) -> None:
    """Windows are smaller than a slice, or larger; slices and the sequences beside them may be of one token."""
    draw = random.Random(seed)
    total, cuts = 30, sorted(draw.sample(range(1, 30), 3))
    beside = [draw.randint(1, 5) for _ in range(4)]
    tokens, contexts = total + sum(beside), Contexts(total)
    given = inputs(tokens, kv_heads, seed)
    leaves = [x.clone().requires_grad_() for x in given[:4]]
    begins = [total, *(total + done for done in accumulate(beside))]
    outs = []
    for (start, stop), ends in zip(pairwise([0, *cuts, total]), pairwise(begins), strict=True):
        rows = torch.cat((torch.arange(start, stop), torch.arange(*ends)))
        pack = Pack((stop - start, ends[1] - ends[0]), chunk=Chunk(start, stop, contexts))

        def run(q: Tensor, k: Tensor, v: Tensor, pack: Pack = pack) -> Tensor:
            context = contexts.of("layer")
            return varlen_attention(q, k, v, pack, scale=SCALE, window=window, sinks=leaves[3], context=context)

        q, k, v = (x[rows] for x in leaves[:3])
        outs.append((rows, checkpoint(run, q, k, v, use_reentrant=False) if recompute else run(q, k, v)))
    for rows, out in reversed(outs):
        out.backward(given[4][rows])
    whole = torch.empty_like(given[0])
    for rows, out in outs:
        whole[rows] = out.detach()
    right = with_gradients(by_matrix((total, *beside), window), given)
    torch.testing.assert_close([whole, *(x.grad for x in leaves)], right, rtol=0, atol=1e-12)


def test_frozen_sinks_get_no_gradient() -> None:
    q, k, v, bias, _ = inputs(9, 2, 0)
    q.requires_grad_()
    with_sinks(q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], bias,
               backends.OnCpu(SCALE, range(9), range(9), None)).sum().backward()  # fmt: skip
    assert q.grad is not None
    assert bias.grad is None


def test_no_probabilities_stand_in_memory() -> None:
    """What is kept grows with the length, of windows too; probabilities grow with its square."""

    def kept(length: int, window: int | None) -> int:
        found: dict[int, int] = {}

        def note(x: Tensor) -> Tensor:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        leaves = [x.requires_grad_() for x in inputs(length, 2, 0)[:4]]
        q, k, v, bias = leaves
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = per_sequence_sdpa(q, k, v, Segments.whole((length,)), SCALE, window, None, sinks=bias)
        assert out.grad_fn is not None
        return sum(found.values())

    for window in (None, 300):
        assert kept(1200, window) < 2.1 * kept(600, window)


def test_bf16_is_as_near_as_the_probabilities_are() -> None:
    given = inputs(200, 2, 3)
    right = with_gradients(by_matrix((200,), None), given)
    narrow = [x.bfloat16() for x in given]

    def error(run: Callable[..., Tensor]) -> list[float]:
        found = with_gradients(run, narrow)
        return [float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(found, right, strict=True)]

    def by_kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return per_sequence_sdpa(q, k, v, Segments.whole((200,)), SCALE, None, None, sinks=bias)

    mine = error(by_kernel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "has_log_sum_exp", lambda q, v: False)
        shown = error(by_kernel)
    assert all(x <= max(1.5 * y, 0.01) for x, y in zip(mine, shown, strict=True)), (mine, shown)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_calls_of_the_kernel_for_gpus(monkeypatch: pytest.MonkeyPatch, window: int | None, kv_heads: int) -> None:
    """One call for all sequences of a row, by an operator that computes what the GPU's does; a slice among others."""
    flash = Flash()
    monkeypatch.setattr(backends, "_aten", flash)
    lengths = (5, 1, 12)
    given = inputs(sum(lengths), kv_heads, 1)
    bounds = backends._bounds(Segments.whole(lengths), torch.device("cpu"))
    kernel = OnGpu(SCALE, bounds, window)
    mine = with_gradients(lambda q, k, v, bias: with_sinks(q, k, v, bias, kernel), given)
    torch.testing.assert_close(mine, with_gradients(by_matrix(lengths, window), given), rtol=0, atol=1e-12)
    assert flash.calls == ["_flash_attention_forward", "_flash_attention_backward"]


def test_gpus_with_flash_kernels_attend_to_sinks_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's varlen_attn would run without sinks; what else runs on GPUs keeps the probabilities."""
    given = inputs(9, 2, 1)
    segments, chosen = Segments.whole((4, 5)), SimpleNamespace(called=[])
    monkeypatch.setattr(backends, "with_sinks", lambda *rows: chosen.called.append(rows[-1]))
    options: dict[str, Any] = {"scale": SCALE, "window": 3, "softcap": None, "dropout": None, "backend": None}
    monkeypatch.setattr(backends, "choose_backend", lambda q, v, softcap: backends.torch_varlen)
    monkeypatch.setattr(backends, "gpu_works", lambda *_: True)
    q, k, v, bias, _ = given
    backends._attend(q, k, v, segments, sinks=bias, **options)
    assert isinstance(chosen.called[0], OnGpu)
    assert chosen.called[0].bounds[0].tolist() == [0, 4, 9]
    assert chosen.called[0].window == 3


@pytest.mark.parametrize("wrong", [None, "_flash_attention_forward", "_flash_attention_backward", "lacking"])
def test_a_kernel_is_tried_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str | None
) -> None:
    """One that drops the score of a sink, that gives other gradients, or that this torch does not have."""
    flash = Flash()
    if wrong == "lacking":
        monkeypatch.delattr(Flash, "_flash_attention_forward")
    elif wrong is not None:
        right = getattr(flash, wrong)
        monkeypatch.setattr(flash, wrong, lambda *args, **options: tuple(1.2 * x for x in right(*args, **options)))
    monkeypatch.setattr(backends, "_aten", flash)
    with torch.no_grad():
        assert backends.gpu_works.__wrapped__(torch.device("cpu"), torch.float32, 64) == (wrong is None)
    assert ("keeps probabilities in memory" in caplog.text) == (wrong is not None)


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
    given, pack = inputs(sum(lengths), kv_heads, seed, sinks=False), Pack(lengths)
    with pytest.MonkeyPatch.context() as patch:
        if blocks:
            patch.setattr(backends, "QUERY_BLOCK", 7)
            patch.setattr(backends, "LEAST_BLOCK", 5)
        mine = with_gradients(
            lambda q, k, v: varlen_attention(q, k, v, pack, scale=SCALE, window=window, seen=seen), given
        )
    expected = with_gradients(by_matrix(lengths, window, spans, whole), given)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 1, 3, 50]), st.sampled_from([4, 2, 1]))
def test_two_calls_of_the_kernel_for_gpus(seed: int, window: int | None, kv_heads: int) -> None:
    """One for the row, and one for all spans turned round; without spans that matter, one."""
    lengths, spans = drawn(seed)
    given, flash = inputs(sum(lengths), kv_heads, seed, sinks=False), Flash()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_aten", flash)
        seen = Seen(spans).within(0, sum(lengths))
        kernel = WithSpans.on_gpu(SCALE, Segments.whole(lengths), window, seen, torch.device("cpu"))
        mine = with_gradients(lambda q, k, v: with_sinks(q, k, v, None, kernel), given)
    expected = with_gradients(by_matrix(lengths, window, spans), given)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    assert len(flash.calls) == (4 if any(stop - start > 1 for start, stop in spans) else 2)


def test_spans_in_slices_are_refused() -> None:
    q, k, v, *_ = inputs(6, 2, 0)
    pack = Pack((6,), chunk=Chunk(0, 6, None))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="see each other"):
        varlen_attention(q, k, v, pack, seen=Seen(((1, 3),)))


def test_a_span_beyond_a_window_is_refused_where_its_tokens_see_all_of_it() -> None:
    seen = Seen(((1, 5),), whole=True)
    with pytest.raises(ConfigError, match="4 tokens, which see each other, is longer than a window of 3"):
        WithSpans.on_gpu(SCALE, Segments.whole((6,)), 3, seen, torch.device("cpu"))
