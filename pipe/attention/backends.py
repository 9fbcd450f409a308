"""Block-diagonal causal attention over packed sequences, for any model that uses Hugging Face's interface.

`hydra_attention` is registered under the name ATTENTION_NAME without a mask function, so Hugging Face builds
no T x T mask; the pack [Note: packs] arrives as the keyword argument `hydra`. A feature that a backend
lacks is an error: dropping one silently would train another model.

[Note: sinks]
A sink is a learnt score of a key that every query of a head sees and that has no value. It takes its share of the
softmax, and adds nothing. Where a kernel returns out = softmax(S) V and lse = log(sum(exp(S))), with the sink's score s

  out' = out * sigmoid(lse - s)      lse' = log(exp(lse) + exp(s))

A kernel's backward computes the probabilities again, as exp(S - lse), and takes from their gradients the sum over a
query's output of output times gradient. Handed out' and lse' in place of its own it computes those with the sink, so it
gives the exact gradients of queries, keys and values. The gradient of s is the same formula for a key whose value is
zero: minus its probability, exp(s - lse'), times that sum. So nothing is kept beyond what the kernel keeps, and no
probabilities stand in memory.

[Note: spans]
Tokens of an image may see each other in both directions (Gemma 3). Such a token sees what it sees causally, and the
later tokens of its span. Those are what a causal kernel computes of the span turned round and moved by one: of the span
4..8, whose tokens see 5..8 behind them,

  queries   6  5  4        the first sees key 7, the second 7 6, the third 7 6 5
  keys      7  6  5

So two calls do, one for the row and one for all of its spans. Both return a log-sum-exp, by which their outputs are put
together; and the backward of each, which is handed what was put together, gives its exact part of the gradients, as
with sinks. A window bounds what is before a token, and not what is behind it in its span. In some models (Gemma 4
unified) it bounds nothing of a span, which must be no longer than a window then, but where a mask says what is seen.

Sinks: Xiao et al. 2023 (StreamingLLM), learnt as in gpt-oss. A softmax in parts: Dao et al. 2022 (FlashAttention).
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import attention

from ds_hydra.pipe.contexts import Context
from ds_hydra.pipe.dropout import AttentionDropout
from ds_hydra.pipe.head_sharing import RowPart
from ds_hydra.pipe.pinned import on_device
from ds_hydra.pipe.recomputed import is_kept, made_once
from ds_hydra.pipe.rows import Pack, Reach, Seen
from ds_hydra.pipe.ulysses import HeadGroup, over_heads
from ds_hydra.zero_hetero.errors import ConfigError

logger = logging.getLogger(__name__)

NAME = "FA3"
_PACKAGE = "flash_attn_interface"
_HOPPER = 9  # the generation of devices, by the first number of their capability
_ours: list[str] = []  # what was activated here, and not by the script


def use_flash_3(device: torch.device) -> bool:
    """Let torch's attention operators of this process run FlashAttention 3 on `device`; whether they do.

    What the script itself has activated stays. Without the package, or on another generation of devices, nothing
    changes.
    """
    if not hasattr(attention, "activate_flash_attention_impl"):
        return False
    if attention.current_flash_attention_impl() is None:
        if torch.cuda.get_device_capability(device)[0] != _HOPPER or importlib.util.find_spec(_PACKAGE) is None:
            return False
        try:
            attention.activate_flash_attention_impl(NAME)
        except (ImportError, RuntimeError) as error:  # a build for another torch
            logger.warning("FlashAttention 3 is installed and cannot be used (%s): attention runs without it", error)
            return False
        _ours.append(NAME)
        logger.info('attention: FlashAttention 3 (hydra.fast_paths without "flash_3" forbids it)')
    return flash_3_runs()


def flash_3_runs() -> bool:
    """Whether torch's operators run FlashAttention 3 now."""
    return getattr(attention, "current_flash_attention_impl", lambda: None)() == NAME


