"""One update of Muon's matrices: directions travel to owners, which iterate, and what they make travels back.

[Note: an exchange] Compiled once for a job on its ranks, and run once an update, by all ranks together. First every
rank forms the directions of its intervals, bucket by bucket, and starts to send each at once. Then owners take the
buckets in the same order: matrices that have come are orthogonalized, and start on their way back while later ones are
still coming. At last all wait for what comes back. So one order of messages holds on all ranks, and no rank waits for
one that waits for it. Neither parameters nor momentum change: whoever is lost meanwhile, the step can be made again.

Memory beside masters and momentum, until the update is made, for P matrix elements on N ranks: P / N directions, and
the matrices that a rank owns or their results, in the types in which they travel, and P / N of the masters' type.

The quintic iteration of Muon has the three forms that users know:

  standard, gram   DeepSpeed's (`deepspeed/runtime/zero/muon/original_muon.py`): the matrix over its norm plus eps. The
                   Gram form iterates on the square of the smaller side and restarts once (Dao 2026, "Gram
                   Newton-Schulz"); of square matrices it is the standard one.
  torch            `torch.optim.Muon`'s: over its norm, which is eps at least.

[Note: types of the iteration] Each form has the type that its origin has: 16 bit where the device can, and FP64 of
matrices in FP64, as attention has it in the self-check. "standard" and "torch" round the matrix to it first of all, so
that matrices may travel to their owners in it and nothing is lost; "gram" scales first. A square matrix and its
transpose differ after an iteration in 16 bit (1 % of the update), so it is always the user's own that is iterated on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hydra.matrices.owners import FEW_STEPS, Kind, MatrixParam, Owned, interval, master_parts, whole_layout
from ds_hydra.pipe.stage import from_flat, to_flat
from ds_hydra.zero_hetero.layout import padded
from ds_hydra.zero_hetero.link import Handle, Link
from ds_hydra.zero_hetero.masters import MasterShards, OptimizerSpan
from ds_hydra.zero_hetero.transfer_plan import plan_transfer
from ds_hydra.zero_hetero.transport import Transport

_THERE_TAG, _BACK_TAG = 3 << 25, (3 << 25) + (1 << 20)  # and the number of the bucket

Group = Mapping[str, Any]  # of the optimizer
Coefficients = tuple[float, float, float]
COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
_RESTART = 2  # the iteration before which the Gram form begins with the matrix again


class Method(NamedTuple):
    """Which iteration, how often, by which numbers."""

    kind: Kind = "gram"
    steps: int = FEW_STEPS
    coefficients: Coefficients = COEFFICIENTS
    eps: float = EPS

    def computed_in(self, given: torch.dtype) -> torch.dtype:
        """The iteration's type for matrices of a type [Note: types of the iteration]."""
        if given == torch.float64 or self.kind == "torch":
            return given if given == torch.float64 else torch.bfloat16
        device = get_accelerator()
        if self.kind == "gram":
            return torch.float16 if device.is_fp16_supported() else torch.float32
        return torch.bfloat16 if device.is_bf16_supported() else torch.float32

    def travels_in(self, given: torch.dtype) -> torch.dtype:
        """The type in which matrices of another may come to their owners."""
        return given if self.kind == "gram" else self.computed_in(given)


def orthogonalized(matrices: Tensor, method: Method, given: torch.dtype) -> Tensor:
    """Each of `matrices`, (rows, columns) or (count, rows, columns), nearly orthogonal, in the type of the iteration
    for matrices that were of the type `given`."""
    computed = method.computed_in(given)
    turned = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if turned else matrices
    if method.kind == "gram":
        x = (x / (x.norm(dim=(-2, -1), keepdim=True) + method.eps)).to(computed)
        if x.size(-1) > x.size(-2):
            return _gram(x, method, turned=turned)
        x = _standard(x, method)
    elif method.kind == "standard":
        x = x.to(computed)
        x = _standard(x / (x.norm(dim=(-2, -1), keepdim=True) + method.eps), method)
    else:
        x = x.to(computed)
        x = _standard(x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=method.eps), method)
    return x.mT if turned else x


