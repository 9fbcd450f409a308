"""Attention: which kernels run on a GPU, in chunks, of latent keys and values, and in groups of heads."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.engine.checked import _refuse_other_ways
from ds_hydra.engine.costs import attention_name
from ds_hydra.host.devices import Flags
from ds_hydra.pipe.attention import backends, interface
from ds_hydra.pipe.attention.backends import choose_backend, per_sequence_sdpa, torch_varlen, varlen_attention
from ds_hydra.pipe.contexts import Contexts
from ds_hydra.pipe.dropout import AttentionDropout, token_keys
from ds_hydra.pipe.in_process import InProcessRanks
from ds_hydra.pipe.models import causal_lm, causal_stage, refusals
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.rows import AT_ONCE, Chunk, Overlap, Pack, cut_heads
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.self_check.check import check_strategies
from ds_hydra.zero_hetero.errors import ConfigError
from tests.support.families import build_model


# --- Which attention runs on a GPU, without one: by what the kernels can, by what is installed, in one order of
# sums.
def on_gpu(head_dim: int, dtype: torch.dtype) -> Any:
    """What the choice asks of queries on a GPU."""
    return SimpleNamespace(is_cuda=True, dtype=dtype, shape=(9, 4, head_dim), device=torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype", "generation", "backend"),
    [
        (64, 64, torch.bfloat16, (9, 0), torch_varlen),
        (256, 256, torch.float16, (8, 0), torch_varlen),
        (64, 64, torch.bfloat16, (7, 5), per_sequence_sdpa),  # a T4: the kernels are not written for it
        (20, 20, torch.bfloat16, (9, 0), per_sequence_sdpa),  # torch's operator wants a multiple of 8
        (264, 264, torch.bfloat16, (9, 0), per_sequence_sdpa),
        (192, 128, torch.bfloat16, (9, 0), torch_varlen),  # values narrower than keys, which are padded
        (128, 192, torch.bfloat16, (9, 0), per_sequence_sdpa),
        (64, 64, torch.float32, (9, 0), per_sequence_sdpa),
    ],
)
def test_attention_is_chosen_by_what_the_kernels_can(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, value_dim: int, dtype: torch.dtype, generation: Any, backend: Any
) -> None:
    backends._has_flash_kernels.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    assert choose_backend(on_gpu(head_dim, dtype), on_gpu(value_dim, dtype), None) is backend
    backends._has_flash_kernels.cache_clear()


@pytest.mark.parametrize("window", [None, 3])
def test_values_narrower_than_keys_are_padded_for_kernels(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Those of latent attention, by a function that takes what torch's kernel takes: a slice among others."""

    def varlen_attn(q: Any, k: Any, v: Any, *bounds: Any, scale: float, window_size: tuple[int, int]) -> Any:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        return per_sequence_sdpa(q, k, v, segments, scale, window_size[0] + 1 or None, None)

    segments = backends.Segments((2, 5), (6, 5))
    q, k, v = (
        torch.randn(rows, 4, width, dtype=torch.float64, requires_grad=True)
        for rows, width in ((7, 24), (11, 24), (11, 16))
    )
    options: dict[str, Any] = {"scale": 0.2, "window": window, "softcap": None, "sinks": None, "dropout": None}
    monkeypatch.setattr(backends, "_torch_varlen", lambda: varlen_attn)
    found = []
    for backend in ("torch", "sdpa"):
        out = backends._attend(q, k, v, segments, backend=backend, **options)
        found.append([out, *torch.autograd.grad(out.sin().sum(), (q, k, v))])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """A Hopper GPU with FlashAttention 3 installed, as torch would find them; what torch was told to run."""
    active: list[str | None] = [None]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: name == "flash_attn_interface")
    monkeypatch.setattr(backends.attention, "current_flash_attention_impl", lambda: active[-1])
    monkeypatch.setattr(backends.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(backends.attention, "restore_flash_attention_impl", lambda: active.append(None))
    return active


def test_flash_attention_3_runs_where_it_can(hopper: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    source: Any = SimpleNamespace(plan=SimpleNamespace(num_heads=4, num_layers=2), width=lambda entry: 256)

    def name() -> str:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *args, **kwargs: on_gpu(64, torch.bfloat16))
            return attention_name(source, cuda, torch.bfloat16)

    without = Flags(HydraConfig(10, fast_paths=()), cuda)
    assert hopper == [None]
    assert name() == "torch_varlen"
    flags_3 = Flags(HydraConfig(10), cuda)
    assert name() == "torch_varlen (FA3)", "a cost table of the other kernels is refused"
    flags_3.close()
    without.close()
    assert hopper == [None, "FA3", None]
    hopper.append("FA4")  # by the script itself
    Flags(HydraConfig(10), cuda).close()
    assert hopper[-1] == "FA4"


def test_flash_attention_3_of_another_torch_is_left_alone(
    hopper: list[str | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(backends.attention, "activate_flash_attention_impl", broken)
    Flags(HydraConfig(10), torch.device("cuda", 0)).close()
    assert "undefined symbol" in caplog.text
    assert hopper == [None]


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attn_adds_up_in_one_order_where_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    asked: list[bool] = []

    def kernel(q: Any, *args: Any, deterministic: bool, **kwargs: Any) -> Any:
        asked.append(deterministic)
        return q

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=kernel))
    held = Flags(HydraConfig(10, deterministic=deterministic), torch.device("cpu"))
    q = torch.zeros(10, 4, 8)
    backends.flash_attn(q, q, q, backends.Segments.whole((10,)), 1.0, None, None)
    held.close()
    assert asked == [deterministic]


# --- Attention in chunks, and queries that are scaled by their position: as alone, in packs and slices (Llama
# 4).
MUTANTS: dict[str, Any] = {
    "chunks_are_not_seen": lambda: mock.patch.object(interface, "_chunk_of", return_value=None),
    "chunks_are_too_long": lambda: mock.patch.object(interface, "_chunk_of", return_value=9),
    "the_row_is_counted": lambda: mock.patch.object(causal_stage, "count_by_sequence"),
}


@pytest.mark.drawn
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_self_check_finds(mutant: str) -> None:
    with MUTANTS[mutant]():
        found = check_strategies(build_model("llama4", torch.float32), [StrategyShape.parse("tp1")], keep=False)
    assert re.search(r"the loss is .* off, and model\.layers\.\d", found.objections()[0])


def test_dropout_in_chunks_runs_once_for_each_sequence() -> None:
    """Kernels know chunks as sequences of their own, but numbers are drawn by a token's place in its sequence."""
    model = build_model("llama4", torch.float32).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    source = CausalLM(model, by_one_rank=True)
    assert {box.path for of in source.boxes.of for box in of} == {"self_attn"}


def test_a_small_copy_that_meets_otherwise_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Llama 4 was before its chunks were known: the model is examined with fewer tokens than a chunk has, and its
    copy with more."""
    monkeypatch.setattr(interface, "_chunk_of", lambda module: None)
    monkeypatch.setattr(causal_stage, "count_by_sequence", lambda *_: None)
    monkeypatch.setattr(refusals, "_KNOWN_LAYER_TYPES", frozenset({"full_attention"}))
    model = build_model("llama4", torch.float32)
    source = CausalLM(model, by_one_rank=True)
    found = check_strategies(model, [StrategyShape.parse("tp1")], keep=False)
    assert (bool(source.boxes), found.objections(), found.boxed) == (False, [], "self_attn")
    with pytest.raises(ConfigError, match="a small copy of the model runs self_attn once for each sequence"):
        _refuse_other_ways(found, source)
    _refuse_other_ways(replace(found, boxed=""), source)


# --- Latent attention: its heads are shared by tensor parallel ranks, whether or not a model's plan has a word
# of it.
@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear"])
def test_heads_are_cut_where_the_plan_has_no_word_of_them(family: str) -> None:
    """Of Kimi's layers two have delta rules, whose projections are called alike: every rank computes these whole."""
    source = CausalLM(build_model(family, torch.float32))
    assert (source.plan.heads_cut, source.plan.no_tp, source.plan.no_slices) == (True, "", "")
    attention = "model.layers.3.self_attn"
    cut = {name: source.specs[f"{attention}.{name}.weight"].shard_shape(0, 4) for name in ("kv_b_proj", "o_proj")}
    assert cut == {"kv_b_proj": (8 * (8 + 12) // 4, 16), "o_proj": (64, 8 * 12 // 4)}
    assert source.specs[f"{attention}.kv_a_proj_with_mqa.weight"].rule.dim is None
    whole = [f"model.layers.0.self_attn.{name}.weight" for name in ("q_proj", "o_proj")]
    assert all(source.specs[name].rule.dim is None for name in whole if family == "kimi_linear")


def test_attention_that_cannot_be_cut_is_left_whole() -> None:
    """As it was before: of code that views its tensors by all heads, say."""
    with mock.patch.object(causal_lm, "latent_styles", return_value={"model.layers.0.self_attn.o_proj": "rowwise"}):
        source = CausalLM(build_model("deepseek_v3", torch.float32))
    assert (source.plan.heads_cut, source.plan.no_tp, source.unnamed.latent) == (False, "", False)


# --- Attention in groups of heads: the same numbers as with all heads at once, by messages in one order on all
# ranks.
Result = tuple[Tensor, ...]
FLOAT64 = torch.float64
LENGTHS = (9, 4, 6)
CUTS = (0, 3, 4, 9)  # of the first sequence, where it runs in slices


def inputs(tokens: int, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """q, k, v, the gradient of the output, and sinks."""
    generator = torch.Generator().manual_seed(heads + kv_heads)
    shapes = ((tokens, heads, 4), (tokens, kv_heads, 4), (tokens, kv_heads, 6), (tokens, heads, 6), (heads,))
    q, k, v, grad, sinks = (torch.randn(shape, generator=generator, dtype=FLOAT64) for shape in shapes)
    return q, k, v, grad, sinks


def packs(rank: int, sp: int, group: Any, groups: int, sliced: bool) -> Iterator[tuple[Pack, int, list[int]]]:
    """The row, or one for each slice of the first sequence with another sequence beside it; and the tokens of each."""
    overlap, first = Overlap(groups, least_tokens=0), LENGTHS[0]
    if not sliced:
        yield Pack(LENGTHS, rank, sp, group, overlap=overlap), 0, list(range(sum(LENGTHS)))
        return
    contexts = Contexts(first)
    beside = [list(range(first, first + 4)), [], list(range(first + 4, sum(LENGTHS)))]
    for (start, stop), others in zip(pairwise(CUTS), beside, strict=True):
        lengths = (stop - start, len(others)) if others else (stop - start,)
        pack = Pack(lengths, rank, sp, group, chunk=Chunk(start, stop, contexts), overlap=overlap)
        yield pack, start, [*range(start, stop), *others]


def attended(
    rank: int, sp: int, group: Any, *, groups: int, heads: tuple[int, int] = (8, 8), sliced: bool = False,
    recompute: bool = False, sinks: bool = False, rate: float = 0.0, window: int | None = None,
) -> Result:  # fmt: skip
    """Outputs of this rank's tokens, and the gradients of all that it computes with."""
    q, k, v, grad, bias = inputs(sum(LENGTHS), *heads)
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    outs: list[Tensor] = []
    grads: list[Tensor] = []
    for pack, past, tokens in packs(rank, sp, group, groups, sliced):
        own = tokens[slice(*pack.local)]
        drop = AttentionDropout(rate, token_keys(pack.lengths, [7] * len(pack.lengths), past=past), 3) if rate else None
        context = None if pack.chunk is None else pack.chunk.contexts.of("layer")

        def run(q: Tensor, k: Tensor, v: Tensor, pack: Pack = pack, drop: Any = drop, context: Any = context) -> Tensor:
            given = {"window": window, "sinks": bias if sinks else None, "dropout": drop, "context": context}
            return varlen_attention(q * 2, k, v, pack, **given).sin()

        rows = q[own], k[own], v[own]
        outs.append(checkpoint(run, *rows, use_reentrant=False) if recompute else run(*rows))
        grads.append(grad[own])
    for out, gradient in zip(reversed(outs), reversed(grads), strict=True):
        out.backward(gradient)
    return *(out.detach() for out in outs), *(torch.zeros(0) if x.grad is None else x.grad for x in leaves)


def on_ranks(sp: int, program: Callable[[int, Any], Any]) -> list[Any]:
    ranks = InProcessRanks(sp)
    return ranks.run(lambda rank: program(rank, ranks.group(tuple(range(sp)), rank)))


@pytest.mark.drawn
@pytest.mark.parametrize("sp", [2, 4])
@pytest.mark.parametrize("heads", [(24, 12), (8, 2), (16, 1)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute": True, "window": 3},
        {"sinks": True},
        {"rate": 0.4},
        {"sliced": True},
        {"sliced": True, "window": 5, "rate": 0.4},
        {"sliced": True, "recompute": True, "sinks": True},
    ],
    ids=lambda settings: " ".join(settings) or "plain",
)
def test_groups_of_heads_compute_what_all_at_once_do(sp: int, heads: tuple[int, int], settings: dict[str, Any]) -> None:
    def result(groups: int) -> list[Result]:
        return on_ranks(sp, lambda rank, group: attended(rank, sp, group, groups=groups, heads=heads, **settings))

    at_once, *others = map(result, (1, 2, 5))  # of twelve keys five groups are unequal
    assert all(float(x.abs().sum()) > 0 for x in at_once[0][-4:-1])
    for other in others:
        for mine, expected in zip(other, at_once, strict=True):
            for x, y in zip(mine, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


def test_groups_fit_the_heads_and_their_keys() -> None:
    # Of fewer keys than groups several groups share one, and are alike; else each has whole ones with their queries.
    assert [cut_heads(4, *heads) for heads in ((8, 2), (8, 1), (6, 2), (1, 1), (2, 2))] == [
        (2, 2, 2, 2), (2, 2, 2, 2), (3, 3), (1,), (1, 1),
    ]  # fmt: skip
    assert [cut_heads(n, 8, 8) for n in (1, 2, 3, 4, 8)] == [(8,), (4, 4), (2, 3, 3), (2, 2, 2, 2), (1,) * 8]
    assert cut_heads(8, 16, 16) == (1, 2, 2, 2, 2, 3, 3, 1), "a sixteenth of all comes first, and goes last"
    assert [cut_heads(4, *heads) for heads in ((24, 12), (12, 6), (5, 5))] == [(6,) * 4, (2, 4, 4, 2), (1, 1, 2, 1)]


def _exposed(groups: Sequence[int], attention: float) -> float:
    """How much longer a row takes than its attention, in units of its messages: group by group, one after the other."""
    heads, sent, done = sum(groups), 0.0, 0.0
    come = []
    for n in groups:
        sent += 0.75 * n / heads
        come.append(sent)
    for n, arrived in zip(groups, come, strict=True):
        done = max(done, arrived) + attention * n / heads
        sent = max(sent, done) + 0.25 * n / heads
    return sent - attention


@given(st.integers(1, 8), st.integers(1, 24), st.integers(1, 6))
def test_all_heads_are_in_some_group_and_no_row_waits_longer_than_in_equal_ones(
    at_most: int, kv_heads: int, of_each: int
) -> None:
    heads = of_each * kv_heads
    groups = cut_heads(at_most, heads, kv_heads)
    assert sum(groups) == heads
    assert 1 <= len(groups) <= at_most
    assert all(n % of_each == 0 or of_each % n == 0 for n in groups), "whole keys, or a part of one's queries"
    number = max(n for n in range(1, at_most + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0))
    equal = (heads // number,) * number
    for attention in (0.2, 0.5, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0):
        assert _exposed(groups, attention) <= _exposed(equal, attention) + 1e-9


def test_short_rows_are_exchanged_at_once_and_slices_of_a_sequence_alike() -> None:
    def groups(lengths: Sequence[int], sp: int = 4, total: int = 0) -> int:
        chunk = Chunk(0, lengths[0], Contexts(total)) if total else None
        return Pack(tuple(lengths), 0, sp, chunk=chunk, overlap=Overlap()).head_groups

    assert (groups([4095]), groups([4000, 96]), groups([4096], sp=8), groups([8192], sp=8)) == (1, 2, 1, 2)
    assert (groups([9000]), groups([10**6])) == (4, 8)
    assert (groups([10], total=4096), groups([10, 8000], total=4095)) == (2, 1)
    assert replace(Pack((10**6,), sp=2), overlap=AT_ONCE).head_groups == 1


class _Recorder(dist.ProcessGroup):
    """A group of two that keeps a list of what is started and waited for; nothing moves."""

    def __init__(self, events: list[str]):
        super().__init__(0, 2)  # type: ignore[call-arg]
        self._events, self._started = events, 0

    def alltoall_base(self, output: Tensor, source: Tensor, *_: Any) -> dist.Work:
        name = f"{self._started}"
        self._started += 1
        self._events.append(f"start {name}")
        output.copy_(source)
        events = self._events

        class Message(dist.Work):
            def wait(self, timeout: Any = None) -> bool:
                events.append(f"wait {name}")
                return True

        return Message()


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str], number: int) -> Tensor:
        ctx.events, ctx.number = events, number
        events.append(f"compute {number}")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(f"compute back {ctx.number}")
        return grad * 2, None, None


@contextmanager
def marked(events: list[str]) -> Iterator[None]:
    """Within it, attention of a group of heads leaves its number among the events."""
    attend = backends._attend

    def noted(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        number = sum(event.startswith("compute") for event in events)
        return attend(_Marked.apply(q, events, number), *args, **kwargs)

    with mock.patch.object(backends, "_attend", noted):
        yield


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_messages_start_early_and_are_waited_for_late(kv_heads: int) -> None:
    """Messages are numbered as they start: of four groups 0 to 3 bring q, k and v, and 4 to 7 the outputs back."""
    events: list[str] = []
    pack = Pack((6,), 0, 2, _Recorder(events), overlap=Overlap(least_tokens=0))
    q, k, v = (torch.ones(3, heads, 4, dtype=FLOAT64, requires_grad=True) for heads in (8, kv_heads, kv_heads))
    with marked(events):
        out = varlen_attention(q, k, v, pack)
        forward = list(events)
        events.clear()
        out.sum().backward()
    assert forward == [
        *("start 0", "start 1", "start 2", "start 3"),
        *("wait 0", "compute 0", "start 4", "wait 1", "compute 1", "start 5"),
        *("wait 2", "compute 2", "start 6", "wait 3", "compute 3", "start 7"),
        *("wait 4", "wait 5", "wait 6", "wait 7"),
    ]
    # The gradients of group 3 leave and arrive first: 8 to 11 bring those of the outputs, 12 to 15 those of q, k and v.
    assert events == [
        *("start 8", "start 9", "start 10", "start 11"),
        *("wait 8", "compute back 3", "start 12", "wait 9", "compute back 2", "start 13"),
        *("wait 10", "compute back 1", "start 14", "wait 11", "compute back 0", "start 15"),
        *("wait 15", "wait 14", "wait 13", "wait 12"),
    ]


def below(node: Any) -> set[Any]:
    """All of a graph whose backward waits for that of `node`."""
    found, left = set[Any](), [node]
    while left:
        left += [after for after, _ in left.pop().next_functions if after is not None and after not in found]
        found.update(left)
    return found


def test_no_choice_of_autograds_can_change_the_order_of_messages() -> None:
    """Of any two steps of the backward that start messages, one has to wait for the other."""
    pack = Pack((6,), 0, 2, _Recorder([]), overlap=Overlap(least_tokens=0))
    q, k, v = (torch.ones(3, heads, 4, requires_grad=True) for heads in (8, 4, 4))
    out = varlen_attention(q, k, v, pack)
    starting = [node for node in {out.grad_fn, *below(out.grad_fn)} if node.name() == "_WaitBackward"]
    assert len(starting) == 5
    for one, other in combinations(starting, 2):
        assert other in below(one) or one in below(other)


def test_what_does_not_learn_sends_nothing_back() -> None:
    """Sinks that learn beside frozen queries, keys and values."""
    events: list[str] = []
    pack = Pack((6,), 0, 2, _Recorder(events), overlap=Overlap(least_tokens=0))
    sinks = torch.zeros(8, requires_grad=True)
    q, k, v = (torch.ones(3, 8, 4) for _ in range(3))
    out = varlen_attention(q, k, v, pack, sinks=sinks)
    events.clear()
    out.sum().backward()
    assert sinks.grad is not None
    assert sum(event.startswith("start") for event in events) == sum(event.startswith("wait") for event in events) == 4