def give_flash_3_back() -> None:
    """Undo what `use_flash_3` did."""
    if _ours:
        _ours.clear()
        attention.restore_flash_attention_impl()


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


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kernel: Kernel) -> Tensor:
    """Attention by this kernel, with the scores `sinks` (heads,), if there are any, of keys without a value [Note:
    sinks]; in a layer that is computed again it may be what was kept [Note: kept attention]."""
    out: Tensor = _WithSinks.apply(q, k, v, sinks, kernel)
    return out


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kernel: Kernel) -> Tensor:
        def attend() -> tuple[Tensor, ...]:
            out, lse, *more = kernel.forward(q, k, v)
            if sinks is not None:
                scores = sinks.to(lse.dtype)[:, None]
                _by_heads(out).mul_(torch.sigmoid(lse - scores).unsqueeze(-1))
                lse = torch.logaddexp(lse, scores)
            return out, lse, *more

        out, lse, *more = made_once(attend)
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


def visible(queries: range, keys: range, window: int | None, device: torch.device, spans: Seen | None = None) -> Tensor:
    """Which keys of a sequence these queries of it see, (queries, keys); a window counts the token itself."""
    rows = torch.arange(queries.start, queries.stop, device=device)[:, None]
    columns = torch.arange(keys.start, keys.stop, device=device)[None]
    seen = columns <= rows
    near = columns > rows - window if window is not None else torch.ones_like(seen)
    if spans is None:
        return seen & near
    inside = torch.zeros_like(seen)
    for start, stop in spans.spans:
        inside |= (rows >= start) & (rows < stop) & (columns >= start) & (columns < stop)
    return seen & near | inside if spans.whole else (seen | inside) & near


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


class WithSpans(NamedTuple):
    """A row's causal kernel, and one of its spans turned round [Note: spans]."""

    causal: Kernel
    later: Kernel
    queries: Tensor  # rows of tokens that see some behind them, turned round
    keys: Tensor

    @classmethod
    def on_gpu(
        cls, scale: float, segments: Segments, window: int | None, seen: Seen | None, device: torch.device
    ) -> Kernel:
        """Of spans of the whole sequences `segments` of a row, by `OnGpu`. ConfigError for one that is longer than a
        window and sees beyond it."""
        causal = OnGpu(scale, _bounds(segments, device), window)
        if seen is None:
            return causal
        longer = seen.spans
        if seen.whole and window is not None and (most := max(stop - start for start, stop in longer)) > window:
            raise ConfigError(f"an image of {most} tokens, which see each other, is longer than a window of {window}")
        rows = [on_device(torch.cat([torch.arange(stop - 1 - by, start - by, -1) for start, stop in longer]), device)
                for by in (1, 0)]  # fmt: skip
        turned = Segments.whole(tuple(stop - start - 1 for start, stop in longer))
        return cls(causal, OnGpu(scale, _bounds(turned, device), None), *rows)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """q (T, heads, d), k and v (T, kv_heads, d)."""
        out, lse, *kept = self.causal.forward(q, k, v)
        later, own, *more = self.later.forward(q[self.queries], k[self.keys], v[self.keys])
        before = lse[:, self.queries]
        both = torch.logaddexp(before, own)
        first, second = (torch.exp(part - both).T.unsqueeze(-1) for part in (before, own))
        out[self.queries] = (out[self.queries] * first + later * second).to(out.dtype)
        lse[:, self.queries] = both
        return out, lse, *kept, *more

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *kept: Tensor) -> Gradients:
        """Of their sizes."""
        out, lse, *state = kept
        middle = len(state) // 2  # what both kernels keep is of equal kinds
        found = self.causal.backward(grad, q, k, v, out, lse, *state[:middle])
        at = self.queries
        own = self.later.backward(grad[at], q[at], k[self.keys], v[self.keys], out[at],
                                  lse[:, at].contiguous(), *state[middle:])  # fmt: skip
        for whole, part, rows in zip(found, own, (at, self.keys, self.keys), strict=True):
            whole.index_add_(0, rows, part)
        return found


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


QUERY_BLOCK = 1024  # rows of scores held at once where a mask or a softcap needs them in memory
LEAST_BLOCK = 256  # the same with a window, where fewer rows see fewer keys