def _standard(x: Tensor, method: Method) -> Tensor:
    """X <- a X + (b A + c A A) X of A = X X^T, so many times."""
    a, b, c = method.coefficients
    for _ in range(method.steps):
        square = x @ x.mT
        if method.kind == "torch":
            multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
            x = multiply(x, multiply(square, square, square, beta=b, alpha=c), x, beta=a)
        else:
            x = a * x + (b * square + c * square @ square) @ x
    return x


def _gram(x: Tensor, method: Method, *, turned: bool) -> Tensor:
    """The same of matrices (.., n, m) with m > n, on R = X X^T (n, n): X is multiplied by what the steps amount to, and
    turned back, if it was, in the order that DeepSpeed has: the other one rounds otherwise on some processors."""
    a, b, c = method.coefficients
    square, factor = x @ x.mT, None
    for step in range(method.steps):
        if step == _RESTART and factor is not None:
            x = factor @ x
            square, factor = x @ x.mT, None
        z = b * square + c * square @ square
        if factor is None:
            factor = z.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            factor = a * factor + z @ factor
        if step < method.steps - 1 and step + 1 != _RESTART:
            product = a * square + z @ square
            square = a * product + z @ product
    if factor is None:
        return x.mT if turned else x
    return x.mT @ factor.mT if turned else factor @ x


class Places(NamedTuple):
    """Masters that updates come to, and where their part of a bucket begins in what comes back."""

    masters: MasterShards
    behind: bool  # behind those that this rank owns


@dataclass(frozen=True)
class Leg:
    """One bucket's way there and back, on this rank; `own` are the matrices that it owns."""

    bucket: int
    there: Link
    back: Link
    own: tuple[Owned, ...]
    whole: int  # elements of the matrices that this rank owns, with gaps
    shard: int  # elements of this rank's interval of the bucket
    came: int  # elements of what comes back: of this interval, and of the one that it keeps a copy of


def legs_of(
    masters: MasterShards, params: Sequence[MatrixParam], owned: Sequence[Owned], transport: Transport, shift: int
) -> tuple[Leg, ...]:
    """The ways of all buckets with matrices, in their order; `shift`: which rank's copy this one keeps, 0 for none."""
    rank, num_ranks = masters.rank, masters.num_ranks
    legs = []
    for bucket in sorted({param.bucket for param in params}):
        held = masters.layouts[bucket]
        whole = whole_layout(held.numel, params, owned, bucket, num_ranks)
        parts = master_parts(held, params, bucket, shift)
        there = Link(plan_transfer(held, whole), rank, transport)
        back = Link(plan_transfer(whole, parts), rank, transport)
        mine = tuple(one for one in owned if one.rank == rank and params[one.param].bucket == bucket)
        legs.append(Leg(bucket, there, back, mine, whole.sizes[rank], held.sizes[rank], parts.sizes[rank]))
    return tuple(legs)


