"""Slices of sequences equal whole ones: their rows, what they draw, attention before them, and what stays in reach."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain, combinations, pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_hydra.data.tokens import TokenSequence
from ds_hydra.pipe.attention.backends import varlen_attention
from ds_hydra.pipe.contexts import Context, Contexts
from ds_hydra.pipe.dropout import (
    AttentionDropout,
    drop,
    keep_mask,
    mix,
    normal_from,
    place_key,
    random_bits,
    sequence_key,
    step_key,
    token_keys,
    uniform,
)
from ds_hydra.pipe.head_sharing import most_of_room, row_parts
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.recomputed import computed_again
from ds_hydra.pipe.rows import Chunk, Pack, Reach, position_ids
from ds_hydra.pipe.shape import ParallelScheme, PipelineShape
from ds_hydra.pipe.stage import StagePlace
from ds_hydra.plan.step_plan import MicroBatchPlan, Span
from ds_hydra.planner.pipelines import row_order
from ds_hydra.profiling.stage_memory import measure_activations
from ds_hydra.step.batching import RankBatches, build_batches
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.families import build_model

# --- Slices of sequences equal whole ones: their rows, what they draw, and attention with the keys and values
# before.
CPU, FLOAT64 = torch.device("cpu"), torch.float64
LENGTHS = (40, 7, 3, 25, 1, 60)
IDS = (11, 5, 90, 3, 8, 70)


def cuts(total: int, draw: random.Random, most: int = 4) -> list[tuple[int, int]]:
    inner = sorted(draw.sample(range(1, total), min(total - 1, draw.randint(1, most - 1))))
    return list(pairwise([0, *inner, total]))


# Rows: tokens, positions, labels, weights.


def load(sequence: int) -> TokenSequence:
    """Tokens that tell where they are from, and the next ones; a third of the targets are not learnt."""
    length = LENGTHS[IDS.index(sequence)]
    tokens = 1000 * sequence + np.arange(length)
    labels = np.append(tokens[1:], IGNORED)
    labels[: length // 3] = IGNORED
    return TokenSequence(tokens, labels)


def batches_of(
    plans: Sequence[MicroBatchPlan], loss_norm: str, sp: int, rank: int, *, balances: bool = False
) -> RankBatches:
    pipeline = place_pipeline(PipelineShape.of(ParallelScheme(sp=sp)), 0, 4)
    (place,) = StagePlace.all_of(pipeline, rank, lambda ranks: None)
    return build_batches(plans, IDS, place, load, loss_norm, CPU, step_key=4, balances=balances)


def by_token(plans: Sequence[MicroBatchPlan], loss_norm: str, sp: int) -> tuple[dict[int, tuple[Any, ...]], int]:
    """What stands in the rows for each token (which are all different), and the normaliser of the loss."""
    found: dict[int, tuple[Any, ...]] = {}
    total = 0
    for rank in range(sp):
        built = batches_of(plans, loss_norm, sp, rank)
        total += built.weight
        for batch in built.batches:
            keys = token_keys(batch.pack.lengths, batch.pack.keys, past=batch.pack.past)
            start, stop = batch.pack.local
            rows = (batch.input_ids[0], batch.position_ids[0], batch.labels, batch.weights, keys[start:stop])  # type: ignore[index]
            for token, position, label, weight, key in zip(*(row.tolist() for row in rows), strict=True):  # type: ignore[union-attr]
                if token:  # 0 is padding
                    assert token not in found
                    found[token] = position, label, weight if label != IGNORED else None, key
    return found, total


def random_plans(draw: random.Random) -> list[MicroBatchPlan]:
    """Sequences 0, 3 and 5 in slices that run in turns, the others beside slices."""
    chains = [[Span(i, *ends) for ends in cuts(LENGTHS[i], draw)] for i in (0, 3, 5)]
    rows: list[list[Span]] = []
    while chains:
        rows.append([draw.choice(chains).pop(0)])
        chains = [chain for chain in chains if chain]
    for i in (1, 2, 4):
        draw.choice(rows).insert(draw.randint(0, 1), Span(i, 0, LENGTHS[i]))
    return [MicroBatchPlan(tuple(row)) for row in rows]


@given(st.integers(0, 10**6), st.sampled_from(["token", "sequence"]), st.sampled_from([1, 3]))
def test_rows_of_slices_hold_what_rows_of_whole_sequences_hold(seed: int, loss_norm: str, sp: int) -> None:
    whole = [MicroBatchPlan.of_whole((i,), LENGTHS) for i in range(len(LENGTHS))]
    assert by_token(random_plans(random.Random(seed)), loss_norm, sp) == by_token(whole, loss_norm, sp)


def test_the_target_of_a_slices_last_token_is_the_next_slices_first() -> None:
    plans = [MicroBatchPlan((Span(1, 0, 4),)), MicroBatchPlan((Span(2, 0, 3), Span(1, 4, 7)))]
    first, second = batches_of(plans, "token", 1, 0).batches
    assert first.labels is not None
    assert second.input_ids is not None
    assert first.labels[-1] == second.input_ids[0, 0] == 5004
    assert second.position_ids.tolist() == [[4, 5, 6, 0, 1, 2]]  # the slice stands first


def test_a_slice_counts_with_its_micro_batch_in_the_mean_of_micro_batches() -> None:
    plans = [MicroBatchPlan((Span(1, 0, 4),)), MicroBatchPlan((Span(1, 4, 7), Span(2, 0, 3)))]
    built = batches_of(plans, "micro_batch", 1, 0)
    assert built.weight == 2
    for batch in built.batches:
        assert batch.weights is not None
        assert batch.labels is not None
        assert float(batch.weights[batch.labels != IGNORED].sum()) == pytest.approx(1.0)


def test_routers_count_a_sequence_in_slices_on_ranks_without_its_last_one() -> None:
    """The last 2 of 40 tokens in front of 25 others: both are on rank 0, but rank 1 held some of those before."""
    plans = [MicroBatchPlan((Span(0, 0, 38),)), MicroBatchPlan((Span(0, 38, 40), Span(3, 0, 25)))]
    for rank in range(2):
        first, last = (batch.balance for batch in batches_of(plans, "token", 2, rank, balances=True).batches)
        assert first is not None
        assert last is not None
        assert (0 in last.sequence) == (rank == 0)
        assert float(first.weights[0]) == float(last.weights[0]) == pytest.approx(26 / 40**2)


def test_packs_of_slices_know_their_place() -> None:
    one, other = Contexts(9), Contexts(5)
    packs = [
        Pack((4,), chunk=Chunk(0, 4, one)),
        Pack((3, 2)),
        Pack((2,), chunk=Chunk(0, 2, other)),
        Pack((3, 3), chunk=Chunk(4, 7, one)),
        Pack((3,), chunk=Chunk(2, 5, other)),
        Pack((2,), chunk=Chunk(7, 9, one)),
    ]
    assert [pack.chunk is not None and pack.chunk.is_last for pack in packs] == [False] * 4 + [True] * 2
    assert packs[3].whole_lengths == (9, 3)
    assert position_ids((3, 3), 1, 5, past=4).tolist() == [5, 6, 0, 1]


# Attention.


class Example:
    """A long sequence in slices, with short ones beside some of them."""

    def __init__(
        self, seed: int, *, window: int | None, softcap: float | None, kv_heads: int, extras: bool,
        chunk: int | None = None,
    ):  # fmt: skip
        draw = random.Random(seed)
        self.total = draw.randint(2, 40)
        self.settings: dict[str, Any] = {"window": window, "softcap": softcap, "chunk": chunk}
        generator = torch.Generator().manual_seed(seed)
        self.ends = cuts(self.total, draw)
        self.beside = [tuple(draw.randint(1, 9) for _ in range(draw.choice([0, 0, 1, 2]))) for _ in self.ends]
        tokens = self.total + sum(map(sum, self.beside))
        shapes = ((4, 6), (kv_heads, 6), (kv_heads, 10), (4, 10))
        self.q, self.k, self.v, self.grad = (
            torch.randn(tokens, *shape, generator=generator, dtype=FLOAT64) for shape in shapes
        )
        self.sinks = torch.randn(4, generator=generator, dtype=FLOAT64) if extras else None
        shorts = [n for row in self.beside for n in row]
        self.keys = token_keys([self.total, *shorts], range(1 + len(shorts))) if extras else None

    def run(self, inputs: Sequence[Tensor], rows: Tensor, pack: Pack, context: Context | None = None) -> Tensor:
        keys = None if self.keys is None else self.keys[rows]
        drop = None if keys is None else AttentionDropout(0.3, keys, 99)
        q, k, v = (x[rows] for x in inputs)
        return varlen_attention(q, k, v, pack, sinks=self.sinks, dropout=drop, context=context, **self.settings)

    def whole(self) -> list[Tensor]:
        """Output and gradients of q, k, v with whole sequences."""
        lengths = (self.total, *(n for row in self.beside for n in row))
        inputs = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        out = self.run(inputs, torch.arange(len(self.q)), Pack(lengths))
        return [out.detach(), *torch.autograd.grad(out, inputs, self.grad)]

    def sliced(self, *, recompute: float, contexts: Contexts, draw: random.Random) -> list[Tensor]:
        """The same by slices, forward in order, backward in reverse, each computed again with this probability."""
        inputs = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        outs: list[tuple[Tensor, Tensor]] = []
        begin = self.total
        for (start, stop), beside in zip(self.ends, self.beside, strict=True):
            rows = torch.cat((torch.arange(start, stop), torch.arange(begin, begin + sum(beside))))
            begin += sum(beside)
            pack = Pack((stop - start, *beside), chunk=Chunk(start, stop, contexts))
            given = (inputs, rows, pack, contexts.of("layer"))
            passes: dict[str, Any] = {
                "use_reentrant": False,
                "context_fn": lambda: (computed_again(), computed_again()),
            }
            again = draw.random() < recompute
            out = checkpoint(self.run, *given, **passes) if again else self.run(*given)
            outs.append((rows, out))
        for rows, out in reversed(outs):
            out.backward(self.grad[rows])
        found = torch.empty_like(self.grad)
        for rows, out in outs:
            found[rows] = out.detach()
        gradients = [x.grad for x in inputs if x.grad is not None]
        return [found, *gradients]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([None, 1, 3, 8]), st.sampled_from([None, 2.0]), st.sampled_from([4, 2, 1]),
    st.booleans(), st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip
def test_attention_in_slices_is_attention_of_the_whole(
    seed: int, window: int | None, softcap: float | None, kv_heads: int, extras: bool, recompute: float
) -> None:
    """With windows, softcap, few key heads, sinks and dropout, recomputed and not; and nothing is left behind."""
    case = Example(seed, window=window, softcap=softcap, kv_heads=kv_heads, extras=extras)
    contexts = Contexts(case.total)
    mine = case.sliced(recompute=recompute, contexts=contexts, draw=random.Random(seed))
    torch.testing.assert_close(mine, case.whole(), rtol=0, atol=1e-12)  # of o, q, k and v
    left = vars(contexts.of("layer"))
    assert (left["_rows"], left["_before"], left["_sums"]) == ((), {}, ())


def in_chunks(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], chunk: int) -> Tensor:
    """Attention by the whole score matrix of each sequence; a token sees those of its own chunk."""
    outs = []
    for each_q, each_k, each_v in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
        shared = each_q.shape[1] // each_k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(shared, dim=1) for x in (each_k, each_v))
        place = torch.arange(len(each_q))
        seen = (place[:, None] >= place) & (place[:, None] // chunk == place // chunk)
        scores = torch.einsum("ihd,jhd->hij", each_q, wide_k) * q.shape[-1] ** -0.5
        outs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), wide_v))
    return torch.cat(outs)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 8, 50]), st.sampled_from([4, 2]),
       st.sampled_from([0.0, 0.5, 1.0]))  # fmt: skip
def test_attention_in_chunks_is_that_of_the_whole_score_matrix(
    seed: int, chunk: int, kv_heads: int, recompute: float
) -> None:
    """Of whole sequences in a pack, and of slices, whose first tokens see those of their chunk before them."""
    case = Example(seed, window=None, softcap=None, kv_heads=kv_heads, extras=False, chunk=chunk)
    lengths = (case.total, *(n for row in case.beside for n in row))
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    out = in_chunks(leaves[0], leaves[1], leaves[2], lengths, chunk)
    right = [out.detach(), *torch.autograd.grad(out, leaves, case.grad)]
    torch.testing.assert_close(case.whole(), right, rtol=0, atol=1e-12)
    contexts = Contexts(case.total)
    mine = case.sliced(recompute=recompute, contexts=contexts, draw=random.Random(seed))
    torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)
    left = vars(contexts.of("layer"))
    assert (left["_rows"], left["_before"], left["_sums"]) == ((), {}, ())


def test_a_window_needs_only_the_rows_within_it() -> None:
    context, rows = Context(30), torch.arange(30.0).view(30, 1, 1).expand(30, 2, 3)
    context.join(rows[:20], rows[:20], 0, Reach(4))
    k, v = context.join(rows[20:25], rows[20:25], 20, Reach(4))
    assert k[:, 0, 0].tolist() == v[:, 1, 2].tolist() == [17.0, 18.0, 19.0, 20.0, 21.0, 22.0, 23.0, 24.0]


@pytest.mark.parametrize(("window", "most"), [(4, 8), (12, 16), (None, 30)])
def test_a_window_needs_sums_of_gradients_of_the_rows_within_it(window: int | None, most: int) -> None:
    """A slice of 5 tokens sees 3 or 11 before it; the sums are those of the rows that each slice saw."""
    context = Context(30)
    rows = torch.randn(30, 1, 2, dtype=FLOAT64, requires_grad=True)
    joined = [
        context.join(rows[start : start + 5], rows[start : start + 5], start, Reach(window))
        for start in range(0, 30, 5)
    ]
    held = []
    for index in reversed(range(6)):
        k, v = joined[index]
        torch.autograd.backward((k, v), (torch.full_like(k, 10.0**index), torch.zeros_like(v)))
        held.append(max((len(total) for total in vars(context)["_sums"]), default=0))
    assert max(held) <= most
    assert rows.grad is not None
    seen = [[index for index in range(row // 5, 6) if row >= 5 * index - (window or 31) + 1] for row in range(30)]
    assert rows.grad[:, 0, 0].tolist() == [sum(10.0**index for index in each) for each in seen]


def test_gradients_in_16_bit_are_summed_in_32() -> None:
    """Of 1 + 300 times 1/512, BF16 would keep 1: half of its last place is 1/256."""
    slices = 300
    context = Context(slices)
    given = [torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(slices)]
    joined = [context.join(x, x, start) for start, x in enumerate(given)]
    for index in reversed(range(slices)):
        k, v = joined[index]
        torch.autograd.backward((k, v), (torch.full_like(k, 2.0**-9 if index else 1.0), torch.zeros_like(v)))
    assert given[0].grad is not None
    assert float(given[0].grad) == pytest.approx(1 + 299 / 512, rel=2.0**-8)


def slices_of(total: int, ends: Sequence[tuple[int, int]], context: Context) -> list[Tensor]:
    rows = torch.randn(total, 1, 2, dtype=FLOAT64, requires_grad=True)
    return [torch.cat(context.join(rows[start:stop], rows[start:stop] * 2, start)).sum() for start, stop in ends]


def run_backward(outs: Sequence[Tensor], order: Sequence[int]) -> None:
    for index in order:
        outs[index].backward(retain_graph=True)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 1), (2, 2)])
def test_backwards_in_another_order_than_the_reverse_are_refused(order: Sequence[int]) -> None:
    outs = slices_of(9, [(0, 4), (4, 6), (6, 9)], Context(9))
    told = r"of a sequence of 9 runs when that of the slice up to \d is due.*in reverse order"
    with pytest.raises(PlanError, match=told):
        run_backward(outs, order)


def test_without_the_refusal_gradients_would_be_wrong() -> None:
    """So it guards against something: the same order, with nobody who looks at it."""

    def add(self: Context, gradients: tuple[Tensor, ...], start: int, first: int) -> tuple[Tensor, ...]:
        self._open = first + len(gradients[0])
        return right(self, gradients, start, first)

    right, context = Context.add, Context(6)
    rows = [torch.ones(3, 1, 1, dtype=FLOAT64, requires_grad=True) for _ in range(2)]
    outs = [context.join(x, x, start)[0].sum() for start, x in zip((0, 3), rows, strict=True)]
    with mock.patch.object(Context, "add", add):
        for out in outs:
            out.backward()
    assert rows[0].grad is not None
    assert rows[0].grad.flatten().tolist() == [1.0, 1.0, 1.0]  # both slices saw these rows: it should be 2


def test_forwards_out_of_order_are_refused() -> None:
    with pytest.raises(PlanError, match=r"tokens 4 to 6 of a sequence of 9 run forward when only 0 tokens have"):
        slices_of(9, [(4, 6)], Context(9))


def test_a_slice_needs_a_context() -> None:
    x = torch.zeros(2, 1, 8)
    with pytest.raises(ConfigError, match="an attention that keeps no keys and values"):
        varlen_attention(x, x, x, Pack((2,), chunk=Chunk(0, 2, Contexts(4))))


# --- Random numbers by place: a hash with the statistics of independent draws, that depends on each of its
# ingredients.
T, WIDTH = 2048, 512


def keys(seed: int = 0, step: int = 1, sequence: int = 7, tokens: int = T) -> Tensor:
    return token_keys([tokens], [sequence_key(step_key(seed, step), sequence)])


def mask(keys: Tensor, layer: int | None = 3, module: str = "drop", draw: int = 0, rate: float = 0.5) -> Tensor:
    return keep_mask(keys, place_key(layer, module, draw), range(WIDTH), rate)


def test_hash_is_lowbias32() -> None:
    """As its author's C code computes it."""
    assert [mix(x) for x in (0, 1, 2, 0xFFFFFFFF)] == [0, 0x688990C0, 0xD1132181, 0x6768824A]


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_shares_of_tokens_and_of_features_are_binomial(rate: float) -> None:
    kept = mask(keys(), rate=rate).double()
    spread = math.sqrt(rate * (1 - rate))
    assert abs(kept.mean() - (1 - rate)) < 5 * spread / math.sqrt(kept.numel())
    for dim, size in ((0, T), (1, WIDTH)):
        assert float(kept.mean(dim).std()) == pytest.approx(spread / math.sqrt(size), rel=0.15)