class Segments(NamedTuple):
    """Which rows belong together: queries[i] rows of queries and keys[i] of keys, which may be more, are a sequence.

    Its last query is the token of its last key: a slice of 2 tokens after 4 others has 2 queries and 6 keys, of which
    the first query sees 5.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def whole(cls, lengths: tuple[int, ...]) -> Segments:
        """Those of whole sequences."""
        return cls(lengths, lengths)

    def chunked(self, size: int | None) -> Segments:
        """Those of chunks of so many tokens, if a token sees no others: keys begin where a chunk does."""
        if size is None or max(self.keys) <= size:
            return self
        # With chunks of 4, the slice 2..9 has the queries 2..4, 4..8 and 8..9; the first sees the keys 0..4.
        ends = [
            (max(start, past), min(start + size, keys), start)
            for queries, keys in zip(*self, strict=True)
            for past in (keys - queries,)
            for start in range(past // size * size, keys, size)
        ]
        return Segments(tuple(b - a for a, b, _ in ends), tuple(b - start for _, b, start in ends))


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: Pack,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    backend: str | None = None,
    context: Context | None = None,
    seen: Seen | None = None,
) -> Tensor:
    """Causal attention within each sequence of a pack, by Ulysses over its sequence parallel group.

    q (T_local, heads, d), k (T_local, kv_heads, d), v (T_local, kv_heads, d_v) -> (T_local, heads, d_v).
    `window` counts the token itself; with a `chunk` a token sees those of its own of the chunks of so many tokens into
    which a sequence falls, from its first on; `softcap` bounds the scores by softcap * tanh(scores / softcap); `sinks`
    (heads,) are learnt scores of a key that every token sees and that has no value; `dropout` is that of the heads at
    hand; `context` keeps the keys and values of a pack's slice for the slices behind it; tokens of each span
    of `seen` see each other in both directions [Note: spans].
    Raises ConfigError for a backend that lacks what is asked for, for a slice without a context, and for spans in
    slices, in chunks, or where ranks share the queries of a head.
    """
    seen = None if seen is None else seen.within(0, pack.num_tokens)
    if seen is not None and (pack.chunk is not None or chunk is not None):
        raise ConfigError("tokens of an image see each other, and run in slices or chunks: neither is implemented")
    scale, reach = q.shape[-1] ** -0.5 if scale is None else scale, Reach(window, chunk)
    known: list[_Keys] = []  # by group of key/value heads, which several groups may share

    def of_heads(group: HeadGroup) -> Tensor:
        heads = slice(group.first_head, group.first_head + group.q.shape[1])
        if group.keys == len(known):
            known.append(_keys(group, pack, reach, context))
        attend = partial(
            _attend, scale=scale, window=window, softcap=softcap, backend=backend,
            sinks=None if sinks is None else sinks[heads], seen=seen,
        )  # fmt: skip
        drop = None if dropout is None else replace(dropout, first_head=dropout.first_head + heads.start)
        if group.part is not None:
            if seen is not None:
                raise ConfigError(
                    f"tokens of an image see each other, and {pack.sp} sequence parallel ranks share the queries of "
                    f"{q.shape[1]} heads: use strategies whose sp divides the heads of a rank, within a node"
                )
            return part_of_row(group.q, *known[group.keys], pack, drop, attend, reach, group.part)
        return _row(group.q, known[group.keys], pack, drop, attend, chunk)

    return of_heads(HeadGroup(q, k, v)) if pack.sp == 1 else over_heads(q, k, v, pack, of_heads, reach)


class _Keys(NamedTuple):
    """What queries of a row attend to: keys and values of its tokens, and of the sequence of which it has a slice."""

    own: tuple[Tensor, Tensor]
    joined: tuple[Tensor, Tensor] | None = None


def _keys(group: HeadGroup, pack: Pack, reach: Reach, context: Context | None) -> _Keys:
    own = group.k, group.v
    if pack.chunk is None:
        return _Keys(own)
    if context is None:
        raise ConfigError("a slice of a sequence was handed to an attention that keeps no keys and values of its own")
    size = pack.lengths[0]
    return _Keys(own, context.of_group(group.keys).join(group.k[:size], group.v[:size], pack.past, reach))


def _row(
    q: Tensor, keys: _Keys, pack: Pack, dropout: AttentionDropout | None, attend: Callable[..., Tensor],
    chunk: int | None,
) -> Tensor:  # fmt: skip
    """Attention of a whole row's queries, (T, heads, d), to keys that `attend` is given with theirs."""
    if keys.joined is None:
        return attend(q, *keys.own, Segments.whole(pack.lengths).chunked(chunk), dropout=dropout)
    # Two calls: one call would have to copy the context next to the keys of the sequences beside the slice.
    size, seen = pack.lengths[0], len(keys.joined[0])
    own = None if dropout is None else replace(dropout, keys=dropout.keys[:size], past=pack.past + size - seen)
    out = attend(q[:size], *keys.joined, Segments((size,), (seen,)).chunked(chunk), dropout=own)
    if len(pack.lengths) == 1:
        return out
    rest = None if dropout is None else replace(dropout, keys=dropout.keys[size:])
    k, v = (x[size:] for x in keys.own)
    beside = Segments.whole(pack.lengths[1:]).chunked(chunk)
    return torch.cat((out, attend(q[size:], k, v, beside, dropout=rest)))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None, dropout: AttentionDropout | None, backend: str | None, seen: Seen | None = None,
) -> Tensor:  # fmt: skip
    """Attention on one rank's heads, by the backend that is asked for or the fastest that has what is needed."""
    # A window that no sequence exceeds changes nothing, and without one every backend has its fastest kernel.
    if window is not None and window >= max(segments.keys):
        window = None
    attend = BACKENDS[backend] if backend else choose_backend(q, v, softcap)
    narrower = q.shape[-1] - v.shape[-1]
    by_kernel = attend is torch_varlen and dropout is None and not narrower
    if (sinks is not None or seen is not None or is_kept()) and by_kernel and gpu_works(q.device, q.dtype, q.shape[-1]):
        return with_sinks(q, k, v, sinks, WithSpans.on_gpu(scale, segments, window, seen, q.device))
    if sinks is not None or dropout is not None or seen is not None:
        return per_sequence_sdpa(q, k, v, segments, scale, window, softcap, sinks=sinks, dropout=dropout, seen=seen)
    if attend is per_sequence_sdpa or not narrower:
        return attend(q, k, v, segments, scale, window, softcap)
    # Fused kernels take values as wide as keys, and those of latent attention are narrower.
    return attend(q, k, F.pad(v, (0, narrower)), segments, scale, window, softcap)[..., : v.shape[-1]]


