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

from ds_hydra.matrices.exchange import Exchange, local_scale, method_of, orthogonalized, spectral_scale
from ds_hydra.matrices.owners import MatrixParam, deal
from ds_hydra.pipe.stage import to_flat
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.layout import BucketSpec
from ds_hydra.zero_hetero.masters import MasterShards
from ds_hydra.zero_hetero.transport import InProcessTransport, Post

RANKS, _STEPS, _NEAR = 3, 2, 1e-9


class ParamKind(NamedTuple):
    """A parameter: its shape, how it lies, its heads. One of a single dimension is no matrix."""

    shape: tuple[int, ...]
    dim: int | None = None
    parts: int = 1
    heads: int = 1


KINDS: Mapping[str, tuple[int, ParamKind]] = {  # with its bucket
    "norm": (0, ParamKind((7,))),
    "square, turned": (0, ParamKind((6, 6), 1)),
    "wide, turned": (0, ParamKind((4, 9), 1)),
    "tall": (0, ParamKind((9, 4), 0)),
    "heads": (0, ParamKind((12, 5), 0, 1, 4)),
    "bias": (0, ParamKind((5,))),
    "norm, too": (1, ParamKind((7,))),
    "fused": (1, ParamKind((10, 4), 0, 2)),
    "square": (1, ParamKind((5, 5))),
    "stack": (1, ParamKind((3, 6, 4), 0)),
    "stack cut by rows": (1, ParamKind((3, 6, 4), 1, 2)),
    "filters": (1, ParamKind((8, 1, 3))),
    "bias, too": (1, ParamKind((5,))),
}
Kinds = Mapping[str, tuple[int, ParamKind]]
Rank = tuple[MasterShards, list[list[Any]]]


def prove(kind: type, group: Mapping[str, Any]) -> None:
    """ConfigError unless the optimizer of this class makes of each kind of matrix what one process would, with the
    settings of this group, each matrix once a step."""
    own = {key: value for key, value in group.items() if key not in ("params", "fused", "foreach", "initial_lr")}
    flat_only = own["adjust_lr_fn"] is not None  # torch's knows matrices alone
    kinds = {name: one for name, one in KINDS.items() if len(one[1].shape) <= 2 or not flat_only}
    values, grads = drawn(kinds, _STEPS)
    found, counted = _on_ranks(kind, own, kinds, values, grads)
    matrices = {name: value for name, value in values.items() if len(value.shape) > 1}
    for name, value in _in_one_process(own, kinds, matrices, grads).items():
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


def drawn(kinds: Kinds, steps: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Values in FP64, and gradients of so many steps, of which each is larger."""
    random = torch.Generator().manual_seed(0)

    def draw(size: int) -> dict[str, Tensor]:
        return {
            n: size * torch.randn(one.shape, generator=random, dtype=torch.float64) for n, (_, one) in kinds.items()
        }

    return draw(1), [draw(1 + step) for step in range(steps)]


def params_of(kinds: Kinds) -> tuple[list[BucketSpec], list[MatrixParam]]:
    """Two buckets, and where each parameter lies in its own."""
    buckets, params = [], []
    for bucket in (0, 1):
        at = 0
        for name, (of, one) in kinds.items():
            if of == bucket:
                params.append(MatrixParam(bucket, name, at, one.shape, one.dim, one.parts, one.heads))
                at += params[-1].numel
        own = [(param.name, param.numel) for param in params if param.bucket == bucket]
        buckets.append(BucketSpec(str(bucket), tuple(own)))
    return buckets, params


def ranks_of(kinds: Kinds, values: Mapping[str, Tensor], groups: Sequence[Sequence[str]]) -> list[Rank]:
    """Masters of three ranks with these values, and what each has of every group, by names."""
    made, buckets = [], params_of(kinds)[0]
    for rank in range(RANKS):
        masters = MasterShards(buckets, rank, RANKS, "cpu", next(iter(values.values())).dtype)
        for name, (_, one) in kinds.items():
            masters.load(name, to_flat(values[name], one.dim, one.parts))
        parts = masters.param_groups([{"names": names} for names in groups])
        masters.put_grads(None)
        made.append((masters, [part["params"] for part in parts]))
    return made


def put_grads(masters: MasterShards, kinds: Kinds, grads: Mapping[str, Tensor]) -> None:
    """Give a rank its part of whole gradients."""
    for piece in masters.pieces():
        _, one = kinds[piece.name]
        masters.grad_of(piece).copy_(to_flat(grads[piece.name], one.dim, one.parts)[piece.start : piece.stop])


def whole_values(ranks: Sequence[MasterShards], kinds: Kinds) -> dict[str, Tensor]:
    """Parameters in the user's shape, element by element, by where each one lies."""
    found = {}
    for name, (_, one) in kinds.items():
        flat = torch.cat([p.shard for masters in ranks for p in masters.pieces() if p.name == name])
        order = to_flat(torch.arange(flat.numel()).view(one.shape), one.dim, one.parts)
        value = torch.empty_like(flat)
        value[order] = flat
        found[name] = value.view(one.shape)
    return found


def _on_ranks(
    kind: Any,
    group: Mapping[str, Any],
    kinds: Kinds,
    values: Mapping[str, Tensor],
    grads: Sequence[Mapping[str, Tensor]],
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Values after the steps, and how many matrices were orthogonalized of each."""
    params = [param for param in params_of(kinds)[1] if len(param.shape) > 1]
    owned = deal([(p.batch[0], p.numel // p.batch[0], p.apart) for p in params], RANKS)
    names = [param.name for param in params]
    post, of = Post(), dict.fromkeys(names, 0)
    ranks = []
    for masters, parts in ranks_of(kinds, values, [names, [name for name in kinds if name not in names]]):
        optimizer = kind([{**group, "params": parts[0]}, {"params": parts[1]}])
        transport = InProcessTransport(post, masters.rank)
        ranks.append((masters, optimizer, Exchange(masters, params, owned, transport, of)))
    counted: Counter[str] = Counter()
    for given in grads:
        for masters, _, _ in ranks:
            put_grads(masters, kinds, given)
        begun = [list(exchange.begin(optimizer.param_groups, optimizer.state)) for _, optimizer, exchange in ranks]
        coming = [exchange.owners_turn(own, optimizer.param_groups)
                  for own, (_, optimizer, exchange) in zip(begun, ranks, strict=True)]  # fmt: skip
        for back, (_, optimizer, exchange) in zip(coming, ranks, strict=True):
            exchange.finish(back, optimizer.param_groups)
            optimizer.step()
            counted += exchange.counts
    return whole_values([masters for masters, _, _ in ranks], kinds), counted


def _in_one_process(
    group: Mapping[str, Any],
    kinds: Kinds,
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


def _block(one: ParamKind) -> tuple[int, int]:
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
    one, grad = ParamKind((32, 32), 1), torch.randn(32, 32, generator=random)
    own = {**group, "lr": 1.0, "weight_decay": 0.0}
    zeros = {"square, turned": torch.zeros(32, 32)}
    found, _ = _on_ranks(kind, own, {"square, turned": (0, one)}, zeros, [{"square, turned": grad}])
    mu = group["momentum"]
    new = torch.lerp(torch.zeros_like(grad), grad, 1.0 - mu)
    made = orthogonalized(torch.lerp(grad, new, mu) if group["nesterov"] else new, method_of(group), torch.float32)
    scale = local_scale(MatrixParam(0, "", 0, one.shape, 1), group)
    if not torch.equal(found["square, turned"], -(made.float() * scale)):
        raise ConfigError("Muon orthogonalizes the transpose of a square matrix: train with AdamW, and tell us")