def test_neighbours_are_uncorrelated() -> None:
    kept = mask(keys()).double()
    for rows in (kept, kept.T):
        corr = torch.corrcoef(rows).fill_diagonal_(0.0)
        noise = rows.shape[1] ** -0.5
        assert float(corr.std()) == pytest.approx(noise, rel=0.05)
        assert float(corr.abs().max()) < 7 * noise


def test_every_ingredient_counts() -> None:
    """Masks that differ in one ingredient are independent: half of the elements agree."""
    masks = {
        "plain": mask(keys()),
        "seed": mask(keys(seed=1)),
        "large seed": mask(keys(seed=1 << 32)),
        "step": mask(keys(step=2)),
        "sequence": mask(keys(sequence=8)),
        "position": mask(keys(tokens=T + 1)[1:]),
        "layer": mask(keys(), layer=4),
        "no layer": mask(keys(), layer=None),
        "module": mask(keys(), module="other"),
        "draw": mask(keys(), draw=1),
    }
    for (one, a), (other, b) in combinations(masks.items(), 2):
        assert abs(float((a == b).double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(T * WIDTH), (one, other)
        by_token = (a == b).double().mean(dim=1)
        assert float((by_token - 0.5).abs().max()) < 7 * 0.5 / math.sqrt(WIDTH), (one, other)


def test_parts_draw_what_the_whole_draws() -> None:
    """A part of the features, of the tokens, or of the sequences of a pack."""
    step, place = step_key(5, 9), place_key(0, "m", 0)
    lengths, ids = [5, 33, 2], [11, 4, 70]
    row = token_keys(lengths, [sequence_key(step, i) for i in ids])
    whole = random_bits(row, place, range(24))
    assert torch.equal(random_bits(row[7:30], place, range(8, 16)), whole[7:30, 8:16])
    alone = token_keys([33], [sequence_key(step, 4)])
    assert torch.equal(random_bits(alone, place, range(24)), whole[5:38])


def test_numbers_have_their_distributions() -> None:
    u = uniform(keys(), place_key(None, "m", 0), range(WIDTH), torch.float64)
    assert 0.0 < float(u.min()) < 1e-5 < 1 - 1e-5 < float(u.max()) < 1.0
    counts = torch.histc(u, 64, 0.0, 1.0)
    assert float(((counts - u.numel() / 64) ** 2).sum() / (u.numel() / 64)) < 63 + 5 * math.sqrt(2 * 63)
    normal = normal_from(u)
    assert abs(float(normal.mean())) < 5e-3
    assert float(normal.std()) == pytest.approx(1.0, abs=5e-3)
    assert torch.equal(uniform(keys(), place_key(None, "m", 0), range(WIDTH), torch.float32), u.float())


def test_mean_and_gradient_are_scaled() -> None:
    x = torch.rand(T, WIDTH, dtype=torch.float64, requires_grad=True)
    kept = mask(keys(), rate=0.2)
    out = drop(x, kept, 0.2)
    assert torch.equal(out != 0, kept)
    assert float((out.mean() / x.mean()).detach()) == pytest.approx(1.0, abs=5e-3)
    out.sum().backward()
    assert torch.allclose(x.grad, kept.double() / 0.8, rtol=1e-15)  # type: ignore[arg-type]


def test_attention_is_dropped_by_head_query_and_key() -> None:
    """Of two sequences in a pack, in blocks, the same as each alone and some heads alone."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, 4, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    row = token_keys([28, 12], [3, 4])
    whole = varlen_attention(q, k, v, Pack((28, 12)), dropout=AttentionDropout(0.3, row, 99))
    alone = varlen_attention(q[28:], k[28:], v[28:], Pack((12,)), dropout=AttentionDropout(0.3, row[28:], 99))
    assert torch.allclose(whole[28:], alone, rtol=1e-12)
    heads = AttentionDropout(0.3, row, 99, first_head=2)
    assert torch.allclose(whole[:, 2:], varlen_attention(q[:, 2:], k[:, 2:], v[:, 2:], Pack((28, 12)), dropout=heads))
    assert not torch.allclose(whole, varlen_attention(q, k, v, Pack((28, 12))))
    ones = torch.ones(1, 64, 300, 300)
    kept = AttentionDropout(0.3, token_keys([300], [5]), 7)(ones, first_token=0, first_query=0, first_key=0) > 0
    noise = math.sqrt(0.3 * 0.7 / 300)
    for dim in (2, 3):
        assert float((kept.double().mean(dim) - 0.7).abs().max()) < 7 * noise
    assert abs(float((kept[:, 0] == kept[:, 1]).double().mean()) - (0.49 + 0.09)) < 0.01


# --- What stays of keys and values of a sequence in slices, where a token sees some of those before it.
EXACT = torch.float64


def kept_bytes(total: int, size: int, window: int | None, again: Callable[[int], bool], *, train: bool = True) -> int:
    """Bytes of distinct storages that stay of keys and values of a sequence in slices, when all have run forward: what
    autograd keeps of slices that are not computed again, and what their context holds."""
    context, seen = Context(total), dict[int, int]()

    def note(x: Tensor) -> None:
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()

    alive = []
    for start in range(0, total, size):
        k, v = (torch.randn(size, 2, 4, dtype=EXACT, requires_grad=train) for _ in range(2))
        with torch.set_grad_enabled(train), computed_again() if again(start // size) else nullcontext():
            joined = context.join(k, v, start, Reach(window))
        if train and not again(start // size):
            alive.append(joined)
            for x in joined:
                note(x)
    held = vars(context)
    for x in (*held["_rows"], *chain.from_iterable(held["_before"].values())):
        note(x)
    return sum(seen.values())


ROW = 2 * 2 * 4 * 8  # bytes of keys and values of a token


@pytest.mark.parametrize(
    ("size", "window", "again", "most"),
    [
        (256, 17, "all", 15 * 16),  # 16 rows of each of 15 slices that others follow, in place of 4,096
        (256, 17, "others", 8 * 272 + 8 * 16),  # every other slice stays, with the rows in its reach
        (256, 17, "none", 16 * 272),
        (16, 257, "none", 4096 * 9 // 8),  # of slices shorter than the window an eighth is there twice
        (16, 257, "all", 4096 * 9 // 8),
        (256, None, "all", 4096),  # no window: later slices attend to all
        (256, None, "none", 4096),
    ],
)
def test_of_a_window_only_rows_in_reach_of_others_stay(size: int, window: int | None, again: str, most: int) -> None:
    rule = {"all": lambda i: True, "others": lambda i: i % 2 == 1, "none": lambda i: False}[again]
    assert kept_bytes(4096, size, window, rule) <= most * ROW


def test_an_evaluation_keeps_a_window() -> None:
    assert kept_bytes(4096, 256, 17, lambda i: False, train=False) == 0, "after the last slice"
    assert kept_bytes(4096, 16, 257, lambda i: False, train=False) <= 8 * 256 * ROW


def test_the_memory_model_knows_what_does_not_grow_with_a_slice() -> None:
    """Five rows before a slice, in a layer that is computed again; and what random numbers follow from on a CPU."""
    source = CausalLM(build_model("mistral", torch.float32))
    found = measure_activations(source, 1, 1, torch.device("cpu"), torch.float32, 512)
    rows, of_draws = 5 * 2 * 4 * 8 * 4, 2 * torch.get_rng_state().nbytes
    assert rows + of_draws <= found.state <= 4 * rows + of_draws
    inputs = 512 / found.layer  # what enters a layer and, of the stage's last, what leaves it
    assert found.recomputed == pytest.approx(inputs, rel=0.25)


# --- Which tokens' queries each of the ranks computes that have the same heads, and which keys it needs. Pure
# but for torch's types.
REACHES = st.sampled_from([Reach(), Reach(window=5), Reach(chunk=4)])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(2, 6), REACHES)
def test_parts_are_a_row_and_have_the_keys_that_their_queries_see(lengths: list[int], count: int, reach: Reach) -> None:
    tokens = sum(lengths)
    if tokens < count:
        return
    parts = row_parts(tuple(lengths), 0, reach, count)
    assert [parts[0].start, *(part.stop for part in parts)] == [*(part.start for part in parts), tokens]
    positions = position_ids(lengths, 0, tokens)
    for part in parts:
        assert part.start < part.stop
        seen = [
            token - at + reach.first(at) for token in range(part.start, part.stop) for at in (int(positions[token]),)
        ]
        assert part.first == seen[0] <= min(seen)


def test_parts_cost_about_the_same() -> None:
    """Of a sequence of 12 tokens the first eight see 36 keys and the others 42, where halves of six see 21 and 57."""
    (first, last) = row_parts((12,), 0, Reach(), 2)
    assert (first.stop, last.first) == (8, 0)
    work = np.arange(1, 1001)
    shares = [work[part.start : part.stop].sum() / work.sum() for part in row_parts((1000,), 0, Reach(), 4)]
    assert max(shares) < 0.252
    windowed = row_parts((1000,), 0, Reach(window=10), 4)
    assert max(part.stop - part.start for part in windowed) < 256
    assert [part.first for part in windowed[1:]] == [part.start - 9 for part in windowed[1:]]


def test_a_slice_costs_what_it_sees() -> None:
    """Of tokens 900..1000 of a sequence all see about as many keys, so they are shared by their number."""
    (first, _) = row_parts((100,), 900, Reach(), 2)
    assert first.stop in (51, 50)


@pytest.mark.parametrize("lengths", [[9660, *range(100, 900, 30)], [2912, *range(100, 1000, 32)]])
def test_in_the_order_of_a_plan_two_ranks_compute_nearly_what_they_hold(lengths: list[int]) -> None:
    """Sorted, the longer half of the tokens is most of the work; a single long sequence is cut off its middle."""
    half = sum(lengths) // 2

    def off(row: list[int]) -> int:
        return abs(row_parts(tuple(row), 0, Reach(), 2)[0].stop - half)

    assert off([lengths[i] for i in row_order(range(len(lengths)), lengths)]) < 0.3 * off(sorted(lengths))


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_a_row_within_its_share_has_memory_for_what_the_first_node_keeps_more(nodes: int) -> None:
    """In queries of a token that a node holds: at least 13.4 a layer, and queries, outputs, keys and values of those
    that the first node computes, in place of those that it holds."""
    first = row_parts((4096,), 0, Reach(), nodes)[0]
    assert (first.stop - first.start) * nodes / 4096 == pytest.approx(nodes**0.5, rel=1e-3)
    more = 4.0 * ((first.stop - first.start) * nodes / 4096 - 1.0)
    assert most_of_room(nodes) * (13.4 + more) <= 13.4
    assert most_of_room(nodes) * (13.4 + more) > 0.94 * 13.4, "no more is left free than is needed"