Attend = Callable[[Tensor, Tensor, Tensor, Segments, float, int | None, float | None], Tensor]


def choose_backend(q: Tensor, v: Tensor, softcap: float | None) -> Attend:
    """The fastest backend that has what is asked for: torch's varlen_attn, else flash-attn, else per-sequence SDPA."""
    head_dim = q.shape[-1]
    fused = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and v.shape[-1] <= head_dim <= 256
    fused = fused and _has_flash_kernels(q.device)
    # flash-attn pads a head of, say, 20 numbers to 24 by itself; torch's operator refuses it.
    if fused and softcap is None and head_dim % 8 == 0 and _torch_varlen() is not None:
        return torch_varlen
    if fused and importlib.util.find_spec("flash_attn") is not None:
        return flash_attn
    return per_sequence_sdpa


@cache
def _has_flash_kernels(device: torch.device) -> bool:
    """Whether a GPU is of a generation that FlashAttention 2 is written for: Ampere (8.0) or later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _torch_varlen() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


def torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """torch.nn.attention.varlen (FlashAttention 2 in the torch build, or 3: `flash_3`); CUDA, 16 bit, no softcap."""
    if softcap is not None:
        raise ConfigError("torch's varlen_attn has no softcap; install flash-attn or use the sdpa backend")
    varlen_attn = _torch_varlen()
    if varlen_attn is None:
        raise ConfigError("this torch has no torch.nn.attention.varlen.varlen_attn with window_size; use torch >= 2.12")
    # Kernels count the tokens to the left without the token itself: a window of 4 is 3 here, and -1 stands for all.
    left = -1 if window is None else window - 1
    k, v, extra = _match_heads(q, k, v, "enable_gqa" in inspect.signature(varlen_attn).parameters)
    return varlen_attn(q, k, v, *_bounds(segments, q.device), scale=scale, window_size=(left, 0), **extra)


def flash_attn(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """The flash-attn package; CUDA, 16 bit, with window and softcap."""
    from flash_attn import flash_attn_varlen_func

    left = -1 if window is None else window - 1
    return flash_attn_varlen_func(
        q, k, v, *_bounds(segments, q.device),
        softmax_scale=scale, causal=True, window_size=(left, 0), softcap=softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),  # else dq is added up in any order
    )  # fmt: skip


def per_sequence_sdpa(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None, softcap: float | None,
    *, sinks: Tensor | None = None, dropout: AttentionDropout | None = None, seen: Seen | None = None,
) -> Tensor:  # fmt: skip
    """One scaled_dot_product_attention per sequence: any device, any dtype, every feature.

    With dropout, a softcap, or sinks where `has_log_sum_exp` says no or beside spans, the probabilities stand in
    memory, in blocks of query rows.
    """
    outs: list[Tensor] = []
    shown = softcap is not None or dropout is not None or (sinks is not None and not has_log_sum_exp(q, v))
    start = 0
    # A sequence alone is not cut out of its row: the backward would copy it.
    parts = (x.split(sizes) if len(sizes) > 1 else (x,)
             for x, sizes in ((q, segments.queries), (k, segments.keys), (v, segments.keys)))  # fmt: skip
    for queries, keys, *rows in zip(*segments, *parts, strict=True):
        qs, ks, vs = (x.transpose(0, 1).unsqueeze(0) for x in rows)
        own = None if seen is None else seen.within(start, start + queries)
        if shown or queries < keys or (window is not None and window < keys) or own is not None:
            drop = None if dropout is None else partial(dropout, first_token=start)
            in_memory = shown or (sinks is not None and own is not None)
            out = _blocked(qs, ks, vs, scale, window, softcap, sinks=sinks, drop=drop, shown=in_memory, own=own)
        elif sinks is not None or (is_kept() and has_log_sum_exp(q, v)):
            out = with_sinks(qs, ks, vs, sinks, OnCpu(scale, range(queries), range(keys), None))
        else:  # which lets the first query see the first key only: right for a whole sequence alone
            out = _sdpa(qs, ks, vs, is_causal=True, scale=scale, enable_gqa=qs.shape[1] != ks.shape[1])
        outs.append(out.squeeze(0).transpose(0, 1))
        start += queries
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's operator, but never by cuDNN, which torch prefers on Hopper and later GPUs."""
    # Its gradients with a mask were found wrong on an H200, without a word (torch 2.11; also pytorch issue 196678), and
    # it compiles for each new length. A backward is that of the kernel which its forward took.
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, **options)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(q, k, v, **options)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _blocked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None,
    *, sinks: Tensor | None, drop: Callable[..., Tensor] | None, shown: bool, own: Seen | None,
) -> Tensor:  # fmt: skip
    """One sequence, or a slice with all keys so far, in blocks of query rows, each against the keys it can see.

    q (1, heads, T, d), k (1, kv_heads, past + T, d) and v likewise -> (1, heads, T, d_v). `shown`: the probabilities
    stand in memory. `own`: spans of a whole sequence.
    """
    # A mask or a softcap needs the scores in memory. 32 heads of a sequence of 32,768 tokens have 128 GiB of them in
    # FP32; a block of 1,024 rows has 4 GiB at most. With a window of 256 tokens the rows 1024..1279 see only the keys
    # 769..1279, since row 1024 sees itself and the 255 before it: the block needs 16 MiB.
    size = QUERY_BLOCK if window is None else min(QUERY_BLOCK, max(LEAST_BLOCK, window))
    length = q.shape[2]
    past = k.shape[2] - length
    queries_per_key = q.shape[1] // k.shape[1]
    by_kernel = not shown and (sinks is not None or (own is None and is_kept() and has_log_sum_exp(q, v)))
    outs: list[Tensor] = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = 0 if window is None else max(0, past + start - window + 1)
        inside = [span for span in ([] if own is None else own.spans) if span[0] < stop and start < span[1]]
        first, last = min([first, *(a for a, _ in inside)]), max([past + stop, *(b for _, b in inside)])
        rows, columns = range(past + start, past + stop), range(first, last)
        qb, kb, vb = q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last]
        if by_kernel:
            outs.append(with_sinks(qb, kb, vb, sinks, OnCpu(scale, rows, columns, window)))
            continue
        seen = visible(rows, columns, window, q.device, own)
        if not shown:
            grouped = queries_per_key > 1
            outs.append(_sdpa(qb, kb, vb, attn_mask=seen, scale=scale, enable_gqa=grouped))
            continue
        kb, vb = (x.repeat_interleave(queries_per_key, dim=1) for x in (kb, vb))
        scores = qb @ kb.transpose(-1, -2) * (scale / (softcap or 1.0))
        scores = scores if softcap is None else softcap * torch.tanh(scores)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat(
                (scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, stop - start, 1)), dim=-1
            )
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        weights = torch.softmax(scores, dim=-1, dtype=wide).to(q.dtype)[..., : last - first]
        outs.append((weights if drop is None else drop(weights, first_query=start, first_key=first)) @ vb)
    return torch.cat(outs, dim=2)


