"""Master shards: FP32 parameters and gradients, evenly and permanently sharded over all ranks of the job.

[Note: master shards] Rank r holds the r-th of N equal intervals of every bucket, whatever the strategy of a step
(the optimization phase of Hydraulis, section 5.2). All its intervals lie in one tensor `flat`, bucket after bucket;
`shards[b]` and the optimizer's parameters are views. Its gradients have memory of their own only where they outlive a
phase of a step; else `put_grads` says for each step where they lie [Note: where sums lie].

Example: buckets of 10 and 6 elements on 2 ranks. Rank 1 holds elements 5 to 9 of the first and 3 to 5 of the second,
and `flat` has 8 elements, which are `shards[0]` and `shards[1]`. If the first bucket has the parameters a (7 elements)
and b (3), rank 1 owns elements 5 and 6 of a and all of b. An optimizer with one group for a and one for b gets two
parameters of bucket 0, of 2 and 3 elements; with one group for both it gets one parameter of 5.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hydra.zero_hetero.errors import PlanError
from ds_hydra.zero_hetero.layout import BucketSpec, Layout, even_layout
from ds_hydra.zero_hetero.transport import start_gather

BLOCK_ON_CPU = 1 << 16  # elements that are squared in FP64 at once: 512 KiB, which stays in cache


def global_grad_norm(grads: Iterable[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """L2 norm of the gradients of the whole job; see `norm_and_words`."""
    return norm_and_words(grads, group, 0.0)[0]


def norm_and_words(grads: Iterable[Tensor], group: dist.ProcessGroup | None, word: float) -> tuple[Tensor, Tensor]:
    """L2 norm of the gradients of the whole job, a float64 scalar; and what each rank has said besides, (ranks,)."""
    table = norm_table(grads, group, word)
    return norm_of(table), table[:, 1]


def norm_of(table: Tensor) -> Tensor:
    """L2 norm of the gradients of the whole job, of a `norm_table`: a float64 scalar, equal to the bit on all ranks."""
    return table[:, 0].contiguous().sum().sqrt()


def norm_table(grads: Iterable[Tensor], group: dist.ProcessGroup | None, *words: float | Tensor) -> Tensor:
    """The sum of the squares of each rank's gradients, and what it has said besides: (ranks, 1 + words) float64.

    `grads`: what this rank owns, flat tensors of any dtype, at least one, possibly empty. Squares are summed in
    FP64, over the ranks of `group` in rank order. `group` None is a rank alone.
    """
    total: Tensor | None = None
    for grad in grads:
        squares = sum_of_squares(grad)
        total = squares if total is None else total + squares
    assert total is not None, "give the gradient shard even where it is empty"
    own = torch.stack((total, *(torch.as_tensor(word).to(total) for word in words)))
    if group is None or dist.get_world_size(group) == 1:
        return own[None]
    table = total.new_empty(dist.get_world_size(group), len(own))
    # Gathered and not all-reduced: every rank adds the same numbers in the same order, whatever the backend.
    start_gather(table.view(-1), own, group).wait()
    return table


def sum_of_squares(values: Tensor) -> Tensor:
    """Sum of squares in FP64, a scalar on the device of `values` (flat)."""
    if values.device.type != "cpu":
        return torch.linalg.vector_norm(values, dtype=torch.float64).square()
    # vector_norm(dtype=float64) takes six times as long on CPU.
    total = torch.zeros((), dtype=torch.float64)
    block = torch.empty(min(BLOCK_ON_CPU, values.numel()), dtype=torch.float64)
    for part in values.detach().split(BLOCK_ON_CPU):
        wide = block[: part.numel()].copy_(part)
        total += torch.dot(wide, wide)
    return total


def clip_(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale `grads` in place by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # On an accelerator `item` would wait for everything before it, which costs more than a multiplication by 1.
    if scale.device.type == "cpu" and scale.item() == 1.0:
        return
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))


class OwnedPiece(NamedTuple):
    """The elements of one parameter that this rank owns; `shard` is a view of shape (stop - start,)."""

    bucket: int
    name: str
    start: int  # first element, counted in the parameter
    stop: int
    shard: Tensor
    first: int  # element of the bucket's local shard


def as_tensors() -> AbstractContextManager[None]:
    """Within it parameters of an optimizer are those that torch made, whatever a script sees in their place."""
    return torch._C.DisableTorchFunctionSubclass()  # type: ignore[no-any-return]


class OptimizerSpan(NamedTuple):
    """What one parameter of the optimizer stands for: elements [start, stop) of a bucket's local shard."""

    param: nn.Parameter
    bucket: int
    start: int
    stop: int