class Exchange:
    """One rank's part of [Note: an exchange]; `group_of` gives the number of each parameter's group by name."""

    def __init__(
        self,
        masters: MasterShards,
        params: Sequence[MatrixParam],
        owned: Sequence[Owned],
        transport: Transport,
        group_of: Mapping[str, int],
        shift: int = 0,
    ):
        self.params, self._group_of, self._masters = tuple(params), group_of, masters
        self.places = [Places(masters, behind=False)]
        self.legs = legs_of(masters, params, owned, transport, shift)
        self._matrices = [torch.zeros(len(shard), dtype=torch.bool, device=shard.device) for shard in masters.shards]
        names = {param.name for param in params}
        for piece in masters.pieces():
            self._matrices[piece.bucket][piece.first : piece.first + len(piece.shard)] = piece.name in names
        self.counts: Counter[str] = Counter()  # matrices that this rank orthogonalized in the last run, by parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        return self  # with the transport of the job: a copy of an optimizer on trial exchanges nothing

    def follow(self, copied: MasterShards) -> None:
        """Bring updates to a copy of another rank's masters, too: that of `shift` ranks before this one."""
        self.places.append(Places(copied, behind=True))

    def connect(self) -> None:
        """Use each pair of ranks once, before a step depends on it, by sending each element its number; every rank must
        call it. AssertionError where another element comes, or none comes back."""
        masters = self._masters
        for leg in self.legs:
            layout = masters.layouts[leg.bucket].pieces[masters.rank]
            sent = torch.cat([_numbers(piece.start, piece.stop) for piece in layout] or [_numbers(0, 0)])
            sent, whole = sent.to(masters.flat.device), _numbers(0, 0).new_zeros(leg.whole).to(masters.flat.device)
            leg.there.pull(sent, whole, tag=_THERE_TAG + leg.bucket).wait()
            at = 0
            for one in leg.own:
                start, stop = interval(self.params[one.param], one.first, one.last)
                assert torch.equal(whole[at : at + stop - start].cpu(), _numbers(start, stop)), "matrices come whole"
                at += padded(stop - start)
            came = torch.zeros(leg.came, dtype=sent.dtype, device=sent.device)
            leg.back.pull(whole, came, tag=_BACK_TAG + leg.bucket).wait()
            assert torch.equal(came[: leg.shard][self._matrices[leg.bucket]], sent[self._matrices[leg.bucket]])

    def run(self, groups: Sequence[Group], state: Mapping[Any, Mapping[str, Tensor]]) -> None:
        """Give each matrix part of the optimizer its `update`, (elements,); every rank must call it.

        `groups` are the optimizer's, `state` has momentum by part. The gradients must be what the update is made of.
        """
        begun = list(self.begin(groups, state))
        self.finish(self.owners_turn(begun, groups), groups)
        for _, handle, _ in begun:
            handle.wait()

    def begin(
        self, groups: Sequence[Group], state: Mapping[Any, Mapping[str, Tensor]]
    ) -> Iterator[tuple[Leg, Handle, Tensor]]:
        """Start to send the directions of all buckets; yields what comes to this rank of each."""
        spans: dict[int, list[OptimizerSpan]] = {}
        group_of = {id(param): group for group in groups if group["use_muon"] for param in group["params"]}
        for span in self._masters.spans:
            if id(span.param) in group_of:
                spans.setdefault(span.bucket, []).append(span)
        given = self._masters.flat
        wire = _common([method_of(group).travels_in(given.dtype) for group in groups if group["use_muon"]], given.dtype)
        for leg in self.legs:
            sent = torch.empty(leg.shard, dtype=wire, device=given.device)
            for param, _, start, stop in spans.get(leg.bucket, ()):
                sent[start:stop].copy_(direction(param, state.get(param, {}), group_of[id(param)]))
            whole = torch.empty(leg.whole, dtype=wire, device=given.device)
            yield leg, leg.there.pull(sent, whole, tag=_THERE_TAG + leg.bucket), whole

    def owners_turn(
        self, begun: list[tuple[Leg, Handle, Tensor]], groups: Sequence[Group]
    ) -> list[tuple[Leg, Handle, Tensor]]:
        """Orthogonalize what this rank owns, and start to send it back; what comes back to this rank of each bucket.
        What came is let go of."""
        self.counts.clear()
        given = self._masters.flat
        back = _common(
            [method_of(group).computed_in(given.dtype) for group in groups if group["use_muon"]], given.dtype
        )
        coming = []
        for number, (leg, handle, whole) in enumerate(begun):
            handle.wait_arrived()
            begun[number] = leg, handle, whole.new_empty(0)
            made = torch.empty(leg.whole, dtype=back, device=given.device)
            at = 0
            for one in leg.own:
                param = self.params[one.param]
                start, stop = interval(param, one.first, one.last)
                group = groups[self._group_of[param.name]]
                values = turned(whole[at : at + stop - start], param, one.last - one.first, group, given.dtype)
                made[at : at + stop - start].copy_(values)
                self.counts[param.name] += one.last - one.first
                at += padded(stop - start)
            came = torch.empty(leg.came, dtype=back, device=given.device)
            coming.append((leg, leg.back.pull(made, came, tag=_BACK_TAG + leg.bucket), came))
        return coming

    def finish(self, coming: list[tuple[Leg, Handle, Tensor]], groups: Sequence[Group]) -> None:
        """Wait for all that comes back, and let go of it; each part of the optimizer, of masters and of a copy, gets
        its `update`."""
        values: dict[int, tuple[Leg, Tensor]] = {}
        while coming:
            leg, handle, came = coming.pop(0)
            handle.wait()
            values[leg.bucket] = leg, came.to(self._masters.flat.dtype)
        shapes = {param.name: param for param in self.params}
        for masters, behind in self.places:
            shards = {b: whole[leg.shard :] if behind else whole[: leg.shard] for b, (leg, whole) in values.items()}
            for piece in masters.pieces():
                if piece.name not in shapes:
                    continue
                scale = local_scale(shapes[piece.name], groups[self._group_of[piece.name]])
                if scale != 1.0:
                    shards[piece.bucket][piece.first : piece.first + piece.stop - piece.start].mul_(scale)
            for span in masters.spans:
                if span.bucket in shards:
                    vars(span.param)["update"] = shards[span.bucket][span.start : span.stop]