def _match_heads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, dict[str, bool]]:
    """Key and value heads as torch's kernel takes them, and its arguments for that.

    `grouped` says that the kernel itself lets several query heads share a key head; otherwise key heads are repeated.
    """
    if q.shape[1] == k.shape[1]:
        return k, v, {}
    if grouped:
        return k, v, {"enable_gqa": True}
    queries_per_key = q.shape[1] // k.shape[1]
    return k.repeat_interleave(queries_per_key, dim=1), v.repeat_interleave(queries_per_key, dim=1), {}


@lru_cache(maxsize=32)
def _bounds(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """What varlen kernels want to know: where sequences begin and end among queries and keys, and the longest of each.

    The first two are (sequences + 1,). Both kernels let the last query of a sequence see its last key.
    """
    # Lengths 3, 5 and 2 give 0 3 8 10: sequence i has the tokens bounds[i] .. bounds[i + 1] - 1, and a token attends
    # only within its own, so no mask of 10 x 10 is made. The numbers come from the host once for all layers of a
    # micro-batch and those that are computed again.
    found = [
        on_device(torch.tensor((0, *accumulate(sizes)), dtype=torch.int32), device)
        for sizes in dict.fromkeys(segments)  # queries and keys of whole sequences are the same
    ]
    return found[0], found[-1], max(segments.queries), max(segments.keys)


BACKENDS: dict[str, Attend] = {"torch": torch_varlen, "flash": flash_attn, "sdpa": per_sequence_sdpa}


KeysAndValues = tuple[Tensor, Tensor]


def part_of_row(
    q: Tensor, own: KeysAndValues, joined: KeysAndValues | None, pack: Pack, dropout: AttentionDropout | None,
    attend: Callable[..., Tensor], reach: Reach, part: RowPart,
) -> Tensor:  # fmt: skip
    """Attention of a part's queries, (T, heads, d), to keys that `attend` is given with theirs.

    `own` are keys and values of the row's tokens from `part.first` on, `joined` of the sequence of which a slice stands
    first in the row, up to the slice's end.
    """
    offsets = pack.offsets
    # The part may begin within a sequence, whose keys begin before it; of those behind it all tokens are in the part.
    number = bisect_right(offsets, part.start) - 1
    begin, stop = offsets[number], min(part.stop, offsets[number + 1])
    position, size = (pack.past if number == 0 else 0) + part.start - begin, stop - part.start
    first = reach.first(position)
    # With which position of the sequence the keys begin that are at hand.
    rows, origin = own, part.first - begin
    if joined is not None and number == 0:
        rows, origin = joined, reach.first(pack.past)
    k, v = (x[first - origin : position + size - origin] for x in rows)
    drop = None if dropout is None else replace(dropout, keys=dropout.keys[part.start : stop], past=first)
    outs = [attend(q[:size], k, v, Segments((size,), (len(k),)).chunked(reach.chunk), dropout=drop)]
    if joined is not None and number > 0:
        # What slices behind it have left for the slice's own keys is handed on by the backward of what it was given.
        outs[0] = outs[0] + joined[0][:0].sum() + joined[1][:0].sum()
    if stop < part.stop:
        k, v = (x[stop - part.first : part.stop - part.first] for x in own)
        ends = [min(end, part.stop) for end in offsets[number + 1 :] if end < part.stop] + [part.stop]
        lengths = tuple(end - start for start, end in pairwise(ends))
        drop = None if dropout is None else replace(dropout, keys=dropout.keys[stop : part.stop])
        outs.append(attend(q[size:], k, v, Segments.whole(lengths).chunked(reach.chunk), dropout=drop))
    return torch.cat(outs) if len(outs) > 1 else outs[0]