class MasterShards:
    """This rank's part of the FP32 parameters and their gradients; see [Note: master shards].

    `layouts[b]`: who owns which interval of bucket b. `shards[b]`, `grads[b]`: this rank's, flat, in `dtype`. There are
    no gradients before the first `put_grads`. Gradients are on `device`, and so are the shards unless they are
    `on_host`.
    """

    def __init__(
        self,
        buckets: Sequence[BucketSpec],
        rank: int,
        num_ranks: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        *,
        pinned: bool = False,
        run: int = 0,
    ):
        """`pinned`: in memory of the host that a device reads by itself. `run`: at most so many elements of the shards
        come to the device for an update at one time, and all are in the host's memory; 0: they are on the device."""
        self.buckets = tuple(buckets)
        self.rank = rank
        self.num_ranks = num_ranks
        self.layouts: list[Layout] = [even_layout(b.numel, num_ranks, b.owners) for b in self.buckets]
        sizes = [layout.sizes[rank] for layout in self.layouts]
        self.device, self._run = torch.device(device), run
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device="cpu" if run else device, pin_memory=pinned)
        self.shards: list[Tensor] = list(self.flat.split(sizes))
        self.grads: list[Tensor] = []
        self._own_grads: list[Tensor] = []
        self.spans: list[OptimizerSpan] = []
        self._in_groups: list[list[int]] = []  # the identities of the parameters of each of the optimizer's groups
        self._owned = {piece.name: piece for piece in self._cut_pieces()}
        self._numels = {name: numel for bucket in self.buckets for name, numel in bucket.params}
        if len(self._numels) < sum(len(bucket.params) for bucket in self.buckets):
            listed = [name for bucket in self.buckets for name, _ in bucket.params]
            twice = sorted({name for name in listed if listed.count(name) > 1})
            raise PlanError(f"{twice} are in two buckets each; list shared parameters once, where they are stored")

    @property
    def on_host(self) -> bool:
        """Whether values and optimizer states are in the host's memory, and come to the device for an update."""
        return self._run > 0

    def load(self, name: str, flat: Tensor) -> None:
        """Take this rank's interval of a whole parameter, given flat in master order, of any dtype and device.

        Raises PlanError for a name that no bucket holds and for a tensor of another size.
        """
        numel = self._numel_of(name)
        if flat.numel() != numel:
            raise PlanError(f"parameter {name!r} has {numel} elements, the tensor to load {flat.numel()}")
        piece = self._owned.get(name)
        if piece is not None:
            with torch.no_grad():
                piece.shard.copy_(flat.reshape(-1)[piece.start : piece.stop])

    def pieces(self) -> Iterator[OwnedPiece]:
        """What this rank owns, parameter by parameter in the order of the buckets."""
        return iter(self._owned.values())

    def put_grads(self, grads: Sequence[Tensor] | None) -> None:
        """From now on the gradients are these tensors, per bucket like `shards`; None: memory of their own, which is
        kept from then on."""
        if grads is None:
            if not self._own_grads:
                memory = torch.zeros_like(self.flat, device=self.device)
                self._own_grads = list(memory.split([shard.numel() for shard in self.shards]))
            grads = self._own_grads
        self.grads = list(grads)
        with as_tensors():
            for param, bucket, start, stop in self.spans:
                param.grad = self.grads[bucket][start:stop]  # a view, so that a push fills it

    @property
    def dropped_grads(self) -> bool:
        """Whether who has the optimizer has dropped the gradients, as its `zero_grad` does."""
        with as_tensors():
            return bool(self.grads) and any(span.param.grad is None for span in self.spans)

    def keep_grads(self) -> None:
        """Move the gradients to memory of their own, if they lie elsewhere."""
        before = self.grads
        self.put_grads(None)
        for kept, grad in zip(self.grads, before, strict=True):
            if kept is not grad and kept.data_ptr() != grad.data_ptr():
                kept.copy_(grad)

    def scale_grads(self, factor: float) -> None:
        """Multiply the gradients by a number, and give them to the optimizer's parameters if these have lost them."""
        self.put_grads(self.grads)
        for grad in self.grads:
            grad.mul_(factor)

    def forget_grads(self) -> None:
        """Let go of the gradients and of their memory, until the next `put_grads`."""
        self.grads, self._own_grads = [], []
        with as_tensors():
            for span in self.spans:
                span.param.grad = None

    def grad_of(self, piece: OwnedPiece) -> Tensor:
        """The gradient of a piece, a view of its shape."""
        return self.grads[piece.bucket][piece.first : piece.first + piece.stop - piece.start]

    def param_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups for any element-wise `torch.optim` optimizer, over this rank's elements only.

        `groups` have `names` (parameter names) and any options of the optimizer; together they name each parameter
        once. What one group owns side by side in a bucket becomes one 1-D parameter whose data are a view of the
        shard, and whose `.grad` is one of what `put_grads` is given: update with `step()`, and never drop the gradients
        with `zero_grad()`, for a push overwrites them. Every group is returned, those without elements too, so that
        schedulers see the same groups on every rank. Of shards that are `on_host` parameters are cut to what comes to
        the device at once, and show zeros there.
        """
        group_of = self._group_of_each(groups)
        # An element-wise optimizer does not care where a parameter begins or ends. So what lies side by side in one
        # group is one parameter: a few long ones per bucket in place of many short ones.
        params: list[list[nn.Parameter]] = [[] for _ in groups]
        self.spans = []
        for bucket, start, stop, group in self._runs(group_of):
            for first in range(start, stop, self._run or stop - start):
                last = min(stop, first + self._run) if self._run else stop
                param = nn.Parameter(self.shown(bucket, first, last))
                params[group].append(param)
                self.spans.append(OptimizerSpan(param, bucket, first, last))
        self._in_groups = [[*map(id, owned)] for owned in params]
        return [
            {**{key: value for key, value in group.items() if key != "names"}, "params": owned}
            for group, owned in zip(groups, params, strict=True)
        ]

    def shown(self, bucket: int, start: int, stop: int) -> Tensor:
        """What a parameter of the optimizer shows between updates: its part of a shard, or zeros without memory."""
        shard = self.shards[bucket][start:stop]
        return torch.zeros((), dtype=shard.dtype, device=self.device).expand(len(shard)) if self._run else shard

    def moved_parameters(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Which of an optimizer's groups hold other parameters than `param_groups` gave them, in words; "": none."""
        for number, (own, group) in enumerate(zip_longest(self._in_groups, groups)):
            if own is None or group is None or own != [*map(id, group["params"])]:
                return f"the parameters of group {number} of {len(groups)} of engine.optimizer.param_groups"
        return ""

    def optimizer_state(self, optimizer: torch.optim.Optimizer, key: str) -> list[Tensor]:
        """An element-wise state such as "exp_avg", per bucket like `shards`; zeros where there is none yet."""
        state = [torch.zeros_like(shard) for shard in self.shards]
        for param, bucket, start, stop in self.spans:
            value = optimizer.state.get(param, {}).get(key)
            if value is not None:
                state[bucket][start:stop].copy_(value)
        return state

    def state_of(self, optimizer: torch.optim.Optimizer, names: Collection[str]) -> Iterator[Tensor]:
        """This rank's elements of some parameters, as views: of their values, and of each element-wise state."""
        for piece in self.pieces():
            if piece.name not in names:
                continue
            start, stop = piece.first, piece.first + piece.shard.numel()
            yield piece.shard
            for param, bucket, first, last in self.spans:
                begin, end = max(first, start), min(last, stop)
                if bucket == piece.bucket and begin < end:
                    states = optimizer.state.get(param, {}).values()
                    yield from (s[begin - first : end - first] for s in states
                                if isinstance(s, Tensor) and s.shape == param.shape)  # fmt: skip

    def gather_full(
        self,
        group: dist.ProcessGroup | None,
        *,
        source: Sequence[Tensor] | None = None,
        ranks: Sequence[int] | None = None,
        names: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        """Whole parameters by name, flat in master order, on CPU; called on all ranks of `group` together, which are
        all that hold masters; None is a rank alone.

        `source`: what to gather, per bucket like `shards` (default: the shards). `ranks`: who gets them (default:
        all); the others get an empty dictionary. `names`: of which parameters (default: all). Goes bucket by bucket, so
        a device holds one whole bucket.
        """
        receivers = range(self.num_ranks) if ranks is None else ranks
        gathered: dict[str, Tensor] = {}
        for bucket, spec in enumerate(self.buckets):
            wanted_here = [names is None or name in names for name, _ in spec.params]
            if not any(wanted_here):
                continue
            local = (self.shards if source is None else source)[bucket].detach()
            whole = self.gather_bucket(bucket, local, group, receivers)
            if self.rank in receivers:
                values = whole.cpu().split([numel for _, numel in spec.params])
                # Cloned, so that who keeps one parameter does not keep the whole bucket.
                triples = zip(spec.params, values, wanted_here, strict=True)
                gathered |= {name: value.clone() for (name, _), value, asked in triples if asked}
        return gathered

    def gather_bucket(
        self, bucket: int, local: Tensor, group: dist.ProcessGroup | None, receivers: Collection[int]
    ) -> Tensor:
        """A whole bucket, flat, on the receivers, and nothing elsewhere; `local` is what this rank has of it."""
        # One collective of all ranks, also where one is to have the bucket: messages from each rank would make a pair
        # of each, whose buffers on devices stay, and as much comes to its node.
        sizes, local = self.layouts[bucket].sizes, local.to(self.device)
        if group is None or self.num_ranks == 1:
            whole = local.clone()
        else:
            width = max(sizes)
            whole = local.new_empty(self.num_ranks * width)
            own = local if len(local) == width else torch.cat((local, local.new_zeros(width - len(local))))
            start_gather(whole, own.contiguous(), group).wait()
            if len(whole) > self.buckets[bucket].numel:
                whole = torch.cat([part[:size] for part, size in zip(whole.view(-1, width), sizes, strict=True)])
        return whole if self.rank in receivers else whole[:0].clone()

    def _cut_pieces(self) -> Iterator[OwnedPiece]:
        """This rank's interval of every bucket, cut where parameters begin."""
        for index, bucket in enumerate(self.buckets):
            for piece in self.layouts[index].pieces[self.rank]:
                for (name, numel), offset in zip(bucket.params, bucket.offsets.values(), strict=True):
                    start, stop = max(piece.start, offset), min(piece.stop, offset + numel)
                    if start < stop:
                        first, last = start - piece.start, stop - piece.start
                        shard = self.shards[index][first:last]
                        yield OwnedPiece(index, name, start - offset, stop - offset, shard, first)

    def _runs(self, group_of: Mapping[str, int]) -> Iterator[tuple[int, int, int, int]]:
        """Maximal (bucket, start, stop, group) of adjacent pieces in one group, in the local shard."""
        bucket, start, stop, group = -1, 0, 0, -1
        for piece in self.pieces():
            length = piece.stop - piece.start
            if (piece.bucket, group_of[piece.name]) == (bucket, group):
                stop += length  # pieces come in the order of the shard, so this one touches the run
                continue
            if stop > start:
                yield bucket, start, stop, group
            start = stop if piece.bucket == bucket else 0
            bucket, stop, group = piece.bucket, start + length, group_of[piece.name]
        if stop > start:
            yield bucket, start, stop, group

    def _group_of_each(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """The optimizer group of each parameter; PlanError unless every parameter is in exactly one."""
        group_of: dict[str, int] = {}
        for index, group in enumerate(groups):
            for name in group["names"]:
                self._numel_of(name)
                if name in group_of:
                    raise PlanError(
                        f"parameter {name!r} is in optimizer groups {group_of[name]} and {index}; name it in one"
                    )
                group_of[name] = index
        missing = [name for name in self._numels if name not in group_of]
        if missing:
            raise PlanError(
                f"{len(missing)} of {len(self._numels)} parameters are in no optimizer group, the first is "
                f"{missing[0]!r}; name each in one group, or call requires_grad_(False) on what is not to be trained"
            )
        return group_of

    def _numel_of(self, name: str) -> int:
        if name not in self._numels:
            raise PlanError(f"no bucket holds a parameter {name!r}; there are {len(self._numels)} parameters")
        return self._numels[name]
