"""Is a step of Muon what it is in one process? Tried on small matrices, on ranks that are not there, before step 0.

Three ranks in this process hold even intervals of two buckets with matrices of all kinds: square and oblong, turned as
row-parallel ones lie, fused, in stacks, with heads. Two steps are made by the exchange and the optimizer that the job
uses, in FP64, and by a plain loop over whole matrices. The loop does not iterate: of a matrix U S V^T the iteration
makes U f(S) V^T, where f is the polynomial of each singular value. One more try, in the iteration's own type, wants
the same bits for a square matrix that lies turned, since its transpose would differ in 16 bit alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hydra.matrices.exchange import Exchange, local_scale, method_of, spectral_scale
from ds_hydra.matrices.newton_schulz import orthogonalized
from ds_hydra.matrices.owners import MatrixParam, deal
from ds_hydra.pipe.stage import to_flat
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.layout import BucketSpec
from ds_hydra.zero_hetero.masters import MasterShards
from ds_hydra.zero_hetero.transport import InProcessTransport, Post

_RANKS, _STEPS, _NEAR = 3, 2, 1e-9


class Kind(NamedTuple):
    """A parameter: its shape, how it lies, its heads."""

    shape: tuple[int, ...]
    dim: int | None = None
    parts: int = 1
    heads: int = 1


KINDS: Mapping[str, tuple[int, Kind]] = {  # with its bucket
    "square, turned": (0, Kind((6, 6), 1)),
    "wide, turned": (0, Kind((4, 9), 1)),
    "tall": (0, Kind((9, 4), 0)),
    "heads": (0, Kind((12, 5), 0, 1, 4)),
    "fused": (1, Kind((10, 4), 0, 2)),
    "square": (1, Kind((5, 5))),
    "stack": (1, Kind((3, 6, 4), 0)),
    "stack cut by rows": (1, Kind((3, 6, 4), 1, 2)),
    "filters": (1, Kind((8, 1, 3))),
}


def prove(kind: type, group: Mapping[str, Any]) -> None:
    """ConfigError unless the optimizer of this class makes of each kind of matrix what one process would, with the
    settings of this group, each matrix once a step."""
    own = {key: value for key, value in group.items() if key not in ("params", "fused", "foreach", "initial_lr")}
    flat_only = own["adjust_lr_fn"] is not None  # torch's knows matrices alone
    kinds = {name: one for name, one in KINDS.items() if len(one[1].shape) == 2 or not flat_only}
    random = torch.Generator().manual_seed(0)
    values = {name: torch.randn(one.shape, generator=random, dtype=torch.float64) for name, (_, one) in kinds.items()}
    grads = [
        {name: torch.randn(value.shape, generator=random, dtype=torch.float64) for name, value in values.items()}
        for _ in range(_STEPS)
    ]
    found, counted = _on_ranks(kind, own, kinds, values, grads)
    expected = _in_one_process(own, kinds, values, grads)
    for name, value in expected.items():
        count = _STEPS * kinds[name][1].heads if len(value.shape) == 2 else _STEPS * value.shape[0]
        if counted[name] != count:
            raise ConfigError(f"Muon orthogonalizes a matrix ({name}) {counted[name]} times, where it is {count}")
        apart = float((found[name] - value).abs().max())
        if not apart <= _NEAR:
            raise ConfigError(
                f"Muon on ranks is not Muon in one process: of small matrices ({name}, {tuple(value.shape)}) it makes "
                f"values that are {apart:.1e} apart; train with AdamW, and tell us"
            )
    _prove_turned(kind, own)


def _params(kinds: Mapping[str, tuple[int, Kind]]) -> tuple[list[BucketSpec], list[MatrixParam]]:
    """Two buckets, each with a vector before and behind its matrices."""
    buckets, params = [], []
    for bucket in (0, 1):
        listed, at = [(f"norm {bucket}", 7)], 7
        for name, (of, one) in kinds.items():
            if of == bucket:
                params.append(MatrixParam(bucket, name, at, one.shape, one.dim, one.parts, one.heads))
                listed.append((name, params[-1].numel))
                at += params[-1].numel
        buckets.append(BucketSpec(str(bucket), (*listed, (f"bias {bucket}", 5))))
    return buckets, params


def _on_ranks(
    kind: Any,
    group: Mapping[str, Any],
    kinds: Mapping[str, tuple[int, Kind]],
    values: Mapping[str, Tensor],
    grads: Sequence[Mapping[str, Tensor]],
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Values after the steps, and how many matrices were orthogonalized of each."""
    buckets, params = _params(kinds)
    owned = deal([(p.batch[0], p.numel // p.batch[0], p.apart) for p in params], _RANKS)
    rest = [f"{what} {bucket}" for bucket in (0, 1) for what in ("norm", "bias")]
    names, post, dtype = [list(kinds), rest], Post(), next(iter(values.values())).dtype
    ranks = []
    for rank in range(_RANKS):
        masters = MasterShards(buckets, rank, _RANKS, "cpu", dtype)
        for name, (_, one) in kinds.items():
            masters.load(name, to_flat(values[name], one.dim, one.parts))
        parts = masters.param_groups([{"names": names[0]}, {"names": names[1]}])
        masters.put_grads(None)
        optimizer = kind([{**group, "params": parts[0]["params"]}, {"params": parts[1]["params"]}])
        of = dict.fromkeys(names[0], 0)
        ranks.append((masters, optimizer, Exchange(masters, params, owned, InProcessTransport(post, rank), of)))
    counted: Counter[str] = Counter()
    for given in grads:
        for masters, _, _ in ranks:
            for piece in masters.pieces():
                if piece.name in given:
                    _, one = kinds[piece.name]
                    whole = to_flat(given[piece.name], one.dim, one.parts)
                    masters.grad_of(piece).copy_(whole[piece.start : piece.stop])
        begun = [list(exchange.begin(optimizer.param_groups, optimizer.state)) for _, optimizer, exchange in ranks]
        coming = [exchange.owners_turn(own, optimizer.param_groups)
                  for own, (_, optimizer, exchange) in zip(begun, ranks, strict=True)]  # fmt: skip
        for back, (_, optimizer, exchange) in zip(coming, ranks, strict=True):
            exchange.finish(back, optimizer.param_groups)
            optimizer.step()
            counted += exchange.counts
    found = {}
    for name, (_, one) in kinds.items():
        whole = torch.cat([p.shard for masters, _, _ in ranks for p in masters.pieces() if p.name == name])
        found[name] = _as_user(whole, one)
    return found, counted


def _as_user(flat: Tensor, one: Kind) -> Tensor:
    """A parameter in the user's shape, of its elements in flat order: element by element, by where each one lies."""
    order = to_flat(torch.arange(flat.numel()).view(one.shape), one.dim, one.parts)
    value = torch.empty_like(flat)
    value[order] = flat
    return value.view(one.shape)


def _in_one_process(
    group: Mapping[str, Any],
    kinds: Mapping[str, tuple[int, Kind]],
    values: Mapping[str, Tensor],
    grads: Sequence[Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """The same by a plain loop over whole matrices."""
    found, rate, mu = {}, float(group["lr"]), group["momentum"]
    for name, value in values.items():
        one, momentum = kinds[name][1], torch.zeros_like(value)
        param = MatrixParam(0, name, 0, one.shape, one.dim, one.parts, one.heads)
        for given in grads:
            momentum = mu * momentum + (1 - mu) * given[name]
            towards = (1 - mu) * given[name] + mu * momentum if group["nesterov"] else momentum
            blocks = towards.view(-1, *_block(one))
            made = torch.stack([_by_singular_values(block, group) for block in blocks]).view(one.shape)
            scale = local_scale(param, group) * (spectral_scale(param) if group["adjust_lr_fn"] is None else 1.0)
            value = (1 - rate * group["weight_decay"]) * value - rate * scale * made
        found[name] = value
    return found


def _block(one: Kind) -> tuple[int, int]:
    """Rows and columns of each of its matrices."""
    rows, columns = one.shape[-2:]
    return (rows // one.heads, columns) if len(one.shape) == 2 else (rows, columns)


def _by_singular_values(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    method = method_of(group)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    norm = values.norm()
    values = values / (norm.clamp(min=method.eps) if method.kind == "torch" else norm + method.eps)
    a, b, c = method.coefficients
    for _ in range(method.steps):
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right


def _prove_turned(kind: type, group: Mapping[str, Any]) -> None:
    """ConfigError unless a square matrix that lies turned is iterated on as the user has it, in the job's type."""
    random = torch.Generator().manual_seed(1)
    one, grad = Kind((32, 32), 1), torch.randn(32, 32, generator=random)
    own = {**group, "lr": 1.0, "weight_decay": 0.0}
    zeros = {"square, turned": torch.zeros(32, 32)}
    found, _ = _on_ranks(kind, own, {"square, turned": (0, one)}, zeros, [{"square, turned": grad}])
    mu = group["momentum"]
    new = torch.lerp(torch.zeros_like(grad), grad, 1.0 - mu)
    made = orthogonalized(torch.lerp(grad, new, mu) if group["nesterov"] else new, method_of(group), torch.float32)
    scale = local_scale(MatrixParam(0, "", 0, one.shape, 1), group)
    if not torch.equal(found["square, turned"], -(made.float() * scale)):
        raise ConfigError("Muon orthogonalizes the transpose of a square matrix: train with AdamW, and tell us")