def _numbers(start: int, stop: int) -> Tensor:
    """Of elements, as a type holds them that has gone over every link."""
    return torch.arange(start, stop).remainder_(1 << 20).float()


def _common(types: Sequence[torch.dtype], wide: torch.dtype) -> torch.dtype:
    """The one type, if there is one; else one that holds all."""
    return types[0] if types and all(one == types[0] for one in types) else wide


def method_of(group: Group) -> Method:
    """The iteration of a group's matrices."""
    kind: Kind = "torch" if group["adjust_lr_fn"] is not None else group["ns_method"]
    return Method(kind, group["ns_steps"], tuple(group["ns_coefficients"]), group["ns_eps"])


def direction(param: Tensor, state: Mapping[str, Tensor], group: Group) -> Tensor:
    """What is orthogonalized, of elements of a part: momentum M <- mu M + (1 - mu) G, and by Nesterov's rule
    (1 - mu) G + mu M of it."""
    grad, momentum = param.grad, group["momentum"]
    assert grad is not None, "a step has put gradients there"
    before = state.get("momentum_buffer")
    new = torch.lerp(torch.zeros_like(grad) if before is None else before, grad, 1.0 - momentum)
    return torch.lerp(grad, new, momentum) if group["nesterov"] else new


def turned(flat: Tensor, param: MatrixParam, count: int, group: Group, given: torch.dtype) -> Tensor:
    """So many matrices of a parameter, flat in master order, orthogonalized as the user has them, and flat again."""
    number, rows, columns = param.batch
    whole = count == number
    shape = param.shape if whole else (count * rows, columns)
    dim, parts = (param.dim, param.parts) if whole else (0, 1)
    matrix = from_flat(flat, shape, dim, parts).contiguous()
    # One matrix as such, and not as a stack of one: libraries round products of stacks otherwise.
    matrix = matrix.view(rows, columns) if count == 1 and len(param.shape) in (2, 4) else matrix.view(-1, rows, columns)
    made = orthogonalized(matrix, method_of(group), given)
    if group["adjust_lr_fn"] is None and (scale := spectral_scale(param)) != 1.0:
        made = made * scale
    return to_flat(made.reshape(shape), dim, parts)


def spectral_scale(param: MatrixParam) -> float:
    """sqrt(max(1, rows / columns)), of each block of a weight that is orthogonalized head by head; of filters of four
    dimensions by the last two, as DeepSpeed has it."""
    rows, columns = param.batch[1:] if len(param.shape) == 2 else param.shape[-2:]
    return float((rows / columns) ** 0.5) if rows > columns else 1.0


def local_scale(param: MatrixParam, group: Group) -> float:
    """What torch multiplies the rate of a matrix by; by DeepSpeed's rule its owner has scaled it, in the iteration's
    type."""
    if group["adjust_lr_fn"] is None:
        return 1.0
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return float(0.2 * max(param.shape[:2]) ** 0.5)
    return float(max(1.0, param.shape[0] / param.shape[1]) ** 0.5)
