"""Master shards: any number of ranks trains as torch.optim on the whole tensors does, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.testing import run_ranks
from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import BucketSpec
from ds_hydra.zero_hetero.masters import MasterShards, clip_, global_grad_norm
from ds_hydra.zero_hetero.transport import TorchTransport

BUCKETS = (
    BucketSpec("embed", (("embed.weight", 57),)),
    BucketSpec("layer.0", (("a.weight", 40), ("a.bias", 5), ("norm.weight", 3), ("b.weight", 33))),
    BucketSpec("head", (("tiny.bias", 2),)),
)
NAMES = [name for bucket in BUCKETS for name, _ in bucket.params]
GROUPS: list[dict[str, Any]] = [
    {"names": [name for name in NAMES if "bias" not in name and "norm" not in name], "weight_decay": 0.1, "lr": 0.02},
    {"names": [name for name in NAMES if "bias" in name or "norm" in name], "weight_decay": 0.0, "lr": 0.01},
]


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(n, generator=generator) for bucket in BUCKETS for name, n in bucket.params}


def train_sharded(rank: int, num_ranks: int, steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Clipped AdamW steps on random gradients; norms, parameters and first moments."""
    masters = MasterShards(BUCKETS, rank, num_ranks, "cpu")
    for name, value in tensors(0).items():
        masters.load(name, value)
    optimizer = torch.optim.AdamW(masters.param_groups(GROUPS), foreach=False)
    masters.put_grads(None)
    norms = []
    for step in range(steps):
        gradients = tensors(1 + step)
        for piece in masters.pieces():
            masters.grad_of(piece).copy_(gradients[piece.name][piece.start : piece.stop])
        norm = global_grad_norm(masters.grads, dist.group.WORLD)
        clip_(masters.grads, norm, 1.0)
        optimizer.step()
        norms.append(norm.item())
    transport = TorchTransport()
    moments = masters.gather_full(transport, source=masters.optimizer_state(optimizer, "exp_avg"), ranks=[0])
    assert bool(moments) == (rank == 0)
    return norms, masters.gather_full(transport), moments


@pytest.mark.drawn
@pytest.mark.parametrize("num_ranks", [1, 4, 5, 7])
def test_adamw_is_bit_equal_to_the_whole(num_ranks: int) -> None:
    params = {name: torch.nn.Parameter(value) for name, value in tensors(0).items()}
    groups = [
        {"params": [params[name] for name in group["names"]], "lr": group["lr"], "weight_decay": group["weight_decay"]}
        for group in GROUPS
    ]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    expected_norms = []
    for step in range(3):
        gradients = tensors(1 + step)
        for name, param in params.items():
            param.grad = gradients[name]
        norm = torch.cat([g.double() for g in gradients.values()]).norm()
        clip_(gradients.values(), norm, 1.0)
        optimizer.step()
        expected_norms.append(norm.item())

    def body(rank: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        return train_sharded(rank, num_ranks, 3)

    results = run_ranks(body, num_ranks)
    for norms, values, _ in results:
        assert norms == results[0][0]  # the same on every rank
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        assert list(values) == NAMES
        for name, value in values.items():
            assert torch.equal(value, params[name].detach()), name
    for name, value in results[0][2].items():
        assert torch.equal(value, optimizer.state[params[name]]["exp_avg"]), name


def test_clipping_is_torchs() -> None:
    grads = [torch.randn(100, generator=torch.Generator().manual_seed(3)), torch.empty(0)]
    param = torch.nn.Parameter(torch.zeros(100))
    param.grad = grads[0].clone()
    torch.nn.utils.clip_grad_norm_([param], 0.5)
    norm = global_grad_norm(grads, None)
    clip_(grads, norm, 0.5)
    torch.testing.assert_close(grads[0], param.grad)
    before = grads[0].clone()
    clip_(grads, global_grad_norm(grads, None), 5.0)
    assert torch.equal(grads[0], before)


def test_each_rank_owns_its_interval_once() -> None:
    num_ranks = 6
    seen = {name: torch.zeros(n, dtype=torch.int) for bucket in BUCKETS for name, n in bucket.params}
    for rank in range(num_ranks):
        masters = MasterShards(BUCKETS, rank, num_ranks, "cpu")
        groups = masters.param_groups(GROUPS)
        masters.put_grads(None)
        assert [group["lr"] for group in groups] == [0.02, 0.01]  # also where a rank owns nothing of a group
        assert sum(p.numel() for group in groups for p in group["params"]) == masters.flat.numel()
        for param, bucket, start, stop in masters.spans:
            assert param.data_ptr() == masters.shards[bucket][start:stop].data_ptr()
            assert param.grad is not None
            assert param.grad.data_ptr() == masters.grads[bucket][start:stop].data_ptr()
        for piece in masters.pieces():
            seen[piece.name][piece.start : piece.stop] += 1
    assert all(bool((count == 1).all()) for count in seen.values())


def test_adjacent_pieces_of_a_group_are_one_parameter() -> None:
    masters = MasterShards(BUCKETS, 0, 1, "cpu")
    assert [(bucket, start, stop) for _, bucket, start, stop in (masters.param_groups(GROUPS), masters.spans)[1]] == [
        (0, 0, 57),
        (1, 0, 40),
        (1, 40, 48),
        (1, 48, 81),
        (2, 0, 2),
    ]


def test_bad_groups_and_tensors_are_refused() -> None:
    masters = MasterShards(BUCKETS, 0, 2, "cpu")
    with pytest.raises(PlanError, match=r"'a\.bias' is in optimizer groups 1 and 2"):
        masters.param_groups([*GROUPS, {"names": ["a.bias"]}])
    with pytest.raises(PlanError, match=r"3 of 6 parameters.*'a\.bias'"):
        masters.param_groups(GROUPS[:1])
    with pytest.raises(PlanError, match=r"no bucket holds a parameter 'x'"):
        masters.load("x", torch.zeros(1))
    with pytest.raises(PlanError, match=r"'a\.bias' has 5 elements.*6"):
        masters.load("a.bias", torch.zeros(6))
    with pytest.raises(PlanError, match="two buckets"):
        MasterShards([BUCKETS[0], BucketSpec("again", BUCKETS[0].params)], 0, 2, "cpu")
    with pytest.raises(PlanError, match=r"\['w'\] twice"):
        BucketSpec("b", (("w", 1), ("w", 2)))
