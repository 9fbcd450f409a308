"""Random numbers by place: a hash with the statistics of independent draws, that depends on each of its ingredients."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from ds_hydra.pipe.attention.backends import varlen_attention
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
from ds_hydra.pipe.rows import Pack
from ds_hydra.zero_hetero.errors import ConfigError

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


@pytest.mark.parametrize("backend", ["torch", "flash"])
def test_kernels_that_draw_by_themselves_are_refused(backend: str) -> None:
    x = torch.zeros(4, 2, 8)
    told = rf"backend '{backend}' draws dropout \(0\.1\) by itself.*attention_dropout to 0 .*'sdpa'"
    with pytest.raises(ConfigError, match=told):
        varlen_attention(x, x, x, Pack((4,)), dropout=AttentionDropout(0.1, keys(tokens=4), 0), backend=backend)
